// SPDX-License-Identifier: MIT
// shard/forward.c -- the work of a unit before and after its module's forward (docs/semantics.md#lifecycle).
//
// Entering a module gathers its unit, then starts the gather of the unit that followed it in the latest forward, so
// that this gather overlaps with compute. By default one unit is gathered early at a time; if the script removes that
// limit, all units that follow are gathered at once. A script may also list the units to gather early.
#include <stdio.h>

#include "shard/gather.h"
#include "shard/order.h"
#include "shard/root.h"
#include "shard/views/views.h"
#include "ops/op.h"

static int64_t next_use = 1;

// ---- inputs ------------------------------------------------------------------------------------

static ms_status inputs_of(int n, const ms_id *io, ms_tensor **t)
{
    if (n > MS_MAX_IN)
        return ms__fail(MS_EINVAL,
                        "fsdp: a module has %d tensors among its inputs or outputs; at most %d are supported", n,
                        MS_MAX_IN);
    for (int k = 0; k < n; k++)
        if (!(t[k] = ms__tensor(io[k]))) return ms__failure();
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

// Moves the inputs of the outermost unit to the device on which the units of its root compute.
static ms_status inputs_to_device(const unit *u, int n, ms_id *io)
{
    static const ms_op *to_device;
    if (!to_device) to_device = ms__op_by_name("to_device");
    const context *c = u->context;
    UNIT_RANGE(NULL, "inputs_to_device");
    for (int k = 0; k < c->n && u->n == 0; k++)
        if (c->units[k]->n) u = c->units[k];
    if (u->n == 0 || ms__is_meta(u->memory.device)) return MS_OK;
    for (int k = 0; k < n; k++) {
        ms_tensor *t = ms__tensor(io[k]);
        if (!t) return ms__failure();
        if (ms__device(t) != u->memory.device && !ms__is_meta(ms__device(t)))
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
        if (!t) return ms__failure();
        if (!ms__is_float(t->dtype) || t->dtype == dtype) continue;
        MS_TRY(convert_input(cast, t, dtype, &io[k]));
    }
    return MS_OK;
}

// ---- pre-forward -------------------------------------------------------------------------------

ms_status ms_unit_pre_forward(double handle, int n, ms_id *io)
{
    unit *u = ms__unit(handle);
    ms_tensor *in[MS_MAX_IN], *out[MS_MAX_IN];
    if (!u) return ms__failure();
    context *c = u->context;
    if (!c)
        return ms__fail(MS_ESTATE, "fsdp: unit '%s' runs forward before its root was initialised (ms_unit_lazy_init)",
                        u->name);

    ms__run_meets_unit();
    ms__unit_after_errors(u);
    // Parameters that stayed whole after a forward without backward are stale if the script has changed their shards
    // since. All ranks reach the same result.
    if (MS_UNLIKELY(u->state.gathered && !u->memory.in_place && ms__unit_idle(u) &&
                    u->state.gathered_from != ms__unit_versions(u)))
        ms__unit_shard(u);
    // If a checkpoint is recomputed during this unit's own backward, the parameters are whole already.
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
    int64_t use = (int64_t)((uint64_t)next_use++ << VERSION_BITS | ms__use_versions(ms__unit_versions(u)));
    if (u->pass.open && !u->pass.open_pass) u->pass.open_pass = use;
    if (st == MS_OK && recomputing) {
        if (ms__state.grad_mode)
            st = ms__order_take_place(u, use);  // without grad mode, a nested checkpoint runs for the first time
    } else if (st == MS_OK && (!u->pass.open || u->pass.open_pass == use)) {
        ms__order_entered(c, u);
        st = ms__prefetch_forward(u);
    }
    if (st == MS_OK) st = inputs_of(n, io, in);
    bool recorded = false;
    if (st == MS_OK && u->n > 0) {
        st = ms__unit_boundary(ms__unit_token(u), use, n, in, out, &recorded);
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

// ---- post-forward ------------------------------------------------------------------------------

// Called when u's forward has ended or failed. If this was the end of the forward pass that u began, closes the pass.
static void forward_left(unit *u)
{
    context *c = u->context;
    if (c->opened != u || u->pass.forwards > 0 || u->pass.open) return;
    c->opened = NULL;
    // Reshard units that were gathered early for modules that did not run.
    for (int k = 0; k < c->n; k++)
        if ((c->units[k]->state.gather || c->units[k]->state.fetched) && ms__unit_idle(c->units[k]))
            ms__unit_shard(c->units[k]);
}

// Reshards u after its forward, unless it stays whole for the backward. graph: whether the pass recorded a graph.
static ms_status reshard_after_forward(unit *u, bool graph)
{
    if (!ms__unit_idle(u)) return MS_OK;
    // reshard_after_forward is 1: always. Otherwise, the root by rule, and units that stay whole for the backward, are
    // resharded if no backward follows (in validation): whole parameters would be stale after the next optimizer step.
    bool leave =
        u->settings.reshard_after_forward == 1 || ((u->settings.by_rule || u->views->whole_for_backward) && !graph);
    // If reshard_after_forward is a group size, the ranks of post_group keep slices for the backward.
    bool few = u->settings.reshard_after_forward > 1 && u->settings.post_group;
    if (few && graph) return ms__unit_shard_to_post(u);
    if (few || leave) {
        ms__unit_shard(u);
    } else if (u->settings.by_rule && u->views->stay) {
        u->views->stay(u);
    }
    return MS_OK;
}

// If the forward that u opened is complete, makes its recorded order the latest one.
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
    if (!u) return ms__failure();
    context *c = u->context;
    bool skipped = u->pass.skipped & 1, recomputing = ms__run_recomputing();
    int64_t use = u->pass.uses[u->pass.forwards & 63];
    if (u->n && !skipped) ms__unit_log(u, "post_forward");
    UNIT_RANGE_IF(!skipped, u, "post_forward");
    ms_status st = inputs_of(n, io, out);
    bool grad = false,
         regional =
             ms__region && !ms__state.grad_mode;  // the graph is recorded when the checkpoint's region runs again
    if (st == MS_OK && !skipped && u->n > 0) {
        for (int k = 0; k < n; k++) {
            if (!out[k]->requires_grad || !ms__state.grad_mode) continue;
            grad = true;
            if (st == MS_OK) st = ms__unit_hook(out[k], ms__unit_token(u), use);
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

// ---- passes of several modules -----------------------------------------------------------------

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
    if (!u || !u->pass.open) return u ? MS_OK : ms__failure();
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
