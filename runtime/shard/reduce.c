// SPDX-License-Identifier: MIT
// shard/reduce.c -- a unit's gradients are reduced over the ranks, where backward left them or packed, and land on its
// shard (docs/semantics.md#reduction). The schedule (shard/schedule.c) says when.
#include <stdio.h>

#include "device/device.h"
#include "shard/unit.h"
#include "ops/op.h"

void ms__unit_drop_reduction(reduction *r)
{
    if (!r->owner) return;
    ms__work_wait(r->scattered);
    ms__work_wait(r->work);
    ms__work_release(r->scattered);
    ms__work_release(r->work);
    ms__release(r->in);
    ms__release(r->out);
    free(r->present);
    free(r->at);
    *r = (reduction) { 0 };
}

// A reduced gradient joins what the local tensor has. part is a view of the unit's reduced block.
ms_status ms__unit_land_part(unit_param *p, ms_tensor *part)
{
    ms_leaf *l = ms__leaf_of(p->local);
    if (!l) return (ms_status)ms_error_code();
    if (!l->grad) {
        ms__leaf_set_grad(l, ms__retain(part));
        return MS_OK;
    }
    ms_tensor *same;
    MS_TRY(ms__op2(&same, ms__op_by_name("add_"), l->grad, part));
    ms__release(same);
    return MS_OK;
}

static ms_status land_all(ms_run *run, reduction *r, ms_tensor *out)
{
    for (int k = 0; k < r->n; k++) {
        unit_param *p = r->present[k];
        ms_tensor *part = ms__tensor_on(out->storage, out->dtype, p->local->ndim, p->local->shape, r->at[k]);
        ms_status st = ms__unit_bring(r->owner->memory.home, p->dtype, &part);
        if (st == MS_OK) st = ms__unit_land_part(p, part);
        ms__release(part);
        MS_TRY(st);
    }
    for (int k = r->n - 1; k >= 0; k--)  // the agenda is a stack: the first parameter's hooks run first
        MS_TRY(ms__leaf_hooks(run, r->present[k]->param));
    return MS_OK;
}

static ms_status add_to(ms_tensor *sum, ms_tensor *t)
{
    ms_tensor *same;
    MS_TRY(ms__op2(&same, ms__op_by_name("add_"), sum, t));
    ms__release(same);
    return MS_OK;
}

// Waits until the reduced block is there; what was reduced is let go.
static ms_status reduced(reduction *r)
{
    ms_status st = ms__work_wait(r->scattered), all = ms__work_wait(r->work);
    ms__work_release(r->scattered);
    ms__work_release(r->work);
    r->scattered = r->work = NULL;
    ms__release(r->in);
    r->in = NULL;
    return st != MS_OK ? st : all;
}

static bool same_present(const unit *u, const reduction *r)
{
    return u->gradients.n_partial == r->n &&
           !memcmp(u->gradients.partial_of, r->present, (size_t)r->n * sizeof *r->present);
}

// Not all-reduced yet: it waits with the unit for a backward that is.
static ms_status keep_partial(reduction *r)
{
    unit *u = r->owner;
    if (u->gradients.partial && !same_present(u, r))
        return ms__fail(MS_ESTATE,
                        "fsdp: unit '%s': %d parameters had gradients in one backward without all-reduce, %d in "
                        "another; they must be the same ones",
                        u->name, u->gradients.n_partial, r->n);
    if (u->gradients.partial) return add_to(u->gradients.partial, r->out);
    u->gradients.partial = ms__retain(r->out);
    u->gradients.partial_of = r->present;
    u->gradients.n_partial = r->n;
    r->present = NULL;
    return MS_OK;
}

// t in another dtype, on another device: itself, or a copy that whoever needs it waits for. Takes t, unless it fails.
ms_status ms__unit_bring(int device, int dtype, ms_tensor **t)
{
    for (int step = 0; step < 2; step++) {  // cast where the numbers are, then moved
        ms_tensor *from = *t, *to;
        int where = step == 0 ? ms__device(from) : device;
        if (from->dtype == dtype && ms__device(from) == where) continue;
        ms_status st = ms__tensor_new(&to, dtype, where, from->ndim, from->shape, "fsdp: gradients");
        if (st != MS_OK) return st;
        st = step == 1 && ms__is_contiguous(from) ? ms__copy_async(to, from, NULL) : ms__copy(to, from);
        if (st != MS_OK) {
            ms__release(to);
            return st;
        }
        ms__release(from);
        *t = to;
    }
    return MS_OK;
}

// The reduced block of r goes to its parameters. Takes r's parts.
static ms_status land_reduced(ms_run *run, reduction *r)
{
    // Cast at once where all parameters have one dtype, else one by one.
    int dtype = r->n ? r->present[0]->dtype : r->out->dtype;
    for (int k = 1; k < r->n; k++)
        if (r->present[k]->dtype != dtype) dtype = r->out->dtype;
    ms_status st = r->partial ? keep_partial(r) : ms__unit_bring(r->owner->memory.home, dtype, &r->out);
    if (st == MS_OK && !r->partial) st = land_all(run, r, r->out);
    ms__release(r->out);
    r->out = NULL;
    return st;
}

