// SPDX-License-Identifier: MIT
// formulas/rotary.h -- rotary positions: a pair of features is turned by an angle, shared by CPU and GPU; and which
// angles and which memory belong to a row.
#ifndef MS_FORMULAS_ROTARY
#define MS_FORMULAS_ROTARY

#include "tensor/dtype.h"

MS_FN float ms_turned_first_f32(float a, float b, float c, float s) { return a * c - b * s; }
MS_FN float ms_turned_second_f32(float a, float b, float c, float s) { return b * c + a * s; }
MS_FN double ms_turned_first_f64(double a, double b, double c, double s) { return a * c - b * s; }
MS_FN double ms_turned_second_f64(double a, double b, double c, double s) { return b * c + a * s; }

// Rows of n features, of which i and i + half form a pair for i < half; the rest stay. Row r is at
// [r / (h * t), r / t % h, r % t] of three dimensions, with strides in elements.
typedef struct ms_rotary_rows {
    int64_t rows, n, half, h, t, stride[3];
    bool per_batch;  // each index of the first dimension has angles of its own
} ms_rotary_rows;

MS_FN int64_t ms_rotary_start(const ms_rotary_rows *q, int64_t r)
{
    int64_t b = r / (q->h * q->t), i = r / q->t % q->h, j = r % q->t;
    return b * q->stride[0] + i * q->stride[1] + j * q->stride[2];
}
// The first of the row's angles.
MS_FN int64_t ms_rotary_angles(const ms_rotary_rows *q, int64_t r)
{
    return ((q->per_batch ? r / (q->h * q->t) * q->t : 0) + r % q->t) * q->half;
}

#endif
