// SPDX-License-Identifier: MIT
// shard/script.c -- what scripts need of units beside the schedule: parameters' parts and wholes, names, stand-ins
// for sharded gradients and copies, and the owner that a script's collector releases.
#include <stdio.h>

#include "device/device.h"
#include "shard/unit.h"
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

// Wholes that no backward needs are stale now. They go at once: a script that reads or changes them then meets a
// sharded parameter.
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
    if (u->views == MS_VIEWS_PIECES && u->n) {
        ms_tensor *t = ms__flat_of_pieces(u);
        return t ? ms__name(t) : 0;
    }
    if (!u->flat.local) {
        ms__fail(MS_EINVAL, "fsdp: unit '%s' has no flat parameter", u->name);
        return 0;
    }
    bool named = u->flat.local->slot != 0;
    ms_id id = ms__name_unscoped(ms__retain(u->flat.local));
    if (id && !named) ms__own(u->flat.local);
    return id;
}

double ms_unit_flat_offset(ms_id id)
{
    unit_param *p = managed(id);
    return p ? (double)(p->shard_at / (size_t)ms__dtype_size(p->dtype)) : -1;
}

ms_id ms_unit_local(ms_id id)
{
    unit_param *p = managed(id);
    if (!p) return 0;
    ms__unit_keep(p->owner);
    bool named = p->local->slot != 0;
    ms_id local = ms__name_unscoped(ms__retain(p->local));
    if (local && !named) ms__own(p->local);
    return local;
}

