// SPDX-License-Identifier: MIT
// shard/layout/flat.c -- what units of fsdp.FSDP do beside those of fully_shard (docs/semantics.md#comm-hooks, #summon,
// #classic): their gradients are one flat gradient, divided before and after it is summed (by the unit, or by a
// communication hook), and it lands on the flat parameter or on the pieces of the parameters.
#include <stdio.h>

#include "device/device.h"
#include "shard/unit.h"
#include "ops/op.h"

// ---- division and sum -------------------------------------------------------------------------

// A power of two near the root of n before the sum and the rest after it: the least overflow in half types.
void ms_comm_division(int n, double *before, double *after)
{
    int f = 1;
    while (n % f == 0 && n / f > f) f *= 2;
    *before = f;
    *after = (double)n / f;
}

static ms_status divide(ms_tensor *t, double by)
{
    if (!(by > 1)) return MS_OK;
    ms_tensor *same;
    MS_TRY(ms__op1f(&same, ms__op_by_name("div_scalar_"), t, by));
    ms__release(same);
    return MS_OK;
}

static ms_status group_fits(const ms_group *g, int n, const char *what)
{
    if (ms__group_rank(g) < 0)
        return ms__fail(MS_EINVAL, "communication hook: this rank is no member of the state's process group");
    if (ms__group_size(g) != n)
        return ms__fail(MS_EINVAL, "communication hook: the state's process group has %d ranks, %s %d",
                        ms__group_size(g), what, n);
    return MS_OK;
}

ms_status ms_comm_hook_run(const ms_comm_hook *h, ms_id grad_id, ms_id out_id)
{
    ms_tensor *grad = ms__tensor(grad_id), *out = NULL, *in, *sum = NULL;
    ms_group *g = ms__group_by_id(h->group);
    if (!grad || !g || (out_id != 0 && !(out = ms__tensor(out_id)))) return (ms_status)ms_error_code();
    if (out && (grad->numel != out->numel * ms__group_size(g) || grad->dtype != out->dtype))
        return ms__fail(MS_EINVAL, "communication hook: grad is %s, output %s, for %d ranks", ms__tensor_text(grad),
                        ms__tensor_text(out), ms__group_size(g));
    if (!ms__is_contiguous(grad) || (out && !ms__is_contiguous(out)))
        return ms__fail(MS_EINVAL, "communication hook: grad and output must be contiguous");
    bool low = h->kind == MS_COMM_LOW && h->low != grad->dtype;
    ms_status st = MS_OK;
    if (low) {
        MS_TRY(ms__tensor_new(&in, h->low, ms__device(grad), grad->ndim, grad->shape, "communication hook"));
        st = ms__copy(in, grad);
        if (st == MS_OK && out)
            st = ms__tensor_new(&sum, h->low, ms__device(out), out->ndim, out->shape, "communication hook");
    } else {
        in = ms__retain(grad);
        sum = ms__retain(out);
    }
    ms_tensor *result = out ? sum : in;
    if (st == MS_OK) st = divide(in, h->before);
    if (st == MS_OK)
        st = ms__collective(&(ms_request) { .group = g,
                                            .op = out ? MS_DIST_REDUCE_SCATTER : MS_DIST_ALL_REDUCE,
                                            .in = out ? in : NULL,
                                            .out = result },
                            NULL);
    if (st == MS_OK) st = divide(result, h->after);
    if (st == MS_OK && low) st = ms__copy(out ? out : grad, result);
    (out ? out : grad)->version->count++;
    ms__release(in);
    ms__release(sum);
    return st;
}

