// SPDX-License-Identifier: MIT
// ops/data.c -- fills and copies tensors from C code, one by one and in lists.
#include "cpu/cpu.h"
#include "device/capturing.h"
#include "device/device.h"
#include "device/host_pins.h"
#include "device/move.h"
#include "ops/copy.h"
#include "ops/data.h"

ms_step_recorder ms__step_recorder;

ms_status ms__fill_data(ms_tensor *t, double value)
{
    if (t->numel == 0 || ms__device(t) == MS_META) return MS_OK;
    if (MS_UNLIKELY(ms__capturing != NULL)) return ms__step_recorder.fill(t, value);
    if (ms__is_cuda(ms__device(t))) return ms__cuda()->fill_tensor(t, value);
    ms__cpu_fill_tensor(t, value);
    return MS_OK;
}

// *out: src as a contiguous tensor of `dtype` on src's device: src itself (retained) or a copy.
static ms_status dense_copy(ms_tensor **out, const ms_tensor *src, int dtype)
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
    if (MS_UNLIKELY(ms__capturing != NULL)) return ms__step_recorder.copy(dst, src);
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
    MS_TRY(dense_copy(&whole, src, dst->dtype));
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

// ---- lists of copies ------------------------------------------------------------------------------

static bool casts(int dtype) { return dtype == MS_F32 || ms__is_half(dtype); }

// Whether the copy can be launched together with others. In a captured step every copy is a separate piece of work: as
// a node of a CUDA graph it needs no launch of its own.
static bool joins(const ms_copies *c, const ms_tensor *dst, const ms_tensor *src)
{
    int device = ms__device(dst);
    if (MS_UNLIKELY(ms__capturing != NULL)) return false;
    if (!ms__is_cuda(device) || (c->n && c->index != ms__index(device)) || !ms__is_contiguous(dst)) return false;
    if (!src) return true;
    return ms__device(src) == device && src->numel == dst->numel && ms__is_contiguous(src) &&
           (src->dtype == dst->dtype || (casts(src->dtype) && casts(dst->dtype)));
}

ms_status ms__copies_add(ms_copies *c, ms_tensor *dst, ms_tensor *src)
{
    if (!joins(c, dst, src)) return src ? ms__copy(dst, src) : ms__zero(dst);
    if (dst->numel == 0) return MS_OK;
    if (src) MS_TRY(ms__storage_sync(src->storage, false));
    MS_TRY(ms__storage_sync(dst->storage, true));
    MS_TRY(ms__grow(&c->list, &c->cap, c->n, sizeof *c->list, "copy", "copies"));
    c->index = ms__index(ms__device(dst));
    c->list[c->n++] = (ms_cuda_copy) { .dst = ms__data(dst),
                                       .src = src ? ms__data(src) : NULL,
                                       .numel = dst->numel,
                                       .dst_dtype = dst->dtype,
                                       .src_dtype = src ? src->dtype : dst->dtype };
    return MS_OK;
}

ms_status ms__copies_end(ms_copies *c, ms_status sofar)
{
    if (sofar == MS_OK && c->n) sofar = ms__cuda()->ranks.copy_all(c->index, MS_STREAM_COMPUTE, c->n, c->list);
    free(c->list);
    *c = (ms_copies) { 0 };
    return sofar;
}
