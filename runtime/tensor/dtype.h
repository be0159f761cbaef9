// SPDX-License-Identifier: MIT
// tensor/dtype.h -- element types and their conversions. Half types are loaded as float and rounded on store (to
// nearest even) by the functions here, on the CPU and in CUDA.
#ifndef MS_DTYPE_H
#define MS_DTYPE_H

#include <stdint.h>
#include <string.h>
#include "moonshard.h"

#ifdef __CUDACC__
#define MS_FN static __host__ __device__ inline
#else
// Always inlined: a function that is called from a kernel's clones exists once, for the lowest level of x86-64, where
// fma is a call of libm.
#define MS_FN static inline __attribute__((always_inline))
#endif

typedef struct {
    uint16_t bits;
} ms_f16;
typedef struct {
    uint16_t bits;
} ms_bf16;

MS_FN float ms__bits_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
MS_FN uint32_t ms__float_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

MS_FN float ms_bf16_to_float(ms_bf16 h) { return ms__bits_float((uint32_t)h.bits << 16); }
#ifdef __CUDA_ARCH__
// By the instructions of a GPU: the same numbers, and NaN with bits of its own.
MS_FN ms_bf16 ms_float_to_bf16(float x)
{
    ms_bf16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
    return h;
}
MS_FN float ms_f16_to_float(ms_f16 h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits));
    return f;
}
MS_FN ms_f16 ms_float_to_f16(float x)
{
    ms_f16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
    return h;
}
#else
MS_FN ms_bf16 ms_float_to_bf16(float f)
{
    uint32_t u = ms__float_bits(f);
    uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    ms_bf16 h;
    h.bits = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : r);  // NaN must stay NaN
    return h;
}

// Both conversions have no branches, so that loops vectorise (F. Giesen: float<->half by magic multiplication).
MS_FN float ms_f16_to_float(ms_f16 h)
{
    uint32_t sign = (uint32_t)(h.bits & 0x8000u) << 16, mag = (uint32_t)(h.bits & 0x7fffu) << 13;
    // Multiply by 2^112: corrects the exponent's bias, also of subnormals.
    float f = ms__bits_float(mag) * ms__bits_float(0x77800000u);
    uint32_t u = ms__float_bits(f);
    u = mag >= 0x0f800000u ? (mag | 0x7f800000u) : u;  // inf, NaN
    return ms__bits_float(u | sign);
}
MS_FN ms_f16 ms_float_to_f16(float x)
{
    uint32_t u = ms__float_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    float sub = ms__bits_float(a) + 0.5f;  // for subnormals, the addition rounds
    uint32_t subnormal = ms__float_bits(sub) - 0x3f000000u;
    uint32_t normal = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
    uint32_t r = a < 0x38800000u ? subnormal : normal;
    r = a >= 0x47800000u ? 0x7c00u : r;  // 2^16 and above; just below, the carry of the rounding gives inf
    r = a > 0x7f800000u ? 0x7e00u : r;
    ms_f16 h;
    h.bits = (uint16_t)(r | sign);
    return h;
}
#endif

// The sizes are the hexadecimal digits of one constant, a digit per dtype. Every operator call reads several sizes;
// this needs no load from memory.
MS_FN int ms__dtype_size(int dtype) { return (int)(0x2111482284 >> (4 * dtype) & 15); }
#ifdef __cplusplus
extern "C" {
#endif
const char *ms__dtype_name(int dtype);
int ms__promote(int a, int b);  // PyTorch's result dtype of two tensors with at least one dimension each
#ifdef __cplusplus
}
#endif

MS_FN int ms__is_float(int dtype) { return dtype <= MS_BF16; }  // float32, float64, float16, bfloat16
MS_FN int ms__is_half(int dtype) { return dtype == MS_F16 || dtype == MS_BF16; }
// Whether v can be stored in the dtype. Floating-point dtypes and bool (0 or not 0) accept every number.
MS_FN int ms__holds(int dtype, double v)
{
    // The number of bits without the sign bit, which uint8 does not have.
    int bits = 8 * ms__dtype_size(dtype) - (dtype != MS_U8);
    double high = bits == 63 ? 0x1p63 : (double)((int64_t)1 << bits), low = dtype == MS_U8 ? 0 : -high;
    return ms__is_float(dtype) || dtype == MS_BOOL || (v >= low && v < high && v == __builtin_floor(v));
}
// Runs the statement that is given for the dtype; none if it is not floating-point.
#define MS_CASE_FLOAT(dtype, F32, F64, F16, BF16) \
    switch (dtype) {                              \
    case MS_F32: F32; break;                      \
    case MS_F64: F64; break;                      \
    case MS_F16: F16; break;                      \
    case MS_BF16: BF16; break;                    \
    default: break;                               \
    }

#endif