ms_status ms_unit_set_comm_hook(double handle, const ms_comm_hook *h)
{
    unit *u = ms__unit(handle);
    if (!u) return (ms_status)ms_error_code();
    if (h->kind == MS_COMM_SUM || h->kind == MS_COMM_LOW) {
        ms_group *g = ms__group_by_id(h->group);
        if (!g) return (ms_status)ms_error_code();
        bool sharded = u->world > 1;
        MS_TRY(group_fits(g,
                          sharded        ? u->world
                          : u->replicate ? ms__group_size(u->replicate)
                                         : 1,
                          sharded ? "the shards" : "the replicas"));
    }
    u->settings.hook = *h;
    return MS_OK;
}

// ---- reduction --------------------------------------------------------------------------------

static void reduction_free(reduction *r)
{
    ms__release(r->in);
    ms__release(r->out);
    free(r->present);
    free(r->at);
    *r = (reduction) { 0 };
}

// The place of p's piece in a tensor laid out like the shard.
static ms_tensor *piece_of(const unit_param *p, ms_tensor *flat)
{
    return ms__tensor_on(flat->storage, flat->dtype, p->local->ndim, p->local->shape,
                         flat->offset + (int64_t)(p->shard_at / (size_t)ms__dtype_size(p->dtype)));
}

// Calls fn for each tensor whose grad is a part of the flat gradient, with that part.
static ms_status each_part(unit *u, ms_tensor *flat, ms_status (*fn)(unit_param *p, ms_tensor *part))
{
    if (u->views == MS_VIEWS_FLAT) return fn(&u->flat, flat);
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        if (!p->param->requires_grad) continue;
        ms_tensor *part = piece_of(p, flat);
        ms_status st = fn(p, part);
        ms__release(part);
        MS_TRY(st);
    }
    return MS_OK;
}

static ms_status add_landed(unit_param *p, ms_tensor *part)
{
    ms_tensor *g = p->local->leaf ? p->local->leaf->grad : NULL, *same;
    if (!g) return MS_OK;
    ms_tensor *here = ms__retain(g);
    if (ms__device(g) != ms__device(part)) {
        ms__release(here);
        MS_TRY(ms__tensor_new(&here, g->dtype, ms__device(part), g->ndim, g->shape, "communication hook"));
        ms_status copied = ms__copy(here, g);
        if (copied != MS_OK) {
            ms__release(here);
            return copied;
        }
    }
    ms_status st = ms__op2(&same, ms__op_by_name("add_"), part, here);
    ms__release(here);
    if (st == MS_OK) ms__release(same);
    return st;
}

static ms_status replace_landed(unit_param *p, ms_tensor *part)
{
    if (p->local->leaf) ms__leaf_set_grad(p->local->leaf, NULL);
    return ms__unit_land_part(p, part);
}

static ms_status land_flat(ms_run *run, reduction *r)
{
    unit *u = r->owner;
    MS_TRY(ms__unit_bring(u->memory.home, r->dtype, &r->out));
    MS_TRY(each_part(u, r->out, r->replaces ? replace_landed : ms__unit_land_part));
    if (u->views == MS_VIEWS_FLAT) return ms__leaf_hooks(run, u->flat.local);
    for (int j = u->n - 1; j >= 0; j--)  // the agenda is a stack: the first parameter's hooks run first
        if (u->params[j].param->requires_grad) MS_TRY(ms__leaf_hooks(run, u->params[j].param));
    return MS_OK;
}

ms_status ms__flat_land(ms_run *run, context *c)
{
    reduction r = c->reducing;
    c->reducing = (reduction) { 0 };
    ms_status st = ms__work_wait(r.scattered), all = ms__work_wait(r.work);
    ms__work_release(r.scattered);
    ms__work_release(r.work);
    if (st == MS_OK) st = all;
    ms__drop(&r.in);
    if (st == MS_OK) st = divide(r.out, r.after);
    if (st == MS_OK) st = land_flat(run, &r);
    reduction_free(&r);
    return st;
}

