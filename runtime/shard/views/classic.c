// SPDX-License-Identifier: MIT
// shard/views/classic.c -- the rules of fsdp.FSDP (docs/semantics.md#comm-hooks, #summon, #classic). The gradients of a
// unit form one flat gradient, which is divided before and after it is summed (by the unit or by a communication hook).
// It lands in the unit's leaves: in the flat parameter, or in the pieces of the parameters.
#include <stdio.h>

#include "device/capture.h"
#include "device/device.h"
#include "shard/layout/layout.h"
#include "shard/views/classic.h"
#include "shard/views/hook.h"
#include "ops/op.h"

// ---- construction -------------------------------------------------------------------------------

ms_status ms__classic_check(const unit *u, const ms_tensor *t, const ms_tensor *first)
{
    const char *p = t->name ? t->name : "?";
    if (t->unit_param) return ms__fail(MS_EINVAL, "Cannot flatten a `FlatParameter`");
    if (t->node)
        return ms__fail(MS_EINVAL, "fsdp: parameter '%s' of unit '%s' is the result of an operator, expected a leaf", p,
                        u->name);
    if (!ms__is_float(t->dtype)) return ms__fail(MS_EINVAL, "Cannot flatten integer dtype tensors");
    if (t->dtype != first->dtype)
        return ms__fail(MS_EINVAL, "Must flatten tensors with uniform dtype but got %s and %s",
                        ms__dtype_name(first->dtype), ms__dtype_name(t->dtype));
    if (u->views->one_leaf && t->requires_grad != first->requires_grad)
        return ms__fail(MS_EINVAL, "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`");
    if (ms__device(t) != ms__device(first)) {
        char a[64], b[64];
        snprintf(a, sizeof a, "%s", strrchr(ms__tensor_text(first), ' ') + 1);
        snprintf(b, sizeof b, "%s", strrchr(ms__tensor_text(t), ' ') + 1);
        return ms__fail(MS_EINVAL, "Must flatten tensors on the same device but got both %s and %s", a, b);
    }
    return MS_OK;
}

ms_tensor *ms__classic_flat(const unit *u)
{
    int64_t n = (int64_t)(u->memory.shard_bytes / (size_t)ms__dtype_size(u->params[0].dtype));
    ms_tensor *t = ms__tensor_on(u->memory.shard, u->params[0].dtype, 1, &n, 0);
    t->is_param = true;
    t->name = ms__intern("flat_param");
    for (int j = 0; j < u->n; j++) t->requires_grad |= u->params[j].param->requires_grad;
    return t;
}

ms_status ms__classic_off_home(const unit *u, const char *device)
{
    (void)u;
    return ms__fail(MS_ESTATE,
                    "An FSDP-managed module with parameter CPU offloading enabled has parameters on %s. Make sure "
                    "to not move the module "
                    "from CPU when offloading parameters.",
                    device);
}

ms_status ms__classic_changed(const unit *u, bool stayed)
{
    (void)u;
    (void)stayed;
    return ms__fail(MS_ESTATE, "FSDP does not support changing the parameters between forward and backward");
}

// ---- reduction ---------------------------------------------------------------------------------

// p's piece as a view of a tensor that is laid out like the shard.
static ms_tensor *piece_of(const unit_param *p, ms_tensor *flat)
{
    int64_t at = flat->offset + ms__shard_index(p);
    return ms__tensor_on(flat->storage, flat->dtype, p->local->ndim, p->local->shape, at);
}

// The leaf whose grad contains p's part of the flat gradient: p itself, or the unit's one flat parameter.
static unit_param *leaf_for(unit *u, unit_param *p) { return u->leaves == u->params ? p : u->leaves; }

// Calls fn for each leaf whose grad is a part of the flat gradient, and passes that part.
static ms_status each_part(unit *u, ms_tensor *flat, ms_status (*fn)(unit_param *p, ms_tensor *part))
{
    if (u->leaves != u->params) return fn(u->leaves, flat);
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
    ms_tensor *here = ms__retain(ms__landed(p));
    if (!here) return MS_OK;
    ms_status st = ms__unit_bring(ms__device(part), here->dtype, &here);
    if (st == MS_OK) st = ms__add_to(part, here);
    ms__release(here);
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
    MS_TRY(ms__unit_bring_home(u, r->dtype, &r->out));
    MS_TRY(each_part(u, r->out, r->replaces ? replace_landed : ms__unit_land_part));
    bool one = u->leaves != u->params;
    for (int j = u->n_leaves - 1; j >= 0; j--)  // tasks form a stack: the hooks of the first parameter run first
        if (one || u->leaves[j].param->requires_grad) MS_TRY(ms__leaf_hooks(run, u->leaves[j].param));
    return MS_OK;
}

