// SPDX-License-Identifier: MIT
// shard/views/sharded.c -- parameters of fully_shard: operators refuse them while they are sharded. This rank's part of
// each is a local tensor, on which its reduced gradient lands (docs/semantics.md#reduction). Gradients are reduced in
// place where backward stored them, or packed.
#include <stdio.h>

#include "ops/data.h"
#include "device/device.h"
#include "shard/layout/layout.h"
#include "shard/views/views.h"
#include "ops/op.h"

// ---- parameters --------------------------------------------------------------------------------

static ms_status check_gradient(const unit *u, const ms_tensor *t, const ms_tensor *first)
{
    const char *p = t->name ? t->name : "?", *name = u->name;
    if (t->unit_param)
        return ms__fail(MS_ESTATE, "fsdp: parameter '%s' is already managed by unit '%s'", p,
                        ((unit_param *)t->unit_param)->owner->name);
    if (t->node)
        return ms__fail(MS_EINVAL, "fsdp: parameter '%s' of unit '%s' is the result of an operator, expected a leaf", p,
                        name);
    if (t->ndim == 0)
        return ms__fail(
            MS_EINVAL, "fully_shard doesn't support scalar parameters. Change %s to a 1D tensor with numel equal to 1.",
            p);
    if (!ms__is_contiguous(t))
        return ms__fail(MS_EINVAL, "FSDP does not support non-contiguous parameters yet: %s %s", p, ms__tensor_text(t));
    if (ms__device(t) != ms__device(first))
        return ms__fail(MS_EINVAL, "fsdp: the parameters of unit '%s' are on different devices: %s and '%s' %s", name,
                        ms__tensor_text(first), p, ms__tensor_text(t));
    return MS_OK;
}

static ms_status off_home(const unit *u, const char *device)
{
    char names[1024];
    ms__unit_list(u, device, names, sizeof names);
    return ms__fail(MS_ESTATE,
                    "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a "
                    "CPU state dict or call "
                    "module:to_empty(\"cpu\"). Found following parameters on non-CPU device: [%s]",
                    names);
}

// Parameters may change after forward if the whole parameters of the forward still exist: backward then uses these.
static ms_status changed(const unit *u, bool stayed)
{
    if (stayed) return MS_OK;
    return ms__fail(
        MS_ESTATE,
        "fsdp: the parameters of unit '%s' were changed between its forward and its backward; change them before "
        "the forward or after the backward",
        u->name);
}

// ---- landing -----------------------------------------------------------------------------------

static ms_status land_all(ms_run *run, reduction *r, ms_tensor *out)
{
    for (int k = 0; k < r->n; k++) {
        unit_param *p = r->present[k];
        ms_tensor *part = ms__tensor_on(out->storage, out->dtype, p->local->ndim, p->local->shape, r->at[k]);
        ms_status st = ms__unit_bring_home(r->owner, p->dtype, &part);
        if (st == MS_OK) st = ms__unit_land_part(p, part);
        ms__release(part);
        MS_TRY(st);
    }
    for (int k = r->n - 1; k >= 0; k--)  // tasks form a stack: the hooks of the first parameter run first
        MS_TRY(ms__leaf_hooks(run, r->present[k]->param));
    return MS_OK;
}

static bool same_present(const unit *u, const reduction *r)
{
    return u->gradients.n_partial == r->n &&
           !memcmp(u->gradients.partial_of, r->present, (size_t)r->n * sizeof *r->present);
}

// Keeps gradients that are reduced over the shard group but not over the replicas, until a backward with all-reduce.
static ms_status keep_partial(reduction *r)
{
    unit *u = r->owner;
    if (u->gradients.partial && !same_present(u, r))
        return ms__fail(
            MS_ESTATE,
            "fsdp: unit '%s': the earlier backwards without all-reduce and this one gave gradients to different "
            "parameters (%d and %d of them); all backwards up to the one with all-reduce must reach the same "
            "parameters",
            u->name, u->gradients.n_partial, r->n);
    if (u->gradients.partial) {
        MS_TRY(ms__add_to(u->gradients.partial, r->out));
    } else {
        u->gradients.partial = ms__retain(r->out);
        u->gradients.partial_of = r->present;
        u->gradients.n_partial = r->n;
        r->present = NULL;
    }
    free(u->gradients.partial_at);
    u->gradients.partial_at = r->at;
    r->at = NULL;
    ms__unit_accumulates(u);
    return MS_OK;
}