// The script reduces: an event between the backward's nodes.
static ms_run_state hook_step(ms_task *t, ms_run *run, ms_event *ev)
{
    reduction *r = t->ptr;
    if (t->phase++ == 0) {
        ms_tensor *io[2] = { r->in, r->out };
        r->before = r->out->version->count;
        return ms__run_event(run, ev, MS_EV_REDUCE, r->owner->settings.hook.key, r->owner->handle,
                             r->out != r->in ? 2 : 1, io, 0);
    }
    if (r->out != r->in && r->out->version->count == r->before) {
        ms__fail(MS_ESTATE,
                 "communication hook: nothing was written to output; it is to be filled with this rank's part of the "
                 "reduced gradient of unit '%s'",
                 r->owner->name);
        return MS_RUN_FAILED;
    }
    return land_flat(run, r) == MS_OK ? MS_RUN_DONE : MS_RUN_FAILED;
}

static void hook_drop(ms_task *t)
{
    reduction_free(t->ptr);
    free(t->ptr);
}

static ms_status push_hook(ms_run *run, reduction *r)
{
    reduction *kept = malloc(sizeof *kept);
    if (!kept) return ms__no_memory(sizeof *kept, "fsdp", "a communication hook");
    *kept = *r;
    ms_task task = { .step = hook_step, .drop = hook_drop, .ptr = kept };
    ms_status st = ms__run_push(run, &task);
    if (st != MS_OK) free(kept);
    return st;
}

ms_status ms__flat_reduce(ms_run *run, unit *u)
{
    context *c = u->context;
    const ms_comm_hook *h = &u->settings.hook;
    reduction r = { .owner = u,
                    .present = calloc((size_t)u->n + 1, sizeof *r.present),
                    .at = calloc((size_t)u->n + 1, sizeof *r.at) };
    if (!r.present || !r.at) {
        reduction_free(&r);
        return ms__no_memory(((size_t)u->n + 1) * (sizeof *r.present + sizeof *r.at), "fsdp", "reducing unit '%s'",
                             u->name);
    }
    for (int j = 0; j < u->n; j++)
        if (u->params[j].pending) r.present[r.n++] = &u->params[j];
    ms_status st = ms__unit_land(run, c);
    if (st != MS_OK || r.n == 0) {
        reduction_free(&r);
        return st;
    }
    // A low-precision hook casts for itself, from what the gradients are.
    int own = r.present[0]->pending->dtype, dtype = h->kind == MS_COMM_LOW          ? h->low
                                                    : u->settings.reduce_dtype >= 0 ? u->settings.reduce_dtype
                                                                                    : own;
    r.dtype = h->kind == MS_COMM_LOW ? h->lands : u->options.keep_low ? dtype : u->params[0].dtype;
    bool script = h->kind == MS_COMM_SCRIPT, summed = h->kind == MS_COMM_SUM || h->kind == MS_COMM_LOW;
    int64_t wide = u->layout->columns(u, r.n, r.present, r.at), all = wide * u->world;
    st = ms__tensor_new(&r.in, dtype, u->memory.device, 1, &all, "fsdp: gradients to reduce");
    if (st == MS_OK) st = u->layout->pack(u, r.n, r.present, r.in);
    for (int k = 0; k < r.n; k++) ms__drop(&r.present[k]->pending);
    // Offloaded, the result is wanted on the CPU, unless the script reduces it.
    if (st == MS_OK && u->world > 1)
        st = ms__tensor_new(&r.out, dtype, script ? u->memory.device : u->memory.home, 1, &wide,
                            "fsdp: reduced gradients");
    else if (st == MS_OK) r.out = ms__retain(r.in);
    if (st == MS_OK && script) {
        // What is not sharded is reduced in place, with what it had before.
        r.replaces = u->world == 1;
        if (r.replaces) st = each_part(u, r.in, add_landed);
        if (st == MS_OK) st = push_hook(run, &r);
        if (st != MS_OK) reduction_free(&r);
        return st;
    }
    ms_group *group = summed ? ms__group_by_id(h->group) : NULL;
    ms_group *scatter = u->world > 1 ? (group ? group : u->group) : NULL,
             *replicas = u->world == 1 && u->replicate && group ? group : u->replicate;
    r.after = summed ? h->after : u->options.after;
    if (st == MS_OK && u->settings.fake_reduce) {  // this rank's own part of its own gradient
        r.after = 0;
        if (r.out != r.in) {
            ms_tensor *own = ms__tensor_on(r.in->storage, r.in->dtype, 1, &wide, u->rank * wide);
            st = ms__copy(r.out, own);
            ms__release(own);
        }
    } else if (st == MS_OK) {
        ms_label label = ms__unit_label(u, ms__unit_reduced_name(u));
        label.text_only = u->settings.checked;
        ms_request blocks = { .group = scatter,
                              .op = MS_DIST_REDUCE_SCATTER,
                              .stream = MS_STREAM_REDUCE,
                              .in = r.in,
                              .out = r.out,
                              .label = label };
        ms_request wholes = {
            .group = replicas, .op = MS_DIST_ALL_REDUCE, .stream = MS_STREAM_REDUCE, .out = r.out, .label = label
        };
        st = divide(r.in, summed ? h->before : u->options.before);
        if (st == MS_OK && scatter) st = ms__collective(&blocks, &r.scattered);
        if (st == MS_OK && replicas) st = ms__collective(&wholes, &r.work);
    }
    c->reducing = r;
    if (st != MS_OK) ms__unit_drop_reduction(&c->reducing);
    return st;
}

