// SPDX-License-Identifier: MIT
// rows/layout.h -- how tensors lie in memory: merged dimensions, rows, and results whose strides have the order of
// another tensor's strides. A script that transposes an input usually transposes the result back; keeping the order
// saves both copies.
#ifndef MS_LAYOUT_H
#define MS_LAYOUT_H

#include "ops/op.h"

// A dimension that a script gave, as an index from 0. Negative numbers count from the end.
static inline int ms__dim_of(int64_t d, int ndim) { return (int)(d < 0 ? d + ndim : d); }

// A view of the positions [first, first + len) of dimension d.
static inline ms_tensor *ms__part_of(const ms_tensor *t, int d, int64_t first, int64_t len)
{
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    shape[d] = len;
    return ms__tensor_view(t, t->ndim, shape, t->stride, t->offset + first * t->stride[d]);
}
// A view of position `at` of dimension d, without that dimension.
static inline ms_tensor *ms__slice_of(const ms_tensor *t, int d, int64_t at)
{
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
    for (int k = 0, n = 0; k < t->ndim; k++)
        if (k != d) {
            shape[n] = t->shape[k];
            stride[n++] = t->stride[k];
        }
    return ms__tensor_view(t, t->ndim - 1, shape, stride, t->offset + at * t->stride[d]);
}

// Drops dimensions of size 1 and merges adjacent dimensions that one stride can traverse. Returns the number of
// dimensions left.
static inline int ms__join_dims(int n, int64_t *shape, int64_t *stride)
{
    int m = 0;
    for (int d = 0; d < n; d++) {
        if (shape[d] == 1) continue;
        if (m > 0 && stride[m - 1] == stride[d] * shape[d]) {
            shape[m - 1] *= shape[d];
            stride[m - 1] = stride[d];
            continue;
        }
        shape[m] = shape[d];
        stride[m++] = stride[d];
    }
    return m;
}

// Dimension d of a contiguous tensor seen as rows: element j of row r lies at ms__row_start(r) + j * stride.
typedef struct ms_rows {
    int64_t rows, n, stride;
} ms_rows;
static inline ms_rows ms__rows_along(const ms_tensor *t, int d)
{
    ms_rows r = { 0, t->ndim ? t->shape[d] : 1, 1 };
    for (int k = d + 1; k < t->ndim; k++) r.stride *= t->shape[k];
    r.rows = t->numel && r.n ? t->numel / r.n : 0;
    return r;
}
MS_FN int64_t ms__row_start(const ms_rows *r, int64_t row)
{
    return r->stride == 1 ? row * r->n : row / r->stride * r->stride * r->n + row % r->stride;
}
// The length of a row that consists of the last `dims` dimensions.
static inline int64_t ms__row_length(const ms_tensor *x, int dims)
{
    int64_t n = 1;
    for (int d = x->ndim - dims; d < x->ndim; d++) n *= x->shape[d];
    return n;
}

// Sets order to t's dimensions by descending stride; the last dimension always comes last.
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

// Stores the sizes of `shape` in `out`, in the order of the dimensions that `order` gives.
static inline void ms__in_order(int ndim, const int *order, const int64_t *shape, int64_t *out)
{
    for (int d = 0; d < ndim; d++) out[d] = shape[order[d]];
}

// Gives `shape` to t, a contiguous tensor that was made with the sizes of ms__in_order. Its strides then descend in the
// order of the dimensions that `order` gives.
static inline void ms__lay_out(ms_tensor *t, const int *order, const int64_t *shape)
{
    int64_t stride[MS_MAX_DIMS];
    memcpy(stride, t->stride, sizeof stride);
    for (int d = 0; d < t->ndim; d++) {
        t->shape[order[d]] = shape[order[d]];
        t->stride[order[d]] = stride[d];
    }
}

// Whether t's elements lie without gaps, with dimension order[0] outermost.
static inline bool ms__is_dense(const ms_tensor *t, const int *order)
{
    int64_t step = 1;
    for (int d = t->ndim - 1; d >= 0; step *= t->shape[order[d]], d--)
        if (t->shape[order[d]] != 1 && t->stride[order[d]] != step) return false;
    return true;
}

#endif
