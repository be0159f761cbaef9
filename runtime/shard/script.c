// SPDX-License-Identifier: MIT
// shard/script.c -- functions that scripts call on units besides forward and backward: local parts, whole parameters,
// settings, manual gathering, tensors without values that represent sharded gradients and copies, and the object whose
// garbage collection frees a unit (ms_unit_owner).
#include <stdio.h>

#include "device/device.h"
#include "shard/gather.h"
#include "shard/layout/layout.h"
#include "shard/make.h"
#include "shard/order.h"
#include "shard/root.h"
#include "shard/script.h"
#include "shard/views/views.h"
#include "ops/op.h"

// ---- parameters -------------------------------------------------------------------------------

static unit_param *managed(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return NULL;
    if (!t->unit_param) ms__fail(MS_EINVAL, "fsdp: parameter '%s' is not sharded", t->name ? t->name : "?");
    return t->unit_param;
}

ms_tensor *ms__unit_local(ms_tensor *t)
{
    unit_param *p = t->unit_param;
    if (!p) return t;
    ms__unit_keep(p->owner);
    return p->local;
}

// An optimizer's step makes whole parameters stale. Those that no backward needs are resharded at once, so that a
// script cannot read or change stale values.
void ms__unit_stepped(ms_tensor *t)
{
    unit_param *p = t->unit_param;
    (p ? p->local : t)->version->count++;
    unit *u = p ? p->owner : NULL;
    if (!u || !u->state.gathered || u->memory.in_place || !ms__unit_idle(u)) return;
    if (u->context && !u->context->in_backward && ms__order_passes_left(u) == 0) ms__unit_shard(u);
}

double ms_unit_of(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    return t && t->unit_param ? ((unit_param *)t->unit_param)->owner->handle : 0;
}

ms_id ms_unit_flat(double handle)
{
    unit *u = ms__unit(handle);
    if (!u) return 0;
    ms__unit_keep(u);
    if (u->views->flat && u->n) return u->views->flat(u);
    ms__fail(MS_EINVAL, "fsdp: unit '%s' has no flat parameter, expected a unit of fsdp.FSDP with parameters", u->name);
    return 0;
}

double ms_unit_flat_offset(ms_id id)
{
    unit_param *p = managed(id);
    return p ? (double)ms__shard_index(p) : -1;
}

ms_id ms_unit_local(ms_id id)
{
    unit_param *p = managed(id);
    if (!p) return 0;
    ms__unit_keep(p->owner);
    return ms__unit_local_id(p->local);
}

ms_status ms_unit_shard_info(ms_id id, ms_shard_info *out)
{
    unit_param *p = managed(id);
    if (!p) return ms__failure();
    *out = (ms_shard_info) { .unit = p->owner->handle,
                             .layout = p->owner->layout->kind,
                             .world = p->owner->world,
                             .rank = p->owner->rank,
                             .dtype = p->dtype,
                             .dim = p->dim,
                             .first = p->first,
                             .here = p->here,
                             .rows = p->rows,
                             .row_numel = p->row_numel,
                             .outer = p->outer };
    return MS_OK;
}

// Gathers all ranks' parts into a new tensor of the whole parameter's shape. part: p's local tensor or its gradient, or
// a tensor laid out like it.
static ms_id gather_for_script(unit_param *p, ms_tensor *part)
{
    const unit *u = p->owner;
    ms_tensor *out;
    int where = u->layout->whole_on_device ? u->memory.device : u->memory.home;
    if (ms__tensor_new(&out, part->dtype, where, p->ndim, p->shape, "full_tensor") != MS_OK) return 0;
    ms_status st = MS_OK;
    if (!ms__is_meta(where)) st = u->world == 1 ? ms__copy_into(out, 0, part) : u->layout->gather_whole(p, part, out);
    if (st == MS_OK) return ms__name(out);
    ms__release(out);
    return 0;
}