// ---- gradients that are not reduced -----------------------------------------------------------
//
// After a backward inside no_sync they are where reduced ones land, so that the script sees, scales and clears them:
// whole, in the dtype they were computed in, views of one flat tensor. What had landed before waits in `saved` for the
// backward that reduces; in a world of one, where both have the same shape, it takes them in.

// Whose grad has p's part of the flat gradient.
static unit_param *slot_of(unit *u, unit_param *p) { return u->views == MS_VIEWS_FLAT ? &u->flat : p; }

static ms_tensor *grad_of(const unit_param *q) { return q->local->leaf ? q->local->leaf->grad : NULL; }

static bool waits(const unit_param *q) { return grad_of(q) && grad_of(q)->unreduced; }

bool ms__unit_unreduced(const ms_tensor *t)
{
    const unit_param *p = t->unit_param;
    return p && p->owner->views != MS_VIEWS_SHARDED && p->owner->world > 1 && waits(p);
}

// p's part of what waits.
static ms_tensor *waiting_part(unit *u, unit_param *p)
{
    const ms_tensor *g = grad_of(slot_of(u, p));
    int64_t at = u->views == MS_VIEWS_FLAT ? (int64_t)(p->full_at / (size_t)ms__dtype_size(p->low)) : 0;
    return ms__tensor_on(g->storage, g->dtype, p->ndim, p->shape, g->offset + at);
}

static ms_status add_part(ms_tensor *to, ms_tensor **g)
{
    ms_tensor *same;
    MS_TRY(ms__unit_bring(ms__device(to), to->dtype, g));
    MS_TRY(ms__op2(&same, ms__op_by_name("add_"), to, *g));
    ms__release(same);
    return MS_OK;
}

// The script may have cleared what waits, and with it what had landed; or put another tensor in its place.
static ms_status look_at(unit *u)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *q = slot_of(u, &u->params[j]);
        if (!waits(q)) ms__drop(&q->saved);
        else if (!ms__is_contiguous(grad_of(q))) {
            ms_tensor *c;
            MS_TRY(ms__contiguous(&c, grad_of(q)));
            c->unreduced = true;
            ms__leaf_set_grad(q->local->leaf, c);
        }
        if (q == &u->flat) break;
    }
    return MS_OK;
}

