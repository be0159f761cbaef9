// SPDX-License-Identifier: MIT
// comm/movers/gpu/gpu.c -- collectives whose tensors stay on a GPU, in a group within one node.
//
// The ranks agree on the CPU (comm/agree/exchange.c), as for tensors in CPU memory. Then each rank only queues work on
// a stream of its GPU: it waits for an event of every member, after which that member's tensors are ready; copies from
// the peers' memory or reduces it, in rank order; records an event; and waits for that event of every member, after
// which its own tensors may change. All of this is queued after the ranks have agreed, so a stream waits only for work
// that has been queued already, never for a host, and no kernel waits at all. The collective is done on the CPU as soon
// as the work is queued; its event (ms__queued) orders the compute stream behind it.
//
// Where a rank cannot map a peer's memory, the bytes go through the windows of the control memory
// (comm/movers/staged.c), on all members alike.
#include <stdio.h>
#include "comm/movers/gpu/gpu.h"
#include "device/device.h"
#include "device/move.h"
#include "ops/queued.h"
#include "comm/movers/bytes.h"
#include "comm/movers/direct.h"

static const ms_bytes gpu_bytes;
extern const ms_mover ms__mover_gpu;

static void keep_failure(ms_gpu_coll *t, ms_status st)
{
    if (t->failed == MS_OK) t->failed = st;
}

static bool lies_on(const ms_storage *s, int device) { return !s || s->device == device; }

// Finds the places of the operands that peers access, and sets t->shared: whether peers can map them.
static void place_operands(ms_coll *c)
{
    ms_gpu_coll *t = c->prepared;
    bool pushes = c->op == MS_DIST_ALL_REDUCE || (c->op == MS_DIST_REDUCE && c->root == c->g->me);
    t->shared = ms__world.mapped && c->g->n <= MS_CUDA_MEMBERS && ms__gpu_shares() && ms__gpu_has_events(t->index);
    if (c->in.bytes > 0 && c->in.storage) t->shared = t->shared && ms__gpu_place(c->in.storage, c->in.data, &t->in);
    if (pushes && c->out.storage) t->shared = t->shared && ms__gpu_place(c->out.storage, c->out.data, &t->out);
    for (int i = 0; i < c->n_parts && t->shared; i++)
        if (c->parts[i].total) t->shared = ms__gpu_place(c->parts[i].t->storage, ms__data(c->parts[i].t), &t->parts[i]);
}

static void check_mapped(ms_coll *c, uint32_t arena)
{
    ms_gpu_coll *t = c->prepared;
    for (int k = 0; k < c->g->n && arena; k++) {
        int seen = k == c->g->me ? 1 : ms__gpu_mapped(arena, c->g->ranks[k]);
        if (seen < 0) t->shared = false;
        if (seen == 0) t->untried = true;
    }
}

// Decides whether c's tensors stay on their GPU; if so, finds their places and takes events.
static ms_status gpu_prepare(ms_coll *c)
{
    int device = c->out.storage ? c->out.storage->device : c->in.storage->device;
    if (c->g->far || !ms__is_cuda(device) || !lies_on(c->in.storage, device)) return MS_OK;
    for (int i = 0; i < c->n_parts; i++)
        if (!lies_on(c->parts[i].t->storage, device)) return MS_OK;
    ms_gpu_coll *t = calloc(1, sizeof *t + (size_t)c->n_parts * sizeof *t->parts);
    if (!t) return ms__no_memory(sizeof *t, ROW(c->op)->name, "places of tensors");
    *t = (ms_gpu_coll) { .index = ms__index(device),
                         .stream = c->stream,
                         .begin = -1,
                         .end = -1,
                         .parts = (ms_gpu_place *)(void *)(t + 1) };
    c->mover = &ms__mover_gpu;
    c->prepared = t;
    c->device = &gpu_bytes;
    if (c->inline_) ms__coll_not_inline(c);
    place_operands(c);
    if (t->shared) {
        check_mapped(c, t->in.arena);
        check_mapped(c, t->out.arena);
        for (int i = 0; i < c->n_parts; i++) check_mapped(c, t->parts[i].arena);
    }
    if (!t->shared) return MS_OK;
    MS_TRY(ms__flight_event(t->index, &t->begin));
    MS_TRY(ms__flight_event(t->index, &t->end));
    return (t->flight = ms__flight_new(c->g)) ? MS_OK : ms__failure();
}

static ms_status gpu_ready(ms_coll *c)
{
    ms_gpu_coll *t = c->prepared;
    ms__note_queued(MS_CUDA | t->index << 8, ROW(c->op)->name);
    return t->stream == MS_STREAM_COMPUTE ? MS_OK : ms__cuda()->record(t->index, MS_STREAM_COMPUTE, &t->ready);
}