static void drop_partial(unit *u)
{
    ms__drop(&u->gradients.partial);
    free(u->gradients.partial_of);
    free(u->gradients.partial_at);
    u->gradients.partial_of = NULL;
    u->gradients.partial_at = NULL;
    u->gradients.n_partial = 0;
}

static void clear_waiting(unit_param *p)
{
    unit *u = p->owner;
    bool others = false;
    for (int k = 0; k < u->gradients.n_partial; k++) {
        int64_t *at = &u->gradients.partial_at[k];
        if (u->gradients.partial_of[k] == p && *at >= 0) {
            ms_tensor *all = u->gradients.partial,
                      *part = ms__tensor_on(all->storage, all->dtype, p->local->ndim, p->local->shape, *at);
            (void)ms__zero(part);
            ms__release(part);
            *at = -1;
        }
        others |= *at >= 0;
    }
    if (!others) drop_partial(u);
}

// Lands r->out, the reduced gradients, on the parameters, or keeps it if r is partial; releases r's reference to it.
static ms_status land_reduced(ms_run *run, reduction *r)
{
    // Parameters of one dtype are cast together, others one by one.
    int dtype = r->n ? r->present[0]->dtype : r->out->dtype;
    for (int k = 1; k < r->n; k++)
        if (r->present[k]->dtype != dtype) dtype = r->out->dtype;
    ms_status st = r->partial ? keep_partial(r) : ms__unit_bring_home(r->owner, dtype, &r->out);
    if (st == MS_OK && !r->partial) st = land_all(run, r, r->out);
    ms__release(r->out);
    r->out = NULL;
    return st;
}

// For a unit with an all-reduce hook: passes the reduced gradients to the script before they land.
static ms_run_state hooked_step(ms_task *t, ms_run *run, ms_event *ev)
{
    reduction *r = t->ptr;
    if (t->phase++ == 0) {
        if (ms__reduction_wait(r) != MS_OK) return MS_RUN_FAILED;
        return ms__run_event(run, ev,
                             &(ms_question) { MS_EV_ALL_REDUCE, .key = r->owner->settings.all_reduce_hook,
                                              .unit = r->owner->handle, .n = 1, .in = &r->out });
    }
    return land_reduced(run, r) == MS_OK ? MS_RUN_DONE : MS_RUN_FAILED;
}

static ms_status land_on_shard(ms_run *run, reduction *reducing)
{
    reduction r = *reducing;
    *reducing = (reduction) { 0 };
    if (r.owner->settings.all_reduce_hook != 0 && !r.partial) {
        ms_status st = ms__reduction_push(run, &r, hooked_step);
        if (st != MS_OK) ms__reduction_drop(&r);
        return st;
    }
    ms_status st = ms__reduction_wait(&r);
    if (st == MS_OK) st = land_reduced(run, &r);
    ms__reduction_free(&r);
    return st;
}

// ---- reduction -----------------------------------------------------------------------------------

// Adds the gradients of the current backward to the gradients kept from earlier backwards. Gradients that are not
// reduced now are kept in the reduce dtype, if the unit has one.
static ms_status take_gradients(unit *u)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        ms_tensor *g = p->fresh;
        if (!g) continue;
        p->fresh = NULL;
        p->run = NULL;
        if (p->pending) {
            // ms__accumulate takes ownership of g, and never writes into a buffer that another gradient shares.
            MS_TRY(ms__accumulate(&p->pending, g));
            continue;
        }
        int dtype = u->settings.reduce_dtype >= 0 && !u->settings.sync ? u->settings.reduce_dtype : g->dtype;
        ms_status st = ms__unit_bring(ms__device(g), dtype, &g);
        if (st == MS_OK) p->pending = g;
        else ms__release(g);
        MS_TRY(st);
    }
    return MS_OK;
}

// The dtype in which gradients of several dtypes are reduced: the widest; float32 for two different half types.
static int promoted(int n, unit_param **present)
{
    int dtype = present[0]->pending->dtype;
    for (int k = 1; k < n; k++) {
        int other = present[k]->pending->dtype;
        if (other == dtype) continue;
        int wide = ms__dtype_size(other), here = ms__dtype_size(dtype);
        dtype = wide > here ? other : wide < here ? dtype : MS_F32;
    }
    return dtype;
}

