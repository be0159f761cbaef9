// unit_summon.c -- whole parameters of an fsdp.FSDP unit for the script, and what it wrote into them back (behaviour.md 3.2).
#include <stdio.h>

#include "device.h"
#include "unit.h"
#include "op.h"

int ms_unit_is_idle(double handle)
{
    unit *u = ms__unit(handle);
    return u && ms__unit_idle(u) && !(u->context && u->context->in_backward);
}

// p whole, in the stored dtype.
static ms_tensor *whole_of(const unit *u, const unit_param *p, int ndim, const int64_t *shape, int64_t from)
{
    int64_t at = (int64_t)(p->full_at / (size_t)ms__dtype_size(p->low)) + from;
    return ms__tensor_on(u->summoned ? u->summoned : u->full, p->dtype, ndim, shape, at);
}

// What is whole on a device is shown in the CPU's memory, and the device's is let go.
static ms_status show_on_cpu(unit *u)
{
    ms_storage *from = u->summoned ? u->summoned : u->full, *to;
    size_t bytes = u->summoned ? u->shard_bytes * (size_t)u->world : u->full_bytes;
    MS_TRY(ms__storage_new(&to, MS_CPU, bytes, "summon_full_params"));
    ms_status st = ms__move(MS_CPU, to->data, from->device, from->data, bytes);
    if (st != MS_OK) {
        ms__storage_release(to);
        return st;
    }
    if (u->summoned) ms__storage_release(u->summoned);
    else ms__unit_shard(u);
    u->summoned = to;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        ms_tensor *whole = whole_of(u, p, p->ndim, p->shape, 0);
        ms__tensor_point(p->param, whole);
        ms__release(whole);
        p->param->sharded = false;
    }
    return MS_OK;
}

ms_status ms_unit_summon(double handle, int show)
{
    unit *u = ms__unit(handle);
    if (!u) return (ms_status)ms_error_code();
    if (!ms_unit_is_idle(handle)) return ms__fail(MS_ESTATE, "Cannot manually unshard parameters during forward/backward");
    if ((u->device & 0xff) == MS_META) return ms__fail(MS_ESTATE, "summon_full_params: the parameters of unit '%s' are on meta", u->name);
    u->was_whole = u->gathered && !u->casts;
    u->was_concealed = u->was_whole && u->concealed;
    if (u->casts && u->n) {
        ms__unit_shard(u);                  // the copy in low precision would not show what is written
        ms_piece piece = { .out_stride = u->shard_bytes, .bytes = u->shard_bytes, .total = u->shard_bytes * (size_t)u->world };
        MS_TRY(ms__storage_new(&u->summoned, u->device, piece.total, "summon_full_params"));
        ms_status st = ms__storage_sync(u->shard, false);
        if (st == MS_OK && u->world == 1) st = ms__move(u->summoned->device, u->summoned->data, u->shard->device, u->shard->data, u->shard_bytes);
        else if (st == MS_OK)
            st = ms__all_gather_pieces(u->group, u->summoned, u->shard, 1, &piece, u->params[0].dtype, MS_STREAM_COMPUTE, u->name, NULL);
        if (st != MS_OK) {
            ms__storage_release(u->summoned);
            u->summoned = NULL;
            return st;
        }
        for (int j = 0; j < u->n && show; j++) {
            unit_param *p = &u->params[j];
            ms_tensor *whole = whole_of(u, p, p->ndim, p->shape, 0);
            ms__tensor_point(p->param, whole);
            ms__release(whole);
            p->param->sharded = false;
        }
    } else {
        MS_TRY(ms__unit_start_gather(u, false, false));
        MS_TRY(ms__unit_finish_gather(u));
        if (!show) ms__unit_show(u, false);
    }
    u->summoning = true;
    if (show != 2 || u->n == 0 || u->device == MS_CPU) return MS_OK;
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
    if (!u) return (ms_status)ms_error_code();
    if (!u->summoning) return MS_OK;
    u->summoning = false;
    ms_status st = writeback && (u->summoned || !u->in_place) ? write_back(u) : MS_OK;
    if (u->summoned) {
        ms__unit_show(u, false);
        ms__storage_release(u->summoned);
        u->summoned = NULL;
    } else if (!u->was_whole) {
        ms__unit_shard(u);
    } else {
        ms__unit_show(u, !u->was_concealed);        // in view again where they were not shown
        u->concealed = u->was_concealed;
    }
    return st;
}