// A place for whole gradients in the grad of every parameter that has none yet. filled: which of them are new, and hold
// no numbers.
static ms_status make_places(unit *u, int dtype, bool *filled)
{
    const unit_param *last = &u->params[u->n - 1];
    int64_t n = (int64_t)(last->full_at / (size_t)ms__dtype_size(last->low)) + last->numel;
    ms_tensor *flat = NULL;
    for (int j = 0; j < u->n; j++)  // nothing but the memory itself may be missing below
        if (!ms__leaf_of(slot_of(u, &u->params[j])->local)) return (ms_status)ms_error_code();
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j], *q = slot_of(u, p);
        filled[j] = q == &u->flat && j > 0 ? filled[0] : true;
        if (waits(q) || (q != &u->flat && !p->param->requires_grad)) continue;
        ms_leaf *l = q->local->leaf;
        if (l->grad && u->world == 1 && ms__is_contiguous(l->grad)) {
            l->grad->unreduced = true;
            continue;
        }
        if (!flat)
            MS_TRY(ms__tensor_new(&flat, dtype, u->world == 1 ? u->memory.home : u->memory.device, 1, &n,
                                  "fsdp: accumulated gradients"));
        if (l->grad) q->saved = ms__retain(l->grad);
        int64_t at = q == p ? (int64_t)(p->full_at / (size_t)ms__dtype_size(p->low)) : 0;
        ms_tensor *g = q == p ? ms__tensor_on(flat->storage, dtype, p->ndim, p->shape, at) : ms__retain(flat);
        g->unreduced = true;
        ms__leaf_set_grad(l, g);
        filled[j] = false;
    }
    ms__release(flat);
    return MS_OK;
}

ms_status ms__flat_keep(unit *u)
{
    int k = 0;
    while (k < u->n && !u->params[k].fresh) k++;
    if (k == u->n) return MS_OK;
    bool *filled = malloc((size_t)u->n * sizeof *filled);
    if (!filled) return ms__no_memory((size_t)u->n * sizeof *filled, "fsdp", "gradients of unit '%s'", u->name);
    ms_status st = ms__tensor_reserve(2 * u->n + 2, "fsdp");
    if (st == MS_OK) st = look_at(u);
    if (st == MS_OK) st = make_places(u, u->params[k].fresh->dtype, filled);
    for (int j = 0; st == MS_OK && j < u->n; j++) {
        unit_param *p = &u->params[j];
        p->run = NULL;
        if (!waits(slot_of(u, p))) {  // it asks for none any more
            ms__drop(&p->fresh);
            continue;
        }
        ms_tensor *to = waiting_part(u, p);
        if (p->fresh) st = filled[j] ? add_part(to, &p->fresh) : ms__copy(to, p->fresh);
        else if (!filled[j]) st = ms__zero(to);
        ms__release(to);
        ms__drop(&p->fresh);
        grad_of(slot_of(u, p))->version->count++;
    }
    free(filled);
    return st;
}

ms_status ms__flat_take(unit *u)
{
    MS_TRY(look_at(u));
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        ms_tensor *g = p->fresh;
        p->fresh = NULL;
        p->run = NULL;
        if (waits(slot_of(u, p))) {
            ms_tensor *to = waiting_part(u, p);
            ms_status st = g ? add_part(to, &g) : MS_OK;
            ms__release(g);
            g = to;
            if (st != MS_OK) ms__release(g);
            MS_TRY(st);
        }
        if (p->pending && g) MS_TRY(ms__accumulate(&p->pending, g));
        else if (g) p->pending = g;
    }
    for (int j = 0; j < u->n; j++) {
        unit_param *q = slot_of(u, &u->params[j]);
        if (!waits(q)) continue;
        grad_of(q)->unreduced = false;  // the script may hold it still
        ms__leaf_set_grad(q->local->leaf, q->saved);
        q->saved = NULL;
    }
    return MS_OK;
}

