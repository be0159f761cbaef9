// SPDX-License-Identifier: MIT
// shard/schedule.c -- when units gather, reshard and reduce (docs/semantics.md#lifecycle, #accumulation).
//
// Forward: a unit's gather starts, and is waited for, when its module is entered; then the gather of
// the unit that followed it in the latest forward is started early, so it runs under this one's
// compute. Backward: the first gradient of a module's output gathers it again and starts the gather
// of the unit before it in the recorded order; when the gradients of its inputs are there its own
// gradients are packed, and reduced on the reduce queue while the next unit computes.
//
// At most two units besides the root are whole at a time, unless the script lifts that limit: then all that the order
// has still to come are gathered at once. One reduction is under way at most: it lands
// when half of the next unit's gradients have arrived (so that its buffers are gone before that unit's
// own are packed, at a place that does not depend on timing), or at that unit's post-backward.
#include <stdio.h>

#include "autograd/owner.h"
#include "shard/unit.h"
#include "ops/op.h"

// The graph keeps a unit's handle, not its address: the module may die before the graph does.
static void *token_of(const unit *u) { return (void *)(uintptr_t)(uint64_t)u->handle; }

static unit *from_token(void *token)
{
    unit *u = ms__unit((double)(uint64_t)(uintptr_t)token);
    if (!u) ms__clear_error();
    return u;
}

// A use is a number; the versions that the parameters had in its forward ride in the low bits.
enum { VERSION_BITS = 20 };
static int64_t next_use = 1;

static uint64_t version_bits(uint64_t use) { return use & ((1u << VERSION_BITS) - 1); }

// ---- forward ----------------------------------------------------------------------------------

static ms_status inputs_of(int n, const ms_id *io, ms_tensor **t)
{
    if (n > MS_MAX_IN)
        return ms__fail(MS_EINVAL,
                        "fsdp: a module with %d tensors among its inputs or outputs; at most %d are supported", n,
                        MS_MAX_IN);
    for (int k = 0; k < n; k++)
        if (!(t[k] = ms__tensor(io[k]))) return (ms_status)ms_error_code();
    return MS_OK;
}

static ms_status convert_input(const ms_op *op, ms_tensor *t, int to, ms_id *out)
{
    ms_call c;
    c.op = op;
    c.n_in = 1;
    c.in[0] = t;
    c.n_i = 1;
    c.i[0] = to;
    c.n_f = 0;
    MS_TRY(ms__dispatch(&c));
    *out = ms__name(c.out[0]);
    return MS_OK;
}

// Where the units of u's root compute: what goes into the outermost of them is brought there.
static ms_status inputs_to_device(const unit *u, int n, ms_id *io)
{
    static const ms_op *to_device;
    if (!to_device) to_device = ms__op_by_name("to_device");
    const context *c = u->context;
    UNIT_RANGE(NULL, "inputs_to_device");
    for (int k = 0; k < c->n && u->n == 0; k++)
        if (c->units[k]->n) u = c->units[k];
    if (u->n == 0 || (u->memory.device & 0xff) == MS_META) return MS_OK;
    for (int k = 0; k < n; k++) {
        ms_tensor *t = ms__tensor(io[k]);
        if (!t) return (ms_status)ms_error_code();
        if (ms__device(t) != u->memory.device && (ms__device(t) & 0xff) != MS_META)
            MS_TRY(convert_input(to_device, t, u->memory.device, &io[k]));
    }
    return MS_OK;
}

static ms_status cast_floats(int n, ms_id *io, int dtype, const char *phase)
{
    UNIT_RANGE(NULL, phase);
    static const ms_op *cast;
    if (!cast) cast = ms__op_by_name("cast");
    for (int k = 0; k < n; k++) {
        ms_tensor *t = ms__tensor(io[k]);
        if (!t) return (ms_status)ms_error_code();
        if (!ms__is_float(t->dtype) || t->dtype == dtype) continue;
        MS_TRY(convert_input(cast, t, dtype, &io[k]));
    }
    return MS_OK;
}

