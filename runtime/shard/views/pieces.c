// SPDX-License-Identifier: MIT
// shard/views/pieces.c -- units of fsdp.FSDP with use_orig_params: while sharded, a parameter is a view of this
// rank's 1-d piece of it. The flat parameter over all pieces is made when a script asks for it.
#include "shard/gather.h"
#include "shard/views/classic.h"
#include "ops/op.h"

static ms_tensor *resting(unit_param *p) { return ms__tensor_alias(p->local); }

static uint64_t written(const unit *u)
{
    uint64_t sum = 0;
    for (int j = 0; j < u->n; j++) sum += u->params[j].param->version->count;
    return sum;
}

// The parameters of a unit that stays whole, such as the root, are views of their pieces between passes, as in
// sharded units. Tensors saved in the graph are views of the whole parameters and stay valid.
static void stay(unit *u)
{
    if (!u->state.gathered || u->world == 1) return;
    ms__unit_keep(u);
    ms__unit_show(u, false);
    u->state.concealed = true;
}

// ---- the flat parameter over all pieces ---------------------------------------------------------

// The index of p's first element in a flat gradient like g: over whole parameters if g is unreduced, else over the
// shard.
static int64_t place_in_flat(const unit_param *p, const ms_tensor *g)
{
    return g->unreduced ? ms__whole_index(p) : ms__shard_index(p);
}

// *out: the flat gradient, of which the pieces' gradients are views. If the script has replaced some of the pieces'
// gradients, makes a new flat gradient, of which all of them become views. NULL if there is no gradient, or if the
// pieces' gradients differ in dtype or in whether they are reduced.
static ms_status grad_of_pieces(unit *u, ms_tensor **out)
{
    const ms_tensor *first = NULL;
    bool together = true;
    int64_t base = 0, n = (int64_t)(u->memory.shard_bytes / (size_t)ms__dtype_size(u->params[0].dtype));
    *out = NULL;
    for (int j = 0; j < u->n; j++) {
        const ms_tensor *g = ms__landed(&u->params[j]);
        if (!g || g->numel == 0) continue;
        int64_t at = g->offset - place_in_flat(&u->params[j], g);
        if (!first) {
            first = g;
            base = at;
        }
        if (g->unreduced != first->unreduced || g->dtype != first->dtype) return MS_OK;
        together &= g->storage == first->storage && at == base && ms__is_contiguous(g);
    }
    if (!first) return MS_OK;
    const unit_param *last = &u->params[u->n - 1];
    if (first->unreduced) n = ms__whole_index(last) + last->numel;
    if (together && base >= 0 && (size_t)(base + n) * (size_t)ms__dtype_size(first->dtype) <= first->storage->bytes) {
        *out = ms__tensor_on(first->storage, first->dtype, 1, &n, base);
        return MS_OK;
    }
    MS_TRY(ms__tensor_new(out, first->dtype, ms__device(first), 1, &n, "fsdp: flat gradient"));
    ms_status st = ms__zero(*out);
    for (int j = 0; j < u->n && st == MS_OK; j++) {
        unit_param *p = &u->params[j];
        ms_tensor *g = ms__landed(p);
        if (!g || g->numel == 0) continue;
        ms_tensor *part = ms__tensor_on((*out)->storage, (*out)->dtype, g->ndim, g->shape, place_in_flat(p, g));
        part->unreduced = g->unreduced;
        if ((st = ms__copy(part, g)) == MS_OK) ms__leaf_set_grad(p->local->leaf, part);
        else ms__release(part);
    }
    if (st != MS_OK) ms__drop(out);
    return st;
}

// A flat parameter over the pieces; its grad contains the pieces' grads.
static ms_id flat_parameter_id(unit *u)
{
    ms_tensor *g = NULL;
    if (grad_of_pieces(u, &g) != MS_OK) return 0;
    ms_tensor *t = ms__classic_flat(u);
    ms_leaf *l = g ? ms__leaf_of(t) : NULL;
    if (l) ms__leaf_set_grad(l, g);
    else ms__release(g);
    return ms__name(t);
}

const views ms__views_pieces = {
    CLASSIC_VIEWS,      .name = "pieces",          .align = 16,  .keeps_shape = true,
    .resting = resting, .flat = flat_parameter_id, .stay = stay, .written = written,
};
