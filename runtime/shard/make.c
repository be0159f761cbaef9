// SPDX-License-Identifier: MIT
// shard/make.c -- makes units, moves them to other devices and dtypes, and deletes them.
#include <stdio.h>

#include "device/device.h"
#include "device/move.h"
#include "shard/extend.h"
#include "shard/gather.h"
#include "shard/layout/layout.h"
#include "shard/make.h"
#include "shard/root.h"
#include "shard/views/views.h"
#include "ops/op.h"

static const layout *const layouts[] = { [MS_LAYOUT_ROWS] = &ms__layout_rows, [MS_LAYOUT_FLAT] = &ms__layout_flat };
static const views *const known_views[] = {
    [MS_VIEWS_SHARDED] = &ms__views_sharded, [MS_VIEWS_FLAT] = &ms__views_flat, [MS_VIEWS_PIECES] = &ms__views_pieces
};

// ---- construction -----------------------------------------------------------------------------

static void release_params(unit *u)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        ms__release(p->fresh);
        ms__release(p->pending);
        ms__release(p->saved);
        ms__release(p->whole);
        ms__release(p->resting);
        if (p->local) ms__disown(p->local);
        ms__release(p->local);
        if (p->param) p->param->unit_param = NULL;
        ms__release(p->param);
    }
    if (u->leaves == u->params) return;
    ms__release(u->leaves->saved);
    u->leaves->local->unit_param = NULL;
    ms__disown(u->leaves->local);
    ms__release(u->leaves->local);
}

static void unit_delete(unit *u)
{
    release_params(u);
    ms__group_release(u->group);
    ms__group_release(u->replicate);
    ms__group_release(u->settings.post_group);
    if (u->memory.shard) ms__storage_release(u->memory.shard);
    if (u->memory.gather_buffer) ms__storage_release(u->memory.gather_buffer);
    ms__unit_drop_post(u);
    ms__extensions_drop(u);
    ms__release(u->gradients.partial);
    free(u->gradients.partial_of);
    free(u->gradients.partial_at);
    free(u->params);
    free(u->memory.pieces);
    free(u->pass.active);
    free(u->settings.forward_prefetch.units);
    free(u->settings.backward_prefetch.units);
    free(u);
}

static const char *owner_text(const unit *u)
{
    char text[512];
    snprintf(text, sizeof text, "a parameter of unit '%s'", u->name);
    return ms__intern(text);
}

// The storage for whole parameters: the shard itself, or a vacated storage, whose bytes the first gather allocates.
static ms_status make_buffer(unit *u, ms_storage *shard, ms_storage **out)
{
    u->memory.in_place = u->world == 1 && !u->memory.casts && u->memory.home == u->memory.device;
    if (u->memory.in_place) {
        *out = ms__storage_retain(shard);
        return MS_OK;
    }
    MS_TRY(ms__storage_new(out, u->memory.device, 0, "fsdp: gathered parameters"));
    ms__storage_vacate(*out);
    (*out)->bytes = u->memory.gather_bytes;
    (*out)->owner = owner_text(u);
    ms__storage_hold(*out, MS_MEMORY_GATHERED);
    return MS_OK;
}

// Sets the dtype in which each parameter is gathered, and whether one of them differs from the parameter's stored
// dtype.
static void choose_dtypes(unit *u)
{
    u->memory.casts = u->memory.n_extensions > 0;  // extensions read a copy of the shard in the gathered dtypes
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        p->gather_dtype = u->settings.param_dtype >= 0 && ms__is_float(p->dtype) ? u->settings.param_dtype : p->dtype;
        u->memory.casts |= p->gather_dtype != p->dtype;
    }
}

