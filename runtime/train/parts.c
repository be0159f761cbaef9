// SPDX-License-Identifier: MIT
// train/parts.c -- loops over lists of gradients on the CPU: norms and scaling. Results do not depend on the number of
// threads, because blocks have a fixed size.
#include <math.h>

#include "train/parts.h"

#include "ops/op.h"

// The sum of |g|^p over one block; for an infinite p, the maximum of |g|. Always adds in 16 lanes, so that the bits do
// not depend on the instruction set.
#define NORM_BODY(LOAD)                                                      \
    double lane[16] = { 0 };                                                 \
    int64_t k = 0;                                                           \
    if (p == 2) {                                                            \
        for (; k + 16 <= n; k += 16)                                         \
            for (int l = 0; l < 16; l++) {                                   \
                double x = (double)LOAD(g[k + l]);                           \
                lane[l] += x * x;                                            \
            }                                                                \
        for (; k < n; k++) {                                                 \
            double x = (double)LOAD(g[k]);                                   \
            lane[k % 16] += x * x;                                           \
        }                                                                    \
    } else if (p == 1) {                                                     \
        for (; k < n; k++) lane[k % 16] += fabs((double)LOAD(g[k]));         \
    } else if (isinf(p)) {                                                   \
        for (; k < n; k++) {                                                 \
            double x = fabs((double)LOAD(g[k]));                             \
            lane[0] = x > lane[0] || x != x ? x : lane[0];                   \
        }                                                                    \
        return lane[0];                                                      \
    } else {                                                                 \
        for (; k < n; k++) lane[k % 16] += pow(fabs((double)LOAD(g[k])), p); \
    }                                                                        \
    double sum = 0;                                                          \
    for (int l = 0; l < 16; l++) sum += lane[l];                             \
    return sum;

#define SAME(x) (x)
static MS_KERNEL double norm_f32(const float *g, int64_t n, double p) { NORM_BODY(SAME) }
static MS_KERNEL double norm_f64(const double *g, int64_t n, double p) { NORM_BODY(SAME) }
static MS_KERNEL double norm_f16(const ms_f16 *g, int64_t n, double p) { NORM_BODY(ms_f16_to_float) }
static MS_KERNEL double norm_bf16(const ms_bf16 *g, int64_t n, double p) { NORM_BODY(ms_bf16_to_float) }

#define SCALE_BODY(LOAD, STORE) \
    for (int64_t k = 0; k < n; k++) g[k] = STORE(LOAD(g[k]) * f);
static MS_KERNEL void scale_f32(float *g, int64_t n, float f) { SCALE_BODY(SAME, SAME) }
static MS_KERNEL void scale_f64(double *g, int64_t n, double f) { SCALE_BODY(SAME, SAME) }
static MS_KERNEL void scale_f16(ms_f16 *g, int64_t n, float f) { SCALE_BODY(ms_f16_to_float, ms_float_to_f16) }
static MS_KERNEL void scale_bf16(ms_bf16 *g, int64_t n, float f) { SCALE_BODY(ms_bf16_to_float, ms_float_to_bf16) }

const ms_norm_part *ms__part_of(const ms_part_list *list, int64_t b, int64_t *from, int64_t *n)
{
    int low = 0, high = list->n - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (list->parts[mid].block <= b) low = mid;
        else high = mid - 1;
    }
    const ms_norm_part *t = &list->parts[low];
    *from = (b - t->block) * MS_PART_BLOCK;
    *n = t->numel - *from < MS_PART_BLOCK ? t->numel - *from : MS_PART_BLOCK;
    return t;
}

void ms__parts_measure(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const ms_part_list *list = arg;
    double p = list->p, *out = list->partial;
    for (int64_t b = first; b < last; b++) {
        int64_t from, n;
        const ms_norm_part *t = ms__part_of(list, b, &from, &n);
        MS_CASE_FLOAT(t->dtype, out[b] = norm_f32((const float *)t->g + from, n, p),
                      out[b] = norm_f64((const double *)t->g + from, n, p),
                      out[b] = norm_f16((const ms_f16 *)t->g + from, n, p),
                      out[b] = norm_bf16((const ms_bf16 *)t->g + from, n, p))
    }
}

void ms__parts_scale(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const ms_part_list *list = arg;
    double f = list->factor;
    for (int64_t b = first; b < last; b++) {
        int64_t from, n;
        const ms_norm_part *t = ms__part_of(list, b, &from, &n);
        MS_CASE_FLOAT(t->dtype, scale_f32((float *)t->g + from, n, (float)f), scale_f64((double *)t->g + from, n, f),
                      scale_f16((ms_f16 *)t->g + from, n, (float)f), scale_bf16((ms_bf16 *)t->g + from, n, (float)f))
    }
}

void ms__parts_run(ms_part_list *list, int64_t blocks, ms_range_fn fn)
{
    if (blocks <= 2) fn(list, 0, blocks, 0);
    else ms__parallel_tasks(blocks, fn, list);
}