ms_status ms_unit_pre_forward(double handle, int n, ms_id *io)
{
    unit *u = ms__unit(handle);
    ms_tensor *in[MS_MAX_IN], *out[MS_MAX_IN];
    if (!u) return (ms_status)ms_error_code();
    context *c = u->context;
    if (!c) return ms__fail(MS_ESTATE, "fsdp: unit '%s' runs forward before lazy initialisation", u->name);

    ms__run_meets_unit();
    ms__unit_after_errors(u);
    // What stayed whole after a forward without a backward is stale when the script has changed the parameters since
    // (every rank sees that alike).
    if (MS_UNLIKELY(u->state.gathered && !u->memory.in_place && ms__unit_idle(u) &&
                    u->state.gathered_from != ms__unit_versions(u)))
        ms__unit_shard(u);
    // A checkpoint is being recomputed inside this unit's own backward: its parameters are whole already.
    bool recomputing = ms__run_recomputing();
    u->pass.skipped = u->pass.skipped << 1 | (recomputing && u->pass.n_active > 0);
    u->pass.forwards++;
    if (u->pass.skipped & 1) return MS_OK;

    UNIT_RANGE(u, "pre_forward");
    ms_status st = MS_OK;
    if (!c->opened && !recomputing) {
        c->opened = u;
        c->n_entered = 0;
        ms__unit_log(NULL, "root_pre_forward");
        st = inputs_to_device(u, n, io);
    }
    if (u->n) ms__unit_log(u, "pre_forward");
    if (st == MS_OK && u->settings.cast_forward_inputs && u->settings.param_dtype >= 0)
        st = cast_floats(n, io, u->settings.param_dtype, "cast_forward_inputs");
    if (st == MS_OK) st = ms__unit_start_gather(u, false, false);
    if (st == MS_OK) st = ms__unit_finish_gather(u);
    int64_t use = (int64_t)((uint64_t)next_use++ << VERSION_BITS | version_bits(ms__unit_versions(u)));
    if (u->pass.open && !u->pass.open_pass) u->pass.open_pass = use;
    if (st == MS_OK && recomputing) {
        if (ms__state.grad_mode)
            st = ms__order_take_place(u, use);  // not where a checkpoint inside it runs for the first time
    } else if (st == MS_OK && (!u->pass.open || u->pass.open_pass == use)) {
        ms__order_entered(c, u);
        st = ms__prefetch_forward(u);
    }
    if (st == MS_OK) st = inputs_of(n, io, in);
    bool recorded = false;
    if (st == MS_OK && u->n > 0) {
        st = ms__unit_boundary(token_of(u), use, n, in, out, &recorded);
        if (st == MS_OK)
            for (int k = 0; k < n; k++) io[k] = ms__name(out[k]);
    }
    if (st != MS_OK) {
        ms_unit_forward_failed(handle);
        return st;
    }
    u->pass.uses[u->pass.forwards & 63] = use;
    return MS_OK;
}

static void forward_left(unit *u)
{
    context *c = u->context;
    if (c->opened != u || u->pass.forwards > 0 || u->pass.open) return;
    c->opened = NULL;
    // What was prefetched for a module that did not run this time is given back.
    for (int k = 0; k < c->n; k++)
        if ((c->units[k]->state.gather || c->units[k]->state.fetched) && ms__unit_idle(c->units[k]))
            ms__unit_shard(c->units[k]);
}

// The memory stays whole, and the parameters show their pieces.
static void conceal(unit *u)
{
    ms__unit_keep(u);
    ms__unit_show(u, false);
    u->state.concealed = true;
}

// graph: a backward will come.
static ms_status reshard_after_forward(unit *u, bool graph)
{
    if (!ms__unit_idle(u)) return MS_OK;
    // The root stays whole for its backward. When none will come (validation), it would go stale at the next optimizer
    // step.
    bool leave =
        u->settings.reshard_after_forward == 1 || ((u->settings.by_rule || u->views != MS_VIEWS_SHARDED) && !graph);
    // A number: kept in slices by few ranks, where a backward will want it.
    bool few = u->settings.reshard_after_forward > 1 && u->settings.post_group;
    if (few && graph) return ms__unit_shard_to_post(u);
    if (few || leave) {
        ms__unit_shard(u);
    } else if (u->settings.by_rule && u->views == MS_VIEWS_PIECES && u->world > 1) {
        // Where the others of its strategy show their pieces, so does the root. What the graph saved are views of the
        // whole.
        conceal(u);
    }
    return MS_OK;
}