// Decides where a unit computes and where its shards are, given that its module is on `device`; a device in the options
// takes precedence when the unit is made. Offloaded shards are moved to the CPU then, and their unit always computes on
// the device in the options, or else on the module's first device other than meta. A script may move the shards with
// the module, but offloaded shards can only be gathered from the CPU. made: the unit is being made, not moved.
static void settle_unit(unit *u, int device, bool made)
{
    u->memory.device = u->memory.home = device;
    if (ms__is_meta(device)) return;
    if (!u->options.offload) {
        if (made && u->memory.computes >= 0) u->memory.device = u->memory.home = u->memory.computes;
        return;
    }
    if (u->memory.computes < 0) u->memory.computes = device;
    u->memory.device = u->memory.computes;
    if (made) u->memory.home = MS_CPU;
}

// Plans the unit and makes its storages on its current devices; the shard is filled with zeros.
static ms_status make_storages(unit *u)
{
    MS_TRY(u->layout->plan(u));
    if (u->settings.post_group) {
        size_t ranks = (size_t)ms__group_size(u->settings.post_group);
        u->memory.post_bytes = ((u->memory.gather_bytes + ranks - 1) / ranks + 63) & ~(size_t)63;
    }
    ms_storage *shard = NULL, *buffer = NULL;
    MS_TRY(ms__storage_new(&shard, u->memory.home, u->memory.shard_bytes, "fsdp: shard"));
    ms__unit_pin(u, shard);
    ms_status st = shard->data ? ms__set_bytes(shard->device, shard->data, 0, u->memory.shard_bytes) : MS_OK;
    if (st == MS_OK) st = make_buffer(u, shard, &buffer);
    if (st != MS_OK) {
        ms__storage_release(shard);
        return st;
    }
    ms__storage_hold(shard, MS_MEMORY_PARAMETERS);
    u->memory.shard = shard;
    u->memory.gather_buffer = buffer;
    if (u->views->place) u->views->place(u);
    return MS_OK;
}

// Makes p's local, whole and resting tensors (shard/unit.h) over the unit's storages.
static void make_views(unit *u, unit_param *p)
{
    int64_t shape[MS_MAX_DIMS];
    int ndim = u->layout->local_shape(p, shape);
    ms_tensor *local = ms__tensor_on(u->memory.shard, p->dtype, ndim, shape, ms__shard_index(p));
    if (p->local) {  // scripts may hold this tensor, so it is made a view of the new storage
        ms__tensor_point(p->local, local);
        ms__release(local);
    } else {
        p->local = local;
        local->requires_grad = p->param->requires_grad;
        local->is_param = true;
        local->name = p->param->name;
        ms__own(local);
    }
    ms__release(p->whole);
    ms__release(p->resting);
    p->whole = ms__tensor_on(u->memory.gather_buffer, p->gather_dtype, p->ndim, p->shape, ms__whole_index(p));
    p->resting = u->views->resting ? u->views->resting(p)
                                   : ms__tensor_on(u->memory.gather_buffer, p->dtype, p->ndim, p->shape, 0);
    p->resting->sharded = !u->views->resting;
}

// Copies this rank's part of the whole parameter to p's local tensor.
static ms_status copy_part(unit_param *p, ms_tensor *whole)
{
    if (p->here == 0) return MS_OK;
    ms_tensor *from;
    MS_TRY(ms__contiguous(&from, whole));
    ms_tensor *part = p->owner->layout->part(p, from);
    ms_status st = ms__copy(p->local, part);
    ms__release(part);
    ms__release(from);
    return st;
}

ms_status ms__unit_replan(unit *u)
{
    choose_dtypes(u);
    MS_TRY(u->layout->plan(u));
    ms_storage *buffer;
    MS_TRY(make_buffer(u, u->memory.shard, &buffer));
    ms__storage_release(u->memory.gather_buffer);
    u->memory.gather_buffer = buffer;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        make_views(u, p);
        ms__tensor_point(p->param, p->resting);
    }
    return MS_OK;
}

