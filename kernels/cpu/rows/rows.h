// SPDX-License-Identifier: MIT
// cpu/rows/rows.h -- what kernels that work on one row at a time share: rows of half types pass through a
// float32 row, rows along an inner dimension through a contiguous one; sums keep 16 lanes on every
// instruction set and a fixed tree, so that bits depend on neither it nor the threads.
#ifndef MS_ROWS_H
#define MS_ROWS_H

#include <math.h>
#include "formulas/math32.h"
#include "ops/op.h"

#define MS_INLINE static inline __attribute__((always_inline))

// Dimension d of a contiguous tensor as rows: row r's element j lies at start(r) + j * stride.
typedef struct ms_rows {
    int64_t rows, n, stride;
} ms_rows;
static inline ms_rows ms__rows_along(const ms_tensor *t, int d)
{
    ms_rows r = { .n = t->ndim ? t->shape[d] : 1, .stride = 1 };
    for (int k = d + 1; k < t->ndim; k++) r.stride *= t->shape[k];
    r.rows = t->numel && r.n ? t->numel / r.n : 0;
    return r;
}
static inline int64_t ms__row_start(const ms_rows *r, int64_t row)
{
    return r->stride == 1 ? row * r->n : row / r->stride * r->stride * r->n + row % r->stride;
}

// Rows of a block of a parallel loop: about 8 K elements, a matter of the shape only.
static inline int64_t ms__rows_per_block(int64_t n) { return n >= 8192 || n <= 0 ? 1 : 8192 / n; }

// n elements as float32: the memory itself where it is that, else converted into room.
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
// Where to write a row that ms__row_out then puts in place.
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

// Sums, maxima and exponentials of rows, once per accumulation type.
#define REAL float
#define INT int32_t
#define R(x) x##_f32
#define EXP(x) ms_exp_f32(x)
#include "cpu/rows/rows_body.h"
#undef REAL
#undef INT
#undef R
#undef EXP
#define REAL double
#define INT int64_t
#define R(x) x##_f64
#define EXP(x) exp(x)
#include "cpu/rows/rows_body.h"
#undef REAL
#undef INT
#undef R
#undef EXP

#endif
