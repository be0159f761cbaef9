// SPDX-License-Identifier: MIT
// comm/movers/move.c -- moves the bytes of a collective after the members have agreed on it (comm/agree/exchange.c).
// Three ways:
//
//  inline      every input is in a payload in the control memory
//  direct      peers' tensors are read and written in place
//  staged      in rounds through the windows: for memory that peers cannot map, and for other nodes (comm/movers/far.c)
//
// Where no node has two members, all-gathers of contiguous blocks and reductions of two members use no rounds: they
// send messages only (see the function single). All three ways add in rank order, so they give the same bits.
#include "comm/movers/move.h"
#include "device/device.h"
#include "comm/memory/arena.h"
#include "comm/memory/control.h"
#include "comm/memory/window.h"
#include "comm/movers/far.h"
#include "comm/movers/gpu.h"
#include "comm/movers/reduce.h"

static size_t min(size_t a, size_t b) { return a < b ? a : b; }
static size_t max(size_t a, size_t b) { return a > b ? a : b; }

// memmove, also for empty tensors, which have no address.
static inline void put(void *to, const void *from, size_t n)
{
    if (n) memmove(to, from, n);
}

// As put, but `to` (put_out) or `from` (put_in) is in a tensor of c, which may be on a GPU; the other is in a window.
static inline void put_out(ms_coll *c, void *to, const void *from, size_t n)
{
    if (MS_UNLIKELY(c->gpu.there != NULL)) ms__gpu_copy(c, to, from, n, MS_TO_DEVICE);
    else put(to, from, n);
}
static inline void put_in(ms_coll *c, void *to, const void *from, size_t n)
{
    if (MS_UNLIKELY(c->gpu.there != NULL)) ms__gpu_copy(c, to, from, n, MS_TO_HOST);
    else put(to, from, n);
}

// The number of bytes in [at, bytes), but at most n.
static size_t left(size_t bytes, size_t at, size_t n) { return at < bytes ? min(bytes - at, n) : 0; }

// The elements [*first, *first + n) of `count` that member k of n_members reduces. The cuts are at cache lines; they do
// not affect the result. Returns n.
static size_t share(size_t count, int n_members, int k, size_t *first)
{
    size_t each = ((count + (size_t)n_members - 1) / (size_t)n_members + 63) & ~(size_t)63;
    *first = each * (size_t)k < count ? each * (size_t)k : count;
    return count - *first < each ? count - *first : each;
}

// Copies within CPU memory; or queues a copy on the collective's stream, if the tensors are on a GPU.
static inline void copy(ms_coll *c, char *dst, const char *src, size_t n)
{
    if (MS_UNLIKELY(c->gpu.there != NULL)) ms__gpu_copy(c, dst, src, n, MS_ON_DEVICE);
    else ms__comm_copy(dst, src, n);
}

static void reduce(ms_coll *c, const char *const *src, int n_dst, char *const *dst, size_t n)
{
    int64_t numel = (int64_t)n;
    ms_cuda_reduction all = { .n_parts = 1, .numel = &numel, .src = src, .n_dst = n_dst, .dst = dst };
    if (MS_UNLIKELY(c->gpu.there != NULL)) ms__gpu_reduce(c, &all);
    else ms__reduce(&c->reducer, src, n_dst, dst, n);
}

// Runs operations whose result each rank computes from the complete inputs of all members.
static void move_blocks(ms_coll *c, const char **in)
{
    int n = c->g->n, me = c->g->me;
    size_t block = c->count * (size_t)ms__dtype_size(c->reducer.dtype);
    char *out = c->out.data;
    switch (c->op) {
    case OP_REDUCE_SCATTER:
        for (int k = 0; k < n; k++) in[k] += (size_t)me * block;
        reduce(c, in, 1, &out, c->count);
        break;
    case OP_BROADCAST:
        if (c->root != me) copy(c, out, in[c->root], block);
        break;
    case OP_GATHER:
        for (int k = 0; k < n && c->root == me; k++) copy(c, out + (size_t)k * block, in[k], block);
        break;
    case OP_SCATTER: copy(c, out, in[c->root] + (size_t)me * block, block); break;
    case OP_ALL_TO_ALL:
        for (int j = 0; j < n; j++) {
            int k = (me + j) % n;
            copy(c, out + (size_t)k * block, in[k] + (size_t)me * block, block);
        }
        break;
    case OP_SEND_RECV:
        if (me == 1) copy(c, out, in[0], block);
        break;
    default: break;
    }
}

