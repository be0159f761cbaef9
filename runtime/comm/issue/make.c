// SPDX-License-Identifier: MIT
// comm/issue/make.c -- makes a collective of a request: finds the tensors and the fields that ranks compare.
#include <stdio.h>
#include "comm/issue/make.h"
#include "base/watched.h"
#include "device/capture.h"
#include "comm/movers/mover.h"

// ---- the fingerprint ------------------------------------------------------------------------------

// Adds to the fingerprint a value that must be equal on all ranks.
static void agree_on(ms_coll *c, uint64_t value)
{
    c->fingerprint.agreed = ms__hash_value(c->fingerprint.agreed, value);
}

// Shapes chosen by the script must agree on all ranks. Shapes of units need not be compared: the engine chooses them.
static void agree_on_shape(ms_coll *c, const ms_tensor *t)
{
    ms_fingerprint *p = &c->fingerprint;
    p->shaped = (uint8_t)(t->ndim + 1);
    p->agreed ^= p->shaped;
    for (int d = 0; d < t->ndim; d++) {
        agree_on(c, (uint64_t)t->shape[d]);
        p->shape[d] = t->shape[d] > UINT32_MAX ? UINT32_MAX : (uint32_t)t->shape[d];
    }
}

static void label_fingerprint(ms_coll *c, const ms_label *l)
{
    ms_fingerprint *p = &c->fingerprint;
    if (l->site) {
        // Keep the end of a long path.
        size_t n = strlen(l->site);
        memcpy(p->site, n < SITE ? l->site : l->site + n - SITE + 1, n < SITE ? n + 1 : SITE);
    }
    if (l->unit) {  // "" is the name of the root unit; NULL: no unit
        c->unit = ms__intern(l->unit);
        snprintf(p->unit, UNIT_NAME, "%s", l->unit);
        p->model = l->model;
    }
    p->alias = (uint8_t)l->alias;
    p->part = l->part;
    if (MS_UNLIKELY(l->part)) snprintf(p->part_of, PART_OF, "%s", l->part_of);
    p->step = ms__world.step;
}

// ---- tensors --------------------------------------------------------------------------------------

static void *copy_list(const void *list, int n, size_t each, const char *op, const char *what)
{
    void *copy = malloc((size_t)(n ? n : 1) * each);
    if (!copy) ms__no_memory((size_t)n * each, op, "%d %s", n, what);
    else if (n) memcpy(copy, list, (size_t)n * each);
    return copy;
}

static ms_status take_pieces(ms_coll *c, const ms_request *r)
{
    int members = c->g->n, me = c->g->me < 0 ? 0 : c->g->me;
    uint64_t block = r->in ? ms__nbytes(r->in) : 0;
    ms_piece whole = { .out_stride = block, .bytes = block, .total = block * (uint64_t)members };
    c->n_pieces = r->in ? 1 : r->n_pieces;
    c->pieces = copy_list(r->in ? &whole : r->pieces, c->n_pieces, sizeof whole, "all_gather", "pieces");
    if (!c->pieces) return MS_ENOMEM;
    size_t esize = (size_t)ms__dtype_size(c->reducer.dtype);
    for (int i = 0; i < c->n_pieces; i++) {
        const ms_piece *p = &c->pieces[i];
        size_t mine = ms__piece_bytes(p, me);
        c->in.numel += (double)(mine / esize);
        c->out.numel += (double)(p->total / esize);
        c->in.bytes += mine;
        // Offsets in the output may differ between ranks; what peers read must be equal.
        agree_on(c, p->in_offset);
        agree_on(c, p->bytes);
        agree_on(c, p->total);
        agree_on(c, p->line);
    }
    c->fingerprint.count = (uint64_t)(r->in ? c->in.numel : c->out.numel);
    c->in.storage = r->in ? r->in->storage : r->from;
    c->out.storage = r->in ? r->out->storage : r->to;
    c->in.data = r->in ? ms__data(r->in) : r->from->data;
    c->out.data = r->in ? ms__data(r->out) : r->to->data;
    const ms_piece *p = c->pieces;
    if (c->n_pieces == 1 && !p->line && p->total == (uint64_t)members * p->bytes && p->out_stride == p->bytes &&
        p->bytes <= PAYLOAD) {
        c->inline_ = true;
        c->in.data += p->in_offset;
        c->out.data += p->out_offset;
        c->count = p->bytes / esize;
    }
    return MS_OK;
}

static ms_status take_parts(ms_coll *c, const ms_request *r)
{
    if (!(c->parts = copy_list(r->parts, r->n_parts, sizeof *c->parts, "reduce_scatter", "parts"))) return MS_ENOMEM;
    c->n_parts = r->n_parts;
    for (int i = 0; i < c->n_parts; i++) {
        ms__retain(c->parts[i].t);
        agree_on(c, c->parts[i].bytes);
        agree_on(c, c->parts[i].total);
    }
    c->out.numel = (double)r->out->numel;
    c->in.numel = c->out.numel * c->g->n;
    c->count = (size_t)r->out->numel;
    c->fingerprint.count = (uint64_t)c->in.numel;
    c->out.storage = r->out->storage;
    c->out.data = ms__data(r->out);
    c->out.bytes = ms__nbytes(r->out);
    c->in.bytes = c->out.bytes * (size_t)c->g->n;
    return MS_OK;
}