static bool uniform(int n, unit_param **present)
{
    for (int k = 1; k < n; k++)
        if (present[k]->pending->dtype != present[0]->pending->dtype) return false;
    return true;
}

// The packed gradients have no room for parameters without a gradient. If ranks omitted different parameters of equal
// size, their gradients would be mixed without an error, so the label lists the parameters that are present.
static void mark_present(const unit *u, const reduction *r, ms_label *label, char *words, size_t size)
{
    uint64_t mark = MS_HASH_START;
    int missing = u->n - r->n, named = 0;
    if (missing == 0) return;
    snprintf(words, size, missing <= r->n ? "no gradient of" : "gradients of");
    for (int j = 0, k = 0; j < u->n; j++) {
        bool there = k < r->n && r->present[k] == &u->params[j];
        k += there;
        mark = ms__hash_value(mark, (uint64_t)there);
        if (there == (missing <= r->n) || strlen(words) >= 72) continue;
        const char *name = u->params[j].param->name;
        ms__append(words, size, "%s'%s'", named++ ? ", " : " ", name ? name : "?");
    }
    int left = (missing <= r->n ? missing : r->n) - named;
    if (left) ms__append(words, size, " and %d more", left);
    label->part = mark;
    label->part_of = words;
}

// Takes p's gradient. *mine: the gradient in the stored dtype, on the unit's home device, in memory of its own. If it
// is a copy that the list `together` makes when it runs, *was is the source, which must live until then.
static ms_status take_alone(unit_param *p, ms_copies *together, ms_tensor **mine, ms_tensor **was)
{
    ms_tensor *g = p->pending;
    int home = p->owner->memory.home;
    p->pending = NULL;
    *mine = g;
    if (g->refs == 1 && g->storage->refs == 1 && !g->slot && g->dtype == p->dtype && ms__device(g) == home &&
        ms__is_contiguous(g))
        return MS_OK;
    ms_status st;
    if (ms__device(g) != home) {
        st = ms__unit_bring_home(p->owner, p->dtype, mine);
    } else {
        *was = g;
        st = ms__tensor_new(mine, p->dtype, home, g->ndim, g->shape, "fsdp: gradient");
        if (st != MS_OK) *mine = NULL;
        else st = ms__copies_add(together, *mine, g);
    }
    if (st != MS_OK) ms__drop(mine);
    return st;
}

static ms_status land_one(ms_run *run, unit_param *p, ms_tensor **mine, double scale)
{
    ms_tensor *part = ms__tensor_on((*mine)->storage, (*mine)->dtype, p->local->ndim, p->local->shape, (*mine)->offset);
    ms_status st = MS_OK;
    ms__drop(mine);
    if (scale != 1) {
        ms_tensor *same;
        st = ms__op1f(&same, ms__op_by_name("mul_scalar_"), part, scale);
        if (st == MS_OK) ms__release(same);
    }
    if (st == MS_OK) st = ms__unit_land_part(p, part);
    ms__release(part);
    return st == MS_OK ? ms__leaf_hooks(run, p->param) : st;
}

// World of one: gradients land without a reduction. On a GPU they are converted in one launch, on the CPU one after the
// other, so that at most one of them exists twice.
static ms_status land_alone(ms_run *run, unit *u, double scale)
{
    ms_copies together = { 0 };
    ms_status st = MS_OK;
    int step = ms__is_cuda(u->memory.device) ? u->n : 1;
    ms_tensor **mine = calloc(2 * (size_t)step, sizeof *mine), **was = mine + step;
    if (!mine) return ms__no_memory(2 * (size_t)step * sizeof *mine, "fsdp", "gradients of unit '%s'", u->name);
    for (int first = 0; first < u->n && st == MS_OK; first += step) {
        for (int k = 0; k < step && st == MS_OK; k++)
            if (u->params[first + k].pending) st = take_alone(&u->params[first + k], &together, &mine[k], &was[k]);
        st = ms__copies_end(&together, st);
        for (int k = 0; k < step; k++) ms__drop(&was[k]);
        for (int k = 0; k < step; k++) {
            if (mine[k] && st == MS_OK) st = land_one(run, &u->params[first + k], &mine[k], scale);
            ms__drop(&mine[k]);
        }
    }
    free(mine);
    return st;
}