ms_status ms__classic_land(ms_run *run, reduction *reducing)
{
    reduction r = *reducing;
    *reducing = (reduction) { 0 };
    ms_status st = ms__reduction_wait(&r);
    if (st == MS_OK) st = ms__divide(r.out, r.after);
    if (st == MS_OK) st = land_flat(run, &r);
    ms__reduction_free(&r);
    return st;
}

// Lets the script's communication hook reduce, in an event between two nodes of the backward.
static ms_run_state hook_step(ms_task *t, ms_run *run, ms_event *ev)
{
    reduction *r = t->ptr;
    if (t->phase++ == 0) {
        ms_tensor *io[2] = { r->in, r->out };
        r->before = r->out->version->count;
        return ms__run_event(run, ev,
                             &(ms_question) { MS_EV_REDUCE, .key = r->owner->settings.hook.key,
                                              .unit = r->owner->handle, .n = r->out != r->in ? 2 : 1, .in = io });
    }
    if (r->out != r->in && r->out->version->count == r->before) {
        ms__fail(
            MS_ESTATE,
            "communication hook: nothing was written to output; the hook must fill it with this rank's part of the "
            "reduced gradient of unit '%s'",
            r->owner->name);
        return MS_RUN_FAILED;
    }
    return land_flat(run, r) == MS_OK ? MS_RUN_DONE : MS_RUN_FAILED;
}

// A rank that has frozen a parameter would add zeros to the gradient of the ranks that train it, without an error, so
// the label lists the frozen parameters.
static void mark_frozen(const unit *u, ms_label *label, char *words, size_t size)
{
    uint64_t mark = MS_HASH_START;
    int frozen = 0;
    for (int j = 0; j < u->n; j++) {
        const ms_tensor *p = u->params[j].param;
        mark = ms__hash_value(mark, (uint64_t)p->requires_grad);
        if (p->requires_grad) continue;
        if (strlen(words) < 72) ms__append(words, size, "%s'%s'", frozen ? ", " : "frozen: ", p->name ? p->name : "?");
        frozen++;
    }
    if (!frozen) return;
    label->part = mark;
    label->part_of = words;
}

