// SPDX-License-Identifier: MIT
// comm/script/calls.c -- collectives as scripts call them: tensors are passed by id, and all arguments are checked
// before anything is sent. Lists, views and Lua's strings are copied to contiguous tensors.
#include <stdio.h>
#include "device/capture.h"
#include "device/device.h"
#include "device/move.h"
#include "ops/op.h"
#include "comm/issue/captured.h"
#include "comm/issue/issue.h"
#include "comm/issue/make.h"
#include "comm/memory/control.h"

static ms_status check_tensor(const char *op, const char *what, ms_tensor *t)
{
    if (ms__device(t) == MS_META)
        return ms__fail(MS_EUNSUPPORTED, "%s: %s is %s, which has no data", op, what, ms__tensor_text(t));
    if (t->sharded)
        return ms__fail(MS_ESTATE, "%s: %s is sharded parameter '%s'; pass its to_local() or full_tensor()", op, what,
                        t->name ? t->name : "?");
    return MS_OK;
}

static ms_status check_reduction_of(const char *op, int reduction, int dtype)
{
    if (reduction < 0 || reduction > MS_PROD)
        return ms__fail(MS_EINVAL, "%s: reduction is %d, expected MS_DIST_SUM to MS_DIST_PROD", op, reduction);
    if (reduction == MS_AVG && !ms__is_float(dtype))
        return ms__fail(MS_EINVAL, "%s: 'avg' needs a floating-point dtype, the tensor is %s", op,
                        ms__dtype_name(dtype));
    return MS_OK;
}

static bool tensors_overlap(const ms_tensor *a, const ms_tensor *b)
{
    if (a->storage != b->storage || a->numel == 0 || b->numel == 0) return false;
    const char *x = ms__data(a), *y = ms__data(b);
    return x < y + ms__nbytes(b) && y < x + ms__nbytes(a);
}

typedef struct {
    ms_tensor *in, *out, *result;
} operands;  // owned references; result: the script's tensor, if out is a contiguous copy of it

static void operands_drop(operands *o)
{
    ms__release(o->in);
    ms__release(o->out);
    ms__release(o->result);
}

// Sets o->out to a contiguous tensor to write to: t itself, or a temporary tensor that is copied back to t.
static ms_status prepare_output(operands *o, const char *op, ms_tensor *t, bool async, bool reads)
{
    if (ms__is_contiguous(t)) {
        o->out = ms__retain(t);
        return MS_OK;
    }
    if (async)
        return ms__fail(MS_EINVAL, "%s: the output of an asynchronous collective must be contiguous; %s is not", op,
                        ms__tensor_text(t));
    MS_TRY(ms__tensor_like(&o->out, t, op));
    o->result = ms__retain(t);
    return reads ? ms__copy(o->out, t) : MS_OK;
}

// Packs the root's list of a scatter into one tensor with a block per rank.
static ms_status pack_list(ms_tensor **packed, const ms_dist_call *d, const ms_group *g, const ms_tensor *out)
{
    if (d->n_list != g->n)
        return ms__fail(MS_EINVAL,
                        "scatter: the length of the list is %d, expected the number of ranks in the group, %d",
                        d->n_list, g->n);
    int64_t numel = out->numel * g->n;
    MS_TRY(ms__tensor_new(packed, out->dtype, MS_CPU, 1, &numel, "scatter"));
    size_t n = ms__nbytes(out);
    for (int k = 0; k < g->n; k++) {
        ms_tensor *t = ms__tensor(d->list[k]), *whole;
        ms_status status = t ? check_tensor("scatter", "an element of the list", t) : ms__failure();
        if (status == MS_OK && (t->numel != out->numel || t->dtype != out->dtype))
            status =
                ms__fail(MS_EINVAL,
                         "scatter: element %d of the list must have the size and dtype of out; it is %s, out is %s",
                         k + 1, ms__tensor_text(t), ms__tensor_text(out));
        if (status == MS_OK && (status = ms__contiguous(&whole, t)) == MS_OK) {
            status = ms__storage_sync(whole->storage, false);
            if (status == MS_OK && n)
                status =
                    ms__move(MS_CPU, (char *)ms__data(*packed) + (size_t)k * n, ms__device(whole), ms__data(whole), n);
            ms__release(whole);
        }
        if (status != MS_OK) {
            ms__release(*packed);
            *packed = NULL;
            return status;
        }
    }
    return MS_OK;
}

