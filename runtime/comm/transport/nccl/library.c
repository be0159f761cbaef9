// SPDX-License-Identifier: MIT
// comm/transport/nccl/library.c -- finds and loads NCCL.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "comm/transport/nccl/library.h"

nccl_library nccl;

#define NAME "libnccl.so.2"

// Where NCCL may be besides the loader's path: in `folders` below the folder that the environment's `variable` names;
// if variable is NULL, in `folders` themselves. An entry whose variable is not set is skipped.
static const struct {
    const char *variable, *folders;
} places[] = {
    { "CUDA_HOME", "/{lib64,lib,targets/*/lib}" },
    { "CUDA_PATH", "/{lib64,lib,targets/*/lib}" },
    { "VIRTUAL_ENV", "/lib*/python3*/site-packages/nvidia/*/lib" },
    { "CONDA_PREFIX", "/{lib,targets/*/lib,lib/python3*/site-packages/nvidia/*/lib}" },
    { NULL, "/usr/local/{cuda,cuda-*}/{lib64,lib,targets/*/lib}" },
    { "HOME", "/.local/lib/python3*/site-packages/nvidia/*/lib" },
    { NULL, "/usr/{lib,local/lib}/python3*/{dist,site}-packages/nvidia/*/lib" },
};

static void *search(void)
{
    void *lib = dlopen(NAME, RTLD_NOW | RTLD_LOCAL);
    for (size_t k = 0; k < sizeof places / sizeof *places && !lib; k++) {
        char pattern[4096];
        const char *root = places[k].variable ? getenv(places[k].variable) : "";
        if (!root || (places[k].variable && !*root)) continue;
        snprintf(pattern, sizeof pattern, "%s%s/" NAME, root, places[k].folders);
        glob_t found;
        if (glob(pattern, GLOB_BRACE, NULL, &found) != 0) continue;
        for (size_t i = 0; i < found.gl_pathc && !lib; i++) lib = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
        globfree(&found);
    }
    return lib;
}

// The specs' stand-in for NCCL: no other library works with the emulated GPU.
static void *standin(char *text, size_t n)
{
    Dl_info here;
    char path[4096] = "";
    if (dladdr((void *)standin, &here) && here.dli_fname) {
        const char *slash = strrchr(here.dli_fname, '/');
        if (slash)
            snprintf(path, sizeof path, "%.*s/standin/libnccl_standin.so.2", (int)(slash - here.dli_fname),
                     here.dli_fname);
    }
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) snprintf(text, n, "the emulated GPU needs the specs' stand-in for NCCL: %s", dlerror());
    return lib;
}

static void *load_library(char *text, size_t n)
{
    const char *mode = getenv("MOONSHARD_CUDA"), *path = getenv("MOONSHARD_NCCL");
    if (mode && (strcmp(mode, "emulated") == 0 || strcmp(mode, "ptx") == 0)) return standin(text, n);
    if (mode && strcmp(mode, "null") == 0) {
        snprintf(text, n, "NCCL cannot use the null device (MOONSHARD_CUDA)");
        return NULL;
    }
    void *lib = path && *path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : search();
    if (!lib && path && *path) snprintf(text, n, "NCCL cannot be loaded (MOONSHARD_NCCL): %s", dlerror());
    else if (!lib)
        snprintf(text, n,
                 "NCCL (" NAME ") is neither in the loader's path nor in the folders of CUDA toolkits and Python "
                 "packages; install it, or set MOONSHARD_NCCL to the path of the file");
    return lib;
}

static const char *path_of(void *lib)
{
    struct link_map *map;
    return dlinfo(lib, RTLD_DI_LINKMAP, &map) == 0 && *map->l_name ? map->l_name : NAME;
}

static int take_symbols(void *lib, char *text, size_t n)
{
#define FIND(result, name, parameters) \
    if (!(*(void **)&nccl.name = dlsym(lib, "nccl" #name)) && !missing) missing = "nccl" #name;
    const char *missing = NULL;
    int version = 0;
    NCCL_FUNCTIONS(FIND)
    nccl_result got = nccl.GetVersion ? nccl.GetVersion(&version) : NCCL_Success;
    if (got != NCCL_Success) {
        snprintf(text, n, "%s: ncclGetVersion failed with result %d", path_of(lib), (int)got);
        return -1;
    }
    if (nccl.GetVersion && version < NCCL_OLDEST) {
        int major = version < 10000 ? 1000 : 10000;  // up to 2.8, a version had one digit less: 2708 is 2.7.8
        snprintf(text, n, "%s is NCCL %d.%d.%d, expected 2.28 or newer", path_of(lib), version / major,
                 version % major / 100, version % 100);
        return -1;
    }
    if (missing) {
        snprintf(text, n, "%s has no function %s, expected NCCL 2.28 or newer", path_of(lib), missing);
        return -1;
    }
    return 0;
}

int nccl_load(char *text, size_t n)
{
    static int loaded;
    if (loaded) return 0;
    // Makes NCCL run operations of several communicators on a GPU in the order in which the host queues them, which is
    // the same on all ranks. Otherwise the operations may wait for each other.
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    void *lib = load_library(text, n);
    if (!lib || take_symbols(lib, text, n) != 0) return -1;
    loaded = 1;
    return 0;
}
