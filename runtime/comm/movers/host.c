// SPDX-License-Identifier: MIT
// comm/movers/host.c -- collectives on tensors of a GPU that go through CPU memory, where peers read them: neither
// the ranks' GPUs (comm/movers/gpu/gpu.c) nor a library (comm/movers/nccl/nccl.c) can move them.
//
// The input is copied when the collective is issued, in the order of the compute stream. The thread that runs the
// collective copies the output back, on the collective's stream, before the collective completes. Until then the
// output's storage carries the collective's event, so that the next operator on it waits.
#include "device/device.h"
#include "device/move.h"
#include "comm/movers/mover.h"

typedef struct {
    int device;
    char *dst;  // on the device
    size_t bytes;
    bool runs;                       // all blocks are contiguous (ms_piece.line is 0): only their bytes are copied back
    ms_storage *out;                 // on the device, retained; NULL: nothing is copied back
    ms_storage *host_in, *host_out;  // retained
    char *host;
} host_coll;

extern const ms_mover ms__mover_host;

static ms_status host_storage(ms_storage **out, size_t bytes, const ms_coll *c)
{
    return ms__storage_new(out, MS_CPU, bytes, ROW(c->op)->name);
}

static ms_status host_prepare(ms_coll *c)
{
    MS_TRY(ms__coll_sync(c));
    host_coll *s = calloc(1, sizeof *s);
    ms_status st = MS_OK;
    if (!s) return ms__no_memory(sizeof *s, ROW(c->op)->name, "a copy in CPU memory");
    c->mover = &ms__mover_host;
    c->prepared = s;
    char *in = c->in.data, *out = c->out.data;
    size_t in_bytes = c->in.bytes, out_bytes = c->out.bytes;
    if (c->n_pieces) {  // pieces may reach to the ends of their storages
        if (c->in.storage) in_bytes = c->in.storage->bytes - (size_t)(in - (char *)c->in.storage->data);
        if (c->out.storage) out_bytes = c->out.storage->bytes - (size_t)(out - (char *)c->out.storage->data);
        s->runs = true;
        for (int k = 0; k < c->n_pieces; k++) s->runs = s->runs && c->pieces[k].line == 0;
    } else if (ROW(c->op)->kind & IN_PLACE) {
        in_bytes = out_bytes = c->count * (size_t)ms__dtype_size(c->reducer.dtype);
    }
    bool same = in == out && c->in.storage && c->in.storage == c->out.storage;  // empty tensors have no address
    if (ms__storage_on_gpu(c->in.storage)) {
        if ((st = host_storage(&s->host_in, in_bytes, c)) != MS_OK) return st;
        if ((st = ms__move(MS_CPU, s->host_in->data, c->in.storage->device, in, in_bytes)) != MS_OK) return st;
        c->in.data = s->host_in->data;
        c->in.storage = s->host_in;
        if (same || (in == out && !c->out.storage)) c->out.data = c->in.data;
    }
    if (ms__storage_on_gpu(c->out.storage)) {
        s->device = c->out.storage->device;
        s->dst = out;
        s->bytes = out_bytes;
        s->out = ms__storage_retain(c->out.storage);
        c->marked = c->out.storage;
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

// Copies the output back.
static ms_status host_leave(ms_coll *c, ms_status status)
{
    host_coll *s = c->prepared;
    if (status != MS_OK || !s->out) return status;
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

static void host_drop(ms_coll *c)
{
    host_coll *s = c->prepared;
    if (s->out) ms__storage_release(s->out);
    if (s->host_in) ms__storage_release(s->host_in);
    if (s->host_out) ms__storage_release(s->host_out);
    free(s);
    c->prepared = NULL;
}

const ms_mover ms__mover_host = { .name = "host", .prepare = host_prepare, .leave = host_leave, .drop = host_drop };
