// SPDX-License-Identifier: MIT
// cpu/rows/rows.h -- helpers for kernels that work row by row. Rows of half types pass through a float32 buffer, rows
// along an inner dimension through a contiguous buffer. Sums use 16 lanes on every instruction set and a fixed tree, so
// results depend neither on the instruction set nor on the number of threads.
#ifndef MS_ROWS_H
#define MS_ROWS_H

#include <math.h>
#include "formulas/math32.h"
#include "rows/layout.h"

#define MS_INLINE static inline __attribute__((always_inline))

// The number of rows in a block of a parallel loop: up to 8 K elements, or one longer row. Depends only on the shape.
static inline int64_t ms__rows_per_block(int64_t n) { return n >= 8192 || n <= 0 ? 1 : 8192 / n; }

// n elements from element `at` on, `stride` elements apart, as float32: a pointer to the tensor's memory where
// possible, else to a converted copy in room.
static inline const float *ms__row_in(int dtype, const void *base, int64_t at, int64_t stride, int64_t n, float *room)
{
    if (dtype == MS_F32 && stride == 1) return (const float *)base + at;
    if (dtype == MS_F32)
        for (int64_t j = 0; j < n; j++) room[j] = ((const float *)base)[at + j * stride];
    else if (dtype == MS_F16)
        for (int64_t j = 0; j < n; j++) room[j] = ms_f16_to_float(((const ms_f16 *)base)[at + j * stride]);
    else if (stride == 1)
        for (int64_t j = 0; j < n; j++) room[j] = ms_bf16_to_float(((const ms_bf16 *)base)[at + j]);
    else
        for (int64_t j = 0; j < n; j++) room[j] = ms_bf16_to_float(((const ms_bf16 *)base)[at + j * stride]);
    return room;
}
// Where to write a row: the tensor's memory where possible, else room, from which ms__row_out then stores it.
static inline float *ms__row_at(int dtype, void *base, int64_t at, int64_t stride, float *room)
{
    return dtype == MS_F32 && stride == 1 ? (float *)base + at : room;
}
static inline void ms__row_out(int dtype, void *base, int64_t at, int64_t stride, int64_t n, const float *row)
{
    if (dtype == MS_F32) {
        if (stride != 1)
            for (int64_t j = 0; j < n; j++) ((float *)base)[at + j * stride] = row[j];
    } else if (dtype == MS_F16)
        for (int64_t j = 0; j < n; j++) ((ms_f16 *)base)[at + j * stride] = ms_float_to_f16(row[j]);
    else if (stride == 1)
        for (int64_t j = 0; j < n; j++) ((ms_bf16 *)base)[at + j] = ms_float_to_bf16(row[j]);
    else
        for (int64_t j = 0; j < n; j++) ((ms_bf16 *)base)[at + j * stride] = ms_float_to_bf16(row[j]);
}
static inline const double *ms__row_in_f64(int dtype, const void *base, int64_t at, int64_t stride, int64_t n,
                                           double *room)
{
    (void)dtype;
    if (stride == 1) return (const double *)base + at;
    for (int64_t j = 0; j < n; j++) room[j] = ((const double *)base)[at + j * stride];
    return room;
}
static inline double *ms__row_at_f64(int dtype, void *base, int64_t at, int64_t stride, double *room)
{
    (void)dtype;
    return stride == 1 ? (double *)base + at : room;
}
static inline void ms__row_out_f64(int dtype, void *base, int64_t at, int64_t stride, int64_t n, const double *row)
{
    (void)dtype;
    if (stride != 1)
        for (int64_t j = 0; j < n; j++) ((double *)base)[at + j * stride] = row[j];
}

// Loops of 64 and 16 elements over arrays, which the compiler keeps in registers on every instruction set. (GCC 12
// splits vector types that are wider than the registers through memory, and compares them element by element.) `omp
// simd`: without it, GCC unrolls the loops of 16 before it looks for vectors.
#define MS_LANES(n, l) _Pragma("omp simd") for (int l = 0; l < (n); l++)

// y[j] = TERM(j) for j < n: the last pass over a row, during which FETCH(j) prefetches 64 elements of the next one.
// Else memory would rest during this pass.
#define MS_ROW_SET(n, y, TERM, FETCH)                \
    {                                                \
        int64_t j = 0;                               \
        for (; j + 64 <= (n); j += 64) {             \
            FETCH(j);                                \
            MS_LANES(64, l)(y)[j + l] = TERM(j + l); \
        }                                            \
        for (; j < (n); j++) (y)[j] = TERM(j);       \
    }

// Sums, maxima and exponentials of rows, once per accumulation type.
#define REAL float
#define R(x) x##_f32
#define EXP_NORMAL(x) ms_exp_normal_f32(x)
#include "cpu/rows/rows_body.h"
#undef REAL
#undef R
#undef EXP_NORMAL
#define REAL double
#define R(x) x##_f64
#define EXP_NORMAL(x) exp(x)
#include "cpu/rows/rows_body.h"
#undef REAL
#undef R
#undef EXP_NORMAL

#endif
