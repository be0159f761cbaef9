// SPDX-License-Identifier: MIT
// rows/layout.h -- results laid out in the order of another tensor's strides. A script that transposes an input usually
// transposes the result back; the same layout saves both copies.
#ifndef MS_LAYOUT_H
#define MS_LAYOUT_H

#include "ops/op.h"

// order[0] is the dimension with the largest stride; the last dimension stays innermost.
static inline void ms__order_of_strides(const ms_tensor *t, int order[MS_MAX_DIMS])
{
    for (int d = 0; d < t->ndim; d++) order[d] = d;
    for (int d = 1; d < t->ndim - 1; d++)
        for (int e = d; e > 0 && t->stride[order[e - 1]] < t->stride[order[e]]; e--) {
            int o = order[e];
            order[e] = order[e - 1];
            order[e - 1] = o;
        }
}

static inline void ms__in_order(int ndim, const int *order, const int64_t *shape, int64_t *out)
{
    for (int d = 0; d < ndim; d++) out[d] = shape[order[d]];
}

// Gives `shape` to a fresh contiguous tensor made with the sizes of ms__in_order.
static inline void ms__lay_out(ms_tensor *t, const int *order, const int64_t *shape)
{
    int64_t stride[MS_MAX_DIMS];
    memcpy(stride, t->stride, sizeof stride);
    for (int d = 0; d < t->ndim; d++) {
        t->shape[order[d]] = shape[order[d]];
        t->stride[order[d]] = stride[d];
    }
}

// Do t's elements lie without gaps in that order?
static inline bool ms__is_dense(const ms_tensor *t, const int *order)
{
    int64_t step = 1;
    for (int d = t->ndim - 1; d >= 0; step *= t->shape[order[d]], d--)
        if (t->shape[order[d]] != 1 && t->stride[order[d]] != step) return false;
    return true;
}

#endif
