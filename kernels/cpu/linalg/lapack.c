// SPDX-License-Identifier: MIT
// cpu/linalg/lapack.c -- loads LAPACK: see lapack.h. The engine is built without its headers: Fortran's interface has
// not changed for decades, and without the library only ms.linalg and what calls it fail.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include "cpu/linalg/lapack.h"

// OpenBLAS is the faster one. It gets one thread: more would run beside the rank's own, and change the bits of results.
static const char *const names[] = { "libopenblas.so.0", "liblapack.so.3" };

static ms_lapack table;
static char why[512];

static void *symbol_of(void *library, const char *type, const char *name)
{
    char symbol[32];
    snprintf(symbol, sizeof symbol, "%s%s_", type, name);
    void *at = dlsym(library, symbol);
    if (!at && !*why) snprintf(why, sizeof why, "the library has no function %s", symbol);
    return at;
}

static void fill(void *library)
{
#define FIND_F32(NAME, ARGUMENTS) *(void **)&table.f32.NAME = symbol_of(library, "s", #NAME);
#define FIND_F64(NAME, ARGUMENTS) *(void **)&table.f64.NAME = symbol_of(library, "d", #NAME);
    MS_LAPACK(FIND_F32, float)
    MS_LAPACK(FIND_F64, double)
    void (*set_threads)(int) = NULL;
    *(void **)&set_threads = dlsym(library, "openblas_set_num_threads");
    if (set_threads) set_threads(1);
}

static void load(void)
{
    const char *given = getenv("MOONSHARD_LAPACK");
    void *library = NULL;
    if (given && *given) library = dlopen(given, RTLD_NOW | RTLD_LOCAL);
    else
        for (int k = 0; k < MS_COUNT(names) && !library; k++) library = dlopen(names[k], RTLD_NOW | RTLD_LOCAL);
    if (library) {
        fill(library);
        return;
    }
    const char *text = dlerror();
    snprintf(why, sizeof why, "%s", text ? text : "the library cannot be loaded");
}

ms_status ms__lapack(const ms_lapack **out, const char *who)
{
    static bool tried;
    if (!tried) load();
    tried = true;
    if (*why)
        return ms__fail(MS_EUNSUPPORTED,
                        "%s needs LAPACK: %s; install Debian's libopenblas0-pthread or liblapack3, or name a library "
                        "in MOONSHARD_LAPACK",
                        who, why);
    *out = &table;
    return MS_OK;
}