// The serial number of the next unit with this name, the class of its module, in this group. It counts calls, whether
// they succeed or not, because every rank makes the same calls. If making a model fails on one rank, that rank skips
// the model's later units; so counting starts again in each epoch (comm/recover.h).
static uint32_t next_serial(const char *name, double group)
{
    static struct {
        const char *name;
        double group;
        uint32_t n;
    } * counts;
    static int n, cap;
    static uint64_t epoch;
    name = ms__intern(name);
    if (epoch != ms__comm_epoch()) {
        epoch = ms__comm_epoch();
        for (int k = 0; k < n; k++) counts[k].n = (uint32_t)(epoch & 0xffff) << 16;
    }
    for (int k = 0; k < n; k++)
        if (counts[k].name == name && counts[k].group == group) return ++counts[k].n;
    if (ms__grow(&counts, &cap, n, sizeof *counts, "fsdp", "models")) return 0;
    counts[n].name = name;
    counts[n].group = group;
    return counts[n++].n = (uint32_t)(epoch & 0xffff) << 16 | 1;
}

double ms_unit_new(const char *name, int n, const ms_id *params, const ms_unit_options *o)
{
    unit *u = calloc(1, sizeof *u);
    ms_group *g = ms__group_by_id(o->group);
    uint32_t serial = next_serial(name, o->group);
    if (!u) ms__no_memory(sizeof *u, "fsdp", "unit '%s'", name);
    if (!u || !g || ms__tensor_reserve(4 * n + 8, "fsdp") != MS_OK) {
        free(u);
        return 0;
    }
    u->name = ms__intern(name);
    u->serial = serial;
    u->layout = layouts[o->layout];
    u->views = known_views[o->views];
    u->options.backward_prefetch_at = o->backward_prefetch;
    u->options.offload = o->offload != 0;
    u->options.pins = o->offload == 2;
    u->options.keep_low = o->keep_low_precision_grads != 0;
    u->group = ms__group_hold(g);
    u->rank = ms__group_rank(g);
    u->world = ms__group_size(g);
    u->settings.param_dtype = u->options.param_dtype = o->param_dtype;
    u->settings.reduce_dtype = u->options.reduce_dtype = o->reduce_dtype;
    u->options.output_dtype = o->output_dtype;
    u->settings.cast_forward_inputs = o->cast_forward_inputs != 0;
    u->settings.reshard_after_forward = o->reshard_after_forward;
    u->settings.prefetches = u->settings.limited = true;
    u->settings.reshard_after_backward = u->settings.sync = u->settings.unshard_in_backward = u->settings.all_reduce =
        true;
    if (o->replicates && !(u->replicate = ms__group_hold(ms__group_by_id(o->replicate_group)))) goto failed;
    if (o->reshards_to && !(u->settings.post_group = ms__group_hold(ms__group_by_id(o->reshard_group)))) goto failed;
    if (u->replicate && ms__group_size(u->replicate) == 1) {
        ms__group_release(u->replicate);
        u->replicate = NULL;
    }
    ms_comm_division(u->world * (u->replicate ? ms__group_size(u->replicate) : 1), &u->options.before,
                     &u->options.after);
    u->params = u->leaves = calloc((size_t)n + 1, sizeof *u->params);
    u->memory.pieces = calloc((size_t)n + 1, sizeof *u->memory.pieces);
    if (!u->params || !u->memory.pieces) {
        ms__no_memory(((size_t)n + 1) * (sizeof *u->params + sizeof *u->memory.pieces), "fsdp",
                      "unit '%s' of %d parameters", name, n);
        goto failed;
    }
    if (u->rank < 0) {
        ms__fail(MS_EINVAL, "fsdp: this rank is not a member of the group of unit '%s'", name);
        goto failed;
    }
    for (int j = 0; j < n; j++) {
        ms_tensor *t = ms__tensor(params[j]);
        const ms_tensor *first = j ? u->params[0].param : t;
        if (!t || u->views->check(u, t, first) != MS_OK) goto failed;
        unit_param *p = &u->params[j];
        p->owner = u;
        p->param = ms__retain(t);
        p->dtype = t->dtype;
        p->dim = o->dims ? o->dims[j] : 0;
        p->ndim = t->ndim;
        memcpy(p->shape, t->shape, sizeof p->shape);
        p->numel = t->numel;
        u->n = u->n_leaves = j + 1;
    }
    choose_dtypes(u);
    u->memory.computes = o->device;
    settle_unit(u, n ? ms__device(u->params[0].param) : o->device >= 0 ? o->device : MS_CPU, true);
    if (make_storages(u) != MS_OK || ms__unit_handle_new(u) != MS_OK) goto failed;
    for (int j = 0; j < n; j++) {
        unit_param *p = &u->params[j];
        make_views(u, p);
        if (!ms__is_meta(u->memory.device) && copy_part(p, p->param) != MS_OK) goto failed_late;
    }
    for (int j = 0; j < n; j++) {  // from here on nothing can fail
        unit_param *p = &u->params[j];
        ms__tensor_point(p->param, p->resting);
        p->param->sharded = p->resting->sharded;
        p->param->unit_param = p;
    }
    return u->handle;

failed_late:
    ms__unit_handle_drop(u->handle);
failed:
    unit_delete(u);
    return 0;
}