static void reduction_free(reduction *r)
{
    ms__release(r->out);
    free(r->present);
    free(r->at);
    *r = (reduction) { 0 };
}

// A unit whose script wants to see the reduced block first.
static ms_run_state hooked_step(ms_task *t, ms_run *run, ms_event *ev)
{
    reduction *r = t->ptr;
    if (t->phase++ == 0) {
        if (reduced(r) != MS_OK) return MS_RUN_FAILED;
        return ms__run_event(run, ev, MS_EV_ALL_REDUCE, r->owner->settings.all_reduce_hook, r->owner->handle, 1,
                             &r->out, 0);
    }
    return land_reduced(run, r) == MS_OK ? MS_RUN_DONE : MS_RUN_FAILED;
}

static void hooked_drop(ms_task *t)
{
    reduction *r = t->ptr;
    if (r->work || r->scattered) (void)reduced(r);
    reduction_free(r);
    free(r);
}

ms_status ms__unit_land(ms_run *run, context *c)
{
    if (!c->reducing.owner) return MS_OK;
    if (c->reducing.owner->views != MS_VIEWS_SHARDED) return ms__flat_land(run, c);
    reduction r = c->reducing;
    c->reducing = (reduction) { 0 };
    if (r.owner->settings.all_reduce_hook != 0 && !r.partial) {
        reduction *kept = malloc(sizeof *kept);
        ms_task task = { .step = hooked_step, .drop = hooked_drop, .ptr = kept };
        ms_status st = kept ? ms__run_push(run, &task) : MS_ENOMEM;
        if (st != MS_OK) {
            free(kept);
            ms__unit_drop_reduction(&r);
            return ms__no_memory(sizeof *kept + sizeof task, "fsdp", "a reduction");
        }
        *kept = r;
        return MS_OK;
    }
    ms_status st = reduced(&r);
    if (st == MS_OK) st = land_reduced(run, &r);
    reduction_free(&r);
    return st;
}

// What gradients of several dtypes are reduced in together: the widest; of two half types neither holds the other.
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

// Parameters without a gradient are left out of the block: where ranks leave out different ones it would mix their
// gradients, and where the sizes are equal nobody would notice.
static void mark_present(const unit *u, const reduction *r, ms_label *label, char *words, size_t size)
{
    uint64_t mark = 14695981039346656037ull;
    int missing = u->n - r->n, told = 0,
        at = snprintf(words, size, missing <= r->n ? "no gradient of" : "gradients of");
    if (missing == 0) return;
    for (int j = 0, k = 0; j < u->n; j++) {
        bool there = k < r->n && r->present[k] == &u->params[j];
        k += there;
        mark = (mark ^ (uint64_t)there) * 1099511628211ull;
        if (there == (missing <= r->n) || at >= 72) continue;
        const char *name = u->params[j].param->name;
        int n = snprintf(words + at, size - (size_t)at, "%s'%s'", told ? ", " : " ", name ? name : "?");
        at = n < (int)size - at ? at + n : (int)size - 1;
        told++;
    }
    int left = (missing <= r->n ? missing : r->n) - told;
    if (left) snprintf(words + at, size - (size_t)at, " and %d more", left);
    label->part = mark;
    label->part_of = words;
}

// World of one: a gradient lands as it is.
static ms_status land_alone(ms_run *run, unit *u, double scale)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        ms_tensor *g = p->pending;
        if (!g) continue;
        p->pending = NULL;
        bool own = g->refs == 1 && g->storage->refs == 1 && !g->slot && g->dtype == p->dtype &&
                   ms__device(g) == u->memory.home && ms__is_contiguous(g);
        ms_tensor *mine = g;
        ms_status st = MS_OK;
        if (!own && ms__device(g) != u->memory.home) {
            st = ms__unit_bring(u->memory.home, p->dtype, &mine);
            if (st != MS_OK) ms__release(mine);
        } else if (!own) {
            st = ms__tensor_new(&mine, p->dtype, u->memory.home, g->ndim, g->shape, "fsdp: gradient");
            if (st == MS_OK && (st = ms__copy(mine, g)) != MS_OK) ms__release(mine);
            ms__release(g);
        }
        if (st == MS_OK) {
            ms_tensor *part = ms__tensor_on(mine->storage, mine->dtype, p->local->ndim, p->local->shape, mine->offset);
            ms__release(mine);
            if (scale != 1) {
                ms_tensor *same;
                st = ms__op1f(&same, ms__op_by_name("mul_scalar_"), part, scale);
                if (st == MS_OK) ms__release(same);
            }
            if (st == MS_OK) st = ms__unit_land_part(p, part);
            ms__release(part);
        }
        if (st == MS_OK) st = ms__leaf_hooks(run, p->param);
        MS_TRY(st);
    }
    return MS_OK;
}

