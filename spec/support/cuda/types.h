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
#define __grid_constant__
#define CUDART_CB
#define __align__(n) __attribute__((aligned(n)))

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorCudartUnloading = 4,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorMisalignedAddress = 716,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes {
    cudaMemoryType type;
};
enum {
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaEventInterprocess = 4,
    cudaHostRegisterDefault = 0,
    cudaIpcMemLazyEnablePeerAccess = 1,
    cudaHostAllocMapped = 2
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
// Called with the address of a vector that is read or written (fault.h).
namespace ms_shim
{
inline void check_aligned(const void *p, size_t bytes);
}

// Vector types check that their address is aligned at every copy.
#define MS_VECTOR2(name, T)                         \
    struct alignas(2 * sizeof(T)) name {            \
        T x, y;                                     \
        name() = default;                           \
        name(T x_, T y_) : x(x_), y(y_) {}          \
        name(const name &o) { *this = o; }          \
        name &operator=(const name &o)              \
        {                                           \
            ms_shim::check_aligned(&o, sizeof o);   \
            ms_shim::check_aligned(this, sizeof o); \
            x = o.x, y = o.y;                       \
            return *this;                           \
        }                                           \
    };                                              \
    inline name make_##name(T x, T y) { return name(x, y); }
#define MS_VECTOR4(name, T)                                          \
    struct alignas(4 * sizeof(T)) name {                             \
        T x, y, z, w;                                                \
        name() = default;                                            \
        name(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {} \
        name(const name &o) { *this = o; }                           \
        name &operator=(const name &o)                               \
        {                                                            \
            ms_shim::check_aligned(&o, sizeof o);                    \
            ms_shim::check_aligned(this, sizeof o);                  \
            x = o.x, y = o.y, z = o.z, w = o.w;                      \
            return *this;                                            \
        }                                                            \
    };                                                               \
    inline name make_##name(T x, T y, T z, T w) { return name(x, y, z, w); }
MS_VECTOR2(float2, float)
MS_VECTOR4(float4, float)
MS_VECTOR2(double2, double)
MS_VECTOR2(int2, int)
MS_VECTOR4(int4, int)
MS_VECTOR2(uint2, unsigned)
MS_VECTOR4(uint4, unsigned)
MS_VECTOR2(ushort2, unsigned short)
MS_VECTOR4(ushort4, unsigned short)
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
struct cudaIpcEventHandle_t {
    char reserved[64];
};
