// SPDX-License-Identifier: MIT
// comm/movers/alone.c -- collectives in a group of one rank.
#include "comm/movers/alone.h"
#include "comm/movers/bytes.h"
#include "device/device.h"
#include "device/move.h"
#include "comm/movers/direct.h"

static ms_status alone_on_cpu(ms_coll *c)
{
    if (c->op == MS_DIST_BARRIER || (c->in.data == c->out.data && c->reducer.scale == 1 && c->op != MS_DIST_ALL_GATHER))
        return MS_OK;
    if (c->n_pieces && c->inline_) c->out.data -= c->pieces[0].out_offset, c->in.data -= c->pieces[0].in_offset;
    return ms__move_direct(c);
}

// The parts of a reduce-scatter, one after the other.
static ms_status take_own_parts(ms_coll *c, int device)
{
    char *out = c->out.data;
    for (int i = 0; i < c->n_parts; i++) {
        const ms_part *p = &c->parts[i];
        size_t n = part_bytes(p, 0);
        MS_TRY(ms__move(device, out, p->t->storage->device, ms__data(p->t), n));
        MS_TRY(ms__set_bytes(device, out + n, 0, p->bytes - n));
        out += p->bytes;
    }
    return MS_OK;
}

static ms_status alone_on_device(ms_coll *c, int in_device, int out_device)
{
    size_t esize = (size_t)ms__dtype_size(c->reducer.dtype);
    if (c->op == MS_DIST_BARRIER) return MS_OK;
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
    size_t bytes = c->op == MS_DIST_REDUCE_SCATTER || c->op == MS_DIST_ALL_GATHER || c->op == MS_DIST_ALL_REDUCE
                       ? c->count * esize
                   : c->in.bytes < c->out.bytes ? c->in.bytes
                                                : c->out.bytes;
    if (c->n_parts) MS_TRY(take_own_parts(c, out_device));
    else if (c->in.data != c->out.data && c->in.data && c->out.data)
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

ms_status ms__move_alone(ms_coll *c)
{
    if (!ms__coll_on_device(c)) return alone_on_cpu(c);
    return alone_on_device(c, c->in.storage ? c->in.storage->device : MS_CPU,
                           c->out.storage ? c->out.storage->device : MS_CPU);
}
