// SPDX-License-Identifier: MIT
// cpu/attention/few.h -- the products in attention of few queries, for all floating-point types (few.c).
#ifndef MS_FEW_H
#define MS_FEW_H

#include "ops/op.h"

// m rows of queries or outputs, d numbers each, and their scores [m, n] with the n rows of x, keys or values, which
// have d adjacent numbers each, a multiple of 16. `rows` and `scores` are of the accumulating type; dtype is that of x:
// float64 for doubles, float32, or what ms__few_reads of the half types. While a row of x is read, what lies `ahead`
// bytes after it is fetched: in a burst, that would fill the queue of loads, and computing would wait.
typedef struct {
    int dtype;
    int64_t m, n, d;
    const void *x;
    int64_t x_rs, ahead;
    void *rows, *scores;
    int64_t scores_rs;
} ms_few;
bool ms__few_reads(int dtype);
// Sets the scores to the dot products of queries and keys.
void ms__few_scores_f32(const ms_few *f);
void ms__few_scores_f64(const ms_few *f);
// Adds to each output the values times its scores.
void ms__few_sums_f32(const ms_few *f);
void ms__few_sums_f64(const ms_few *f);

#endif
