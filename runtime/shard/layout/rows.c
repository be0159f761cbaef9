// SPDX-License-Identifier: MIT
// shard/layout/rows.c -- who owns which bytes of a unit: `rows` cuts every parameter along dimension 0
// (fully_shard), `flat` is one padded flat parameter (FSDP). The schedule in unit.c never asks which.
//
// rows: rank k of W has rows [k*chunk, (k+1)*chunk) of a parameter, chunk = ceil(rows / W), as
// torch.chunk cuts: the last ranks may have fewer or none. The gather moves each parameter's rows
// straight to their place in the whole, so there is no copy-out; padding rows do not travel. A later
// dimension is cut alike, evenly; then a rank's part goes to its place in lines.
#include "shard/unit.h"

enum { ALIGN = 64 };  // every parameter starts on a cache line, in the shard and in the whole

static size_t align_up(size_t n) { return (n + ALIGN - 1) & ~(size_t)(ALIGN - 1); }
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static size_t size_of(int dtype) { return (size_t)ms__dtype_size(dtype); }

static ms_tensor *zone(ms_tensor *flat, int ndim, const int64_t *shape, int64_t offset)
{
    return ms__tensor_on(flat->storage, flat->dtype, ndim, shape, offset);
}

static ms_status copy_into(ms_tensor *flat, int64_t offset, ms_tensor *src)
{
    ms_tensor *dst = zone(flat, src->ndim, src->shape, offset);
    ms_status st = ms__copy(dst, src);
    ms__release(dst);
    return st;
}

static ms_status zero_zone(ms_tensor *flat, int64_t offset, int64_t n)
{
    if (n <= 0) return MS_OK;
    ms_tensor *dst = zone(flat, 1, &n, offset);
    ms_status st = ms__zero(dst);
    ms__release(dst);
    return st;
}

// ---- rows -------------------------------------------------------------------------------------

static ms_status rows_plan(unit *u)
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
        p->first = min64(p->rows, u->rank * p->chunk);
        p->here = min64(p->rows, (u->rank + 1) * p->chunk) - p->first;
        p->shard_at = shard;
        p->full_at = full;
        p->low_at = low;
        size_t row = (size_t)p->row_numel * size_of(p->low), outer = (size_t)p->outer;
        if (p->extended) {
            shard = align_up(shard + outer * (size_t)(p->chunk * p->row_numel) * size_of(p->dtype));
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
        shard = align_up(shard + outer * (size_t)(p->chunk * p->row_numel) * size_of(p->dtype));
        low = align_up(low + outer * (size_t)(p->chunk * p->row_numel) * size_of(p->low));
        full = align_up(full + outer * (size_t)p->rows * row);
    }
    u->memory.shard_bytes = shard;
    u->memory.low_bytes = low;
    u->memory.full_bytes = full;
    return MS_OK;
}

static int rows_local_shape(const unit_param *p, int64_t *shape)
{
    memcpy(shape, p->param->shape, sizeof p->param->shape);
    shape[p->dim] = p->here;
    return p->param->ndim;
}

static int64_t rows_columns(unit *u, int n, unit_param **present, int64_t *at)
{
    (void)u;
    int64_t total = 0;
    for (int k = 0; k < n; k++) {
        at[k] = total;
        total += present[k]->outer * present[k]->chunk * present[k]->row_numel;
    }
    return total;
}

static ms_status rows_pack(unit *u, int n, unit_param **present, ms_tensor *in)
{
    int64_t total = in->numel / u->world, column = 0;
    for (int k = 0; k < n; k++) {
        const unit_param *p = present[k];
        ms_tensor *g = p->pending;
        int64_t wide = p->outer * p->chunk * p->row_numel;
        for (int r = 0; r < u->world; r++) {
            int64_t first = min64(p->rows, r * p->chunk), rows = min64(p->rows, (r + 1) * p->chunk) - first;
            int64_t shape[MS_MAX_DIMS], at = r * total + column;
            memcpy(shape, g->shape, sizeof shape);
            shape[p->dim] = rows;
            if (rows > 0) {
                ms_tensor *part = ms__tensor_view(g, g->ndim, shape, g->stride, g->offset + first * g->stride[p->dim]);
                ms_status st = copy_into(in, at, part);
                ms__release(part);
                MS_TRY(st);
            }
            MS_TRY(zero_zone(in, at + p->outer * rows * p->row_numel, wide - p->outer * rows * p->row_numel));
        }
        column += wide;
    }
    return MS_OK;
}