// Returns the rule that the sizes of out and in violate; NULL if they fit. out is NULL on a rank that receives nothing.
static const char *size_rule(int op, const ms_tensor *out, const ms_tensor *in, int64_t n)
{
    switch (ROW(op)->sizes) {
    case OUT_ALL:
        return !out || out->numel == in->numel * n ? NULL
                                                   : "out must have in's number of elements times the number of ranks";
    case IN_ALL:
        return in->numel == out->numel * n ? NULL : "in must have out's number of elements times the number of ranks";
    case EQUAL_SIZE:
        if (in->numel == out->numel && (in->numel % n == 0 || !(ROW(op)->kind & CUT))) return NULL;
        return ROW(op)->kind & CUT
                   ? "in and out must have the same number of elements, a multiple of the number of ranks"
                   : "in and out must have the same number of elements";
    default: return NULL;
    }
}

// Fails if out and in overlap, unless op allows it (IN_BLOCK) and the smaller tensor is this rank's block of the
// larger.
static ms_status check_overlap(int op, const char *name, const ms_tensor *out, const ms_tensor *in, int me)
{
    bool block = ROW(op)->kind & IN_BLOCK;
    const ms_tensor *small = op == MS_DIST_ALL_GATHER ? in : out, *large = op == MS_DIST_ALL_GATHER ? out : in;
    if (!tensors_overlap(in, out)) return MS_OK;
    if (block && (const char *)ms__data(large) + (size_t)me * ms__nbytes(small) == ms__data(small)) return MS_OK;
    return ms__fail(MS_EINVAL, "%s: out and in overlap%s", name,
                    block ? "; a call in place must pass this rank's own block of the larger tensor" : "");
}

// Checks the tensors of a script's call, makes them contiguous and fills in the request.
static ms_status prepare_call(const ms_dist_call *d, const char *name, operands *o, ms_request *r)
{
    const ms_coll_row *row = ROW(r->op);
    ms_group *g = r->group;
    int root = ms__coll_root(g, r->op, d->root);
    ms_tensor *out = NULL, *in = NULL;
    bool sends = on_side(row->reads, g->me, root);
    if ((row->kind & IN_PLACE) || on_side(row->writes, g->me, root)) {
        if (!(out = ms__tensor(d->out))) return ms__failure();
        MS_TRY(check_tensor(name, "the output", out));
    }
    if (sends && !(row->kind & IN_PLACE) && r->op != MS_DIST_SCATTER) {
        if (!(in = ms__tensor(d->in))) return ms__failure();
        MS_TRY(check_tensor(name, "the input", in));
        if (out && in->dtype != out->dtype)
            return ms__fail(MS_EINVAL, "%s: dtypes differ: out is %s, in is %s", name, ms__tensor_text(out),
                            ms__tensor_text(in));
    }
    if (reduces(r->op)) MS_TRY(check_reduction_of(name, d->reduction, out->dtype));
    const char *rule = size_rule(r->op, out, in, g->n);
    if (rule)
        return ms__fail(MS_EINVAL, "%s: %s: out is %s, in is %s, for %d rank%s", name, rule, ms__tensor_text(out),
                        ms__tensor_text(in), g->n, g->n == 1 ? "" : "s");
    if (in) MS_TRY(ms__contiguous(&o->in, in));
    if (out) MS_TRY(prepare_output(o, name, out, d->async, row->kind & IN_PLACE));
    if (r->op == MS_DIST_SCATTER && sends) MS_TRY(pack_list(&o->in, d, g, o->out));
    if (o->in && o->out) MS_TRY(check_overlap(r->op, name, o->out, o->in, g->me));
    r->in = o->in;
    r->out = o->out;
    return MS_OK;
}

