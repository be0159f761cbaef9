// SPDX-License-Identifier: MIT
// rows/attention.h -- the options of a call of attention, read by the operator and by the kernels of CPU and GPU.
#ifndef MS_ROWS_ATTENTION_H
#define MS_ROWS_ATTENTION_H

#include <math.h>
#include "formulas/attention.h"
#include "ops/op.h"

// share: heads of queries in a row that have the same head of keys and values. p: the probability of dropout. scale:
// what the scores are multiplied by. cap: 0, or the soft cap of the scaled scores.
typedef struct ms_attention {
    ms_span span;
    int64_t share;
    double p, scale, cap;
} ms_attention;

// n_i: the number of the forward's integers: causal?, offset?, window?.
static inline ms_attention ms__attention_of(const ms_call *c, int n_i, const ms_tensor *q, const ms_tensor *k)
{
    int64_t heads = q->ndim > 2 ? q->shape[q->ndim - 3] : 1, own = k->ndim > 2 ? k->shape[k->ndim - 3] : 1;
    int64_t d = q->shape[q->ndim - 1], window = n_i > 2 ? c->i[2] : 0;
    ms_attention a = { { -MS_FAR, MS_FAR }, own > 0 && heads > own ? heads / own : 1, 0, 0, 0 };
    if (n_i > 0 && c->i[0]) {
        a.span.high = n_i > 1 ? c->i[1] : 0;
        if (window > 0) a.span.low = a.span.high + 1 - window;
    }
    if (c->n_f > 0) a.p = c->f[0];
    a.scale = c->n_f > 1 && c->f[1] != 0 ? c->f[1] : 1 / sqrt((double)(d > 0 ? d : 1));
    if (c->n_f > 2) a.cap = c->f[2];
    return a;
}

#endif
