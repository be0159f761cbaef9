// SPDX-License-Identifier: MIT
// cudnn/driver.c -- a stand-in for libcuda.so.1, the driver, on a machine without a GPU. Loading a library of kernels
// succeeds, so that cuDNN compiles its plans for a device that is only described by its properties. All other functions
// of the driver fail (driver.sh generates them); nothing can be launched.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

#ifndef DRIVER
#define DRIVER 13000  // the version of CUDA that this driver reports
#endif
enum { SUCCESS, NOT_FOUND = 500 };
typedef void *handle;
static handle any = &any;

// Functions that return success and a fixed result.
#define GIVES_HANDLE(name, ...)        \
    int name(handle *h, ##__VA_ARGS__) \
    {                                  \
        *h = any;                      \
        return SUCCESS;                \
    }
#define GIVES_NUMBER(name, number, ...) \
    int name(int *n, ##__VA_ARGS__)     \
    {                                   \
        *n = number;                    \
        return SUCCESS;                 \
    }
#define SUCCEEDS(name, ...) \
    int name(__VA_ARGS__) { return SUCCESS; }

#ifndef NOTHING  // if NOTHING is defined, every function fails
SUCCEEDS(cuInit, unsigned flags)
GIVES_NUMBER(cuDriverGetVersion, DRIVER)
GIVES_NUMBER(cuDeviceGetCount, 1)
GIVES_NUMBER(cuDeviceGet, 0, int index)
GIVES_NUMBER(cuDeviceGetAttribute, 0, int attribute, int device)
GIVES_HANDLE(cuCtxGetCurrent)
GIVES_NUMBER(cuCtxGetDevice, 0)
GIVES_HANDLE(cuLibraryLoadData, const void *code, void *jit, void *values, unsigned n, void *options, void *of,
             unsigned m)
SUCCEEDS(cuLibraryUnload, handle library)
GIVES_HANDLE(cuLibraryGetKernel, handle library, const char *name)
GIVES_HANDLE(cuLibraryGetModule, handle library)
GIVES_HANDLE(cuKernelGetFunction, handle kernel)
GIVES_NUMBER(cuKernelGetAttribute, 0, int attribute, handle kernel, int device)
SUCCEEDS(cuKernelSetAttribute, int attribute, int value, handle kernel, int device)
SUCCEEDS(cuFuncSetAttribute, handle function, int attribute, int value)
#endif

int cuGetErrorString(int error, const char **text)
{
    (void)error;
    *text = "the driver is a stand-in";
    return SUCCESS;
}
int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    char newer[256];
    (void)version, (void)flags;
    snprintf(newer, sizeof newer, "%s_v2", name);
    if (!(*out = dlsym(RTLD_DEFAULT, newer))) *out = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *out ? 0 : 1;
    return *out ? SUCCESS : NOT_FOUND;
}