// No gradient waits to be reduced any more.
void ms__flat_drop_kept(unit *u)
{
    if (u->views == MS_VIEWS_SHARDED || (u->world == 1 && !u->replicate)) return;
    for (int j = 0; j < u->n; j++) {
        unit_param *q = slot_of(u, &u->params[j]);
        if (waits(q)) {
            ms__leaf_set_grad(q->local->leaf, q->saved);
            q->saved = NULL;
        }
        ms__drop(&q->saved);
    }
}

// ---- pieces seen as one -----------------------------------------------------------------------

static int64_t place_in_flat(const unit_param *p, const ms_tensor *g)
{
    return g->unreduced ? (int64_t)(p->full_at / (size_t)ms__dtype_size(p->low))
                        : (int64_t)(p->shard_at / (size_t)ms__dtype_size(p->dtype));
}

// The pieces' gradients as one: what they are views of, which is made where the script has put others in their places.
// NULL: none.
static ms_status grad_of_pieces(unit *u, ms_tensor **out)
{
    const ms_tensor *first = NULL;
    bool together = true;
    int64_t base = 0, n = (int64_t)(u->memory.shard_bytes / (size_t)ms__dtype_size(u->params[0].dtype));
    *out = NULL;
    for (int j = 0; j < u->n; j++) {
        const ms_tensor *g = grad_of(&u->params[j]);
        if (!g || g->numel == 0) continue;
        int64_t at = g->offset - place_in_flat(&u->params[j], g);
        if (!first) {
            first = g;
            base = at;
        }
        if (g->unreduced != first->unreduced || g->dtype != first->dtype) return MS_OK;
        together &= g->storage == first->storage && at == base && ms__is_contiguous(g);
    }
    if (!first) return MS_OK;
    const unit_param *last = &u->params[u->n - 1];
    if (first->unreduced) n = (int64_t)(last->full_at / (size_t)ms__dtype_size(last->low)) + last->numel;
    if (together && base >= 0 && (size_t)(base + n) * (size_t)ms__dtype_size(first->dtype) <= first->storage->bytes) {
        *out = ms__tensor_on(first->storage, first->dtype, 1, &n, base);
        return MS_OK;
    }
    MS_TRY(ms__tensor_new(out, first->dtype, ms__device(first), 1, &n, "fsdp: flat gradient"));
    ms_status st = ms__zero(*out);
    for (int j = 0; j < u->n && st == MS_OK; j++) {
        unit_param *p = &u->params[j];
        ms_tensor *g = grad_of(p);
        if (!g || g->numel == 0) continue;
        ms_tensor *part = ms__tensor_on((*out)->storage, (*out)->dtype, g->ndim, g->shape, place_in_flat(p, g));
        part->unreduced = g->unreduced;
        if ((st = ms__copy(part, g)) == MS_OK) ms__leaf_set_grad(p->local->leaf, part);
        else ms__release(part);
    }
    if (st != MS_OK) ms__drop(out);
    return st;
}

ms_tensor *ms__flat_of_pieces(unit *u)
{
    ms_tensor *g = NULL;
    if (grad_of_pieces(u, &g) != MS_OK) return NULL;
    int64_t n = (int64_t)(u->memory.shard_bytes / (size_t)ms__dtype_size(u->params[0].dtype));
    ms_tensor *t = ms__tensor_on(u->memory.shard, u->params[0].dtype, 1, &n, 0);
    t->is_param = true;
    t->name = ms__intern("flat_param");
    for (int j = 0; j < u->n; j++) t->requires_grad |= u->params[j].param->requires_grad;
    ms_leaf *l = g ? ms__leaf_of(t) : NULL;
    if (l) ms__leaf_set_grad(l, g);
    else ms__release(g);
    return t;
}

ms_status ms_unit_drop_saved_grad(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return (ms_status)ms_error_code();
    unit_param *p = t->unit_param;
    if (p) ms__drop(&p->saved);
    return MS_OK;
}
