// SPDX-License-Identifier: MIT
// shard/backward.c -- the work of a unit before and after its module's backward (docs/semantics.md#lifecycle,
// #accumulation). Runs call it through autograd/owner.h.
//
// The first gradient of a module's output gathers its unit again and by default starts the gather of the preceding unit
// in the recorded order. When the gradients of the module's inputs are complete, the unit's own gradients are reduced
// on the reduce stream while the next unit computes. At most one reduction is in flight. It lands when half of the next
// unit's gradients have arrived, at the latest at that unit's post-backward. Its buffers are then free before that
// unit's are allocated, and the point at which it lands does not depend on timing.
#include "autograd/owner.h"
#include "shard/gather.h"
#include "shard/gather_run.h"
#include "shard/order.h"
#include "shard/root.h"
#include "shard/views/views.h"
#include "ops/op.h"

// ---- backward ---------------------------------------------------------------------------------

// Used if a unit of u's root has all-gather extensions: tasks gather u and the units prefetched with it, before the run
// processes the node whose hook called pre_backward. The task pushed last, for u, runs first.
static ms_status gather_by_tasks(ms_run *run, unit *u, int64_t use)
{
    context *c = u->context;
    int at = ms__order_find(c, use);
    if (!ms__run_recomputing()) {
        if (u->settings.backward_prefetch.n == 0 && at > 0 && c->order[at - 1].unit->settings.unshard_in_backward)
            MS_TRY(ms__unit_push_gather(run, c->order[at - 1].unit, true, true));
        for (int k = u->settings.backward_prefetch.n; k-- > 0;)
            MS_TRY(ms__unit_push_gather(run, u->settings.backward_prefetch.units[k], true, true));
    }
    return u->settings.unshard_in_backward ? ms__unit_push_gather(run, u, false, false) : MS_OK;
}

// Fails if the parameters that backward gathers again differ from those that the forward computed with.
static ms_status check_unchanged(const unit *u, int64_t use)
{
    if (MS_LIKELY(ms__use_versions((uint64_t)use) == ms__use_versions(ms__unit_versions(u))) ||
        !u->settings.unshard_in_backward)
        return MS_OK;
    bool stayed = u->state.gathered && !u->memory.in_place &&
                  ms__use_versions(u->state.gathered_from) == ms__use_versions((uint64_t)use);
    return u->views->changed(u, stayed);
}

static ms_status pre_backward(ms_run *run, void *token, int64_t use)
{
    unit *u = ms__unit_of_token(token);
    if (!u || !u->context || ms__unit_active(u, use) >= 0) return MS_OK;
    ms__unit_after_errors(u);
    MS_TRY(check_unchanged(u, use));
    MS_TRY(ms__unit_activate(u, use, run));
    ms__unit_log(u, "pre_backward");
    UNIT_RANGE(u, "pre_backward");
    u->context->in_backward = true;
    if (MS_UNLIKELY(ms__order_extended(u->context))) return gather_by_tasks(run, u, use);
    if (u->settings.unshard_in_backward) {
        MS_TRY(ms__unit_start_gather(u, false, false));
        MS_TRY(ms__unit_finish_gather(u));
    }
    return ms__run_recomputing() || u->options.backward_prefetch_at != MS_PREFETCH_PRE ? MS_OK
                                                                                       : ms__prefetch_backward(u, use);
}

// The latest forward of u whose backward has not ended.
static int64_t latest_use(const unit *u)
{
    const context *c = u->context;
    for (int k = c->n_order; k-- > 0;)
        if (c->order[k].unit == u && !c->order[k].done && !c->order[k].regional) return c->order[k].use;
    return u->pass.uses[1];  // its outputs need no gradient
}

static ms_status read_gathered(ms_run *run, const ms_storage *s, bool *started)
{
    for (context *c = ms__contexts(); c; c = c->next) {
        for (int k = 0; k < c->n; k++) {
            unit *u = c->units[k];
            if (u->memory.gather_buffer != s) continue;
            int64_t use = latest_use(u);
            if (MS_LIKELY(u->state.gathered) || ms__unit_active(u, use) >= 0) return MS_OK;
            *started = true;
            return pre_backward(run, ms__unit_token(u), use);
        }
    }
    return MS_OK;
}

