// SPDX-License-Identifier: MIT
// comm/movers/nodes.c -- one member on every node: no windows and no rounds, messages alone.
#include "comm/memory/control.h"
#include "comm/movers/bytes.h"
#include "comm/movers/far.h"

// For a reduction of two members: the byte offset of the part that member k reduces. *bytes: the size of that part.
static size_t half_at(const ms_coll *c, int k, size_t *bytes)
{
    size_t esize = (size_t)ms__dtype_size(c->reducer.dtype), half = (c->count + 1) / 2;
    if (c->op == MS_DIST_REDUCE) *bytes = k == c->root ? c->count * esize : 0;
    else if (c->op == MS_DIST_REDUCE_SCATTER) *bytes = c->count * esize;
    else *bytes = (k == 0 ? half : c->count - half) * esize;
    return c->op == MS_DIST_REDUCE ? 0 : (size_t)k * (c->op == MS_DIST_REDUCE_SCATTER ? c->count : half) * esize;
}

// An ms_far_source. Packs the values of parts into this rank's windows (buffers 0 to 3) or into `own` (buffer 4).
static const char *half_of(ms_coll *c, int member, size_t at, size_t n, size_t k)
{
    size_t bytes;
    if (!c->n_parts) return c->in.data + half_at(c, member, &bytes) + at;
    static char own[MS_STREAMS][WINDOW / 2];
    char *to = k < 4 ? ms__window(ms__world.rank, c->stream) + k * (WINDOW / 2) : own[c->stream];
    ms__take_parts(c, member, at, to, n);
    return to;
}

// All-gathers of contiguous blocks, and reductions of two members.
static ms_status nodes_serves(ms_waiter *w, bool *yes)
{
    const ms_coll *c = w->c;
    if (!c->g->far || !c->g->single) return MS_OK;
    *yes = (is_shared(c->op) && c->g->n == 2) || c->op == MS_DIST_ALL_GATHER;
    for (int i = 0; i < c->n_pieces; i++) *yes = *yes && !c->pieces[i].line;
    return MS_OK;
}

static ms_status reduce_two(ms_waiter *w)
{
    ms_coll *c = w->c;
    int me = c->g->me;
    size_t bytes[2], mine = half_at(c, me, &bytes[me]), theirs = half_at(c, 1 - me, &bytes[1 - me]);
    bool all = c->op == MS_DIST_ALL_REDUCE;
    return ms__far_pair(w, half_of, bytes, all ? c->out.data + mine : c->out.data, all ? c->out.data + theirs : NULL);
}

static ms_status nodes_move(ms_waiter *w)
{
    ms_coll *c = w->c;
    size_t bytes[RANKS];
    if (is_shared(c->op)) return reduce_two(w);
    for (int i = 0; i < c->n_pieces; i++) {
        const ms_piece *p = &c->pieces[i];
        for (int k = 0; k < c->g->n; k++) bytes[k] = ms__piece_bytes(p, k);
        MS_TRY(ms__far_exchange(w, c->in.data + p->in_offset, c->out.data + p->out_offset, p->out_stride, bytes));
    }
    return MS_OK;
}

const ms_mover ms__mover_nodes = {
    .name = "nodes", .serves = nodes_serves, .move = nodes_move, .finish = ms__finish_shared
};
