// SPDX-License-Identifier: MIT
// comm/engine.c -- the collectives that the shard engine issues (comm.h): what each reads and writes, and what of it is
// compared.
#include "comm/internal.h"

static uint64_t double_bits(double x)
{
    uint64_t u;
    memcpy(&u, &x, 8);
    return u;
}

ms_status ms__all_gather_pieces(ms_group *g, ms_storage *out, ms_storage *in, int n, const ms_piece *pieces, int dtype,
                                ms_stream_kind stream, const char *unit, ms_work **work)
{
    ms_coll *c = ms__coll_new(g, OP_ALL_GATHER, dtype, NULL, unit);
    if (work) *work = NULL;
    if (!c) return MS_ENOMEM;
    size_t esize = (size_t)ms__dtype_size(dtype);
    c->pieces = malloc((size_t)(n ? n : 1) * sizeof *c->pieces);
    if (!c->pieces) {
        ms__coll_drop(c);
        return ms__no_memory((size_t)n * sizeof(ms_piece), "all_gather", "%d pieces", n);
    }
    if (n) memcpy(c->pieces, pieces, (size_t)n * sizeof *pieces);
    c->n_pieces = n;
    double in_numel = 0, out_numel = 0;
    for (int i = 0; i < n; i++) {
        uint64_t mine = (uint64_t)(g->me < 0 ? 0 : g->me) * pieces[i].bytes;
        mine = mine < pieces[i].total ? pieces[i].total - mine : 0;
        if (mine > pieces[i].bytes) mine = pieces[i].bytes;
        in_numel += (double)(mine / esize);
        out_numel += (double)(pieces[i].total / esize);
        c->in_bytes += mine;
        // Places in the output may differ between ranks; what is read from peers must not.
        uint64_t same[4] = { pieces[i].in_offset, pieces[i].bytes, pieces[i].total, pieces[i].line };
        for (int k = 0; k < 4; k++) c->print.extra = (c->print.extra ^ same[k]) * 1099511628211ull;
    }
    c->stream = stream;
    c->print.count = (uint64_t)out_numel;
    c->in_storage = in;
    c->out_storage = out;
    c->in = in->data;
    c->out = out->data;
    if (n == 1 && !pieces[0].line && pieces[0].total == (uint64_t)g->n * pieces[0].bytes &&
        pieces[0].out_stride == pieces[0].bytes && pieces[0].bytes <= PAYLOAD) {
        c->inline_ = true;
        c->in += pieces[0].in_offset;
        c->out += pieces[0].out_offset;
        c->count = pieces[0].bytes / esize;
    }
    return ms__coll_issue(c, in_numel, out_numel, work);
}

// in and out may be one tensor.
static ms_status issue_reduction(ms_group *g, int op, ms_tensor *out, ms_tensor *in, ms_reduction red, double scale,
                                 ms_stream_kind stream, const char *unit, ms_work **work)
{
    ms_coll *c = ms__coll_new(g, op, in->dtype, NULL, unit);
    if (!c) return MS_ENOMEM;
    c->red = (uint8_t)red;
    c->scale = scale;
    c->stream = stream;
    c->count = (size_t)out->numel;
    c->print.count = (uint64_t)in->numel;
    c->print.extra = double_bits(scale);
    c->keep[0] = ms__retain(in);
    if (out != in) c->keep[1] = ms__retain(out);
    c->in_storage = in->storage;
    c->out_storage = out->storage;
    c->in = ms__data(in);
    c->out = ms__data(out);
    c->in_bytes = ms__nbytes(in);
    c->out_bytes = ms__nbytes(out);
    c->inline_ = c->in_bytes <= PAYLOAD;
    return ms__coll_issue(c, (double)in->numel, (double)out->numel, work);
}

ms_status ms__reduce_scatter(ms_group *g, ms_tensor *out, ms_tensor *in, ms_reduction op, double scale,
                             ms_stream_kind stream, const char *unit, ms_work **work)
{
    if (work) *work = NULL;
    if (in->numel != out->numel * g->n || in->dtype != out->dtype)
        return ms__fail(MS_EINVAL, "reduce_scatter: out is %s, in is %s, for %d ranks", ms__tensor_text(out),
                        ms__tensor_text(in), g->n);
    return issue_reduction(g, OP_REDUCE_SCATTER, out, in, op, scale, stream, unit, work);
}