// ---- inline: every input is in a payload ------------------------------------------------------------

ms_status ms__move_inline(ms_coll *c)
{
    ms_group *g = c->g;
    const char *in[RANKS];
    size_t block = c->count * (size_t)ms__dtype_size(c->reducer.dtype);
    for (int k = 0; k < g->n; k++) in[k] = slot_of(g, k, c->seq)->payload;
    if (c->op == OP_ALL_REDUCE || (c->op == OP_REDUCE && c->root == g->me))
        ms__reduce(&c->reducer, in, 1, &c->out.data, c->count);
    else if (c->op == OP_ALL_GATHER)
        for (int k = 0; k < g->n; k++) put(c->out.data + (size_t)k * block, in[k], block);
    else move_blocks(c, in);
    return MS_OK;
}

// ---- direct: tensors in place ----------------------------------------------------------------------

// Copies bytes [at, at + n) of member k's block to their places in the output.
static void put_piece(ms_coll *c, const ms_piece *p, int k, size_t at, const char *from, size_t n)
{
    char *to = c->out.data + p->out_offset + (size_t)k * p->out_stride;
    bool there = c->gpu.there != NULL, host = there && !c->gpu.there->used;
    if (!p->line) {
        if (n && to + at != from) {
            if (host) ms__gpu_copy(c, to + at, from, n, MS_TO_DEVICE);
            else copy(c, to + at, from, n);
        }
        return;
    }
    if (there && !host) {
        ms__gpu_lines(c, to, p->out_line, from, p->line, n);
        return;
    }
    while (n > 0) {
        size_t in_line = at % p->line, m = p->line - in_line < n ? p->line - in_line : n;
        put_out(c, to + at / p->line * p->out_line + in_line, from, m);
        at += m;
        from += m;
        n -= m;
    }
}

static void gather_pieces(ms_coll *c, int k, const char *from)
{
    for (int i = 0; i < c->n_pieces; i++) {
        const ms_piece *p = &c->pieces[i];
        put_piece(c, p, k, 0, from + p->in_offset, ms__piece_bytes(p, k));
    }
}

// The number of bytes of a member's block that the part's tensor provides; the remaining bytes of the part are zeros.
static size_t part_bytes(const ms_part *p, int member)
{
    return ms__piece_bytes(&(ms_piece) { .bytes = p->bytes, .total = p->total }, member);
}

// The address of member k's memory in this process; NULL with the error set.
static char *resolve(const ms_coll *c, int k, uint32_t arena, uint64_t at)
{
    int rank = c->g->ranks[k];
    return MS_UNLIKELY(c->gpu.there != NULL) ? ms__gpu_resolve(c->gpu.there->index, rank, arena, at)
                                             : ms__comm_resolve(rank, arena, at);
}