// A gradient whose rows are runs of memory is read where it is; another one is packed.
static ms_status rows_parts(unit *u, int n, unit_param **present, ms_part *parts)
{
    memset(parts, 0, (size_t)n * sizeof *parts);
    for (int k = 0; k < n; k++) {
        unit_param *p = present[k];
        ms_tensor *g = p->pending;
        size_t row = (size_t)p->row_numel * size_of(g->dtype);
        parts[k].bytes = parts[k].stride = (uint64_t)(p->outer * p->chunk) * row;
        parts[k].total = (uint64_t)(p->outer * p->rows) * row;
        if (p->outer == 1 && ms__is_contiguous(g)) {
            parts[k].t = ms__retain(g);
            continue;
        }
        int64_t all = p->outer * p->chunk * p->row_numel * u->world;
        MS_TRY(ms__tensor_new(&parts[k].t, g->dtype, u->memory.device, 1, &all, "fsdp: gradients to reduce"));
        MS_TRY(rows_pack(u, 1, &p, parts[k].t));
    }
    return MS_OK;
}

// ---- flat -------------------------------------------------------------------------------------

// Pieces that scripts see begin at multiples of 16 bytes in the flat parameter, by the dtype it was made with: moved to
// another one, every element stays on its rank.
static int64_t flat_place(const unit *u, int64_t at)
{
    return (at + u->memory.piece_elements - 1) / u->memory.piece_elements * u->memory.piece_elements;
}

static ms_status flat_plan(unit *u)
{
    int64_t total = 0;
    if (!u->memory.piece_elements)
        u->memory.piece_elements = u->views == MS_VIEWS_PIECES && u->n ? 16 / (int64_t)size_of(u->params[0].dtype) : 1;
    for (int j = 0; j < u->n; j++) {
        if (u->params[j].dtype != u->params[0].dtype)
            return ms__fail(MS_EINVAL, "Must flatten tensors with uniform dtype but got %s and %s",
                            ms__dtype_name(u->params[0].dtype), ms__dtype_name(u->params[j].dtype));
        total = flat_place(u, total) + u->params[j].numel;
    }
    int64_t each = (total + u->world - 1) / u->world, begin = u->rank * each, end = begin + each, at = 0;
    size_t wide = u->n ? size_of(u->params[0].dtype) : 0, low = u->n ? size_of(u->params[0].low) : 0;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        at = flat_place(u, at);
        int64_t n = p->numel, from = max64(at, begin), to = min64(at + n, end);
        p->rows = n;
        p->row_numel = p->outer = 1;
        p->chunk = each;
        p->here = max64(0, to - from);
        p->first = p->here ? from - at : 0;
        p->shard_at = p->here ? (size_t)(from - begin) * wide : 0;
        p->low_at = p->here ? (size_t)(from - begin) * low : 0;
        p->full_at = (size_t)at * low;
        at += n;
    }
    u->memory.n_pieces = u->n ? 1 : 0;
    if (u->n)
        u->memory.pieces[0] = (ms_piece) { .out_stride = (size_t)each * low,
                                           .bytes = (size_t)each * low,
                                           .total = (size_t)(each * u->world) * low };
    u->memory.shard_bytes = (size_t)each * wide;
    u->memory.low_bytes = (size_t)each * low;
    u->memory.full_bytes = (size_t)(each * u->world) * low;
    return MS_OK;
}

static int flat_local_shape(const unit_param *p, int64_t *shape)
{
    if (p->owner->views == MS_VIEWS_PIECES && p->owner->world == 1) {
        memcpy(shape, p->shape, sizeof p->shape);
        return p->ndim;
    }
    shape[0] = p->here;
    return 1;
}

static int64_t flat_columns(unit *u, int n, unit_param **present, int64_t *at)
{
    for (int k = 0; k < n; k++) at[k] = (int64_t)(present[k]->shard_at / size_of(present[k]->dtype));
    return (int64_t)(u->memory.shard_bytes / size_of(u->params[0].dtype));
}

static ms_status flat_pack(unit *u, int n, unit_param **present, ms_tensor *in)
{
    int64_t end = 0, k = 0;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        int64_t at = (int64_t)(p->full_at / size_of(p->low));
        MS_TRY(zero_zone(in, end, at - end));
        end = at + p->numel;
        if (k < n && present[k] == p) {
            MS_TRY(copy_into(in, at, p->pending));
            k++;
        } else {
            MS_TRY(zero_zone(in, at, p->numel));
        }
    }
    return zero_zone(in, end, in->numel - end);
}

const layout ms__layouts[] = {
    [MS_LAYOUT_ROWS] = { .name = "rows",
                         .plan = rows_plan,
                         .pack = rows_pack,
                         .parts = rows_parts,
                         .columns = rows_columns,
                         .local_shape = rows_local_shape },
    [MS_LAYOUT_FLAT] = { .name = "flat",
                         .plan = flat_plan,
                         .pack = flat_pack,
                         .columns = flat_columns,
                         .local_shape = flat_local_shape },
};
