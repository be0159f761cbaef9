// SPDX-License-Identifier: MIT
// base/plugin.c -- finds the path of a library that the engine loads on first use.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/plugin.h"

void ms__plugin_path(char *path, size_t n, const char *name)
{
    Dl_info here;
    const char *slash = dladdr((void *)ms__plugin_path, &here) && here.dli_fname ? strrchr(here.dli_fname, '/') : NULL;
    if (!slash) {
        snprintf(path, n, "%s", name);
        return;
    }
    int folder = (int)(slash - here.dli_fname);
    snprintf(path, n, "%.*s/moonshard/%s", folder, here.dli_fname, name);
    if (access(path, R_OK) != 0) snprintf(path, n, "%.*s/%s", folder, here.dli_fname, name);
}