ms_status ms_dist_run(const ms_dist_call *d, ms_work **work)
{
    if (work) *work = NULL;
    ms_group *g = ms__group_by_id(d->group);
    if (!g) return MS_EINVAL;
    if (d->op < 0 || d->op > MS_DIST_ALL_TO_ALL_SINGLE)
        return ms__fail(MS_EINVAL, "dist: collective is %d, expected MS_DIST_BARRIER to MS_DIST_ALL_TO_ALL_SINGLE",
                        d->op);
    bool p2p = d->op == MS_DIST_SEND || d->op == MS_DIST_RECV;
    int alias = d->op > MS_DIST_RECV ? d->op - MS_DIST_RECV : 0, op = alias ? ms__coll_aliases[alias].op : d->op;
    const char *name = d->op == MS_DIST_SEND   ? "send"
                       : d->op == MS_DIST_RECV ? "recv"
                       : alias                 ? ms__coll_aliases[alias].name
                                               : ROW(op)->name;
    if (g->me < 0) return ms__fail(MS_EINVAL, "%s: rank %d is not a member of this group", name, ms__world.rank);
    if (p2p) {
        if (d->root < 0 || d->root >= ms__world.size)
            return ms__fail(MS_EINVAL, "%s: there is no rank %d in the world of %d rank%s", name, d->root,
                            ms__world.size, ms__world.size == 1 ? "" : "s");
        if (d->root == ms__world.rank)
            return ms__fail(MS_EINVAL, "%s: rank %d is this rank itself, expected another rank", name, d->root);
        if (!(g = d->op == MS_DIST_SEND ? ms__pair(ms__world.rank, d->root) : ms__pair(d->root, ms__world.rank)))
            return MS_ENOMEM;
    }
    ms_request r = { .group = g,
                     .op = p2p ? OP_SEND_RECV : op,
                     .reduction = (ms_reduction)d->reduction,
                     .root = d->root,
                     .by_script = true,
                     .label = { .site = d->site, .alias = alias } };
    // Sends have their own stream: a receive does not wait until the peer has received this rank's earlier send.
    if (d->async && r.op != MS_DIST_BARRIER) r.stream = d->op == MS_DIST_SEND ? MS_STREAM_COPY : ROW(r.op)->stream;
    operands o = { 0 };
    ms_coll *c = NULL;
    ms_status status = r.op == MS_DIST_BARRIER ? MS_OK : prepare_call(d, name, &o, &r);
    if (status == MS_OK && MS_UNLIKELY(ms__capturing != NULL)) {
        if (o.out) o.out->version->count++;
        status = ms__capture_collective(&r, d->async ? work : NULL);
    } else if (status == MS_OK) status = ms__coll_make(&r, &c);
    if (status == MS_OK && c) {
        if (c->out.storage) o.out->version->count++;
        status = ms__coll_issue(c, d->async ? work : NULL);
    }
    if (status == MS_OK && o.out) (o.result ? o.result : o.out)->version->collective = true;
    if (status == MS_OK && o.result) status = ms__copy(o.result, o.out);
    operands_drop(&o);
    return status;
}

// ---- bytes ----------------------------------------------------------------------------------------

static struct {
    ms_tensor *bytes;
    double *lengths;
} received;

static ms_status byte_tensor(ms_tensor **out, size_t n)
{
    int64_t shape = (int64_t)n;
    return ms__tensor_new(out, MS_U8, MS_CPU, 1, &shape, "dist");
}

// The values of different calls must not mix: a rank may call all_gather_object while a peer is inside fsdp.save.
static ms_label label_of(const ms_bytes_call *c)
{
    return (ms_label) { .site = c->site, .part = (uint64_t)c->inside, .part_of = "inside another call" };
}

static ms_status gather_plain(ms_group *g, ms_tensor *out, ms_tensor *in, ms_label label)
{
    ms_request r = { .group = g, .op = MS_DIST_ALL_GATHER, .in = in, .out = out, .label = label };
    return ms__collective(&r, NULL);
}

static ms_status broadcast_plain(ms_group *g, ms_tensor *t, int root, ms_label label)
{
    ms_request r = { .group = g, .op = MS_DIST_BROADCAST, .out = t, .root = root, .label = label };
    return ms__collective(&r, NULL);
}

