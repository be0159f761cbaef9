// SPDX-License-Identifier: MIT
// rows/layers/rotary.h -- the rows of a call of rotary or rms_norm_rotary, for the kernels of the CPU and the GPU.
#ifndef MS_ROWS_ROTARY_H
#define MS_ROWS_ROTARY_H

#include "formulas/rotary.h"
#include "ops/op.h"

enum { MS_ROTARY_X, MS_ROTARY_COS, MS_ROTARY_SIN, MS_ROTARY_WEIGHT };

// Sets *x to the input (retained), or to a contiguous copy if its strides cannot be described.
static inline ms_status ms__rotary_rows(ms_rotary_rows *q, ms_tensor **x, const ms_call *c)
{
    ms_tensor *in = c->in[MS_ROTARY_X];
    const ms_tensor *cos = c->in[MS_ROTARY_COS];
    int d = in->ndim;
    if (d <= 4 && in->stride[d - 1] == 1) *x = ms__retain(in);
    else MS_TRY(ms__contiguous(x, in));
    const ms_tensor *t = *x;
    int64_t n = t->shape[d - 1];
    memset(q, 0, sizeof *q);
    q->rows = n ? t->numel / n : 0, q->n = n, q->half = cos->shape[cos->ndim - 1];
    q->t = t->shape[d - 2], q->h = d > 2 && d <= 4 ? t->shape[d - 3] : 1, q->per_batch = cos->ndim == 4;
    q->stride[2] = t->stride[d - 2];
    if (d > 4) q->stride[0] = q->t * n;  // contiguous
    else q->stride[1] = d > 2 ? t->stride[d - 3] : 0, q->stride[0] = d > 3 ? t->stride[0] : 0;
    return MS_OK;
}

#endif