ms_status ms__reduce_scatter_parts(ms_group *g, ms_tensor *out, int n, const ms_part *parts, ms_reduction op,
                                   double scale, ms_stream_kind stream, const char *unit, ms_work **work)
{
    if (work) *work = NULL;
    ms_coll *c = ms__coll_new(g, OP_REDUCE_SCATTER, out->dtype, NULL, unit);
    if (!c) return MS_ENOMEM;
    if (!(c->parts = malloc((size_t)(n ? n : 1) * sizeof *c->parts))) {
        ms__coll_drop(c);
        return ms__no_memory((size_t)n * sizeof *c->parts, "reduce_scatter", "%d parts", n);
    }
    c->n_parts = n;
    c->print.extra = double_bits(scale);
    for (int i = 0; i < n; i++) {
        c->parts[i] = parts[i];
        ms__retain(parts[i].t);
        uint64_t same[2] = { parts[i].bytes, parts[i].total };
        for (int k = 0; k < 2; k++) c->print.extra = (c->print.extra ^ same[k]) * 1099511628211ull;
    }
    double numel = (double)out->numel * g->n;
    c->red = (uint8_t)op;
    c->scale = scale;
    c->stream = stream;
    c->count = (size_t)out->numel;
    c->print.count = (uint64_t)numel;
    c->keep[1] = ms__retain(out);
    c->out_storage = out->storage;
    c->out = ms__data(out);
    c->out_bytes = ms__nbytes(out);
    c->in_bytes = c->out_bytes * (size_t)g->n;
    return ms__coll_issue(c, numel, (double)out->numel, work);
}

ms_status ms__all_reduce(ms_group *g, ms_tensor *t, ms_reduction op, double scale, ms_stream_kind stream,
                         const char *unit, ms_work **work)
{
    if (work) *work = NULL;
    return issue_reduction(g, OP_ALL_REDUCE, t, t, op, scale, stream, unit, work);
}

ms_status ms__coll_rooted(ms_coll **out, ms_group *g, int op, int dtype, int root, const char *site, const char *unit)
{
    int m = ms__group_member(g, root);
    if (m < 0) return ms__fail(MS_EINVAL, "%s: rank %d is not a member of the group", ms__coll_names[op], root);
    if (!(*out = ms__coll_new(g, op, dtype, site, unit))) return MS_ENOMEM;
    (*out)->root = m;
    (*out)->print.root = root;
    return MS_OK;
}

ms_status ms__broadcast_on(ms_group *g, ms_tensor *t, int src, ms_stream_kind stream, const char *site,
                           const char *unit, ms_work **work)
{
    ms_coll *c = NULL;
    MS_TRY(ms__coll_rooted(&c, g, OP_BROADCAST, t->dtype, src, site, unit));
    c->stream = stream;
    c->count = (size_t)t->numel;
    c->print.count = (uint64_t)t->numel;
    c->keep[0] = ms__retain(t);
    c->in = c->out = ms__data(t);
    // The root reads, the others write: what is not touched is not waited for.
    if (c->root == g->me) c->in_storage = t->storage;
    else c->out_storage = t->storage;
    c->inline_ = ms__nbytes(t) <= PAYLOAD;
    c->in_bytes = c->root == g->me ? ms__nbytes(t) : 0;
    return ms__coll_issue(c, (double)t->numel, (double)t->numel, work);
}

ms_status ms__broadcast_from(ms_group *g, ms_tensor *t, int src, const char *unit)
{
    return ms__broadcast_on(g, t, src, MS_STREAM_COMPUTE, NULL, unit, NULL);
}

ms_status ms__barrier(ms_group *g, uint64_t extra, const char *site, const char *unit)
{
    ms_coll *c = ms__coll_new(g, OP_BARRIER, MS_U8, site, unit);
    if (!c) return MS_ENOMEM;
    c->inline_ = true;
    c->print.extra = extra;
    return ms__coll_issue(c, 0, 0, NULL);
}