ms_status ms_unit_set_name(double handle, const char *name)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    u->name = ms__intern(name);
    if (u->memory.gather_buffer->owner) u->memory.gather_buffer->owner = owner_text(u);
    return MS_OK;
}

void ms_unit_free(double handle)
{
    unit *u = ms__unit(handle);
    if (!u) return;
    ms__unit_shard(u);
    ms__context_leave(u);
    if (u->settings.hook.key != 0) ms__dead_key(u->settings.hook.key);
    if (u->settings.all_reduce_hook != 0) ms__dead_key(u->settings.all_reduce_hook);
    ms__unit_handle_drop(handle);
    unit_delete(u);
}

// ---- replacement of a parameter -----------------------------------------------------------------

static ms_status check_replacement(const unit *u, const unit_param *p, const ms_tensor *t)
{
    const char *name = p->param->name ? p->param->name : "?";
    if (!ms__unit_idle(u))
        return ms__fail(
            MS_ESTATE,
            "fsdp: parameter '%s' was replaced between the forward and the backward of unit '%s'; replace it "
            "before the forward",
            name, u->name);
    if (t->unit_param)
        return ms__fail(
            MS_ESTATE,
            "fsdp: parameter '%s' was replaced by one that unit '%s' manages, expected one that no unit manages", name,
            ((unit_param *)t->unit_param)->owner->name);
    bool same =
        t->ndim == p->ndim && t->dtype == p->dtype && !memcmp(t->shape, p->shape, (size_t)t->ndim * sizeof *t->shape);
    if (same && !t->node && !t->sharded && !ms__is_meta(ms__device(t))) return MS_OK;
    return ms__fail(
        MS_EINVAL,
        "fsdp: parameter '%s' was replaced by %s, expected a whole leaf %s %s with values, like the old parameter",
        name, ms__tensor_text(t), ms__dtype_name(p->dtype), ms__shape_text(p->ndim, p->shape));
}

ms_status ms_unit_replace(double handle, int j, ms_id id)
{
    unit *u = ms__unit(handle);
    ms_tensor *t = u ? ms__tensor(id) : NULL;
    if (!u || !t) return ms__failure();
    if (j < 0 || j >= u->n) return ms__fail(MS_EINVAL, "fsdp: unit '%s' has no parameter %d", u->name, j + 1);
    unit_param *p = &u->params[j];
    MS_TRY(check_replacement(u, p, t));
    ms__unit_shard(u);
    MS_TRY(copy_part(p, t));
    ms_tensor *former = p->param;
    former->unit_param = NULL;
    t->name = former->name;
    p->param = ms__retain(t);
    p->local->requires_grad = t->requires_grad;
    ms__tensor_point(t, p->resting);
    t->sharded = p->resting->sharded;
    t->unit_param = p;
    ms__release(former);
    return MS_OK;
}

// ---- all-gather extensions --------------------------------------------------------------------

