// SPDX-License-Identifier: MIT
// comm/movers/device.c -- collectives on tensors of a GPU that go through CPU memory, where peers read them: neither
// the ranks' GPUs (comm/movers/gpu.c) nor a library (comm/movers/native.c) can move them. In a group of one rank the
// bytes stay on the device.
//
// The input is copied when the collective is issued, in the order of the compute stream. The thread that runs the
// collective copies the output back, on the collective's stream, before the collective completes. Until then the
// output's storage carries the collective's event, so that the next operator on it waits.
#include "comm/movers/device.h"
#include "device/device.h"
#include "device/move.h"

struct ms_stage {
    int device;
    char *dst;  // on the device
    size_t bytes;
    bool runs;                       // all blocks are contiguous (ms_piece.line is 0): only their bytes are copied back
    ms_storage *out;                 // on the device, retained; NULL: nothing is copied back
    ms_storage *host_in, *host_out;  // retained
    char *host;
};

static bool there(const ms_storage *s) { return s && ms__is_cuda(s->device); }
bool ms__coll_on_device(const ms_coll *c) { return there(c->in.storage) || there(c->out.storage); }

static ms_status host_storage(ms_storage **out, size_t bytes, const ms_coll *c)
{
    return ms__storage_new(out, MS_CPU, bytes, ROW(c->op)->name);
}

ms_status ms__coll_stage(ms_coll *c, ms_storage **kept)
{
    struct ms_stage *s = calloc(1, sizeof *s);
    ms_status st = MS_OK;
    if (!s) return ms__no_memory(sizeof *s, ROW(c->op)->name, "a copy in CPU memory");
    c->gpu.stage = s;
    char *in = c->in.data, *out = c->out.data;
    size_t in_bytes = c->in.bytes, out_bytes = c->out.bytes;
    if (c->n_pieces) {  // pieces may reach to the ends of their storages
        if (c->in.storage) in_bytes = c->in.storage->bytes - (size_t)(in - (char *)c->in.storage->data);
        if (c->out.storage) out_bytes = c->out.storage->bytes - (size_t)(out - (char *)c->out.storage->data);
        s->runs = true;
        for (int k = 0; k < c->n_pieces; k++) s->runs = s->runs && c->pieces[k].line == 0;
    } else if (c->op == OP_BROADCAST || c->op == OP_ALL_REDUCE || c->op == OP_REDUCE) {
        in_bytes = out_bytes = c->count * (size_t)ms__dtype_size(c->reducer.dtype);
    }
    bool same = in == out && c->in.storage && c->in.storage == c->out.storage;  // empty tensors have no address
    if (there(c->in.storage)) {
        if ((st = host_storage(&s->host_in, in_bytes, c)) != MS_OK) return st;
        if ((st = ms__move(MS_CPU, s->host_in->data, c->in.storage->device, in, in_bytes)) != MS_OK) return st;
        c->in.data = s->host_in->data;
        c->in.storage = s->host_in;
        if (same || (in == out && !c->out.storage)) c->out.data = c->in.data;
    }
    if (there(c->out.storage)) {
        s->device = c->out.storage->device;
        s->dst = out;
        s->bytes = out_bytes;
        s->out = ms__storage_retain(c->out.storage);
        *kept = c->out.storage;
        if (same) s->host_out = ms__storage_retain(s->host_in);
        else {
            if ((st = host_storage(&s->host_out, out_bytes, c)) != MS_OK) return st;
            // Bytes between the lines (ms_piece.line) of a piece must not change: they are copied to the CPU and back.
            if (c->n_pieces && !s->runs) st = ms__move(MS_CPU, s->host_out->data, s->device, out, out_bytes);
            else st = ms__cuda_sync(s->device, MS_STREAM_COMPUTE);  // queued kernels may still use the bytes
            if (st != MS_OK) return st;
            if (in == out && !c->in.storage) c->in.data = s->host_out->data;
            c->out.data = s->host_out->data;
        }
        c->out.storage = s->host_out;
        s->host = c->out.data;
    }
    return MS_OK;
}

ms_status ms__coll_unstage(ms_coll *c)
{
    struct ms_stage *s = c->gpu.stage;
    if (!s || !s->out) return MS_OK;
    int index = ms__index(s->device), stream = c->stream;
    const ms_cuda_table *t = ms__cuda();
    if (c->n_pieces && s->runs) {
        uint64_t shift = c->inline_ ? c->pieces[0].out_offset : 0;
        for (int i = 0; i < c->n_pieces; i++) {
            const ms_piece *p = &c->pieces[i];
            for (int k = 0; k < c->g->n; k++) {
                uint64_t at = p->out_offset + (uint64_t)k * p->out_stride - shift;
                size_t n = ms__piece_bytes(p, k);
                // Adjacent blocks are copied as one.
                while (p->out_stride == p->bytes && k + 1 < c->g->n) n += ms__piece_bytes(p, ++k);
                if (n) MS_TRY(t->copy(index, stream, s->dst + at, s->host + at, n, MS_TO_DEVICE));
            }
        }
    } else {
        MS_TRY(t->copy(index, stream, s->dst, s->host, s->bytes, MS_TO_DEVICE));
    }
    return t->sync(index, stream);
}

void ms__coll_stage_drop(ms_coll *c)
{
    struct ms_stage *s = c->gpu.stage;
    if (!s) return;
    if (s->out) ms__storage_release(s->out);
    if (s->host_in) ms__storage_release(s->host_in);
    if (s->host_out) ms__storage_release(s->host_out);
    free(s);
    c->gpu.stage = NULL;
}

// A collective in a group of one rank: copies on the device.
ms_status ms__coll_alone_there(ms_coll *c, int in_device, int out_device)
{
    size_t esize = (size_t)ms__dtype_size(c->reducer.dtype);
    if (c->op == OP_BARRIER) return MS_OK;
    if (c->n_pieces) {
        uint64_t in_shift = c->inline_ ? c->pieces[0].in_offset : 0,
                 out_shift = c->inline_ ? c->pieces[0].out_offset : 0;
        for (int i = 0; i < c->n_pieces; i++) {
            const ms_piece *p = &c->pieces[i];
            size_t n = ms__piece_bytes(p, 0), line = p->line ? (size_t)p->line : n;
            for (size_t done = 0, row = 0; done < n; done += line, row++)
                MS_TRY(ms__move(out_device, c->out.data + (p->out_offset - out_shift) + row * p->out_line, in_device,
                                c->in.data + (p->in_offset - in_shift) + done, line < n - done ? line : n - done));
        }
        return MS_OK;
    }
    size_t bytes = c->op == OP_REDUCE_SCATTER || c->op == OP_ALL_GATHER || c->op == OP_ALL_REDUCE ? c->count * esize
                   : c->in.bytes < c->out.bytes                                                   ? c->in.bytes
                                                                                                  : c->out.bytes;
    if (c->in.data != c->out.data && c->in.data && c->out.data)
        MS_TRY(ms__move(out_device, c->out.data, in_device, c->in.data, bytes));
    if (c->reducer.scale != 1 && reduces(c->op)) {
        if (!ms__is_float(c->reducer.dtype))
            return ms__fail(MS_EUNSUPPORTED, "%s: a scaled result needs a floating-point dtype, the tensor is %s",
                            ROW(c->op)->name, ms__dtype_name(c->reducer.dtype));
        return ms__cuda()->scale(ms__index(out_device), c->reducer.dtype, c->out.data, (int64_t)c->count,
                                 c->reducer.scale);
    }
    return MS_OK;
}