static ms_id full_gradient(unit_param *p)
{
    ms__clear_error();
    ms_tensor *g = p->local->leaf ? p->local->leaf->grad : NULL, *copy;
    if (!g) return 0;
    if (!g->unreduced) return gather_for_script(p, g);
    // The gradient is not reduced: it is already whole, with this rank's values.
    if (ms__tensor_like(&copy, g, "summon_full_params") != MS_OK) return 0;
    if (ms__copy(copy, g) == MS_OK) return ms__name(copy);
    ms__release(copy);
    return 0;
}

ms_id ms_unit_full(ms_id id, int gradient)
{
    unit_param *p = managed(id);
    if (!p) return 0;
    if (gradient) return full_gradient(p);
    ms__unit_keep(p->owner);
    return ms__storage_sync(p->local->storage, false) == MS_OK ? gather_for_script(p, p->local) : 0;
}

bool ms__unit_unreduced(const ms_tensor *t)
{
    const unit_param *p = t->unit_param;
    if (!p) return ms__grad_is_local(t->leaf);
    const ms_tensor *g = p->local->leaf ? p->local->leaf->grad : NULL;
    if (!g || !g->unreduced) return false;
    return p->owner->world > 1 || (p->owner->replicate && !g->version->collective);
}

static const char in_ddp[] =
    "it comes from a backward inside no_sync, or of a forward that was not called through nn.DDP, or one that did not "
    "reach all parameters of nn.DDP; run a backward that reduces it first. If the script itself has reduced the "
    "gradient, set the parameter's grad to nil, then to the result";

ms_status ms__unit_refuse_unreduced(const char *who, int k, const ms_tensor *t)
{
    return ms__fail(MS_ESTATE, "%s: the gradient of parameter %d, '%s', has not been reduced: %s", who, k + 1,
                    t->name ? t->name : "?",
                    t->unit_param ? "it comes from a backward inside no_sync; run a backward outside of no_sync first"
                                  : in_ddp);
}

ms_status ms_unit_check_reduced(ms_id id)
{
    const ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    const unit_param *p = t->unit_param;
    const unit *u = p ? p->owner : NULL;
    if (!p && ms__unit_unreduced(t))
        return ms__fail(MS_ESTATE, "the gradient of parameter '%s' has not been reduced: %s", t->name ? t->name : "?",
                        in_ddp);
    if (!p || (!ms__unit_unreduced(t) && !p->pending && !u->gradients.partial &&
               !(u->context && u->context->reducing.owner == u)))
        return MS_OK;
    return ms__fail(
        MS_ESTATE,
        "the gradients of parameter '%s' have not been reduced; run a backward that reduces them first: outside of "
        "no_sync, with set_requires_gradient_sync, set_requires_all_reduce and set_is_last_backward at true",
        t->name ? t->name : "?");
}

// ---- tensors that represent sharded ones, owners -----------------------------------------------

ms_id ms_unit_stand_in(ms_id id, int dtype)
{
    unit_param *p = managed(id);
    if (!p) return 0;
    ms_tensor *s = ms__tensor_on(p->owner->memory.gather_buffer, dtype, p->ndim, p->shape, 0);
    s->sharded = true;  // the tensor has no values, so operators must refuse it
    s->name = p->param->name;
    return ms__name(s);
}

ms_id ms_unit_gather_like(ms_id id, ms_id part_id)
{
    ms_tensor *t = ms__tensor(id), *part = ms__tensor(part_id);
    if (!t || !part) return 0;
    unit_param *p = t->unit_param;
    if (!p)
        return ms__no_id(ms__fail(MS_EINVAL, "full_tensor: parameter '%s' is not sharded", t->name ? t->name : "?"));
    if (part->numel != p->local->numel)
        return ms__no_id(ms__fail(MS_EINVAL,
                                  "full_tensor: got %s, expected as many elements as this rank's part of '%s' has, %s",
                                  ms__tensor_text(part), t->name ? t->name : "?", ms__tensor_text(p->local)));
    if (ms__storage_sync(part->storage, false) != MS_OK) return 0;
    return gather_for_script(p, part);
}