ms_status ms__classic_reduce(ms_run *run, unit *u, reduction *reducing)
{
    const ms_comm_hook *h = &u->settings.hook;
    reduction r;
    ms_status st = ms__reduction_new(run, u, reducing, &r);
    if (st != MS_OK || r.n == 0) return st;
    // A low-precision hook converts the gradients from their own dtype: reduce_dtype has no effect.
    int own = r.present[0]->pending->dtype, dtype = h->kind == MS_COMM_LOW          ? h->low
                                                    : u->settings.reduce_dtype >= 0 ? u->settings.reduce_dtype
                                                                                    : own;
    r.dtype = h->kind == MS_COMM_LOW ? h->lands : u->options.keep_low ? dtype : u->params[0].dtype;
    bool script = h->kind == MS_COMM_SCRIPT, summed = h->kind == MS_COMM_SUM || h->kind == MS_COMM_LOW;
    int64_t wide = u->layout->columns(u, r.n, r.present, r.at), all = wide * u->world;
    st = ms__tensor_new(&r.in, dtype, u->memory.device, 1, &all, "fsdp: gradients to reduce");
    if (st == MS_OK) st = u->layout->pack(u, r.n, r.present, r.in);
    for (int k = 0; k < r.n; k++) ms__drop(&r.present[k]->pending);
    // With several ranks, the result for an offloaded unit is stored on the CPU, unless the script reduces.
    if (st == MS_OK && u->world > 1)
        st = ms__tensor_new(&r.out, dtype, script ? u->memory.device : u->memory.home, 1, &wide,
                            "fsdp: reduced gradients");
    else if (st == MS_OK) r.out = ms__retain(r.in);
    if (st == MS_OK && script) {
        // With one rank, gradients are reduced in place, together with those that landed before.
        r.replaces = u->world == 1;
        if (r.replaces) st = each_part(u, r.in, add_landed);
        if (st == MS_OK) st = ms__reduction_push(run, &r, hook_step);
        if (st != MS_OK) ms__reduction_free(&r);
        return st;
    }
    ms_group *group = summed ? ms__group_by_id(h->group) : NULL;
    ms_group *scatter = u->world > 1 ? (group ? group : u->group) : NULL,
             *replicas = u->world == 1 && u->replicate && group ? group : u->replicate;
    r.after = summed ? h->after : u->options.after;
    if (st == MS_OK && u->settings.fake_reduce) {  // skip the collective: use this rank's part of its own gradient
        r.after = 0;
        if (r.out != r.in) {
            ms_tensor *own = ms__tensor_on(r.in->storage, r.in->dtype, 1, &wide, u->rank * wide);
            st = ms__copy(r.out, own);
            ms__release(own);
        }
    } else if (st == MS_OK) {
        char words[256] = "";
        ms_label label = ms__unit_label(u, ms__unit_reduced_name(u));
        mark_frozen(u, &label, words, sizeof words);
        bool narrow = h->kind == MS_COMM_LOW || u->settings.reduce_dtype >= 0;  // the script chose the sum's dtype
        ms_request blocks = { .group = scatter,
                              .op = MS_DIST_REDUCE_SCATTER,
                              .stream = ms__unit_stream(u, scatter, MS_STREAM_REDUCE, ms__nbytes(r.in)),
                              .in = r.in,
                              .out = r.out,
                              .narrow = narrow,
                              .label = label };
        ms_request wholes = { .group = replicas,
                              .op = MS_DIST_ALL_REDUCE,
                              .stream = MS_STREAM_REDUCE,
                              .out = r.out,
                              .narrow = narrow,
                              .label = label };
        st = ms__divide(r.in, summed ? h->before : u->options.before);
        if (st == MS_OK && scatter) st = ms__collective(&blocks, &r.scattered);
        if (st == MS_OK && replicas) st = ms__collective(&wholes, &r.work);
    }
    *reducing = r;
    if (st != MS_OK) ms__reduction_drop(reducing);
    return st;
}

// ---- gradients that are not reduced -----------------------------------------------------------
//
// After a backward inside no_sync gradients are kept in the leaves' grads, so that scripts can read, scale and clear
// them: whole, in the dtype they were computed in, as views of one flat tensor. Gradients that landed before wait in
// `saved` for the backward that reduces. In a world of one, gradients are added to those that landed before.

static bool waits(const unit_param *q) { return ms__landed(q) && ms__landed(q)->unreduced; }

// p's part of the unreduced gradients.
static ms_tensor *waiting_part(unit *u, unit_param *p)
{
    const ms_tensor *g = ms__landed(leaf_for(u, p));
    int64_t at = u->leaves != u->params ? ms__whole_index(p) : 0;
    return ms__tensor_on(g->storage, g->dtype, p->ndim, p->shape, g->offset + at);
}

static ms_status add_part(ms_tensor *to, ms_tensor **g)
{
    MS_TRY(ms__unit_bring(ms__device(to), to->dtype, g));
    return ms__add_to(to, *g);
}

// Follows what the script did to the unreduced gradients. If it has cleared one, the saved gradient is dropped, too. If
// it has assigned a tensor that is not contiguous, a contiguous copy replaces it.
static ms_status look_at(unit *u)
{
    for (int j = 0; j < u->n_leaves; j++) {
        unit_param *q = &u->leaves[j];
        if (!waits(q)) ms__drop(&q->saved);
        else if (!ms__is_contiguous(ms__landed(q))) {
            ms_tensor *c;
            MS_TRY(ms__contiguous(&c, ms__landed(q)));
            c->unreduced = true;
            ms__leaf_set_grad(q->local->leaf, c);
        }
    }
    return MS_OK;
}