// Fails if the gradient belongs to this rank's piece instead of the whole parameter. The length of a piece may equal
// the parameter's last dimension; adding such a gradient to a whole one would then broadcast it without an error.
static ms_status gradient_fits(const ms_tensor *param, const ms_tensor *grad)
{
    const unit_param *p = param->unit_param;
    if (MS_LIKELY(grad->ndim == p->ndim && grad->numel == p->numel) || p->param == p->local) return MS_OK;
    return ms__fail(MS_ESTATE,
                    "fsdp: the gradient of parameter '%s' has shape %s: the script computed with this rank's piece of "
                    "it, outside of the "
                    "forward of unit '%s'; compute with parameters inside of the forward",
                    param->name ? param->name : "?", ms__shape_text(grad->ndim, grad->shape), p->owner->name);
}

static ms_status accumulate(ms_run *run, ms_tensor *param, ms_tensor *grad, bool *taken)
{
    unit_param *p = param->unit_param;
    unit *u = p->owner;
    *taken = false;
    if (p->param == p->local) return MS_OK;  // the script computed with the flat parameter itself, outside of a forward
    if (!u->context)
        return ms__fail(MS_ESTATE,
                        "fsdp: parameter '%s' received a gradient before its unit '%s' ran forward; compute with it "
                        "inside of the forward",
                        param->name ? param->name : "?", u->name);
    u->context->in_backward = true;
    size_t bytes = ms__nbytes(grad);
    *taken = true;
    MS_TRY(ms__accumulate(&p->fresh, grad));
    p->run = run;
    u->gradients.arrived += bytes;
    reduction *r = &u->context->reducing;
    if (r->owner && r->owner != u && 2 * u->gradients.arrived >= u->memory.gather_bytes) return ms__unit_land(run, r);
    return MS_OK;
}

// ---- after a backward ------------------------------------------------------------------------

static void reshard_after_backward(unit *u)
{
    if (u->settings.reshard_after_backward) {
        UNIT_RANGE(u, "post_backward_reshard");
        ms__unit_shard(u);
    } else if (u->views->stay) {
        u->views->stay(u);
    }
}

static ms_status reduce_after_backward(ms_run *run, unit *u)
{
    u->gradients.arrived = 0;
    u->gradients.partly = false;
    if (u->n) ms__unit_log(u, "post_backward");
    {
        UNIT_RANGE(u, "post_backward_accumulate");
        MS_TRY(u->views->take(u));
    }
    if (ms__unit_idle(u)) reshard_after_backward(u);
    if (u->n) ms__unit_note(u, MS_UNIT_EV_POST_BACKWARD, false);
    if (!u->settings.sync) {
        ms__unit_accumulates(u);
        return MS_OK;
    }
    if (MS_UNLIKELY(u->gradients.lost))
        return ms__fail(MS_ESTATE,
                        "fsdp: the gradients that unit '%s' had accumulated without a reduction were dropped when a "
                        "backward failed, on this rank or a peer; clear all gradients (zero_grad) and compute them "
                        "again",
                        u->name);
    UNIT_RANGE(u, "post_backward_reduce");
    return u->views->reduce(run, u, &u->context->reducing);
}

static ms_status post_backward(ms_run *run, void *token, int64_t use)
{
    unit *u = ms__unit_of_token(token);
    if (!u || !u->context) return MS_OK;
    int k = ms__unit_active(u, use), at = ms__order_find(u->context, use);
    if (k >= 0) ms__unit_deactivate(u, k);
    if (at >= 0) u->context->order[at].done = true;
    u->gradients.behind = ms__order_passes_left(u);
    // The gradients of all modules of a pass are reduced together, after the last of them.
    if (at >= 0 && ms__order_pass_waits(u->context, at)) {
        u->gradients.partly = true;
        return MS_OK;
    }
    if (u->views->reduces_once && u->gradients.behind > 0) return MS_OK;
    MS_TRY(reduce_after_backward(run, u));
    return u->options.backward_prefetch_at == MS_PREFETCH_POST && !ms__run_recomputing() ? ms__prefetch_backward(u, use)
                                                                                         : MS_OK;
}