// What earlier backwards without all-reduce left joins the block on its way.
static ms_status add_partial(unit *u, reduction *r)
{
    if (!same_present(u, r))
        return ms__fail(MS_ESTATE,
                        "fsdp: unit '%s': %d parameters had gradients in a backward without all-reduce, %d in this "
                        "one; they must be the same ones",
                        u->name, u->gradients.n_partial, r->n);
    MS_TRY(ms__work_wait(r->work));
    MS_TRY(add_to(r->out, u->gradients.partial));
    ms__drop(&u->gradients.partial);
    free(u->gradients.partial_of);
    u->gradients.partial_of = NULL;
    return MS_OK;
}

// Packs the gradients that are there and starts their reduce-scatter. The sum is over ranks in rank order; the mean
// is one multiplication before the one rounding, so there is no overflow that a division beforehand would prevent.
ms_status ms__unit_reduce(ms_run *run, unit *u)
{
    context *c = u->context;
    if (u->views != MS_VIEWS_SHARDED) return ms__flat_reduce(run, u);
    // Over a mesh each of the two steps takes its own mean; a factor of the script's divides at the first. The mean is
    // the sum divided once, as in DDP: the same bits for any number of ranks.
    double scale = u->settings.divide > 0 ? 1 / u->settings.divide : 1;
    if (u->world == 1 && !u->replicate && u->settings.all_reduce_hook == 0) return land_alone(run, u, scale);
    reduction r = { .owner = u,
                    .present = calloc((size_t)u->n + 1, sizeof *r.present),
                    .at = calloc((size_t)u->n + 1, sizeof *r.at) };
    if (!r.present || !r.at) {
        free(r.present);
        free(r.at);
        return ms__no_memory(((size_t)u->n + 1) * (sizeof *r.present + sizeof *r.at), "fsdp", "reducing unit '%s'",
                             u->name);
    }
    for (int j = 0; j < u->n; j++)
        if (u->params[j].pending) r.present[r.n++] = &u->params[j];
    ms_status st = ms__unit_land(run, c);
    if (st != MS_OK || r.n == 0) {
        free(r.present);
        free(r.at);
        return st;
    }
    int dtype = u->settings.reduce_dtype >= 0 ? u->settings.reduce_dtype : promoted(r.n, r.present);
    int64_t wide = u->layout->columns(u, r.n, r.present, r.at), all = wide * u->world;
    // Where they are, if they are of the dtype that travels (small ones travel at once instead).
    ms_part parts[MS_PARTS] = { { 0 } };
    bool apart = u->layout->parts && r.n <= MS_PARTS && u->memory.device == MS_CPU &&
                 dtype == r.present[0]->pending->dtype && uniform(r.n, r.present) && all * ms__dtype_size(dtype) > 4096;
    if (apart) st = u->layout->parts(u, r.n, r.present, parts);
    else st = ms__tensor_new(&r.in, dtype, u->memory.device, 1, &all, "fsdp: gradients to reduce");
    if (st == MS_OK && !apart) st = u->layout->pack(u, r.n, r.present, r.in);
    for (int k = 0; k < r.n; k++) ms__drop(&r.present[k]->pending);
    // Offloaded, the result is wanted on the CPU, unless the script looks at it first.
    int lands = u->settings.all_reduce_hook != 0 ? u->memory.device : u->memory.home;
    if (st == MS_OK) st = ms__tensor_new(&r.out, dtype, lands, 1, &wide, "fsdp: reduced gradients");
    char words[256];
    ms_request request = { .group = u->group,
                           .op = MS_DIST_REDUCE_SCATTER,
                           .reduction = u->settings.divide > 0 ? MS_SUM : MS_AVG,
                           .scale = scale,
                           .stream = MS_STREAM_REDUCE,
                           .in = r.in,
                           .out = r.out,
                           .n_parts = apart ? r.n : 0,
                           .parts = parts,
                           .label = ms__unit_label(u, ms__unit_reduced_name(u)) };
    mark_present(u, &r, &request.label, words, sizeof words);
    if (st == MS_OK) st = ms__collective(&request, &r.work);
    for (int k = 0; k < r.n && apart; k++) ms__release(parts[k].t);
    r.partial = u->replicate && !u->settings.all_reduce;
    if (st == MS_OK && u->replicate && u->settings.all_reduce) {
        if (u->gradients.partial) st = add_partial(u, &r);
        r.scattered = r.work;
        r.work = NULL;
        request.group = u->replicate;
        request.op = MS_DIST_ALL_REDUCE;
        request.scale = 1;
        request.in = NULL;
        request.n_parts = 0;
        if (st == MS_OK) st = ms__collective(&request, &r.work);
    }
    if (st != MS_OK) {
        ms__unit_drop_reduction(&r);
        return st;
    }
    c->reducing = r;
    return MS_OK;
}
