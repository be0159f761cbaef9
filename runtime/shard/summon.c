// SPDX-License-Identifier: MIT
// shard/summon.c -- makes the parameters of fsdp.FSDP whole for scripts to read and write (docs/semantics.md#summon).
#include <stdio.h>

#include "device/device.h"
#include "device/move.h"
#include "shard/gather.h"
#include "shard/root.h"
#include "ops/op.h"

// ---- summon_full_params -----------------------------------------------------------------------

// A view, in the stored dtype, of the whole parameter p from its element number `from` on.
static ms_tensor *whole_of(const unit *u, const unit_param *p, int ndim, const int64_t *shape, int64_t from)
{
    ms_storage *wholes = u->state.summoned ? u->state.summoned : u->memory.gather_buffer;
    return ms__tensor_on(wholes, p->dtype, ndim, shape, ms__whole_index(p) + from);
}

static void show_wholes(unit *u)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        ms_tensor *whole = whole_of(u, p, p->ndim, p->shape, 0);
        ms__tensor_point(p->param, whole);
        ms__release(whole);
        p->param->sharded = false;
    }
}

// Moves the whole parameters from the device to the CPU.
static ms_status show_on_cpu(unit *u)
{
    ms_storage *from = u->state.summoned ? u->state.summoned : u->memory.gather_buffer, *to;
    size_t bytes = u->state.summoned ? u->memory.shard_bytes * (size_t)u->world : u->memory.gather_bytes;
    MS_TRY(ms__storage_new(&to, MS_CPU, bytes, "summon_full_params"));
    ms_status st = ms__move(MS_CPU, to->data, from->device, from->data, bytes);
    if (st != MS_OK) {
        ms__storage_release(to);
        return st;
    }
    if (u->state.summoned) ms__storage_release(u->state.summoned);
    else ms__unit_shard(u);
    u->state.summoned = to;
    show_wholes(u);
    return MS_OK;
}

ms_status ms_unit_summon(double handle, int show)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    if (!ms_unit_get_state(handle)->is_idle)
        return ms__fail(MS_ESTATE, "Cannot manually unshard parameters during forward/backward");
    if (ms__is_meta(u->memory.device))
        return ms__fail(MS_ESTATE,
                        "summon_full_params: the parameters of unit '%s' are on device meta and have no values",
                        u->name);
    ms__unit_keep(u);
    for (int j = 0; j < u->n; j++) u->params[j].seen = u->params[j].param->version->count;
    u->state.was_whole = u->state.gathered && !u->memory.casts;
    u->state.was_concealed = u->state.was_whole && u->state.concealed;
    if (u->memory.casts && u->n) {
        ms__unit_shard(u);  // the script must access values in the stored dtype
        ms_piece piece = { .out_stride = u->memory.shard_bytes,
                           .bytes = u->memory.shard_bytes,
                           .total = u->memory.shard_bytes * (size_t)u->world };
        MS_TRY(ms__storage_new(&u->state.summoned, u->memory.device, piece.total, "summon_full_params"));
        ms_status st = ms__storage_sync(u->memory.shard, false);
        if (st == MS_OK && u->world == 1)
            st = ms__move(u->state.summoned->device, u->state.summoned->data, u->memory.shard->device,
                          u->memory.shard->data, u->memory.shard_bytes);
        else if (st == MS_OK)
            st = ms__unit_gather_apart(u, u->memory.shard, u->state.summoned, u->params[0].dtype, &piece);
        if (st != MS_OK) {
            ms__storage_release(u->state.summoned);
            u->state.summoned = NULL;
            return st;
        }
        if (show) show_wholes(u);
    } else {
        MS_TRY(ms__unit_start_gather(u, false, false));
        MS_TRY(ms__unit_finish_gather(u));
        if (!show) ms__unit_show(u, false);
    }
    u->state.summoning = true;
    if (show != 2 || u->n == 0 || u->memory.device == MS_CPU) return MS_OK;
    ms_status st = show_on_cpu(u);
    if (st != MS_OK) {
        char text[1024];
        snprintf(text, sizeof text, "%s", ms_error());
        (void)ms_unit_unsummon(handle, 0);
        return ms__fail(st, "%s", text);
    }
    return MS_OK;
}

static ms_status write_back(unit *u)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        if (p->here == 0) continue;
        ms_tensor *from = whole_of(u, p, p->local->ndim, p->local->shape, p->first);
        ms_status st = ms__copy(p->local, from);
        ms__release(from);
        MS_TRY(st);
    }
    return MS_OK;
}

ms_status ms_unit_unsummon(double handle, int writeback)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    if (!u->state.summoning) return MS_OK;
    ms_status st = writeback && (u->state.summoned || !u->memory.in_place) ? write_back(u) : MS_OK;
    u->state.summoning = false;
    bool discards = !writeback && !u->memory.in_place;
    for (int j = 0; j < u->n; j++) {  // so that discarded changes are not copied to the shard later
        unit_param *p = &u->params[j];
        if (discards) p->param->version->count = p->seen;
        p->seen = p->param->version->count;
    }
    u->state.shard_seen = ms__unit_shard_versions(u);
    if (u->state.summoned) {
        ms__unit_show(u, false);
        ms__storage_release(u->state.summoned);
        u->state.summoned = NULL;
    } else if (!u->state.was_whole || discards) {  // reshard on all ranks, even if only one rank changed values
        ms__unit_shard(u);
    } else {
        ms__unit_show(u, !u->state.was_concealed);  // views of whole parameters or of pieces, as before
        u->state.concealed = u->state.was_concealed;
    }
    return st;
}
