// SPDX-License-Identifier: MIT
// shard/views/flat.c -- units of fsdp.FSDP without use_orig_params: one flat parameter over the shard is the leaf that
// optimizers have, and the modules' own parameters are views of the whole.
#include "shard/views/classic.h"

static ms_status check(const char *unit, const ms_tensor *t, const ms_tensor *first)
{
    return ms__classic_check(unit, t, first, true);
}

static void place(unit *u)
{
    if (u->n == 0) return;
    unit_param *f = &u->flat;
    int64_t n = (int64_t)(u->memory.shard_bytes / (size_t)ms__dtype_size(u->params[0].dtype));
    ms_tensor *t = ms__tensor_on(u->memory.shard, u->params[0].dtype, 1, &n, 0);
    f->dtype = f->gather_dtype = t->dtype;
    f->chunk = f->here = n;
    f->first = u->rank * n;
    f->rows = f->numel = u->world * n;
    f->row_numel = 1;
    f->ndim = 1;
    f->shape[0] = f->numel;
    if (f->local) {  // scripts may hold the object: it is re-pointed
        ms__tensor_point(f->local, t);
        ms__release(t);
        return;
    }
    f->owner = u;
    f->param = f->local = t;
    t->unit_param = f;
    t->is_param = true;
    t->name = ms__intern("flat_param");
    ms__own(t);
    for (int j = 0; j < u->n; j++) t->requires_grad |= u->params[j].param->requires_grad;
    u->slots = f;
    u->n_slots = 1;
}

static void shown(unit *u)
{
    for (int j = 0; j < u->n; j++) u->params[j].param->requires_grad = u->flat.local->requires_grad;
}

// Always the same id.
static ms_id flat(unit *u)
{
    bool named = u->flat.local->slot != 0;
    ms_id id = ms__name_unscoped(ms__retain(u->flat.local));
    if (id && !named) ms__own(u->flat.local);
    return id;
}

const views ms__views_flat = {
    .name = "flat",
    .check = check,
    .place = place,
    .flat = flat,
    .shown = shown,
    .whole_for_backward = true,
    .rewraps = true,
    .reduces_once = true,
    .take = ms__classic_take,
    .reduce = ms__classic_reduce,
    .land = ms__classic_land,
    .drop_waiting = ms__classic_drop_waiting,
    .off_home = ms__classic_off_home,
    .changed = ms__classic_changed,
};
