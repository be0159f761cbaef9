// SPDX-License-Identifier: MIT
// shard/layout/flat.c -- concatenates a unit's parameters into one padded flat parameter, which is divided into equal
// parts.
#include "ops/data.h"
#include "device/device.h"
#include "device/move.h"
#include "shard/gather.h"
#include "shard/layout/layout.h"
#include "shard/views/views.h"

// Rounds an offset up to where a parameter may begin: views.align bytes, in elements of the dtype that the unit was
// made with. Every element therefore stays on its rank when the unit is converted to another dtype.
static int64_t align_offset(const unit *u, int64_t at)
{
    return (at + u->memory.piece_elements - 1) / u->memory.piece_elements * u->memory.piece_elements;
}

static ms_status plan(unit *u)
{
    int64_t total = 0;
    if (!u->memory.piece_elements)
        u->memory.piece_elements =
            u->views->align && u->n ? u->views->align / (int64_t)ms__element_size(u->params[0].dtype) : 1;
    for (int j = 0; j < u->n; j++) {
        if (u->params[j].dtype != u->params[0].dtype)
            return ms__fail(MS_EINVAL, "Must flatten tensors with uniform dtype but got %s and %s",
                            ms__dtype_name(u->params[0].dtype), ms__dtype_name(u->params[j].dtype));
        total = align_offset(u, total) + u->params[j].numel;
    }
    int64_t each = (total + u->world - 1) / u->world, begin = u->rank * each, end = begin + each, at = 0;
    size_t wide = u->n ? ms__element_size(u->params[0].dtype) : 0,
           low = u->n ? ms__element_size(u->params[0].gather_dtype) : 0;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        at = align_offset(u, at);
        int64_t n = p->numel, from = ms__max64(at, begin), to = ms__min64(at + n, end);
        p->rows = n;
        p->row_numel = p->outer = 1;
        p->chunk = each;
        p->here = ms__max64(0, to - from);
        p->first = p->here ? from - at : 0;
        p->shard_at = p->here ? (size_t)(from - begin) * wide : 0;
        p->cast_at = p->here ? (size_t)(from - begin) * low : 0;
        p->whole_at = (size_t)at * low;
        at += n;
    }
    u->memory.n_pieces = u->n ? 1 : 0;
    if (u->n)
        u->memory.pieces[0] = (ms_piece) { .out_stride = (size_t)each * low,
                                           .bytes = (size_t)each * low,
                                           .total = (size_t)(each * u->world) * low };
    u->memory.shard_bytes = (size_t)each * wide;
    u->memory.cast_bytes = (size_t)each * low;
    u->memory.gather_bytes = (size_t)(each * u->world) * low;
    return MS_OK;
}

static int local_shape(const unit_param *p, int64_t *shape)
{
    if (p->owner->views->keeps_shape && p->owner->world == 1) {
        memcpy(shape, p->shape, sizeof p->shape);
        return p->ndim;
    }
    shape[0] = p->here;
    return 1;
}

static ms_tensor *part(const unit_param *p, ms_tensor *whole)
{
    int64_t one = 1;  // elements are contiguous
    return ms__tensor_view(whole, p->local->ndim, p->local->shape, p->local->ndim == 1 ? &one : whole->stride,
                           whole->offset + p->first * p->row_numel);
}

// The ranks' parts of p differ in size and position, so each rank sends a block of p's size that contains its part at
// the part's position.
static ms_status gather_whole(unit_param *p, ms_tensor *part, ms_tensor *out)
{
    unit *u = p->owner;
    ms_tensor *packed, *all;
    size_t esz = ms__element_size(part->dtype);
    int64_t block = p->rows, n = block * u->world;
    MS_TRY(ms__tensor_new(&packed, part->dtype, u->memory.home, 1, &block, "full_tensor"));
    ms_status st = ms__copy_into(packed, p->first, part);
    if (st == MS_OK) st = ms__tensor_new(&all, part->dtype, u->memory.home, 1, &n, "full_tensor");
    if (st == MS_OK) {
        ms_piece piece = { .out_stride = (size_t)block * esz, .bytes = (size_t)block * esz, .total = (size_t)n * esz };
        st = ms__unit_gather_apart(u, packed->storage, all->storage, part->dtype, &piece);
        int64_t each = (int64_t)(u->memory.shard_bytes / ms__element_size(p->dtype)), begin = ms__whole_index(p);
        for (int r = 0; st == MS_OK && r < u->world; r++) {
            int64_t from = ms__max64(r * each - begin, 0), to = ms__min64((r + 1) * each - begin, block);
            if (to > from)
                st = ms__move(ms__device(out), (char *)ms__data(out) + (size_t)from * esz, u->memory.home,
                              (char *)ms__data(all) + (size_t)(r * block + from) * esz, (size_t)(to - from) * esz);
        }
        ms__release(all);
    }
    ms__release(packed);
    return st;
}

static int64_t columns(unit *u, int n, unit_param **present, int64_t *at)
{
    for (int k = 0; k < n; k++) at[k] = ms__shard_index(present[k]);
    return (int64_t)(u->memory.shard_bytes / ms__element_size(u->params[0].dtype));
}

static ms_status add_all_flat(ms_copies *c, unit *u, int n, unit_param **present, ms_tensor *in)
{
    int64_t end = 0, k = 0;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        int64_t at = ms__whole_index(p);
        MS_TRY(ms__add_zeros(c, in, end, at - end));
        end = at + p->numel;
        if (k < n && present[k] == p) {
            MS_TRY(ms__add_into(c, in, at, p->pending));
            k++;
        } else {
            MS_TRY(ms__add_zeros(c, in, at, p->numel));
        }
    }
    return ms__add_zeros(c, in, end, in->numel - end);
}

static ms_status pack(unit *u, int n, unit_param **present, ms_tensor *in)
{
    ms_copies together = { 0 };
    return ms__copies_end(&together, add_all_flat(&together, u, n, present, in));
}

const layout ms__layout_flat = { .kind = MS_LAYOUT_FLAT,
                                 .whole_on_device = true,
                                 .plan = plan,
                                 .local_shape = local_shape,
                                 .part = part,
                                 .gather_whole = gather_whole,
                                 .columns = columns,
                                 .pack = pack };
