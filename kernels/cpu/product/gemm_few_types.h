// SPDX-License-Identifier: MIT
// cpu/product/gemm_few_types.h -- gemm_few_body.h for both accumulating types, on the level that gemm_few.c has set.
#define HALVES
#define REAL float
#define DTYPE MS_F32
#define CLASS MS_C_F32
#define LANES 16
#define KIND "s"
#define SIZE "4"
#define L(x) LEVEL(x##_f32)
#ifdef LOAD_F16
#define CONVERTS(dtype) true
#else
#define CONVERTS(dtype) ((dtype) != MS_F16)
#endif
#include "cpu/product/gemm_few_body.h"
#undef HALVES
#undef REAL
#undef DTYPE
#undef CLASS
#undef LANES
#undef KIND
#undef SIZE
#undef L
#undef CONVERTS

#define REAL double
#define DTYPE MS_F64
#define CLASS MS_C_F64
#define LANES 8
#define KIND "d"
#define SIZE "8"
#define L(x) LEVEL(x##_f64)
#define CONVERTS(dtype) true
#include "cpu/product/gemm_few_body.h"
#undef REAL
#undef DTYPE
#undef CLASS
#undef LANES
#undef KIND
#undef SIZE
#undef L
#undef CONVERTS

static few_block_fn LEVEL(few_block)(int dtype)
{
    switch (dtype) {
    case MS_F64: return LEVEL(block_real_f64);
    case MS_F16: return LEVEL(block_f16_f32);
    case MS_BF16: return LEVEL(block_bf16_f32);
    case MS_I8: return LEVEL(block_i8_f32);
    default: return LEVEL(block_real_f32);
    }
}
#undef VEC
#undef COLS
#undef PACKED
#undef TARGET
#undef LEVEL
#undef LOAD_BF16
#undef LOAD_F16
#undef LOAD_I8