ms_status ms_unit_shard_info(ms_id id, ms_shard_info *out)
{
    unit_param *p = managed(id);
    if (!p) return (ms_status)ms_error_code();
    *out = (ms_shard_info) { .unit = p->owner->handle,
                             .layout = (int)(p->owner->layout - ms__layouts),
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

// The whole of something laid out like p's local tensor (itself, or its gradient), gathered into a tensor of its own.
ms_id ms__unit_gather_whole(unit_param *p, ms_tensor *part)
{
    unit *u = p->owner;
    ms_tensor *out, *packed;
    size_t esz = (size_t)ms__dtype_size(part->dtype);
    // rows: every rank has `chunk` rows, padded. flat: the ranks' pieces of p differ in size and place, so each sends
    // its piece in a block as long as p, at the place where it belongs.
    // The whole of what is offloaded: beside the parts it is made of, or (flat) on the device, where a state dict has
    // it.
    bool rows = u->layout == &ms__layouts[MS_LAYOUT_ROWS];
    int where = rows ? u->memory.home : u->memory.device;
    int64_t block = rows ? p->outer * p->chunk * p->row_numel : p->rows;
    if (ms__tensor_new(&out, part->dtype, where, p->ndim, p->shape, "full_tensor") != MS_OK) return 0;
    if (u->world == 1) {
        ms_tensor *flat = ms__tensor_on(out->storage, out->dtype, part->ndim, part->shape, 0);
        ms_status st = ms__copy(flat, part);
        ms__release(flat);
        if (st == MS_OK) return ms__name(out);
        ms__release(out);
        return 0;
    }
    ms_status st = ms__tensor_new(&packed, part->dtype, u->memory.home, 1, &block, "full_tensor");
    if (st == MS_OK) {
        ms_tensor *dst = ms__tensor_on(packed->storage, part->dtype, part->ndim, part->shape, rows ? 0 : p->first);
        st = ms__copy(dst, part);
        ms__release(dst);
        ms_request r = { .group = u->group,
                         .op = MS_DIST_ALL_GATHER,
                         .from = packed->storage,
                         .dtype = part->dtype,
                         .n_pieces = 1,
                         .label.unit = u->name };
        if (rows && st == MS_OK) {
            size_t line = (size_t)(p->chunk * p->row_numel) * esz;
            ms_piece piece = { .out_stride = line,
                               .bytes = (size_t)block * esz,
                               .total = (size_t)out->numel * esz,
                               .line = p->dim > 0 ? line : 0,
                               .out_line = (size_t)(p->rows * p->row_numel) * esz };
            r.to = out->storage;
            r.pieces = &piece;
            st = ms__collective(&r, NULL);
        } else if (st == MS_OK) {
            ms_tensor *all;
            int64_t n = block * u->world;
            st = ms__tensor_new(&all, part->dtype, u->memory.home, 1, &n, "full_tensor");
            if (st == MS_OK) {
                ms_piece piece = { .out_stride = (size_t)block * esz,
                                   .bytes = (size_t)block * esz,
                                   .total = (size_t)n * esz };
                r.to = all->storage;
                r.pieces = &piece;
                st = ms__collective(&r, NULL);
                int64_t each = (int64_t)(u->memory.shard_bytes / (size_t)ms__dtype_size(p->dtype));
                int64_t begin = (int64_t)(p->full_at / (size_t)ms__dtype_size(p->low));
                for (int r = 0; st == MS_OK && r < u->world; r++) {
                    int64_t from = r * each > begin ? r * each - begin : 0, to = (r + 1) * each - begin;
                    if (to > block) to = block;
                    if (to > from)
                        st = ms__move(where, (char *)ms__data(out) + (size_t)from * esz, u->memory.home,
                                      (char *)ms__data(all) + (size_t)(r * block + from) * esz,
                                      (size_t)(to - from) * esz);
                }
                ms__release(all);
            }
        }
        ms__release(packed);
    }
    if (st == MS_OK) return ms__name(out);
    ms__release(out);
    return 0;
}

ms_id ms_unit_full_tensor(ms_id id)
{
    unit_param *p = managed(id);
    if (p) ms__unit_keep(p->owner);
    if (!p || ms__storage_sync(p->local->storage, false) != MS_OK) return 0;
    return ms__unit_gather_whole(p, p->local);
}

ms_id ms_unit_full_grad(ms_id id)
{
    unit_param *p = managed(id);
    if (!p) return 0;
    ms__clear_error();
    ms_tensor *g = p->local->leaf ? p->local->leaf->grad : NULL, *copy;
    if (!g) return 0;
    if (!g->unreduced) return ms__unit_gather_whole(p, g);
    if (ms__tensor_like(&copy, g, "summon_full_params") != MS_OK) return 0;  // whole, and of this rank alone
    if (ms__copy(copy, g) == MS_OK) return ms__name(copy);
    ms__release(copy);
    return 0;
}

ms_status ms_unit_check_reduced(ms_id id)
{
    const ms_tensor *t = ms__tensor(id);
    if (!t) return (ms_status)ms_error_code();
    const unit_param *p = t->unit_param;
    const unit *u = p ? p->owner : NULL;
    if (!p || (!ms__unit_unreduced(t) && !p->pending && !u->gradients.partial &&
               !(u->context && u->context->reducing.owner == u)))
        return MS_OK;
    return ms__fail(
        MS_ESTATE,
        "unscale_: gradients of parameter '%s' wait to be reduced, and would stay scaled: they come from a backward "
        "inside no_sync, "
        "without gradient sync or all-reduce, or that was not the last one; run one that reduces them first",
        t->name ? t->name : "?");
}

// ---- names, stand-ins, owners -----------------------------------------------------------------

ms_status ms_unit_set_name(double handle, const char *name)
{
    unit *u = ms__unit(handle);
    if (!u) return (ms_status)ms_error_code();
    u->name = ms__intern(name);
    if (u->memory.full->owner) {
        char text[512];
        snprintf(text, sizeof text, "a parameter of unit '%s'", name);
        u->memory.full->owner = ms__intern(text);
    }
    return MS_OK;
}

ms_id ms_unit_stand_in(ms_id id, int dtype)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return 0;
    unit_param *p = t->unit_param;
    if (!p) {
        ms__fail(MS_EINVAL, "fsdp: parameter '%s' is not sharded", t->name ? t->name : "?");
        return 0;
    }
    ms_tensor *s = ms__tensor_on(p->owner->memory.full, dtype, p->ndim, p->shape, 0);
    s->sharded = true;  // its views would read other bytes: every operator refuses it
    s->name = t->name;
    return ms__name(s);
}

ms_id ms_unit_gather_like(ms_id id, ms_id part_id)
{
    ms_tensor *t = ms__tensor(id), *part = ms__tensor(part_id);
    if (!t || !part) return 0;
    unit_param *p = t->unit_param;
    if (!p) {
        ms__fail(MS_EINVAL, "full_tensor: parameter '%s' is not sharded", t->name ? t->name : "?");
        return 0;
    }
    if (part->numel != p->local->numel) {
        ms__fail(MS_EINVAL, "full_tensor: %s is not laid out like this rank's part of '%s', %s", ms__tensor_text(part),
                 t->name ? t->name : "?", ms__tensor_text(p->local));
        return 0;
    }
    if (ms__storage_sync(part->storage, false) != MS_OK) return 0;
    return ms__unit_gather_whole(p, part);
}

void ms_unit_owner_release(ms_unit_owner *o)
{
    if (o->unit > 0) ms_unit_free(o->unit);
    o->unit = 0;
}
