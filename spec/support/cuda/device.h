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
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorMisalignedAddress: return "misaligned address";
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

namespace ms_shim
{
// Whether MOONSHARD_CUDA_PRETEND is `what`: specs set it to make the driver or a GPU look too old for the engine.
inline bool pretends(const char *what)
{
    const char *s = getenv("MOONSHARD_CUDA_PRETEND");
    return s && strcmp(s, what) == 0;
}
}  // namespace ms_shim

inline cudaError_t cudaGetDeviceCount(int *n)
{
    MS_MAY_FAIL(cudaGetDeviceCount);
    if (ms_shim::pretends("old_driver")) return cudaErrorInsufficientDriver;
    *n = ms_shim::device_count();
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int *v)
{
    MS_MAY_FAIL(cudaDriverGetVersion);
    *v = ms_shim::pretends("old_driver") ? 12040 : 13000;
    return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int *v)
{
    *v = 13000;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int d)
{
    MS_MAY_FAIL(cudaSetDevice);
    if (d < 0 || d >= ms_shim::device_count()) return cudaErrorInvalidValue;
    ms_shim::current_device = d;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int d)
{
    MS_MAY_FAIL(cudaGetDeviceProperties);
    bool old = ms_shim::pretends("sm_75") || (d == 1 && ms_shim::pretends("one_sm_75"));
    *p = cudaDeviceProp {};
    snprintf(p->name, sizeof p->name, "emulated GPU");
    p->major = old ? 7 : 8;
    p->minor = old ? 5 : 0;
    p->multiProcessorCount = 1;
    p->totalGlobalMem = ms_shim::arena_bytes();
    return cudaSuccess;
}