// The event `begin` is recorded on the collective's stream, because an earlier collective of that stream, in another
// group, may have queued work that writes this rank's tensors.
static void gpu_publish(ms_coll *c, ms_slot *s)
{
    ms_gpu_coll *t = c->prepared;
    if (t->ready) keep_failure(t, ms__cuda()->stream_wait(t->index, t->stream, t->ready));
    if (!t->shared) return;
    keep_failure(t, ms__gpu_event_record(t->begin, t->index, t->stream));
    s->flags |= SLOT_GPU | (t->untried ? SLOT_UNTRIED : 0);
    s->in_arena = t->in.arena;
    s->in_at = t->in.at;
    s->out_arena = t->out.arena;
    s->out_at = t->out.at;
    s->begin = (uint32_t)t->begin;
    s->end = (uint32_t)t->end;
    for (int i = 0; i < c->n_parts; i++)
        ((ms_part_place *)s->payload)[i] = (ms_part_place) { t->parts[i].arena, t->parts[i].at, c->parts[i].stride };
}

// ---- agreement on how bytes move ----

// Maps all memory that member k has published, and opens its events. Returns false with the error set if that fails.
static bool map_member(const ms_coll *c, int k)
{
    const ms_slot *s = member_slot(c->g, k, c->seq);
    const ms_gpu_coll *t = c->prepared;
    int index = t->index, rank = c->g->ranks[k];
    if (s->in_arena && !ms__gpu_resolve(index, rank, s->in_arena, 0)) return false;
    if (s->out_arena && !ms__gpu_resolve(index, rank, s->out_arena, 0)) return false;
    for (int i = 0; i < c->n_parts; i++) {
        uint64_t arena = ((const ms_part_place *)s->payload)[i].arena;
        if (arena && !ms__gpu_resolve(index, rank, (uint32_t)arena, 0)) return false;
    }
    void *event;
    if (ms__gpu_event_open(index, rank, s->begin, &event) == MS_OK &&
        ms__gpu_event_open(index, rank, s->end, &event) == MS_OK)
        return true;
    ms__gpu_share_no_more();  // the events of other collectives would fail, too
    return false;
}

static ms_status gpu_serves(ms_waiter *w, bool *all)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    bool untried = false, mapped = true;
    *all = true;
    for (int k = 0; k < g->n; k++) {
        uint32_t flags = member_slot(g, k, c->seq)->flags;
        *all = *all && (flags & SLOT_GPU);
        untried = untried || (flags & SLOT_UNTRIED);
    }
    if (*all && untried) {
        for (int k = 0; k < g->n; k++)
            if (k != g->me && mapped) mapped = map_member(c, k);
        if (!mapped) {
            fprintf(stderr, "moonshard: rank %d: collectives of tensors on cuda go through CPU memory: %s\n",
                    ms__world.rank, ms_error());
            atomic_store_explicit(&own_slot(c)->refused, c->number, memory_order_release);
        }
        MS_TRY(ms__wait_round(w, ++w->round));
        for (int k = 0; k < g->n; k++)
            *all = *all && atomic_load_explicit(&member_slot(g, k, c->seq)->refused, memory_order_acquire) != c->number;
    }
    ((ms_gpu_coll *)c->prepared)->used = *all;
    return MS_OK;
}

// ---- on the stream ----

// Makes the stream wait until every member's tensors are ready.
static ms_status wait_for_members(ms_coll *c)
{
    ms_gpu_coll *t = c->prepared;
    ms_group *g = c->g;
    for (int k = 0; k < g->n; k++)
        if (k != g->me) MS_TRY(ms__gpu_event_wait(t->index, t->stream, g->ranks[k], member_slot(g, k, c->seq)->begin));
    return c->delay > 0 ? ms__cuda()->ranks.pause(t->index, t->stream, c->delay) : MS_OK;
}

// Records the event `end`, before this rank sets `done` in its slot. Returns the first failure.
static ms_status record_end(ms_coll *c)
{
    ms_gpu_coll *t = c->prepared;
    ms_status st = ms__gpu_event_record(t->end, t->index, t->stream);
    return t->failed != MS_OK ? t->failed : st;
}

// done: whether every member has set `done` in its slot; if so, makes the stream wait for every member's `end`. Sets
// `left` in this rank's slot in any case.
static ms_status wait_for_ends(ms_coll *c, bool done)
{
    ms_gpu_coll *t = c->prepared;
    ms_group *g = c->g;
    ms_status st = MS_OK;
    for (int k = 0; k < g->n && done; k++)
        if (k != g->me && st == MS_OK)
            st = ms__gpu_event_wait(t->index, t->stream, g->ranks[k], member_slot(g, k, c->seq)->end);
    if (done && st == MS_OK) st = ms__flight_queued(t->flight, c, t->index);
    atomic_store_explicit(&own_slot(c)->left, c->number, memory_order_release);
    void *end;
    if (t->stream == MS_STREAM_COMPUTE) return st;
    ms_status recorded = ms__cuda()->record(t->index, t->stream, &end);
    if (recorded == MS_OK) ms__queued(MS_CUDA | t->index << 8, t->stream, end);
    return st != MS_OK ? st : recorded;
}