// Does on a GPU what scatter_parts does on the CPU, with one launch for all parts.
static ms_status scatter_parts_there(ms_coll *c)
{
    ms_group *g = c->g;
    const char *src[MS_PARTS * MS_CUDA_MEMBERS];
    char *dst[MS_PARTS], *out = c->out.data;
    int64_t numel[MS_PARTS], zeros[MS_PARTS], esize = ms__dtype_size(c->reducer.dtype);
    for (int i = 0; i < c->n_parts; i++) {
        const ms_part *p = &c->parts[i];
        size_t n = part_bytes(p, g->me);
        for (int k = 0; k < g->n; k++) {
            const char **at = &src[i * g->n + k];
            *at = ms__data(p->t);
            if (n == 0) continue;
            ms_part_place here = { .stride = p->stride };
            if (k != g->me) {
                here = ((ms_part_place *)slot_of(g, k, c->seq)->payload)[i];
                if (!(*at = resolve(c, k, (uint32_t)here.arena, here.at))) return MS_ECOMM;
            }
            *at += (uint64_t)g->me * here.stride;
        }
        numel[i] = (int64_t)n / esize;
        zeros[i] = (int64_t)(p->bytes - n) / esize;
        dst[i] = out;
        out += p->bytes;
    }
    ms_cuda_reduction all = {
        .n_parts = c->n_parts, .numel = numel, .zeros = zeros, .src = src, .n_dst = 1, .dst = dst
    };
    ms__gpu_reduce(c, &all);
    return MS_OK;
}