// Makes a tensor for the unreduced gradient of every leaf that has none. filled[j] is false if the tensor for
// parameter j has no values yet.
static ms_status make_places(unit *u, int dtype, bool *filled)
{
    const unit_param *last = &u->params[u->n - 1];
    int64_t n = ms__whole_index(last) + last->numel;
    ms_tensor *flat = NULL;
    for (int j = 0; j < u->n_leaves; j++)  // make all leaves first: after this loop only the allocation below can fail
        if (!ms__leaf_of(u->leaves[j].local)) return ms__failure();
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j], *q = leaf_for(u, p);
        filled[j] = q != p && j > 0 ? filled[0] : true;
        if (waits(q) || (q == p && !p->param->requires_grad)) continue;
        ms_leaf *l = q->local->leaf;
        if (l->grad && u->world == 1 && ms__is_contiguous(l->grad)) {
            l->grad->unreduced = true;
            continue;
        }
        if (!flat)
            MS_TRY(ms__tensor_new(&flat, dtype, u->world == 1 ? u->memory.home : u->memory.device, 1, &n,
                                  "fsdp: accumulated gradients"));
        if (l->grad) q->saved = ms__retain(l->grad);
        ms_tensor *g =
            q == p ? ms__tensor_on(flat->storage, dtype, p->ndim, p->shape, ms__whole_index(p)) : ms__retain(flat);
        g->unreduced = true;
        ms__leaf_set_grad(l, g);
        filled[j] = false;
    }
    ms__release(flat);
    return MS_OK;
}

// Adds fresh gradients to the unreduced ones in the leaves' grads.
static ms_status keep_whole(unit *u)
{
    int k = 0;
    while (k < u->n && !u->params[k].fresh) k++;
    if (k == u->n) return MS_OK;
    if (ms__recording)
        return ms__capture_refuse(
            "unit '%s' accumulates gradients without reducing them (no_sync); run such steps without ms.capture",
            u->name);
    bool *filled = malloc((size_t)u->n * sizeof *filled);
    if (!filled) return ms__no_memory((size_t)u->n * sizeof *filled, "fsdp", "gradients of unit '%s'", u->name);
    ms_status st = ms__tensor_reserve(2 * u->n + 2, "fsdp");
    if (st == MS_OK) st = look_at(u);
    if (st == MS_OK) st = make_places(u, u->params[k].fresh->dtype, filled);
    for (int j = 0; st == MS_OK && j < u->n; j++) {
        unit_param *p = &u->params[j];
        p->run = NULL;
        if (!waits(leaf_for(u, p))) {  // the parameter no longer requires grad
            ms__drop(&p->fresh);
            continue;
        }
        ms_tensor *to = waiting_part(u, p);
        if (p->fresh) st = filled[j] ? add_part(to, &p->fresh) : ms__copy(to, p->fresh);
        else if (!filled[j]) st = ms__zero(to);
        ms__release(to);
        ms__drop(&p->fresh);
        ms_counter *version = ms__landed(leaf_for(u, p))->version;
        version->count++;
        version->collective = false;
    }
    free(filled);
    return st;
}

// Moves fresh gradients and the leaves' unreduced gradients to `pending`.
static ms_status take_to_reduce(unit *u)
{
    MS_TRY(look_at(u));
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        ms_tensor *g = p->fresh;
        p->fresh = NULL;
        p->run = NULL;
        if (waits(leaf_for(u, p))) {
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
    for (int j = 0; j < u->n_leaves; j++) {
        unit_param *q = &u->leaves[j];
        if (!waits(q)) continue;
        ms__landed(q)->unreduced = false;  // the script may still hold this tensor
        ms__leaf_set_grad(q->local->leaf, q->saved);
        q->saved = NULL;
    }
    return MS_OK;
}

ms_status ms__classic_take(unit *u) { return u->settings.sync ? take_to_reduce(u) : keep_whole(u); }

void ms__classic_drop_waiting(unit *u)
{
    if (u->world == 1 && !u->replicate) return;
    for (int j = 0; j < u->n_leaves; j++) {
        unit_param *q = &u->leaves[j];
        if (waits(q)) {
            ms__leaf_set_grad(q->local->leaf, q->saved);
            q->saved = NULL;
        }
        ms__drop(&q->saved);
    }
}