// The forward that u opened is over: its order is the latest complete one.
static void iteration_left(unit *u)
{
    context *c = u->context;
    if (c->opened != u || u->pass.forwards > 0 || u->pass.open) return;
    unit **spare = c->last;
    int cap = c->cap_last;
    c->last = c->entered;
    c->n_last = c->n_entered;
    c->cap_last = c->cap_entered;
    c->entered = spare;
    c->cap_entered = cap;
    c->n_entered = 0;
    forward_left(u);
}

ms_status ms_unit_post_forward(double handle, int n, ms_id *io)
{
    unit *u = ms__unit(handle);
    ms_tensor *out[MS_MAX_IN];
    if (!u) return (ms_status)ms_error_code();
    context *c = u->context;
    bool skipped = u->pass.skipped & 1, recomputing = ms__run_recomputing();
    int64_t use = u->pass.uses[u->pass.forwards & 63];
    if (u->n && !skipped) ms__unit_log(u, "post_forward");
    UNIT_RANGE_IF(!skipped, u, "post_forward");
    ms_status st = inputs_of(n, io, out);
    bool grad = false,
         regional =
             ms__region && !ms__state.grad_mode;  // regional: a graph comes when the checkpoint's region runs again
    if (st == MS_OK && !skipped && u->n > 0) {
        for (int k = 0; k < n; k++) {
            if (!out[k]->requires_grad || !ms__state.grad_mode) continue;
            grad = true;
            if (st == MS_OK) st = ms__unit_hook(out[k], token_of(u), use);
        }
        if (st == MS_OK && (grad || regional) && !recomputing)
            st = ms__order_push(c, u, use, u->pass.open ? u->pass.open_pass : use, regional);
    }
    if (st == MS_OK && !skipped && u->options.output_dtype >= 0)
        st = cast_floats(n, io, u->options.output_dtype, "cast_forward_outputs");
    if (st != MS_OK) {
        ms_unit_forward_failed(handle);
        return st;
    }
    u->pass.skipped >>= 1;
    u->pass.forwards--;
    u->pass.open_graph |= u->pass.open && (grad || regional);
    if (!skipped && !recomputing) MS_TRY(reshard_after_forward(u, grad || regional));
    iteration_left(u);
    return MS_OK;
}

void ms_unit_forward_failed(double handle)
{
    unit *u = ms__unit(handle);
    if (!u || u->pass.forwards == 0) return;
    u->pass.skipped >>= 1;
    u->pass.forwards--;
    if (ms__unit_idle(u)) ms__unit_shard(u);
    if (u->context) forward_left(u);
}

// ---- passes of several modules ----------------------------------------------------------------

int ms_unit_begin_pass(double handle)
{
    unit *u = ms__unit(handle);
    if (!u || ms__run_recomputing()) return -1;
    if (u->pass.open) return 0;
    u->pass.open = true;
    u->pass.open_graph = false;
    u->pass.open_pass = 0;
    return 1;
}

ms_status ms_unit_end_pass(double handle, int failed)
{
    unit *u = ms__unit(handle);
    if (!u || !u->pass.open) return u ? MS_OK : (ms_status)ms_error_code();
    u->pass.open = false;
    if (failed) {
        if (ms__unit_idle(u)) ms__unit_shard(u);
        forward_left(u);
        return MS_OK;
    }
    MS_TRY(reshard_after_forward(u, u->pass.open_graph));
    iteration_left(u);
    return MS_OK;
}

// ---- backward ---------------------------------------------------------------------------------

// Units with all-gather extensions are gathered by tasks, which come before the node's backward: this unit's first.
static ms_status gather_by_tasks(ms_run *run, unit *u, int64_t use)
{
    context *c = u->context;
    int at = ms__order_find(c, use);
    if (!ms__run_recomputing()) {
        if (u->settings.n_backward_prefetch == 0 && at > 0 && c->order[at - 1].unit->settings.unshard_in_backward)
            MS_TRY(ms__unit_push_gather(run, c->order[at - 1].unit, true, true));
        for (int k = u->settings.n_backward_prefetch; k-- > 0;)
            MS_TRY(ms__unit_push_gather(run, u->settings.backward_prefetch[k], true, true));
    }
    return u->settings.unshard_in_backward ? ms__unit_push_gather(run, u, false, false) : MS_OK;
}

