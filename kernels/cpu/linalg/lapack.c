// SPDX-License-Identifier: MIT
// cpu/linalg/lapack.c -- loads LAPACK: see lapack.h. The engine is built without its headers: Fortran's interface has
// not changed for decades, and without the library only ms.linalg and what calls it fail.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include "cpu/linalg/lapack.h"

// The libraries, in the order in which they are tried. OpenBLAS is the faster one. It gets one thread: more would run
// beside the rank's own threads, and change the bits of results.
static const char *const names[] = { "libopenblas.so.0", "liblapack.so.3" };

static ms_lapack table;
static bool found;
static char why[1024];  // why none of the libraries that were tried can be used

// Fills the table from a library. Returns the first function that the library lacks; NULL if there is none.
static const char *fill_routines(void *library)
{
    const char *missing = NULL;
#define FIND(TYPE, LETTER, NAME) \
    if (!(*(void **)&table.TYPE.NAME = dlsym(library, LETTER #NAME "_")) && !missing) missing = LETTER #NAME "_";
#define FIND_F32(NAME, ARGUMENTS) FIND(f32, "s", NAME)
#define FIND_F64(NAME, ARGUMENTS) FIND(f64, "d", NAME)
    MS_LAPACK(FIND_F32, float)
    MS_LAPACK(FIND_F64, double)
    return missing;
}

static void load_lapack(const char *name)
{
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    const char *missing = library ? fill_routines(library) : NULL, *text = library ? NULL : dlerror();
    found = library && !missing;
    if (found) {
        void (*set_threads)(int) = NULL;
        *(void **)&set_threads = dlsym(library, "openblas_set_num_threads");
        if (set_threads) set_threads(1);
        return;
    }
    if (*why) ms__append(why, sizeof why, "; ");
    if (missing) ms__append(why, sizeof why, "%s has no function %s", name, missing);
    else ms__append(why, sizeof why, "%s", text ? text : "the library cannot be loaded");
    if (library) dlclose(library);
}

ms_status ms__lapack(const ms_lapack **out, const char *who)
{
    static bool tried;
    if (!tried) {
        const char *given = getenv("MOONSHARD_LAPACK");
        tried = true;
        if (given && *given) load_lapack(given);
        else
            for (int k = 0; k < MS_COUNT(names) && !found; k++) load_lapack(names[k]);
    }
    if (!found)
        return ms__fail(MS_EUNSUPPORTED,
                        "%s needs LAPACK: %s; install Debian's libopenblas0-pthread or liblapack3, or name a library "
                        "in MOONSHARD_LAPACK",
                        who, why);
    *out = &table;
    return MS_OK;
}
