// SPDX-License-Identifier: MIT
// cuda/product/library.cu -- where CUDA's libraries may be besides the loader's path.
#include <dlfcn.h>
#include <glob.h>
#include <cstdio>
#include <cstdlib>

#include "cuda/library.h"

// Where a library may be: in `folders` below the folder that the environment's `variable` names or, if variable is
// NULL, in `folders` themselves. %d: the toolkit's major version. An entry whose variable is not set is skipped.
static const struct {
    const char *variable, *folders;
} places[] = {
    { "CUDA_HOME", "/{lib64,lib,targets/*/lib}" },
    { "CUDA_PATH", "/{lib64,lib,targets/*/lib}" },
    { "VIRTUAL_ENV", "/lib*/python3*/site-packages/nvidia/*/lib" },
    { "CONDA_PREFIX", "/{lib,targets/*/lib,lib/python3*/site-packages/nvidia/*/lib}" },
    { NULL, "/usr/local/{cuda,cuda-%d*}/{lib64,lib,targets/*/lib}" },
    { "HOME", "/.local/lib/python3*/site-packages/nvidia/*/lib" },
    { NULL, "/usr/{lib,local/lib}/python3*/{dist,site}-packages/nvidia/*/lib" },
};

static void *open_library(const char *path, std::string *why)
{
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *text = lib ? NULL : dlerror();
    if (text) *why = text;
    return lib;
}

void *ms__cuda_library(const char *name, int cuda, std::string *list)
{
    char folders[512];
    std::string why;
    void *lib = open_library(name, &why);
    if (lib) return lib;
    for (const auto &place : places) {
        const char *root = place.variable ? getenv(place.variable) : "";
        if (!root || (place.variable && !*root)) continue;
        snprintf(folders, sizeof folders, place.folders, cuda);
        *list += std::string("\n  ") + root + folders;
        glob_t found;
        if (glob((std::string(root) + folders + "/" + name).c_str(), GLOB_BRACE, NULL, &found) == 0) {
            for (size_t k = 0; k < found.gl_pathc && !lib; k++) lib = open_library(found.gl_pathv[k], &why);
            globfree(&found);
        }
        if (lib) return lib;
    }
    *list += "\nThe last error: " + why;
    return NULL;
}