// Adds the reduced gradients that earlier backwards without all-reduce kept.
static ms_status add_partial(unit *u, reduction *r)
{
    if (!same_present(u, r))
        return ms__fail(
            MS_ESTATE,
            "fsdp: unit '%s': the earlier backwards without all-reduce and this one gave gradients to different "
            "parameters (%d and %d of them); all backwards up to the one with all-reduce must reach the same "
            "parameters",
            u->name, u->gradients.n_partial, r->n);
    MS_TRY(ms_work_wait(r->work));
    MS_TRY(ms__add_to(r->out, u->gradients.partial));
    drop_partial(u);
    return MS_OK;
}

// The request for the reduce-scatter of r. words: a buffer for the label's text.
static ms_request request_of(unit *u, const reduction *r, char *words, size_t size)
{
    ms_request request = { .group = u->group,
                           .op = MS_DIST_REDUCE_SCATTER,
                           .reduction = u->settings.divide > 0 ? MS_SUM : MS_AVG,
                           .scale = u->settings.divide > 0 ? 1 / u->settings.divide : 1,
                           .narrow = u->settings.reduce_dtype >= 0,
                           .stream =
                               ms__unit_stream(u, u->group, MS_STREAM_REDUCE, ms__nbytes(r->out) * (size_t)u->world),
                           .in = r->in,
                           .out = r->out,
                           .label = ms__unit_label(u, ms__unit_reduced_name(u)) };
    mark_present(u, r, &request.label, words, size);
    return request;
}

// Continues after the reduce-scatter: starts the all-reduce over the replicas, if there are any. Without an all-reduce
// in this backward, the reduced gradients are kept for a later one.
static ms_status over_replicas(unit *u, reduction *r, ms_request request)
{
    r->partial = u->replicate && !u->settings.all_reduce;
    if (!u->replicate || r->partial) return MS_OK;
    if (u->gradients.partial) MS_TRY(add_partial(u, r));
    r->scattered = r->work;
    r->work = NULL;
    request.group = u->replicate;  // possibly on other nodes
    request.stream = ms__unit_stream(u, u->replicate, MS_STREAM_REDUCE, ms__nbytes(r->out) * (size_t)u->world);
    request.op = MS_DIST_ALL_REDUCE;
    request.scale = 1;
    request.in = NULL;
    request.n_parts = 0;
    return ms__collective(&request, &r->work);
}

// All-reduces the gradients that earlier backwards without all-reduce kept, if this backward has added none.
static ms_status reduce_partial(unit *u, reduction *reducing)
{
    reduction r = { .owner = u, .present = u->gradients.partial_of, .at = u->gradients.partial_at };
    for (int k = 0; k < u->gradients.n_partial; k++) {
        if (r.at[k] < 0) continue;
        r.present[r.n] = r.present[k];
        r.at[r.n++] = r.at[k];
    }
    r.out = u->gradients.partial;
    u->gradients.partial = NULL;
    u->gradients.partial_of = NULL;
    u->gradients.partial_at = NULL;
    drop_partial(u);
    ms_request request = { .group = u->replicate,
                           .op = MS_DIST_ALL_REDUCE,
                           .reduction = u->settings.divide > 0 ? MS_SUM : MS_AVG,
                           .scale = 1,
                           .narrow = u->settings.reduce_dtype >= 0,
                           .stream = MS_STREAM_REDUCE,
                           .out = r.out,
                           .label = ms__unit_label(u, ms__unit_reduced_name(u)) };
    ms_status st = ms__collective(&request, &r.work);
    if (st == MS_OK) *reducing = r;
    else ms__reduction_drop(&r);
    return st;
}

// For a unit whose reduce-scatter is a function of the script: calls it, and the unit's all-reduce hook, between two
// nodes of the backward.
static ms_run_state custom_step(ms_task *t, ms_run *run, ms_event *ev)
{
    reduction *r = t->ptr;
    unit *u = r->owner;
    ms_tensor *io[2] = { r->in, r->out }, *same;
    int phase = t->phase++;
    if (phase == 0) {
        r->before = r->out->version->count;
        return ms__run_event(run, ev,
                             &(ms_question) { MS_EV_REDUCE, .key = u->settings.hook.key, .unit = u->handle, .n = 2,
                                              .in = io });
    }
    if (phase == 1) {
        if (r->out->version->count == r->before) {
            ms__fail(MS_ESTATE,
                     "set_custom_reduce_scatter: nothing was written to output; the function must fill it with this "
                     "rank's part of the reduced gradient of unit '%s'",
                     u->name);
            return MS_RUN_FAILED;
        }
        char words[256];
        ms_request request = request_of(u, r, words, sizeof words);
        if (request.scale != 1) {
            if (ms__op1f(&same, ms__op_by_name("mul_scalar_"), r->out, request.scale) != MS_OK) return MS_RUN_FAILED;
            ms__release(same);
        }
        if (over_replicas(u, r, request) != MS_OK || ms__reduction_wait(r) != MS_OK) return MS_RUN_FAILED;
        if (u->settings.all_reduce_hook != 0 && !r->partial)
            return ms__run_event(run, ev,
                                 &(ms_question) { MS_EV_ALL_REDUCE, .key = u->settings.all_reduce_hook,
                                                  .unit = u->handle, .n = 1, .in = &r->out });
    }
    return land_reduced(run, r) == MS_OK ? MS_RUN_DONE : MS_RUN_FAILED;
}