// A captured step repeats no Lua, so nothing would read what the ranks send.
static ms_status no_objects(const char *name)
{
    return ms__capture_refuse("%s sends Lua values; only collectives of tensors can be captured", name);
}

ms_status ms_dist_gather_bytes(const ms_bytes_call *c, const char *data, double n, const char **all,
                               const double **lengths)
{
    if (ms__recording) return no_objects("all_gather_object");
    ms_label label = label_of(c);
    ms_group *g = ms__group_by_id(c->group);
    if (!g) return MS_EINVAL;
    if (g->me < 0)
        return ms__fail(MS_EINVAL, "all_gather_object: rank %d is not a member of this group", ms__world.rank);
    ms_tensor *mine = NULL, *sizes = NULL;
    ms_status status = byte_tensor(&mine, 8);
    if (status == MS_OK) status = byte_tensor(&sizes, 8 * (size_t)g->n);
    if (status == MS_OK) {
        memcpy(ms__data(mine), &n, 8);
        status = gather_plain(g, sizes, mine, label);
    }
    ms__release(mine);
    mine = NULL;
    double *lens = status == MS_OK ? malloc((size_t)g->n * sizeof *lens) : NULL;
    if (status == MS_OK && !lens)
        status = ms__no_memory((size_t)g->n * sizeof *lens, "all_gather_object", "lengths of %d ranks", g->n);
    double most = 0;
    for (int k = 0; k < g->n && status == MS_OK; k++) {
        memcpy(&lens[k], (char *)ms__data(sizes) + 8 * k, 8);
        if (lens[k] > most) most = lens[k];
    }
    ms__release(sizes);
    ms_tensor *got = NULL;
    if (status == MS_OK) status = byte_tensor(&mine, (size_t)most);
    if (status == MS_OK) status = byte_tensor(&got, (size_t)most * (size_t)g->n);
    if (status == MS_OK) {
        if (n > 0) memcpy(ms__data(mine), data, (size_t)n);
        if (most > n) memset((char *)ms__data(mine) + (size_t)n, 0, (size_t)(most - n));
        if (most > 0) status = gather_plain(g, got, mine, label);
    }
    ms__release(mine);
    if (status != MS_OK) {
        ms__release(got);
        free(lens);
        return status;
    }
    // Removes the gaps between values of different lengths.
    char *p = most > 0 ? ms__data(got) : NULL;
    size_t at = 0;
    for (int k = 0; k < g->n && p; k++) {
        memmove(p + at, p + (size_t)k * (size_t)most, (size_t)lens[k]);
        at += (size_t)lens[k];
    }
    ms__release(received.bytes);
    free(received.lengths);
    received.bytes = got;
    received.lengths = lens;
    *all = p ? p : "";
    *lengths = lens;
    return MS_OK;
}

ms_status ms_dist_broadcast_bytes(const ms_bytes_call *c, int source, const char **bytes, double *n)
{
    if (ms__recording) return no_objects("broadcast_object");
    ms_label label = label_of(c);
    ms_group *g = ms__group_by_id(c->group);
    if (!g) return MS_EINVAL;
    if (g->me < 0)
        return ms__fail(MS_EINVAL, "broadcast_object: rank %d is not a member of this group", ms__world.rank);
    bool root = ms__group_member(g, source) == g->me;
    ms_tensor *size = NULL, *got = NULL;
    ms_status status = byte_tensor(&size, 8);
    if (status == MS_OK) {
        memcpy(ms__data(size), n, 8);
        status = broadcast_plain(g, size, source, label);
        memcpy(n, ms__data(size), 8);
    }
    ms__release(size);
    if (status == MS_OK) status = byte_tensor(&got, (size_t)*n);
    if (status == MS_OK && *n > 0) {
        if (root) memcpy(ms__data(got), *bytes, (size_t)*n);
        status = broadcast_plain(g, got, source, label);
    }
    if (status != MS_OK) {
        ms__release(got);
        return status;
    }
    ms__release(received.bytes);
    received.bytes = got;
    *bytes = *n > 0 ? ms__data(got) : "";
    return MS_OK;
}