static ms_status scatter_parts(ms_coll *c)
{
    ms_group *g = c->g;
    const char *src[RANKS];
    char *out = c->out.data;
    if (c->gpu.there) return scatter_parts_there(c);
    for (int i = 0; i < c->n_parts; i++) {
        const ms_part *p = &c->parts[i];
        size_t n = part_bytes(p, g->me);
        for (int k = 0; k < g->n && n > 0; k++) {
            ms_part_place here = { .stride = p->stride };
            if (k != g->me) here = ((ms_part_place *)slot_of(g, k, c->seq)->payload)[i];
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

// Copies bytes [at, at + n) of a member's block out of the parts.
static void take_parts(ms_coll *c, int member, size_t at, char *to, size_t n)
{
    for (int i = 0; i < c->n_parts && n > 0; i++) {
        const ms_part *p = &c->parts[i];
        if (at >= p->bytes) {
            at -= p->bytes;
            continue;
        }
        size_t m = left(p->bytes, at, n), full = left(part_bytes(p, member), at, m);
        put_in(c, to, (const char *)ms__data(p->t) + (uint64_t)member * p->stride + at, full);
        memset(to + full, 0, m - full);
        to += m;
        n -= m;
        at = 0;
    }
}

ms_status ms__move_direct(ms_coll *c)
{
    if (c->n_parts) return scatter_parts(c);
    ms_group *g = c->g;
    int n = g->n, me = g->me;
    const char *in[RANKS];
    char *out[RANKS];
    size_t esize = (size_t)ms__dtype_size(c->reducer.dtype);
    for (int k = 0; k < n; k++) {
        in[k] = c->in.data;
        out[k] = c->out.data;
        if (k == me) continue;
        ms_slot *s = slot_of(g, k, c->seq);
        if (s->in_arena && !(in[k] = resolve(c, k, s->in_arena, s->in_at))) return MS_ECOMM;
        if (s->out_arena && !(out[k] = resolve(c, k, s->out_arena, s->out_at))) return MS_ECOMM;
    }
    if (c->op == OP_ALL_REDUCE || c->op == OP_REDUCE) {
        size_t first, mine = share(c->count, n, me, &first);
        for (int k = 0; k < n; k++) {
            in[k] += first * esize;
            out[k] += first * esize;
        }
        if (c->op == OP_REDUCE) out[0] = out[c->root];
        reduce(c, in, c->op == OP_REDUCE ? 1 : n, out, mine);
    } else if (c->op == OP_ALL_GATHER)
        for (int j = 0; j < n; j++) gather_pieces(c, (me + j) % n, in[(me + j) % n]);
    else move_blocks(c, in);
    return MS_OK;
}

ms_status ms__coll_alone(ms_coll *c)
{
    if (c->op == OP_BARRIER || (c->in.data == c->out.data && c->reducer.scale == 1 && c->op != OP_ALL_GATHER))
        return MS_OK;
    if (c->n_pieces && c->inline_) c->out.data -= c->pieces[0].out_offset, c->in.data -= c->pieces[0].in_offset;
    return ms__move_direct(c);
}

// ---- staged: in rounds through the windows ----------------------------------------------------------

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
        bool here = ms__world.node_of[g->ranks[k]] == ms__world.node;
        windows[k] = here ? ms__world.ctl + slot_of(g, k, c->seq)->out_at : NULL;
    }
    mine = windows[me];
    // With members on other nodes, the leader's window gets the whole result; on one node, each window gets a part.
    char *result = windows[g->leader] + WINDOW;

    if (on_side(ROW(c->op)->reads, me, c->root)) {
        if (piece) {
            put_in(c, mine, c->in.data + piece->in_offset + at, left(ms__piece_bytes(piece, me), at, n));
        } else {
            for (int b = 0; b < blocks; b++) {
                if (c->n_parts) take_parts(c, b, at, mine + (size_t)b * stride, n);
                else put_in(c, mine + (size_t)b * stride, c->in.data + (size_t)(s->first + b) * block + at, n);
            }
        }
    }
    if (c->gpu.there) MS_TRY(ms__gpu_sync(c));
    MS_TRY(ms__wait_round(w, ++*round));

    if (reduces(c->op)) {
        size_t total = stride * (size_t)blocks, count = total / esize;
        if (g->far) {
            if (me == g->leader) MS_TRY(ms__far_reduce(w, windows, result, count));
        } else {
            // Each member reduces its part of the slice into its own window.
            size_t first, m = share(count, members, me, &first);
            const char *src[RANKS];
            for (int k = 0; k < members; k++) src[k] = windows[k] + first * esize;
            char *dst = mine + WINDOW + first * esize;
            ms__reduce(&c->reducer, src, 1, &dst, m);
        }
        MS_TRY(ms__wait_round(w, ++*round));
        if (c->op != OP_REDUCE || c->root == me) {
            size_t skip = c->op == OP_REDUCE_SCATTER ? (size_t)me * stride : 0;
            if (g->far) put_out(c, c->out.data + at, result + skip, n);
            for (int k = 0; k < members && !g->far; k++) {  // the part of [skip, skip + n) that member k has reduced
                size_t first, m = share(count, members, k, &first) * esize;
                size_t from = max(first * esize, skip), to = min(first * esize + m, skip + n);
                if (from < to) put_out(c, c->out.data + at + (from - skip), windows[k] + WINDOW + from, to - from);
            }
        }
    } else {
        // A member on this node has its slice in its own window; members on other nodes, in the leader's result window.
        size_t bytes = stride * (size_t)blocks, own = (size_t)(me - s->first) * stride;
        bool moves_own = me >= s->first && me < s->first + blocks;  // whether this rank's block is moved in this round
        if (g->far) {
            if (me == g->leader) MS_TRY(ms__far_gather(w, windows, result, bytes));
            MS_TRY(ms__wait_round(w, ++*round));
        }
        for (int k = 0; k < members; k++) {
            if (!on_side(ROW(c->op)->reads, k, c->root)) continue;
            const char *from = windows[k] ? windows[k] : result + (size_t)k * bytes;
            switch (c->op) {
            case OP_ALL_GATHER: put_piece(c, piece, k, at, from, left(ms__piece_bytes(piece, k), at, n)); break;
            case OP_BROADCAST:
                if (k != me) put_out(c, c->out.data + at, from, n);
                break;
            case OP_GATHER:
                if (c->root == me) put_out(c, c->out.data + (size_t)k * block + at, from, n);
                break;
            case OP_SCATTER:
                if (moves_own) put_out(c, c->out.data + at, from + own, n);
                break;
            case OP_ALL_TO_ALL:
                if (moves_own) put_out(c, c->out.data + (size_t)k * block + at, from + own, n);
                break;
            case OP_SEND_RECV:
                if (me == 1) put_out(c, c->out.data + at, from, n);
                break;
            default: break;
            }
        }
    }
    if (c->gpu.there) MS_TRY(ms__gpu_sync(c));
    // Windows may be filled again only after all members have read them.
    return ms__wait_round(w, ++*round);
}

// ---- one member on every node: no windows ------------------------------------------------------------

// For a reduction of two members: the byte offset of the part that member k reduces. *bytes: the size of that part.
static size_t half_at(const ms_coll *c, int k, size_t *bytes)
{
    size_t esize = (size_t)ms__dtype_size(c->reducer.dtype), half = (c->count + 1) / 2;
    if (c->op == OP_REDUCE) *bytes = k == c->root ? c->count * esize : 0;
    else if (c->op == OP_REDUCE_SCATTER) *bytes = c->count * esize;
    else *bytes = (k == 0 ? half : c->count - half) * esize;
    return c->op == OP_REDUCE ? 0 : (size_t)k * (c->op == OP_REDUCE_SCATTER ? c->count : half) * esize;
}

// An ms_far_source. Packs the values of parts into this rank's windows (buffers 0 to 3) or into `own` (buffer 4).
static const char *half_of(ms_coll *c, int member, size_t at, size_t n, size_t k)
{
    size_t bytes;
    if (!c->n_parts) return c->in.data + half_at(c, member, &bytes) + at;
    static char own[MS_STREAMS][WINDOW / 2];
    char *to = k < 4 ? ms__window(ms__world.rank, c->stream) + k * (WINDOW / 2) : own[c->stream];
    take_parts(c, member, at, to, n);
    return to;
}

// Runs a collective that needs no windows. Returns false if it needs them.
static bool single(ms_waiter *w, ms_status *status)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    if (!g->far || !g->single) return false;
    if (reduces(c->op) && g->n == 2) {
        size_t bytes[2], mine = half_at(c, g->me, &bytes[g->me]), theirs = half_at(c, 1 - g->me, &bytes[1 - g->me]);
        bool all = c->op == OP_ALL_REDUCE;
        *status =
            ms__far_pair(w, half_of, bytes, all ? c->out.data + mine : c->out.data, all ? c->out.data + theirs : NULL);
        return true;
    }
    if (c->op != OP_ALL_GATHER) return false;
    for (int i = 0; i < c->n_pieces; i++)
        if (c->pieces[i].line) return false;
    size_t bytes[RANKS];
    *status = MS_OK;
    for (int i = 0; i < c->n_pieces && *status == MS_OK; i++) {
        const ms_piece *p = &c->pieces[i];
        for (int k = 0; k < g->n; k++) bytes[k] = ms__piece_bytes(p, k);
        *status = ms__far_exchange(w, c->in.data + p->in_offset, c->out.data + p->out_offset, p->out_stride, bytes);
    }
    return true;
}

