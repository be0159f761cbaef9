// SPDX-License-Identifier: MIT
// ops/copy.c -- asynchronous copies on the copy stream, and copies from pinned memory. Copies between the CPU and a GPU
// on the copy stream serve offloading: a unit's bytes are copied to the GPU while the previous unit computes, and back
// while the next one computes.
//
// An asynchronous copy is a record of the CPU's copy stream (device/stream.h). For a GPU the record makes the GPU's
// copy stream wait for the work that was on the compute stream when the copy was issued. The record ends when the copy
// is complete. Until then both storages are retained; operators on the destination, and those that change the source,
// wait for its event.
#include "device/capture.h"
#include "device/device.h"
#include "ops/op.h"

typedef struct {
    int to, from;
    void *dst;
    const void *src;
    size_t bytes;
    void *ready;  // an event of the GPU's compute stream, for which the copy waits; NULL between CPU tensors
    ms_storage *a, *b;
} copy_record;

static ms_status run_copy(void *arg)
{
    copy_record *r = arg;
    const ms_cuda_table *t = ms__cuda();
    if (!ms__is_cuda(r->to) && !ms__is_cuda(r->from)) {
        memcpy(r->dst, r->src, r->bytes);
        return MS_OK;
    }
    int index = ms__index(ms__is_cuda(r->to) ? r->to : r->from);
    if (r->ready) MS_TRY(t->stream_wait(index, MS_STREAM_COPY, r->ready));
    MS_TRY(t->copy(index, MS_STREAM_COPY, r->dst, r->src, r->bytes,
                   !ms__is_cuda(r->from) ? MS_TO_DEVICE_LATER
                   : !ms__is_cuda(r->to) ? MS_TO_HOST
                                         : MS_ON_DEVICE));
    return t->sync(index, MS_STREAM_COPY);
}

static void retire_copy(void *arg, ms_status result)
{
    copy_record *r = arg;
    (void)result;
    if (r->ready) ms__cuda()->drop(r->ready);
    ms__storage_release(r->a);
    ms__storage_release(r->b);
}

static void mark_pending(ms_pending **at, ms_pending *e)
{
    ms__event_release(*at);
    *at = ms__event_retain(e);
}

ms_status ms__copy_async(ms_tensor *dst, ms_tensor *src, ms_pending **event)
{
    int to = ms__device(dst), from = ms__device(src);
    if (event) *event = NULL;
    if (MS_UNLIKELY(ms__capturing != NULL))
        return ms__capture_refuse("an asynchronous copy of %s to %s cannot be captured", ms__tensor_text(src),
                                  ms__tensor_text(dst));
    if (dst->dtype != src->dtype || dst->numel != src->numel || !ms__is_contiguous(dst) || !ms__is_contiguous(src))
        return ms__fail(MS_EINVAL, "copy_async: %s and %s must be contiguous and have the same dtype and size",
                        ms__tensor_text(dst), ms__tensor_text(src));
    if (to == MS_META || from == MS_META)
        return ms__fail(MS_EINVAL, "copy_async: %s to %s: a tensor on device meta has no data", ms__tensor_text(src),
                        ms__tensor_text(dst));
    if (ms__is_cuda(to) && ms__is_cuda(from) && to != from)
        return ms__fail(MS_EUNSUPPORTED, "copy_async: %s and %s are on different GPUs; use copy_", ms__tensor_text(dst),
                        ms__tensor_text(src));
    if (dst->storage->vacated || src->storage->vacated)
        MS_TRY(ms__storage_sync(dst->storage->vacated ? dst->storage : src->storage, true));
    if (dst->numel == 0) return MS_OK;
    ms_stream *s = ms__stream(MS_CPU, MS_STREAM_COPY);
    MS_TRY(ms__stream_wait(s, src->storage->event));
    MS_TRY(ms__stream_wait(s, dst->storage->event));
    MS_TRY(ms__stream_wait(s, dst->storage->readers));
    copy_record r = { .to = to, .from = from, .dst = ms__data(dst), .src = ms__data(src), .bytes = ms__nbytes(dst) };
    // Wait for earlier work of the compute stream: it writes the source, and may still read the destination.
    if (ms__is_cuda(to) || ms__is_cuda(from))
        MS_TRY(ms__cuda()->record(ms__index(ms__is_cuda(to) ? to : from), MS_STREAM_COMPUTE, &r.ready));
    r.a = ms__storage_retain(dst->storage);
    r.b = ms__storage_retain(src->storage);
    ms_pending *e = NULL;
    ms_status st = ms__launch(s, run_copy, retire_copy, &r, sizeof r, &e);
    if (st != MS_OK) {
        retire_copy(&r, st);
        return st;
    }
    mark_pending(&dst->storage->event, e);
    mark_pending(&src->storage->readers, e);
    dst->version->count++;
    if (event) *event = e;
    else ms__event_release(e);
    return MS_OK;
}

// ---- copies from pinned memory ----

typedef struct {
    void *end;  // an event after the copy
    ms_storage *from;
} source_record;

// Runs on the CPU's copy stream: waits until the GPU has read the source.
static ms_status await_copy(void *arg)
{
    source_record *r = arg;
    int reached;
    while ((reached = ms__cuda()->done(r->end)) == 0 && !ms__stream_cancelled()) ms__nap(50 * 1000);
    return reached < 0 ? ms__failure() : MS_OK;
}

static void retire_source(void *arg, ms_status result)
{
    source_record *r = arg;
    (void)result;
    ms__cuda()->drop(r->end);
    ms__storage_release(r->from);
}

ms_status ms__copy_pinned(ms_tensor *dst, ms_tensor *src)
{
    const ms_cuda_table *t = ms__cuda();
    int index = ms__index(ms__device(dst));
    ms_stream *s = ms__stream(MS_CPU, MS_STREAM_COPY);
    source_record r = { .from = src->storage };
    ms__stream_reap();
    MS_TRY(t->copy(index, MS_STREAM_COMPUTE, ms__data(dst), ms__data(src), ms__nbytes(src), MS_TO_DEVICE_LATER));
    ms_status st = t->record(index, MS_STREAM_COMPUTE, &r.end);
    if (st == MS_OK) {
        ms_pending *e = NULL;
        ms__storage_retain(r.from);
        st = ms__stream_wait(s, r.from->readers);  // the storage keeps one event, which covers its earlier readers
        if (st == MS_OK) st = ms__launch(s, await_copy, retire_source, &r, sizeof r, &e);
        if (st == MS_OK) {
            mark_pending(&r.from->readers, e);
            ms__event_release(e);
            return MS_OK;
        }
        retire_source(&r, st);
    }
    (void)t->sync(index, MS_STREAM_COMPUTE);  // there is no event for which a change of the source could wait
    return st;
}

ms_status ms_copy_async(ms_id dst, ms_id src)
{
    ms_tensor *d = ms__tensor(dst), *s = d ? ms__tensor(src) : NULL;
    return d && s ? ms__copy_async(d, s, NULL) : ms__failure();
}