ms_status ms_unit_extend(double handle, int n, const int32_t *count, const int32_t *which)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    if (n == 0 && u->memory.n_extensions == 0) return MS_OK;
    MS_TRY(ms__extensions_check(u, n, count, which));
    ms__unit_shard(u);
    MS_TRY(ms__extensions_set(u, n, count, which));
    return ms__unit_replan(u);
}

// ---- moving -----------------------------------------------------------------------------------

// Moves a gradient to its parameter's device and dtype. Takes ownership of *t.
static ms_status moved_grad(ms_tensor **t, const ms_tensor *local, bool keep_values)
{
    ms_tensor *old = *t, *g = NULL;
    if (!old) return MS_OK;
    const ms_tensor *like = old->unreduced ? old : local;
    ms_status st = ms__tensor_new(&g, local->dtype, ms__device(local), like->ndim, like->shape, "to");
    if (st == MS_OK && keep_values && (st = ms__copy(g, old)) != MS_OK) {
        ms__release(g);
        g = NULL;
    }
    if (g) g->unreduced = old->unreduced;
    ms__release(old);
    *t = g;
    return st;
}

static ms_status move_grads(unit_param *p, bool keep_values)
{
    ms_leaf *l = p->local->leaf;
    ms_tensor *g = l ? ms__retain(l->grad) : NULL;
    ms_status st = moved_grad(&g, p->local, keep_values), saved = moved_grad(&p->saved, p->local, keep_values);
    if (l) ms__leaf_set_grad(l, g);
    return st != MS_OK ? st : saved;
}

ms_status ms_unit_to(double handle, int device, int dtype, int keep_values)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    if (device < 0) device = u->memory.home;
    if (!ms__unit_idle(u))
        return ms__fail(MS_ESTATE, "to: a forward or backward of unit '%s' has not ended; move it afterwards", u->name);
    if (keep_values && ms__is_meta(u->memory.device) && !ms__is_meta(device))
        return ms__fail(MS_EINVAL, "to: unit '%s' is on meta and has no values to copy; use to_empty(device)", u->name);
    ms__unit_shard(u);
    ms__extensions_drop(u);  // the script registers them again
    ms_storage *shard = u->memory.shard, *buffer = u->memory.gather_buffer;
    ms_tensor **old = calloc((size_t)u->n + 1, sizeof *old);
    if (!old) return ms__no_memory(((size_t)u->n + 1) * sizeof *old, "to", "unit '%s'", u->name);
    int device_before = u->memory.device, home_before = u->memory.home, computes_before = u->memory.computes;
    bool in_place_before = u->memory.in_place;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        old[j] = ms__tensor_alias(p->local);
        if (dtype >= 0 && ms__is_float(p->dtype)) p->dtype = dtype;
    }
    choose_dtypes(u);
    settle_unit(u, device, false);
    ms_status st = make_storages(u);
    if (st != MS_OK) {  // restore the previous state
        u->memory.device = device_before;
        u->memory.home = home_before;
        u->memory.computes = computes_before;
        for (int j = 0; j < u->n; j++) u->params[j].dtype = old[j]->dtype;
        choose_dtypes(u);
        u->layout->plan(u);
        u->memory.in_place = in_place_before;
        u->memory.shard = shard;
        u->memory.gather_buffer = buffer;
    }
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        if (st == MS_OK) {
            make_views(u, p);
            ms__tensor_point(p->param, p->resting);
            if (keep_values && p->here > 0 && !ms__is_meta(device)) {
                ms_status copied = ms__copy(p->local, old[j]);
                if (copied != MS_OK) st = copied;
            }
            ms_status moved = move_grads(p, keep_values && !ms__is_meta(device));
            if (moved != MS_OK) st = moved;
        }
        ms__release(old[j]);
    }
    if (st == MS_OK && u->leaves != u->params) st = move_grads(u->leaves, keep_values && !ms__is_meta(device));
    free(old);
    if (u->memory.shard != shard) {
        ms__storage_release(shard);
        ms__storage_release(buffer);
    }
    return st;
}