// A backward gathers the parameters again: they must be what its forward computed with. Wholes of fully_shard that
// stayed are that.
static ms_status check_unchanged(const unit *u, int64_t use)
{
    if (MS_LIKELY(version_bits((uint64_t)use) == version_bits(ms__unit_versions(u))) ||
        !u->settings.unshard_in_backward)
        return MS_OK;
    if (u->views != MS_VIEWS_SHARDED)
        return ms__fail(MS_ESTATE, "FSDP does not support changing the parameters between forward and backward");
    if (u->state.gathered && !u->memory.in_place && version_bits(u->state.gathered_from) == version_bits((uint64_t)use))
        return MS_OK;
    return ms__fail(MS_ESTATE, "fsdp: the parameters of unit '%s' were changed between its forward and its backward",
                    u->name);
}

static ms_status pre_backward(ms_run *run, void *token, int64_t use)
{
    unit *u = from_token(token);
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

// A piece may be as long as the whole is wide: added to a gradient of the whole it would be repeated in silence.
static ms_status gradient_fits(const ms_tensor *param, const ms_tensor *grad)
{
    const unit_param *p = param->unit_param;
    if (MS_LIKELY(grad->ndim == p->ndim && grad->numel == p->numel) || p == &p->owner->flat) return MS_OK;
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
    if (p == &u->flat) return MS_OK;  // the script computed with the flat parameter itself
    if (!u->context)
        return ms__fail(MS_ESTATE, "fsdp: a gradient for parameter '%s' before unit '%s' ran forward",
                        param->name ? param->name : "?", u->name);
    u->context->in_backward = true;
    size_t bytes = ms__nbytes(grad);
    *taken = true;
    MS_TRY(ms__accumulate(&p->fresh, grad));
    p->run = run;
    u->gradients.arrived += bytes;
    reduction *r = &u->context->reducing;
    if (r->owner && r->owner != u && 2 * u->gradients.arrived >= u->memory.full_bytes)
        return ms__unit_land(run, u->context);
    return MS_OK;
}

// ---- after a backward ------------------------------------------------------------------------

// The running backward's gradients join what earlier ones left. They wait in the reduce dtype when they are not reduced
// now. (fsdp.FSDP's: shard/layout/flat.c.)
static ms_status fold(unit *u)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        ms_tensor *g = p->fresh;
        if (!g) continue;
        p->fresh = NULL;
        p->run = NULL;
        int dtype = u->settings.reduce_dtype >= 0 && !u->settings.sync ? u->settings.reduce_dtype : g->dtype;
        ms_status st = MS_OK;
        if (p->pending) {
            MS_TRY(ms__accumulate(&p->pending, g));  // takes g; never writes into a buffer that another gradient shares
            continue;
        } else if (dtype != g->dtype) {
            ms_tensor *wide;
            st = ms__tensor_new(&wide, dtype, u->memory.device, g->ndim, g->shape, "fsdp: accumulated gradient");
            if (st == MS_OK && (st = ms__copy(wide, g)) != MS_OK) ms__release(wide);
            else if (st == MS_OK) p->pending = wide;
        } else {
            p->pending = ms__retain(g);
        }
        ms__release(g);
        MS_TRY(st);
    }
    return MS_OK;
}

static void reshard_after_backward(unit *u)
{
    if (u->settings.reshard_after_backward) {
        UNIT_RANGE(u, "post_backward_reshard");
        ms__unit_shard(u);
    } else if (u->views == MS_VIEWS_PIECES && u->state.gathered && u->world > 1) {
        conceal(u);
    }
}

static ms_status reduce_after_backward(ms_run *run, unit *u)
{
    u->gradients.arrived = 0;
    u->gradients.partly = false;
    if (u->n) ms__unit_log(u, "post_backward");
    {
        UNIT_RANGE(u, "post_backward_accumulate");
        MS_TRY(u->views == MS_VIEWS_SHARDED ? fold(u) : u->settings.sync ? ms__flat_take(u) : ms__flat_keep(u));
    }
    if (ms__unit_idle(u)) reshard_after_backward(u);
    if (u->n) ms__unit_note(u, MS_UNIT_EV_POST_BACKWARD, false);
    if (!u->settings.sync) return MS_OK;
    UNIT_RANGE(u, "post_backward_reduce");
    return ms__unit_reduce(run, u);
}