// Whether gradients of earlier backwards wait for a reduction that this backward makes, although it may not have used
// u.
static bool is_due(const unit *u)
{
    return u->settings.sync && u->gradients.accumulated && (u->settings.all_reduce || !u->gradients.partial);
}

static ms_status final(ms_run *run)
{
    for (context *c = ms__contexts(); c; c = c->next) {
        if (!c->in_backward) continue;
        ms__unit_log(NULL, "root_post_backward");
        UNIT_RANGE(NULL, "root_post_backward");
        // Handles units that had no post-backward in this run: either their inputs needed no gradient (usually the
        // root), or their gradients come from earlier backwards without a reduction.
        for (int k = 0; k < c->n; k++) {
            unit *u = c->units[k];
            bool waiting = u->pass.n_active > 0 || u->gradients.partly || is_due(u);
            for (int j = 0; j < u->n; j++) waiting |= u->params[j].fresh != NULL;
            u->pass.n_active = 0;
            u->gradients.behind = ms__order_passes_left(u) - 1;
            if (waiting) MS_TRY(reduce_after_backward(run, u));
        }
        if (!c->is_last_backward) continue;
        MS_TRY(ms__unit_land(run, &c->reducing));
        for (int k = 0; k < c->n; k++) {
            unit *u = c->units[k];
            if ((u->state.gather || u->state.fetched) && ms__unit_idle(u))
                ms__unit_shard(u);  // the unit was prefetched, but the backward did not use it
            if (u->views->whole_for_backward && u->state.gathered && ms__unit_idle(u)) reshard_after_backward(u);
            if (u->settings.sync && !u->gradients.partial) u->gradients.accumulated = false;
        }
        c->n_order = 0;
        c->in_backward = false;
        c->backwards++;
    }
    return MS_OK;
}

static bool expects_backward(void)
{
    for (context *c = ms__contexts(); c; c = c->next)
        if (c->n_order > 0) return true;
    return false;
}

static void aborted(ms_run *run)
{
    bool outermost = !ms__run_in_backward();
    bool gave_up = outermost && ms__run_is_backward(run) && ms__run_has_units(run);
    for (context *c = ms__contexts(); c; c = c->next) {
        if (gave_up) ms__unit_drop_pending(c);
        if (!c->in_backward) {
            if (outermost && ms__run_has_units(run))
                c->n_order = 0;  // the run failed before its backward reached c's units
            continue;
        }
        if (outermost) ms__reduction_drop(&c->reducing);
        for (int k = 0; k < c->n; k++) {
            unit *u = c->units[k];
            for (int j = u->pass.n_active; j-- > 0;)
                if (outermost || u->pass.active[j].run == run) ms__unit_deactivate(u, j);
            for (int j = 0; j < u->n; j++)
                if (u->params[j].fresh && (outermost || u->params[j].run == run)) ms__drop(&u->params[j].fresh);
            u->gradients.arrived = 0;
            u->gradients.partly = false;
            if (ms__unit_idle(u)) ms__unit_shard(u);
        }
        if (!outermost) continue;
        c->n_order = 0;
        c->in_backward = false;
    }
}

static const ms_run_owner owner = { .pre_backward = pre_backward,
                                    .read = read_gathered,
                                    .post_backward = post_backward,
                                    .gradient_fits = gradient_fits,
                                    .accumulate = accumulate,
                                    .final = final,
                                    .failed = ms__comm_failed,
                                    .expects_backward = expects_backward,
                                    .abort = aborted };

__attribute__((constructor)) static void own_runs(void) { ms__run_owner = &owner; }
