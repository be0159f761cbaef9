// SPDX-License-Identifier: MIT
// comm/movers/bytes.h -- the bytes of a collective's tensors, in CPU memory or on a GPU.
#ifndef MS_COMM_MOVERS_BYTES_H
#define MS_COMM_MOVERS_BYTES_H

#include "comm/movers/mover.h"
#include "comm/movers/reduce.h"

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t larger(size_t a, size_t b) { return a > b ? a : b; }
// The number of bytes in [at, bytes), but at most n.
static inline size_t bytes_left(size_t bytes, size_t at, size_t n) { return at < bytes ? smaller(bytes - at, n) : 0; }

// memmove, also for empty tensors, which have no address.
static inline void copy_or_move(void *to, const void *from, size_t n)
{
    if (n) memmove(to, from, n);
}

// As copy_or_move, but `to` (put_out) or `from` (put_in) is in a tensor of c, which may be on a GPU; the other is in a
// window.
static inline void put_out(ms_coll *c, void *to, const void *from, size_t n)
{
    if (MS_UNLIKELY(c->device != NULL)) c->device->copy(c, to, from, n, MS_TO_DEVICE);
    else copy_or_move(to, from, n);
}
static inline void put_in(ms_coll *c, void *to, const void *from, size_t n)
{
    if (MS_UNLIKELY(c->device != NULL)) c->device->copy(c, to, from, n, MS_TO_HOST);
    else copy_or_move(to, from, n);
}

// Copies within CPU memory; or queues a copy on the collective's stream, if the tensors are on a GPU.
static inline void copy_block(ms_coll *c, char *dst, const char *src, size_t n)
{
    if (MS_UNLIKELY(c->device != NULL)) c->device->copy(c, dst, src, n, MS_ON_DEVICE);
    else ms__comm_copy(dst, src, n);
}

// Reduces n elements of n_src members' values into each of n_dst places; AVG divides by n_src. Not for values in
// windows if the tensors are on a GPU, whose kernels cannot read windows.
static inline void reduce_block(ms_coll *c, int n_src, const char *const *src, int n_dst, char *const *dst, size_t n)
{
    int64_t numel = (int64_t)n;
    ms_cuda_reduction all = { .n_ranks = n_src, .n_parts = 1, .numel = &numel, .src = src, .n_dst = n_dst, .dst = dst };
    ms_reducer how = c->reducer;
    how.n_ranks = n_src;
    if (MS_UNLIKELY(c->device != NULL)) c->device->reduce(c, &all);
    else ms__reduce(&how, src, n_dst, dst, n);
}

// The elements [*first, *first + n) of `count` that member k of n_members reduces. The cuts are at cache lines; they do
// not affect the result. Returns n.
static inline size_t slice_of_member(size_t count, int n_members, int k, size_t *first)
{
    size_t each = ((count + (size_t)n_members - 1) / (size_t)n_members + 63) & ~(size_t)63;
    *first = each * (size_t)k < count ? each * (size_t)k : count;
    return count - *first < each ? count - *first : each;
}

// The number of bytes of a member's block that the part's tensor provides; the remaining bytes of the part are zeros.
static inline size_t part_bytes(const ms_part *p, int member)
{
    return ms__piece_bytes(&(ms_piece) { .bytes = p->bytes, .total = p->total }, member);
}

// Copies bytes [at, at + n) of member k's block to their places in the output. windows: they come from CPU memory,
// also if the output is on a GPU.
typedef struct {
    int k;
    size_t at, n;
    bool windows;
} ms_block_part;
void ms__put_piece(ms_coll *c, const ms_piece *p, const ms_block_part *part, const char *from);
// Copies bytes [at, at + n) of a member's block out of the parts.
void ms__take_parts(ms_coll *c, int member, size_t at, char *to, size_t n);
// Sets `done`, and after a move that has succeeded waits for the members of this node.
ms_status ms__finish_shared(ms_waiter *w, ms_status moved);

#endif