ms_status ms__move_staged(ms_waiter *w)
{
    ms_status done;
    if (single(w, &done)) return done;
    ms_coll *c = w->c;
    ms_group *g = c->g;
    int blocks = input_blocks(c);
    uint64_t round = w->round;
    // After the first round, every slot gives the position of its member's window.
    slot_of(g, g->me, c->seq)->out_at = ms__ctl_offset(ms__window(g->ranks[g->me], c->stream));
    MS_TRY(ms__wait_round(w, ++round));
    // A round of a reduction moves a slice of every block: a window has room for 64 bytes of each of 1024 blocks, the
    // most that there can be. Otherwise, with members on other nodes, all members' slices share one result window.
    ms_slice most = ms__slice(WINDOW, blocks, g->far && !reduces(c->op) ? g->n : 1);
    for (int i = 0; i < (c->op == OP_ALL_GATHER ? c->n_pieces : 1); i++) {
        part_of_blocks s = { .piece = c->op == OP_ALL_GATHER ? &c->pieces[i] : NULL };
        s.block = s.piece ? (size_t)s.piece->bytes : c->count * (size_t)ms__dtype_size(c->reducer.dtype);
        for (s.at = 0; s.at < s.block; s.at += most.bytes)
            for (s.first = 0; s.first < blocks; s.first += most.blocks) {
                s.n = left(s.block, s.at, most.bytes);
                s.blocks = blocks - s.first < most.blocks ? blocks - s.first : most.blocks;
                MS_TRY(stage_slice(w, &round, &s));
            }
    }
    return MS_OK;
}
