// SPDX-License-Identifier: MIT
// shard/views/flat.c -- units of fsdp.FSDP without use_orig_params: one flat parameter over the shard is the leaf that
// optimizers step, and the modules' own parameters are views of the whole.
#include "shard/views/classic.h"

static void place_flat_views(unit *u)
{
    if (u->n == 0) return;
    unit_param *f = &u->flat;
    ms_tensor *t = ms__classic_flat(u);
    int64_t n = t->numel;
    f->dtype = f->gather_dtype = t->dtype;
    f->chunk = f->here = n;
    f->first = u->rank * n;
    f->rows = f->numel = u->world * n;
    f->row_numel = 1;
    f->ndim = 1;
    f->shape[0] = f->numel;
    if (f->local) {  // scripts may hold this tensor, so it is made a view of the new storage
        ms__tensor_point(f->local, t);
        ms__release(t);
        return;
    }
    f->owner = u;
    f->param = f->local = t;
    t->unit_param = f;
    ms__own(t);
    u->leaves = f;
    u->n_leaves = 1;
}

static void shown(unit *u)
{
    for (int j = 0; j < u->n; j++) u->params[j].param->requires_grad = u->flat.local->requires_grad;
}

static ms_id flat_local_id(unit *u) { return ms__unit_local_id(u->flat.local); }

const views ms__views_flat = {
    CLASSIC_VIEWS, .name = "flat", .one_leaf = true, .place = place_flat_views, .flat = flat_local_id, .shown = shown,
};
