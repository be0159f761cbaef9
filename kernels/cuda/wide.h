// SPDX-License-Identifier: MIT
// cuda/wide.h -- eight adjacent elements of global memory in accesses of 16 bytes.
#ifndef MS_CUDA_WIDE_H
#define MS_CUDA_WIDE_H

#include "cuda/cuda.h"

constexpr int WIDE = 8;

// Before a loop over registers: without it nvcc may keep the array in local memory.
#ifdef MS_EMULATED
#define UNROLL
#else
#define UNROLL _Pragma("unroll")
#endif

static __device__ inline bool is_wide(const void *p) { return ((uintptr_t)p & 15) == 0; }

// p is aligned to 16 bytes. S is the stored type; values are of type T.
template <class T> static __device__ __forceinline__ void load_wide(const float *p, T *v)
{
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
template <class T> static __device__ __forceinline__ void load_wide(const double *p, T *v)
{
    for (int k = 0; k < WIDE / 2; k++) {
        double2 a = ((const double2 *)p)[k];
        v[2 * k] = (T)a.x, v[2 * k + 1] = (T)a.y;
    }
}
static __device__ __forceinline__ float half_value(const ms_f16 *, uint16_t bits) { return ms_f16_to_float({ bits }); }
static __device__ __forceinline__ float half_value(const ms_bf16 *, uint16_t bits)
{
    return ms_bf16_to_float({ bits });
}
template <class T, class S> static __device__ __forceinline__ void load_wide(const S *p, T *v)
{
    uint4 a = *(const uint4 *)p;
    unsigned word[4] = { a.x, a.y, a.z, a.w };
    for (int k = 0; k < 4; k++) {
        v[2 * k] = half_value(p, (uint16_t)(word[k] & 0xffff));
        v[2 * k + 1] = half_value(p, (uint16_t)(word[k] >> 16));
    }
}

// Stores 16 bytes at once. The compiler may split an assignment into words.
template <class V> static __device__ __forceinline__ void put(V *p, V v)
{
#ifdef MS_EMULATED
    *p = v;
#else
    __stwb(p, v);
#endif
}
template <class T> static __device__ __forceinline__ void store_wide(float *p, const T *v)
{
    put((float4 *)p, make_float4((float)v[0], (float)v[1], (float)v[2], (float)v[3]));
    put((float4 *)p + 1, make_float4((float)v[4], (float)v[5], (float)v[6], (float)v[7]));
}
template <class T> static __device__ __forceinline__ void store_wide(double *p, const T *v)
{
    for (int k = 0; k < WIDE / 2; k++) put((double2 *)p + k, make_double2((double)v[2 * k], (double)v[2 * k + 1]));
}
static __device__ __forceinline__ uint16_t half_bits(const ms_f16 *, float x) { return ms_float_to_f16(x).bits; }
static __device__ __forceinline__ uint16_t half_bits(const ms_bf16 *, float x) { return ms_float_to_bf16(x).bits; }
template <class T, class S> static __device__ __forceinline__ void store_wide(S *p, const T *v)
{
    unsigned word[4];
    for (int k = 0; k < 4; k++)
        word[k] = (unsigned)half_bits(p, (float)v[2 * k]) | (unsigned)half_bits(p, (float)v[2 * k + 1]) << 16;
    put((uint4 *)p, make_uint4(word[0], word[1], word[2], word[3]));
}

// One element.
template <class T> static __device__ __forceinline__ T load_one(const float *p) { return (T)*p; }
template <class T> static __device__ __forceinline__ T load_one(const double *p) { return (T)*p; }
template <class T, class S> static __device__ __forceinline__ T load_one(const S *p)
{
    return (T)half_value(p, p->bits);
}
template <class T> static __device__ __forceinline__ void store_one(float *p, T v) { *p = (float)v; }
template <class T> static __device__ __forceinline__ void store_one(double *p, T v) { *p = (double)v; }
template <class T, class S> static __device__ __forceinline__ void store_one(S *p, T v)
{
    p->bits = half_bits(p, (float)v);
}

// Calls fn(S, T) for a floating point dtype: S stores it, T computes.
#define WITH_FLOAT_TYPE(dtype, fn)          \
    switch (dtype) {                        \
    case MS_F32: fn(float, float); break;   \
    case MS_F64: fn(double, double); break; \
    case MS_F16: fn(ms_f16, float); break;  \
    default: fn(ms_bf16, float);            \
    }

#endif
