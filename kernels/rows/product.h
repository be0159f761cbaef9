// SPDX-License-Identifier: MIT
// rows/product.h -- tensors as matrices of a product, for the CPU and the GPU.
#ifndef MS_ROWS_PRODUCT_H
#define MS_ROWS_PRODUCT_H

#include "ops/op.h"

enum { MS_LINEAR_PARTS = 4 };  // the most weights of linear_parts

// Merges all dimensions of t but the last into *rows rows with one *stride (in elements). Returns false if no single
// stride can traverse them.
static inline bool ms__join_rows(const ms_tensor *t, int64_t *rows, int64_t *stride)
{
    *rows = 1;
    *stride = 0;
    for (int d = t->ndim - 2; d >= 0; d--) {
        if (t->shape[d] == 1) continue;
        if (*rows == 1) *stride = t->stride[d];
        else if (t->stride[d] != *stride * *rows) return false;
        *rows *= t->shape[d];
    }
    if (*rows == 1) *stride = t->shape[t->ndim - 1];
    return true;
}

// t as a matrix whose columns are its last dimension: t itself (retained), or a contiguous copy if its rows cannot be
// merged.
static inline ms_status ms__as_rows(ms_tensor **out, ms_tensor *t, int64_t *rows, int64_t *stride)
{
    if (t->numel == 0) {
        *rows = 1;
        for (int d = 0; d < t->ndim - 1; d++) *rows *= t->shape[d];
        *stride = t->shape[t->ndim - 1];
    } else if (!ms__join_rows(t, rows, stride)) {
        MS_TRY(ms__contiguous(out, t));
        ms__join_rows(*out, rows, stride);
        return MS_OK;
    }
    *out = ms__retain(t);
    return MS_OK;
}

// A tensor as an operand of matmul, with at least two dimensions. A 1-d tensor is a row on the left, a column on the
// right.
typedef struct ms_operand {
    int ndim;
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
} ms_operand;
static inline ms_operand ms__operand(const ms_tensor *t, bool left)
{
    ms_operand o;
    o.ndim = t->ndim;
    memcpy(o.shape, t->shape, sizeof t->shape);
    memcpy(o.stride, t->stride, sizeof t->stride);
    if (t->ndim != 1) return o;
    o.ndim = 2;
    o.shape[left ? 0 : 1] = 1;
    o.shape[left ? 1 : 0] = t->shape[0];
    o.stride[left ? 0 : 1] = left ? t->shape[0] * t->stride[0] : 1;
    o.stride[left ? 1 : 0] = t->stride[0];
    return o;
}

#endif
