// SPDX-License-Identifier: MIT
// shard/layout/rows.c -- rank k of W has rows [k*chunk, (k+1)*chunk) of a parameter, with chunk = ceil(rows / W), as
// torch.chunk divides: the last ranks may have fewer rows or none. The gather copies rows directly to their
// place in the whole parameter, so no second copy is needed, and padding rows are not sent. A later dimension is
// divided the same way, but evenly; the gather then copies a rank's part in lines.
#include "ops/data.h"
#include "shard/gather.h"
#include "shard/layout/layout.h"

enum { ALIGN = 64 };  // every parameter begins on a cache line, in the shard and in the gather buffer

static size_t align_row(size_t n) { return (n + ALIGN - 1) & ~(size_t)(ALIGN - 1); }

static ms_status plan(unit *u)
{
    size_t shard = 0, full = 0, low = 0;
    u->memory.n_pieces = 0;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        const ms_tensor *t = p->param;
        p->rows = t->shape[p->dim];
        p->row_numel = p->outer = 1;
        for (int d = 0; d < p->dim; d++) p->outer *= t->shape[d];
        for (int d = p->dim + 1; d < t->ndim; d++) p->row_numel *= t->shape[d];
        p->chunk = (p->rows + u->world - 1) / u->world;
        p->first = ms__min64(p->rows, u->rank * p->chunk);
        p->here = ms__min64(p->rows, (u->rank + 1) * p->chunk) - p->first;
        p->shard_at = shard;
        p->whole_at = full;
        p->cast_at = low;
        size_t row = (size_t)p->row_numel * ms__element_size(p->gather_dtype), outer = (size_t)p->outer;
        if (p->extended) {
            shard = align_row(shard + outer * (size_t)(p->chunk * p->row_numel) * ms__element_size(p->dtype));
            continue;
        }
        ms_piece *piece = &u->memory.pieces[u->memory.n_pieces++];
        *piece = (ms_piece) { .in_offset = u->memory.casts ? low : shard,
                              .out_offset = full,
                              .out_stride = (size_t)p->chunk * row,
                              .bytes = outer * (size_t)p->chunk * row,
                              .total = outer * (size_t)p->rows * row };
        if (p->dim > 0) {
            piece->line = (size_t)p->chunk * row;
            piece->out_line = (size_t)p->rows * row;
        }
        shard = align_row(shard + outer * (size_t)(p->chunk * p->row_numel) * ms__element_size(p->dtype));
        low = align_row(low + outer * (size_t)(p->chunk * p->row_numel) * ms__element_size(p->gather_dtype));
        full = align_row(full + outer * (size_t)p->rows * row);
    }
    u->memory.shard_bytes = shard;
    u->memory.cast_bytes = low;
    u->memory.gather_bytes = full;
    return MS_OK;
}

static int local_shape(const unit_param *p, int64_t *shape)
{
    memcpy(shape, p->param->shape, sizeof p->param->shape);
    shape[p->dim] = p->here;
    return p->param->ndim;
}

static ms_tensor *part(const unit_param *p, ms_tensor *whole)
{
    return ms__tensor_view(whole, p->local->ndim, p->local->shape, whole->stride,
                           whole->offset + p->first * p->row_numel);
}

// Every rank packs its rows into a block of `chunk` rows. A rank with fewer rows does not send the block's rest.
static ms_status gather_whole(unit_param *p, ms_tensor *part, ms_tensor *out)
{
    unit *u = p->owner;
    ms_tensor *packed;
    size_t esz = ms__element_size(part->dtype), line = (size_t)(p->chunk * p->row_numel) * esz;
    int64_t block = p->outer * p->chunk * p->row_numel;
    MS_TRY(ms__tensor_new(&packed, part->dtype, u->memory.home, 1, &block, "full_tensor"));
    ms_status st = ms__copy_into(packed, 0, part);
    ms_piece piece = { .out_stride = line,
                       .bytes = (size_t)block * esz,
                       .total = (size_t)out->numel * esz,
                       .line = p->dim > 0 ? line : 0,
                       .out_line = (size_t)(p->rows * p->row_numel) * esz };
    if (st == MS_OK) st = ms__unit_gather_apart(u, packed->storage, out->storage, part->dtype, &piece);
    ms__release(packed);
    return st;
}

static int64_t columns(unit *u, int n, unit_param **present, int64_t *at)
{
    (void)u;
    int64_t total = 0;
    for (int k = 0; k < n; k++) {
        at[k] = total;
        total += present[k]->outer * present[k]->chunk * present[k]->row_numel;
    }
    return total;
}

static ms_status add_all_rows(ms_copies *c, unit *u, int n, unit_param **present, ms_tensor *in)
{
    int64_t total = in->numel / u->world, column = 0;
    for (int k = 0; k < n; k++) {
        const unit_param *p = present[k];
        ms_tensor *g = p->pending;
        int64_t wide = p->outer * p->chunk * p->row_numel;
        for (int r = 0; r < u->world; r++) {
            int64_t first = ms__min64(p->rows, r * p->chunk), rows = ms__min64(p->rows, (r + 1) * p->chunk) - first;
            int64_t shape[MS_MAX_DIMS], at = r * total + column;
            memcpy(shape, g->shape, sizeof shape);
            shape[p->dim] = rows;
            if (rows > 0) {
                ms_tensor *part = ms__tensor_view(g, g->ndim, shape, g->stride, g->offset + first * g->stride[p->dim]);
                ms_status st = ms__add_into(c, in, at, part);
                ms__release(part);
                MS_TRY(st);
            }
            MS_TRY(ms__add_zeros(c, in, at + p->outer * rows * p->row_numel, wide - p->outer * rows * p->row_numel));
        }
        column += wide;
    }
    return MS_OK;
}

static ms_status pack(unit *u, int n, unit_param **present, ms_tensor *in)
{
    ms_copies together = { 0 };
    return ms__copies_end(&together, add_all_rows(&together, u, n, present, in));
}

// A gradient whose rows are contiguous is read in place; all others are packed.
static ms_status parts(unit *u, int n, unit_param **present, ms_part *parts)
{
    memset(parts, 0, (size_t)n * sizeof *parts);
    for (int k = 0; k < n; k++) {
        unit_param *p = present[k];
        ms_tensor *g = p->pending;
        size_t row = (size_t)p->row_numel * ms__element_size(g->dtype);
        parts[k].bytes = parts[k].stride = (uint64_t)(p->outer * p->chunk) * row;
        parts[k].total = (uint64_t)(p->outer * p->rows) * row;
        if (p->outer == 1 && ms__is_contiguous(g)) {
            parts[k].t = ms__retain(g);
            continue;
        }
        int64_t all = p->outer * p->chunk * p->row_numel * u->world;
        MS_TRY(ms__tensor_new(&parts[k].t, g->dtype, u->memory.device, 1, &all, "fsdp: gradients to reduce"));
        MS_TRY(pack(u, 1, &p, parts[k].t));
    }
    return MS_OK;
}

const layout ms__layout_rows = { .kind = MS_LAYOUT_ROWS,
                                 .extends = true,
                                 .plan = plan,
                                 .local_shape = local_shape,
                                 .part = part,
                                 .gather_whole = gather_whole,
                                 .columns = columns,
                                 .pack = pack,
                                 .parts = parts };