// A rank whose script left out a backward (an error between forward and backward that it caught) goes on with the next
// forward; where nothing has to be gathered for that, its next reduction would pair with the others' of the step
// before, and all would be one step apart for good. So a reduction says how many passes are left behind: the ranks
// compare names.
const char *ms__unit_reduced_name(const unit *u)
{
    if (MS_LIKELY(u->gradients.behind <= 0)) return u->name;
    char text[512];
    snprintf(text, sizeof text, "%s, of which %d more forward%s no backward yet", *u->name ? u->name : "the root",
             u->gradients.behind, u->gradients.behind > 1 ? "s have" : " has");
    return ms__intern(text);
}

static ms_status post_backward(ms_run *run, void *token, int64_t use)
{
    unit *u = from_token(token);
    if (!u || !u->context) return MS_OK;
    int k = ms__unit_active(u, use), at = ms__order_find(u->context, use);
    if (k >= 0) ms__unit_deactivate(u, k);
    if (at >= 0) u->context->order[at].done = true;
    u->gradients.behind = ms__order_passes_left(u);
    // Gradients of modules that ran together are reduced together.
    if (at >= 0 && ms__order_pass_waits(u->context, at)) {
        u->gradients.partly = true;
        return MS_OK;
    }
    // A flat gradient is reduced once, when it is complete: it waits for the module's other uses.
    if (u->views != MS_VIEWS_SHARDED && u->gradients.behind > 0) return MS_OK;
    MS_TRY(reduce_after_backward(run, u));
    return u->options.backward_prefetch_at == MS_PREFETCH_POST && !ms__run_recomputing() ? ms__prefetch_backward(u, use)
                                                                                         : MS_OK;
}

static ms_status final(ms_run *run)
{
    for (context *c = ms__contexts(); c; c = c->next) {
        if (!c->in_backward) continue;
        ms__unit_log(NULL, "root_post_backward");
        UNIT_RANGE(NULL, "root_post_backward");
        // Units whose inputs needed no gradient, the root usually among them, and those to which only earlier backwards
        // came, without sync.
        for (int k = 0; k < c->n; k++) {
            unit *u = c->units[k];
            bool waiting = u->pass.n_active > 0 || u->gradients.partly;
            for (int j = 0; j < u->n; j++) waiting |= u->params[j].fresh || (u->settings.sync && u->params[j].pending);
            u->pass.n_active = 0;
            u->gradients.behind = ms__order_passes_left(u) - 1;
            if (waiting) MS_TRY(reduce_after_backward(run, u));
        }
        if (!c->is_last_backward) continue;
        MS_TRY(ms__unit_land(run, c));
        for (int k = 0; k < c->n; k++) {
            unit *u = c->units[k];
            if ((u->state.gather || u->state.fetched) && ms__unit_idle(u)) ms__unit_shard(u);  // mistargeted prefetch
            // Of fsdp.FSDP also what this backward did not come to.
            if (u->views != MS_VIEWS_SHARDED && u->state.gathered && ms__unit_idle(u)) reshard_after_backward(u);
        }
        c->n_order = 0;
        c->in_backward = false;
        c->backwards++;
    }
    return MS_OK;
}

static void aborted(ms_run *run)
{
    bool outermost = !ms__run_in_backward();
    bool gave_up = outermost && ms__run_is_backward(run) && ms__run_has_units(run);
    for (context *c = ms__contexts(); c; c = c->next) {
        if (gave_up) ms__unit_drop_pending(c);
        if (!c->in_backward) {
            if (outermost && ms__run_has_units(run)) c->n_order = 0;  // it ended before it came to them
            continue;
        }
        if (outermost) ms__unit_drop_reduction(&c->reducing);
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
                                    .post_backward = post_backward,
                                    .gradient_fits = gradient_fits,
                                    .accumulate = accumulate,
                                    .final = final,
                                    .epoch = ms__comm_epoch,
                                    .failed = ms__comm_publish_error,
                                    .abort = aborted };

__attribute__((constructor)) static void own_runs(void) { ms__run_owner = &owner; }
