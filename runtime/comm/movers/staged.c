// SPDX-License-Identifier: MIT
// comm/movers/staged.c -- collectives in rounds through the windows: for memory that peers cannot map, and for other
// nodes (comm/movers/far.c).
#include "comm/memory/control.h"
#include "comm/memory/window.h"
#include "comm/movers/blocks.h"
#include "comm/movers/far.h"

// The number of blocks that this rank sends: one, or one per member.
static int input_blocks(const ms_coll *c) { return ROW(c->op)->kind & CUT ? c->g->n : 1; }

// What a round moves: bytes [at, at + n) of `blocks` blocks from number `first` on. block: the size of a block. piece:
// the piece of an all-gather that the block belongs to.
typedef struct {
    size_t block, at, n;
    int first, blocks;
    const ms_piece *piece;
} part_of_blocks;

static ms_status stage_slice(ms_waiter *w, uint64_t *round, const part_of_blocks *s)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    const ms_piece *piece = s->piece;
    int members = g->n, me = g->me, blocks = s->blocks;
    size_t block = s->block, at = s->at, n = s->n;
    size_t esize = (size_t)ms__dtype_size(c->reducer.dtype), stride = (n + 63) & ~(size_t)63;
    char *windows[RANKS], *mine;
    // The ranks may run the collective on different streams, so each slot gives the position of its member's window.
    for (int k = 0; k < members; k++) {
        bool here = ms__is_here(g->ranks[k]);
        windows[k] = here ? ms__world.ctl + member_slot(g, k, c->seq)->out_at : NULL;
    }
    mine = windows[me];
    // With members on other nodes, the leader's window gets the whole result; on one node, each window gets a part.
    char *result = windows[g->leader] + WINDOW;

    if (on_side(ROW(c->op)->reads, me, c->root)) {
        if (piece) {
            put_in(c, mine, c->in.data + piece->in_offset + at, bytes_left(ms__piece_bytes(piece, me), at, n));
        } else {
            for (int b = 0; b < blocks; b++) {
                if (c->n_parts) ms__take_parts(c, b, at, mine + (size_t)b * stride, n);
                else put_in(c, mine + (size_t)b * stride, c->in.data + (size_t)(s->first + b) * block + at, n);
            }
        }
    }
    if (c->device) MS_TRY(c->device->sync(c));
    MS_TRY(ms__wait_round(w, ++*round));

    if (is_shared(c->op)) {
        size_t total = stride * (size_t)blocks, count = total / esize;
        if (g->far) {
            if (me == g->leader) MS_TRY(ms__far_reduce(w, windows, result, count));
        } else {
            // Each member reduces its part of the slice into its own window.
            size_t first, m = slice_of_member(count, members, me, &first);
            const char *src[RANKS];
            for (int k = 0; k < members; k++) src[k] = windows[k] + first * esize;
            char *dst = mine + WINDOW + first * esize;
            ms__reduce(&c->reducer, src, 1, &dst, m);
        }
        MS_TRY(ms__wait_round(w, ++*round));
        if (c->op != MS_DIST_REDUCE || c->root == me) {
            size_t skip = c->op == MS_DIST_REDUCE_SCATTER ? (size_t)me * stride : 0;
            if (g->far) put_out(c, c->out.data + at, result + skip, n);
            for (int k = 0; k < members && !g->far; k++) {  // the part of [skip, skip + n) that member k has reduced
                size_t first, m = slice_of_member(count, members, k, &first) * esize;
                size_t from = larger(first * esize, skip), to = smaller(first * esize + m, skip + n);
                if (from < to) put_out(c, c->out.data + at + (from - skip), windows[k] + WINDOW + from, to - from);
            }
        }
    } else {
        // A member on this node has its slice in its own window; members on other nodes, in the leader's result window.
        size_t bytes = stride * (size_t)blocks;
        const char *from[RANKS];
        if (g->far) {
            if (me == g->leader) MS_TRY(ms__far_gather(w, windows, result, bytes));
            MS_TRY(ms__wait_round(w, ++*round));
        }
        for (int k = 0; k < members; k++) {
            from[k] = windows[k] ? windows[k] : result + (size_t)k * bytes;
            if (!piece) continue;
            const ms_block_part part = { k, at, bytes_left(ms__piece_bytes(piece, k), at, n), true };
            ms__put_piece(c, piece, &part, from[k]);
        }
        const ms_blocks all = { from, block, at, n, stride, s->first, blocks, true };
        if (!piece) ms__move_blocks(c, &all);
    }
    if (c->device) MS_TRY(c->device->sync(c));
    // Windows may be filled again only after all members have read them.
    return ms__wait_round(w, ++*round);
}

static ms_status staged_serves(ms_waiter *w, bool *yes)
{
    (void)w;
    *yes = true;
    return MS_OK;
}

static ms_status staged_move(ms_waiter *w)
{
    ms_coll *c = w->c;
    if (MS_UNLIKELY(c->inline_)) ms__coll_not_inline(c);  // a peer's tensor is on a GPU
    ms_group *g = c->g;
    int blocks = input_blocks(c);
    uint64_t round = w->round;
    // After the first round, every slot gives the position of its member's window.
    own_slot(c)->out_at = ms__ctl_offset(ms__window(g->ranks[g->me], c->stream));
    MS_TRY(ms__wait_round(w, ++round));
    // A round of a reduction moves a slice of every block: a window has room for 64 bytes of each of 1024 blocks, the
    // most that there can be. Otherwise, with members on other nodes, all members' slices share one result window.
    ms_slice most = ms__slice(WINDOW, blocks, g->far && !is_shared(c->op) ? g->n : 1);
    for (int i = 0; i < (c->op == MS_DIST_ALL_GATHER ? c->n_pieces : 1); i++) {
        part_of_blocks s = { .piece = c->op == MS_DIST_ALL_GATHER ? &c->pieces[i] : NULL };
        s.block = s.piece ? (size_t)s.piece->bytes : c->count * (size_t)ms__dtype_size(c->reducer.dtype);
        for (s.at = 0; s.at < s.block; s.at += most.bytes)
            for (s.first = 0; s.first < blocks; s.first += most.blocks) {
                s.n = bytes_left(s.block, s.at, most.bytes);
                s.blocks = blocks - s.first < most.blocks ? blocks - s.first : most.blocks;
                MS_TRY(stage_slice(w, &round, &s));
            }
    }
    return MS_OK;
}

const ms_mover ms__mover_staged = {
    .name = "staged", .serves = staged_serves, .move = staged_move, .finish = ms__finish_shared
};
