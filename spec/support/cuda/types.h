// SPDX-License-Identifier: MIT
// cuda/types.h -- the CUDA runtime's macros, errors and types.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <cstddef>

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum {
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaIpcMemLazyEnablePeerAccess = 1,
    cudaHostAllocMapped = 2
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w)
{
    return { x, y, z, w };
}
struct dim3 {
    unsigned x, y, z;
};
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem;
};
struct cudaIpcMemHandle_t {
    char reserved[64];
};