// Packs the gradients that are present, or sends them in place, and starts their reduce-scatter. They need no division
// before the sum, because half types are summed in float32 and rounded once (except with ms_request.narrow).
static ms_status reduce(ms_run *run, unit *u, reduction *reducing)
{
    // On a mesh both the reduce-scatter and the all-reduce over `replicate` compute a mean. With a divide factor set by
    // the script both compute sums, and the result of the reduce-scatter is divided by that factor. A mean is the sum
    // divided once, as in DDP, so that fully_shard and DDP give the same bits.
    double scale = u->settings.divide > 0 ? 1 / u->settings.divide : 1;
    bool custom = u->settings.hook.kind == MS_COMM_SCRIPT, asks = custom || u->settings.all_reduce_hook != 0;
    if (u->world == 1 && !u->replicate && !asks) return land_alone(run, u, scale);
    reduction r;
    ms_status st = ms__reduction_new(run, u, reducing, &r);
    if (st == MS_OK && r.n == 0 && u->gradients.partial && u->settings.all_reduce) return reduce_partial(u, reducing);
    if (st != MS_OK || r.n == 0) return st;
    int dtype = u->settings.reduce_dtype >= 0 ? u->settings.reduce_dtype : promoted(r.n, r.present);
    int64_t wide = u->layout->columns(u, r.n, r.present, r.at), all = wide * u->world;
    // Gradients of the reduction's dtype are sent in place if peers can read them there. Packing small ones is faster.
    ms_part parts[MS_PARTS] = { { 0 } };
    bool in_place =
        !custom && (u->memory.device == MS_CPU || (u->memory.home == u->memory.device && ms__group_maps(u->group)));
    bool apart = u->layout->parts && r.n <= MS_PARTS && in_place && dtype == r.present[0]->pending->dtype &&
                 uniform(r.n, r.present) && all * ms__dtype_size(dtype) > 4096;
    if (apart) st = u->layout->parts(u, r.n, r.present, parts);
    else st = ms__tensor_new(&r.in, dtype, u->memory.device, 1, &all, "fsdp: gradients to reduce");
    if (st == MS_OK && !apart) st = u->layout->pack(u, r.n, r.present, r.in);
    for (int k = 0; k < r.n; k++) ms__drop(&r.present[k]->pending);
    // The result for an offloaded unit is stored on the CPU, unless functions of the script need it first.
    if (st == MS_OK)
        st = ms__tensor_new(&r.out, dtype, asks ? u->memory.device : u->memory.home, 1, &wide,
                            "fsdp: reduced gradients");
    if (st == MS_OK && custom) {
        st = ms__reduction_push(run, &r, custom_step);
        if (st != MS_OK) ms__reduction_free(&r);
        return st;
    }
    if (st == MS_OK) {
        char words[256];
        ms_request request = request_of(u, &r, words, sizeof words);
        request.n_parts = apart ? r.n : 0;
        request.parts = parts;
        st = ms__collective(&request, &r.work);
        if (st == MS_OK) st = over_replicas(u, &r, request);
    }
    for (int k = 0; k < r.n && apart; k++) ms__release(parts[k].t);
    if (st != MS_OK) {
        ms__reduction_drop(&r);
        return st;
    }
    *reducing = r;
    return MS_OK;
}

const views ms__views_sharded = {
    .name = "sharded",
    .check = check_gradient,
    .take = take_gradients,
    .reduce = reduce,
    .land = land_on_shard,
    .drop_waiting = drop_partial,
    .clear_waiting = clear_waiting,
    .off_home = off_home,
    .changed = changed,
};