void ms_unit_owner_release(ms_unit_owner *o)
{
    if (o->unit > 0) ms_unit_free(o->unit);
    o->unit = 0;
}

// ---- manual gathering ---------------------------------------------------------------------------

const ms_unit_state *ms_unit_get_state(double handle)
{
    static ms_unit_state state;
    const unit *u = ms__unit(handle);
    state = (ms_unit_state) { 0 };
    if (!u) return &state;
    const context *c = u->context;
    state.is_gathered = u->state.gathered;
    state.is_idle = ms__unit_idle(u) && !(c && c->in_backward);
    state.device = u->memory.device;
    if (!c) return &state;
    state.started = 1;
    state.root = c->root ? c->root->handle : 0;
    state.backwards = (double)c->backwards;
    return &state;
}

ms_status ms_unit_unshard(double handle, int async)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    ms__unit_after_errors(u);
    MS_TRY(ms__unit_start_gather(u, async != 0, false));
    return async ? MS_OK : ms__unit_finish_gather(u);
}

ms_status ms_unit_wait(double handle)
{
    unit *u = ms__unit(handle);
    return u ? ms__unit_finish_gather(u) : ms__failure();
}

ms_status ms_unit_reshard(double handle)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    if (!ms__unit_idle(u))
        return ms__fail(
            MS_ESTATE,
            "reshard: a forward, backward or summon_full_params of unit '%s' has not ended; reshard after it", u->name);
    ms__unit_shard(u);
    return MS_OK;
}

static ms_status set_full_precision(unit *u, bool on)
{
    if (!ms__unit_idle(u))
        return ms__fail(
            MS_ESTATE,
            "fsdp: a forward or backward of unit '%s' has not ended; its precision cannot change before then", u->name);
    ms__unit_shard(u);
    u->settings.param_dtype = on ? -1 : u->options.param_dtype;
    u->settings.reduce_dtype = on ? -1 : u->options.reduce_dtype;
    return ms__unit_replan(u);
}

ms_status ms_unit_set(double handle, int what, double value)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    switch (what) {
    case MS_UNIT_SYNC: u->settings.sync = value != 0; break;
    case MS_UNIT_RESHARD_AFTER_FORWARD:
        u->settings.reshard_after_forward = value != 0;
        ms__group_release(u->settings.post_group);
        u->settings.post_group = NULL;
        u->settings.by_rule = false;
        break;
    case MS_UNIT_RESHARD_AFTER_BACKWARD: u->settings.reshard_after_backward = value != 0; break;
    case MS_UNIT_UNSHARD_IN_BACKWARD: u->settings.unshard_in_backward = value != 0; break;
    case MS_UNIT_ALL_REDUCE: u->settings.all_reduce = value != 0; break;
    case MS_UNIT_ALL_REDUCE_HOOK: u->settings.all_reduce_hook = value; break;
    case MS_UNIT_CHECKED: u->settings.checked = value != 0; break;
    case MS_UNIT_FORWARD_PREFETCH: u->settings.prefetches = value != 0; break;
    case MS_UNIT_LIMIT_GATHERS: u->settings.limited = value != 0; break;
    case MS_UNIT_FAKE_GATHER: u->settings.fake_gather = value != 0; break;
    case MS_UNIT_FAKE_REDUCE: u->settings.fake_reduce = value != 0; break;
    case MS_UNIT_FULL_PRECISION: return set_full_precision(u, value != 0);
    case MS_UNIT_CAST_FORWARD_INPUTS: u->settings.cast_forward_inputs = value != 0; break;
    case MS_UNIT_IS_LAST_BACKWARD:
        if (u->context) u->context->is_last_backward = value != 0;
        break;
    case MS_UNIT_DIVIDE_FACTOR:
        if (!(value > 0)) return ms__fail(MS_EINVAL, "set_gradient_divide_factor: %g is not greater than 0", value);
        u->settings.divide = value;
        break;
    default: return ms__fail(MS_EINVAL, "fsdp: setting is %d, expected MS_UNIT_SYNC to MS_UNIT_CHECKED", what);
    }
    return MS_OK;
}
