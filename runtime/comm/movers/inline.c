// SPDX-License-Identifier: MIT
// comm/movers/inline.c -- collectives whose inputs are in payloads of the control memory.
#include "comm/movers/blocks.h"

static ms_status inline_serves(ms_waiter *w, bool *yes)
{
    *yes = w->c->inline_ && (w->c->g->far || (w->flags & SLOT_INLINE));
    return MS_OK;
}

static ms_status inline_move(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    const char *in[RANKS];
    size_t block = c->count * (size_t)ms__dtype_size(c->reducer.dtype);
    for (int k = 0; k < g->n; k++) in[k] = member_slot(g, k, c->seq)->payload;
    if (c->op == MS_DIST_ALL_REDUCE || (c->op == MS_DIST_REDUCE && c->root == g->me))
        ms__reduce(&c->reducer, in, 1, &c->out.data, c->count);
    else if (c->op == MS_DIST_ALL_GATHER)
        for (int k = 0; k < g->n; k++) copy_or_move(c->out.data + (size_t)k * block, in[k], block);
    else ms__move_whole_blocks(c, in);
    return MS_OK;
}

// No peer accesses this rank's tensors.
static ms_status inline_finish(ms_waiter *w, ms_status moved)
{
    ms_coll *c = w->c;
    set_done(c);
    return moved;
}

const ms_mover ms__mover_inline = {
    .name = "inline", .serves = inline_serves, .move = inline_move, .finish = inline_finish
};