// The tensor whose size and shape the ranks compare.
static const ms_tensor *compared_tensor(const ms_request *r)
{
    bool input = r->op == MS_DIST_REDUCE_SCATTER || (ROW(r->op)->kind & SIZED_BY_INPUT) || !r->out;
    return input && r->in ? r->in : r->out;
}

static ms_status take_tensors(ms_coll *c, const ms_request *r)
{
    const ms_coll_row *row = ROW(c->op);
    int n = c->g->n, me = c->g->me;
    ms_tensor *in = row->kind & IN_PLACE ? r->out : r->in;
    const ms_tensor *sent = compared_tensor(r), *counted = c->op == MS_DIST_REDUCE_SCATTER ? r->out : sent;
    if (c->op == MS_DIST_REDUCE_SCATTER && (in->numel != r->out->numel * n || in->dtype != r->out->dtype))
        return ms__fail(MS_EINVAL,
                        "reduce_scatter: in must have the dtype and %d times the elements of out; out is %s, in is %s",
                        n, ms__tensor_text(r->out), ms__tensor_text(in));
    if (in && on_side(row->reads, me, c->root)) {
        c->in.storage = in->storage;
        c->in.data = ms__data(in);
        c->in.bytes = ms__nbytes(in);
    }
    if (r->out) c->out.data = ms__data(r->out);
    if (r->out && on_side(row->writes, me, c->root)) {
        c->out.storage = r->out->storage;
        c->out.bytes = ms__nbytes(r->out);
    }
    c->in.numel = (double)(in ? in : r->out)->numel;
    c->out.numel = r->out ? (double)r->out->numel : 0;
    c->count = (size_t)(c->op == MS_DIST_ALL_TO_ALL ? counted->numel / n : counted->numel);
    c->fingerprint.count = (uint64_t)(r->by_script ? counted : sent)->numel;
    c->inline_ = (row->kind & IN_PAYLOAD) && ms__nbytes(sent) <= PAYLOAD;
    return MS_OK;
}

static ms_status take_operands(ms_coll *c, const ms_request *r)
{
    if (c->op == MS_DIST_BARRIER) c->inline_ = true;
    else if (c->op == OP_REFUSED) {
        size_t n = strlen(r->refusal) + 1;
        c->in.data = (char *)r->refusal;
        c->in.bytes = n < PAYLOAD ? n : PAYLOAD;
        c->inline_ = true;
    } else if (c->op == MS_DIST_ALL_GATHER) return take_pieces(c, r);
    else return r->n_parts ? take_parts(c, r) : take_tensors(c, r);
    return MS_OK;
}

static ms_coll *spare;

static ms_coll *coll_new(int op)
{
    ms_coll *c = spare;
    if (c) spare = *(ms_coll **)c;
    else if (!(c = malloc(sizeof *c))) return ms__null(ms__no_memory(sizeof *c, ROW(op)->name, "a collective"));
    memset(c, 0, sizeof *c);
    return c;
}

void ms__coll_drop(ms_coll *c)
{
    if (c->mover) c->mover->drop(c);
    ms__release(c->keep[0]);
    ms__release(c->keep[1]);
    if (c->in.storage) ms__storage_release(c->in.storage);
    if (c->out.storage) ms__storage_release(c->out.storage);
    free(c->pieces);
    for (int i = 0; i < c->n_parts; i++) ms__release(c->parts[i].t);
    free(c->parts);
    if (!MS_RECYCLE) {
        free(c);
        return;
    }
    *(ms_coll **)c = spare;
    spare = c;
}

// ---- making collectives ----------------------------------------------------------------------------

ms_status ms__coll_make(const ms_request *r, ms_coll **out)
{
    const ms_coll_row *row = ROW(r->op);
    int root = ms__coll_root(r->group, r->op, r->root);
    if (is_rooted(r->op) && root < 0)
        return ms__fail(MS_EINVAL, "%s: rank %d is not a member of the group", row->name, r->root);
    ms_coll *c = coll_new(r->op);
    if (!c) return MS_ENOMEM;
    const ms_tensor *first = r->in ? r->in : r->out;
    c->g = r->group;
    c->op = (uint8_t)r->op;
    c->reducer = (ms_reducer) { .dtype = first     ? first->dtype
                                         : r->from ? r->dtype
                                                   : MS_U8,
                                .reduction = row->kind & REDUCES ? r->reduction : MS_SUM,
                                .n_ranks = r->group->n,
                                .scale = r->scale != 0 ? r->scale : 1,
                                .narrow = r->narrow };
    c->stream = r->stream;
    c->root = root;
    c->fingerprint.op = c->op;
    c->fingerprint.dtype = (uint8_t)c->reducer.dtype;
    c->fingerprint.reduction = (uint8_t)c->reducer.reduction;
    c->fingerprint.agreed = r->agreed;
    c->fingerprint.root = c->op == OP_REFUSED ? r->root : root < 0 ? -1 : r->group->ranks[root];
    uint64_t scale;
    memcpy(&scale, &c->reducer.scale, sizeof scale);
    if (row->kind & REDUCES) agree_on(c, scale);
    label_fingerprint(c, &r->label);
    ms_status status = take_operands(c, r);
    if (status != MS_OK) {
        c->in.storage = c->out.storage = NULL;  // c has not retained them
        ms__coll_drop(c);
        return status;
    }
    c->keep[0] = ms__retain(r->in);
    c->keep[1] = ms__retain(r->out);
    if (r->by_script && first) agree_on_shape(c, compared_tensor(r));
    *out = c;
    return MS_OK;
}
