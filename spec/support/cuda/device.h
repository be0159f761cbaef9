// SPDX-License-Identifier: MIT
// cuda/device.h -- devices and the texts of errors.
#pragma once
#include "memory.h"

inline const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    default: return "unspecified launch failure";
    }
}
inline const char *cudaGetErrorName(cudaError_t e)
{
    return e == cudaSuccess                 ? "cudaSuccess"
           : e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
                                            : "cudaError";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int *n)
{
    *n = ms_shim::device_count();
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int *v)
{
    *v = 0;
    return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int *v)
{
    *v = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int d)
{
    if (d < 0 || d >= ms_shim::device_count()) return cudaErrorInvalidValue;
    ms_shim::current_device = d;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int)
{
    *p = cudaDeviceProp {};
    snprintf(p->name, sizeof p->name, "emulated GPU");
    p->multiProcessorCount = 1;
    p->totalGlobalMem = ms_shim::arena_bytes();
    return cudaSuccess;
}
