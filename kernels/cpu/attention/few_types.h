// SPDX-License-Identifier: MIT
// cpu/attention/few_types.h -- few_body.h for both accumulating types, on the level that few.c has set.
#define REAL float
#define HALVES
#define STEP F32_STEP
#define SHUFFLED F32_LANES
#define L(x) LEVEL(x##_f32)
#include "cpu/attention/few_body.h"
#undef REAL
#undef HALVES
#undef STEP
#undef SHUFFLED
#undef L
#define REAL double
#define STEP F64_STEP
#define SHUFFLED F64_LANES
#define L(x) LEVEL(x##_f64)
#include "cpu/attention/few_body.h"
#undef REAL
#undef STEP
#undef SHUFFLED
#undef L
#undef TARGET
#undef LEVEL
#undef LOAD_BF16
#undef LOAD_F16
#undef VEC
#undef F32_STEP
#undef F64_STEP
#undef F32_LANES
#undef F64_LANES
#undef MOST
