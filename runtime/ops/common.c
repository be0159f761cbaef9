// SPDX-License-Identifier: MIT
// ops/common.c -- helpers for checks and backwards: result dtypes, reducing gradients to an input's shape, filling,
// copying.
#include "cpu/cpu.h"
#include "device/device.h"
#include "device/host_pins.h"
#include "ops/captured.h"
#include "ops/copy.h"
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

ms_status ms__fill_data(ms_tensor *t, double value)
{
    if (t->numel == 0 || ms__device(t) == MS_META) return MS_OK;
    if (MS_UNLIKELY(ms__capturing != NULL)) return ms__capture_fill(t, value);
    if (ms__is_cuda(ms__device(t))) return ms__cuda()->fill_tensor(t, value);
    ms__cpu_fill_tensor(t, value);
    return MS_OK;
}

// *out: src as a contiguous tensor of `dtype` on src's device: src itself (retained) or a copy.
static ms_status dense(ms_tensor **out, const ms_tensor *src, int dtype)
{
    if (src->dtype == dtype && ms__is_contiguous(src)) {
        *out = ms__retain((ms_tensor *)src);
        return MS_OK;
    }
    MS_TRY(ms__tensor_new(out, dtype, ms__device(src), src->ndim, src->shape, "copy"));
    return ms__or_drop(ms__copy_data(*out, src), out);
}

ms_status ms__copy_data(ms_tensor *dst, const ms_tensor *src)
{
    int to = ms__device(dst), from = ms__device(src);
    if (dst->numel == 0 || to == MS_META) return MS_OK;
    if (MS_UNLIKELY(ms__capturing != NULL)) return ms__capture_copy(dst, src);
    if (MS_LIKELY(to == MS_CPU && from == MS_CPU)) {
        ms__cpu_copy_tensor(dst, src);
        return MS_OK;
    }
    if (to == from) return ms__cuda()->copy_tensor(dst, src);
    if (from == MS_META)
        return ms__fail(MS_EINVAL, "copy: %s has no values to copy into %s", ms__tensor_text(src),
                        ms__tensor_text(dst));
    // Between devices, contiguous bytes of the destination's dtype are sent; each device handles its own strides and
    // broadcasting.
    ms_tensor *whole, *there = NULL;
    MS_TRY(dense(&whole, src, dst->dtype));
    ms_status st = MS_OK;
    bool direct = dst->numel == whole->numel && ms__is_contiguous(dst);
    if (!direct) st = ms__tensor_new(&there, dst->dtype, to, whole->ndim, whole->shape, "copy");
    if (st == MS_OK && from == MS_CPU && whole->storage->block && ms__host_pinned(whole->storage->block))
        st = ms__copy_pinned(direct ? dst : there, whole);
    else if (st == MS_OK) st = ms__move(to, ms__data(direct ? dst : there), from, ms__data(whole), ms__nbytes(whole));
    if (st == MS_OK && there) st = ms__copy_data(dst, there);
    ms__release(there);
    ms__release(whole);
    return st;
}

ms_status ms__zero(ms_tensor *t)
{
    if (t->numel == 0 || ms__is_meta(ms__device(t))) return MS_OK;
    MS_TRY(ms__storage_sync(t->storage, true));
    return ms__fill_data(t, 0);
}

ms_status ms__zeros(ms_tensor **out, int dtype, int device, int ndim, const int64_t *shape)
{
    MS_TRY(ms__tensor_new(out, dtype, device, ndim, shape, "zeros"));
    return ms__or_drop(ms__zero(*out), out);
}

ms_status ms__copy(ms_tensor *dst, ms_tensor *src)
{
    if (dst->numel == 0 || ms__is_meta(ms__device(dst))) return MS_OK;
    MS_TRY(ms__storage_sync(src->storage, false));
    MS_TRY(ms__storage_sync(dst->storage, true));
    return ms__copy_data(dst, src);
}

ms_status ms__contiguous(ms_tensor **out, ms_tensor *t)
{
    if (ms__is_contiguous(t)) {
        *out = ms__retain(t);
        return MS_OK;
    }
    MS_TRY(ms__tensor_like(out, t, "contiguous"));
    return ms__or_drop(ms__copy(*out, t), out);
}

ms_status ms__on_cpu(ms_tensor **out, ms_tensor *t, const char *what)
{
    if (!ms__is_cuda(ms__device(t))) return ms__contiguous(out, t);
    MS_TRY(ms__tensor_new(out, t->dtype, MS_CPU, t->ndim, t->shape, what));
    return ms__or_drop(ms__copy(*out, t), out);
}
