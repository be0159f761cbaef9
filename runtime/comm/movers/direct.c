// SPDX-License-Identifier: MIT
// comm/movers/direct.c -- tensors that are read and written in place, in CPU memory or on a GPU.
#include "comm/movers/direct.h"
#include "comm/memory/arena.h"
#include "comm/movers/blocks.h"

static void gather_pieces(ms_coll *c, int k, const char *from)
{
    for (int i = 0; i < c->n_pieces; i++) {
        const ms_piece *p = &c->pieces[i];
        const ms_block_part all = { .k = k, .n = ms__piece_bytes(p, k) };
        ms__put_piece(c, p, &all, from + p->in_offset);
    }
}

// The address of member k's memory in this process; NULL with the error set.
static char *member_address(ms_coll *c, int k, uint32_t arena, uint64_t at)
{
    int rank = c->g->ranks[k];
    return MS_UNLIKELY(c->device != NULL) ? c->device->resolve(c, rank, arena, at) : ms__comm_resolve(rank, arena, at);
}

static ms_status reduce_parts(ms_coll *c)
{
    ms_group *g = c->g;
    const char *src[RANKS];
    char *out = c->out.data;
    for (int i = 0; i < c->n_parts; i++) {
        const ms_part *p = &c->parts[i];
        size_t n = part_bytes(p, g->me);
        for (int k = 0; k < g->n && n > 0; k++) {
            ms_part_place here = { .stride = p->stride };
            if (k != g->me) here = ((ms_part_place *)member_slot(g, k, c->seq)->payload)[i];
            src[k] = k == g->me ? ms__data(p->t) : ms__comm_resolve(g->ranks[k], (uint32_t)here.arena, here.at);
            if (!src[k]) return MS_ECOMM;
            src[k] += (uint64_t)g->me * here.stride;
        }
        ms__reduce(&c->reducer, src, 1, &out, n / (size_t)ms__dtype_size(c->reducer.dtype));
        if (n < p->bytes) memset(out + n, 0, p->bytes - n);
        out += p->bytes;
    }
    return MS_OK;
}

ms_status ms__move_direct(ms_coll *c)
{
    if (c->n_parts) return reduce_parts(c);
    ms_group *g = c->g;
    int n = g->n, me = g->me;
    const char *in[RANKS];
    char *out[RANKS];
    size_t esize = (size_t)ms__dtype_size(c->reducer.dtype);
    for (int k = 0; k < n; k++) {
        in[k] = c->in.data;
        out[k] = c->out.data;
        if (k == me) continue;
        ms_slot *s = member_slot(g, k, c->seq);
        if (s->in_arena && !(in[k] = member_address(c, k, s->in_arena, s->in_at))) return MS_ECOMM;
        if (s->out_arena && !(out[k] = member_address(c, k, s->out_arena, s->out_at))) return MS_ECOMM;
    }
    if (c->op == MS_DIST_ALL_REDUCE || c->op == MS_DIST_REDUCE) {
        size_t first, mine = slice_of_member(c->count, n, me, &first);
        for (int k = 0; k < n; k++) {
            in[k] += first * esize;
            out[k] += first * esize;
        }
        if (c->op == MS_DIST_REDUCE) out[0] = out[c->root];
        reduce_block(c, n, in, c->op == MS_DIST_REDUCE ? 1 : n, out, mine);
    } else if (c->op == MS_DIST_ALL_GATHER)
        for (int j = 0; j < n; j++) gather_pieces(c, (me + j) % n, in[(me + j) % n]);
    else ms__move_whole_blocks(c, in);
    return MS_OK;
}

static ms_status direct_serves(ms_waiter *w, bool *yes)
{
    *yes = w->flags & SLOT_DIRECT;
    return MS_OK;
}

static ms_status direct_move(ms_waiter *w) { return ms__move_direct(w->c); }

const ms_mover ms__mover_direct = {
    .name = "direct", .serves = direct_serves, .move = direct_move, .finish = ms__finish_shared
};