static void gpu_drop(ms_coll *c)
{
    ms_gpu_coll *t = c->prepared;
    if (t->flight && t->used) {
        ms__flight_begin(t->flight, c, (const int[]) { t->begin, t->end });
    } else {
        if (t->begin >= 0) ms__gpu_event_drop(t->begin, NULL);
        if (t->end >= 0) ms__gpu_event_drop(t->end, NULL);
        if (t->flight) ms__flight_free(t->flight);
    }
    if (t->ready) ms__cuda()->drop(t->ready);
    free(t);
    c->prepared = NULL;
}

// ---- bytes ----

static void gpu_copy(ms_coll *c, void *dst, const void *src, size_t n, ms_direction way)
{
    ms_gpu_coll *t = c->prepared;
    if (n && dst != src) keep_failure(t, ms__cuda()->copy(t->index, t->stream, dst, src, n, way));
}

static void gpu_lines(ms_coll *c, char *dst, size_t dst_line, const char *src, size_t line, size_t n)
{
    ms_gpu_coll *t = c->prepared;
    ms_cuda_lines l = {
        .dst = dst, .src = src, .dst_line = dst_line, .src_line = line, .bytes = line, .lines = n / line
    };
    if (l.lines) keep_failure(t, ms__cuda()->ranks.copy_lines(t->index, t->stream, &l));
    gpu_copy(c, dst + l.lines * dst_line, src + l.lines * line, n % line, MS_ON_DEVICE);
}

static void gpu_reduce(ms_coll *c, ms_cuda_reduction *r)
{
    ms_gpu_coll *t = c->prepared;
    r->dtype = c->reducer.dtype;
    r->reduction = (int)c->reducer.reduction;
    r->scale = c->reducer.scale;
    keep_failure(t, ms__cuda()->ranks.reduce(t->index, t->stream, r));
}

static ms_status gpu_sync(ms_coll *c)
{
    ms_gpu_coll *t = c->prepared;
    keep_failure(t, ms__cuda()->sync(t->index, t->stream));
    return t->failed;
}

static char *gpu_resolve(ms_coll *c, int rank, uint32_t arena, uint64_t at)
{
    const ms_gpu_coll *t = c->prepared;
    return ms__gpu_resolve(t->index, rank, arena, at);
}

static const ms_bytes gpu_bytes = {
    .copy = gpu_copy, .lines = gpu_lines, .reduce = gpu_reduce, .resolve = gpu_resolve, .sync = gpu_sync
};

// ---- moving ----

// Reduces the parts of a reduce-scatter, with one launch for all.
static ms_status reduce_parts_on_gpu(ms_coll *c)
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
                here = ((ms_part_place *)member_slot(g, k, c->seq)->payload)[i];
                if (!(*at = gpu_resolve(c, g->ranks[k], (uint32_t)here.arena, here.at))) return MS_ECOMM;
            }
            *at += (uint64_t)g->me * here.stride;
        }
        numel[i] = (int64_t)n / esize;
        zeros[i] = (int64_t)(p->bytes - n) / esize;
        dst[i] = out;
        out += p->bytes;
    }
    ms_cuda_reduction all = {
        .n_ranks = g->n, .n_parts = c->n_parts, .numel = numel, .zeros = zeros, .src = src, .n_dst = 1, .dst = dst
    };
    gpu_reduce(c, &all);
    return MS_OK;
}

static ms_status gpu_move(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_status moved = wait_for_members(c), kept;
    if (moved == MS_OK) moved = c->n_parts ? reduce_parts_on_gpu(c) : ms__move_direct(c);
    if ((kept = record_end(c)) != MS_OK && moved == MS_OK) moved = kept;
    return moved;
}

// Fails if a peer could not queue its part on its GPU: this rank's result lacks that part. The peer's own error gives
// the reason.
static ms_status check_parts(const ms_coll *c)
{
    const ms_group *g = c->g;
    for (int k = 0; k < g->n; k++) {
        char text[100];
        if (k == g->me || atomic_load(&member_slot(g, k, c->seq)->failed) != c->number) continue;
        snprintf(text, sizeof text, "rank %d could not queue its part on its GPU", g->ranks[k]);
        return ms__coll_fail(c, text);
    }
    return MS_OK;
}

static ms_status gpu_finish(ms_waiter *w, ms_status moved)
{
    ms_coll *c = w->c;
    ms_slot *mine = own_slot(c);
    if (moved != MS_OK) atomic_store(&mine->failed, c->number);
    set_done(c);
    ms_status done = ms__wait_done(w, c->number);
    if (moved == MS_OK) moved = done;
    if (moved == MS_OK) moved = check_parts(c);
    ms_status ended = wait_for_ends(c, done == MS_OK);
    return moved != MS_OK ? moved : ended;
}

static ms_status gpu_part(ms_group *g)
{
    ms__gpu_forget_group(g);
    return MS_OK;
}

const ms_mover ms__mover_gpu = { .name = "gpu",
                                 .prepare = gpu_prepare,
                                 .ready = gpu_ready,
                                 .publish = gpu_publish,
                                 .serves = gpu_serves,
                                 .move = gpu_move,
                                 .finish = gpu_finish,
                                 .drop = gpu_drop,
                                 .part = gpu_part,
                                 .check = ms__flights_check,
                                 .stop = ms__gpu_stop };
