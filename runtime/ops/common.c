// SPDX-License-Identifier: MIT
// ops/common.c -- helpers for checks and backwards: result dtypes, other shapes, reducing gradients to an input's
// shape.
#include "ops/common.h"
#include "rows/ops.h"

static int kind_of(int dtype) { return ms__is_float(dtype) ? 2 : dtype == MS_BOOL ? 0 : 1; }

int ms__result_dtype(const ms_tensor *a, const ms_tensor *b)
{
    if (MS_LIKELY(a->dtype == b->dtype)) return a->dtype;
    if ((a->ndim == 0) != (b->ndim == 0)) {
        const ms_tensor *big = a->ndim ? a : b, *dot = a->ndim ? b : a;
        if (kind_of(dot->dtype) <= kind_of(big->dtype)) return big->dtype;
    }
    return ms__promote(a->dtype, b->dtype);
}

ms_tensor *ms__view_as(const ms_tensor *t, int ndim, const int64_t *shape)
{
    int64_t stride[MS_MAX_DIMS];
    if (t->numel == 0 || ms__is_contiguous(t)) {
        int64_t n = 1;
        for (int d = ndim - 1; d >= 0; d--) {
            stride[d] = n;
            n *= shape[d] > 0 ? shape[d] : 1;
        }
        return ms__tensor_view(t, ndim, shape, stride, t->offset);
    }
    // Compare both shapes from the end: a group of new dimensions must cover a contiguous group of old ones.
    int d = ndim - 1;
    int64_t old = 1, new = 1, base = t->ndim ? t->stride[t->ndim - 1] : 1;
    for (int k = t->ndim - 1; k >= 0; k--) {
        old *= t->shape[k];
        if (k > 0 && (t->shape[k - 1] == 1 || t->stride[k - 1] == old * base)) continue;
        while (d >= 0 && (new < old || shape[d] == 1)) {
            stride[d] = new *base;
            new *= shape[d--];
        }
        if (new != old) return NULL;
        if (k > 0) {
            base = t->stride[k - 1];
            old = new = 1;
        }
    }
    for (; d >= 0; d--) stride[d] = new *base;
    return ms__tensor_view(t, ndim, shape, stride, t->offset);
}

ms_status ms__reshape(ms_tensor **out, ms_tensor *t, int ndim, const int64_t *shape)
{
    ms_tensor *view = ms__view_as(t, ndim, shape);
    if (!view) {
        ms_tensor *whole;
        MS_TRY(ms__contiguous(&whole, t));
        view = ms__view_as(whole, ndim, shape);
        ms__release(whole);
    }
    *out = view;
    return MS_OK;
}

ms_status ms__sum_to(ms_tensor **out, ms_tensor *t, int ndim, const int64_t *shape)
{
    if (ms__has_shape(t, ndim, shape)) {
        *out = ms__retain(t);
        return MS_OK;
    }
    int lead = t->ndim - ndim, n = 1;
    int64_t args[MS_MAX_DIMS + 1] = { 1 };  // args[0]: keepdim
    for (int d = 0; d < t->ndim; d++)
        if (d < lead || (shape[d - lead] == 1 && t->shape[d] != 1)) args[n++] = d;
    ms_tensor *sum, *from = t;
    if (n > 1) MS_TRY(ms__run_op(&ms__op_sum, &(ms_op_args) { 1, &from, .n_i = n, .i = args }, 1, &sum));
    else sum = ms__retain(t);
    ms_status st = ms__reshape(out, sum, ndim, shape);
    ms__release(sum);
    return st;
}

ms_status ms__grad_to(ms_tensor **out, ms_tensor *g, const ms_meta *input)
{
    ms_tensor *sum;
    ms_status st = ms__sum_to(&sum, g, input->ndim, input->shape);
    ms__release(g);
    MS_TRY(st);
    if (ms__device(sum) != input->device) {  // the forward copied the input to another device
        ms_tensor *there = NULL;
        st = ms__tensor_new(&there, sum->dtype, input->device, sum->ndim, sum->shape, "to");
        if (st == MS_OK) st = ms__or_drop(ms__copy(there, sum), &there);
        ms__release(sum);
        MS_TRY(st);
        sum = there;
    }
    if (sum->dtype == input->dtype) {
        *out = sum;
        return MS_OK;
    }
    st = ms__run_op(&ms__op_cast, &(ms_op_args) { 1, &sum, .n_i = 1, .i = (int64_t[]) { input->dtype } }, 1, out);
    ms__release(sum);
    return st;
}

unsigned ms__reduced_dims(const ms_tensor *x, int n, const int64_t *d)
{
    unsigned mask = 0;
    if (n <= 0) return (1u << x->ndim) - 1;
    for (int k = 0; k < n; k++) mask |= 1u << (d[k] < 0 ? d[k] + x->ndim : d[k]);
    return mask;
}
