// SPDX-License-Identifier: MIT
// comm/movers/gpu.c -- collectives whose tensors stay on a GPU, in a group within one node.
//
// The ranks agree on the CPU (comm/agree/exchange.c), as for tensors in CPU memory. Then each rank only queues work on
// a stream of its GPU: it waits for an event of every member, after which that member's tensors are ready; copies from
// the peers' memory or reduces it, in rank order; records an event; and waits for that event of every member, after
// which its own tensors may change. All of this is queued after the ranks have agreed, so a stream waits only for work
// that has been queued already, never for a host, and no kernel waits at all. The collective is done on the CPU as soon
// as the work is queued; its event (ms__queued) orders the compute stream behind it.
//
// Where a rank cannot map a peer's memory, the bytes go through the windows of the control memory (comm/movers/move.c),
// on all members alike.
#include <stdio.h>
#include "comm/movers/gpu.h"
#include "device/device.h"
#include "device/move.h"
#include "ops/queued.h"

static void keep_failure(struct ms_there *t, ms_status st)
{
    if (t->failed == MS_OK) t->failed = st;
}

static bool on(const ms_storage *s, int device) { return !s || s->device == device; }

// Finds the places of the operands that peers access, and sets c->gpu.there->shared: whether peers can map them.
static void place(ms_coll *c)
{
    struct ms_there *t = c->gpu.there;
    bool pushes = c->op == OP_ALL_REDUCE || (c->op == OP_REDUCE && c->root == c->g->me);
    t->shared = ms__world.mapped && c->g->n <= MS_CUDA_MEMBERS && ms__gpu_shares() && ms__gpu_has_events(t->index);
    if (c->in.bytes > 0 && c->in.storage) t->shared = t->shared && ms__gpu_place(c->in.storage, c->in.data, &t->in);
    if (pushes && c->out.storage) t->shared = t->shared && ms__gpu_place(c->out.storage, c->out.data, &t->out);
    for (int i = 0; i < c->n_parts && t->shared; i++)
        if (c->parts[i].total) t->shared = ms__gpu_place(c->parts[i].t->storage, ms__data(c->parts[i].t), &t->parts[i]);
}

static void check_mapped(ms_coll *c, uint32_t arena)
{
    for (int k = 0; k < c->g->n && arena; k++) {
        int seen = k == c->g->me ? 1 : ms__gpu_mapped(arena, c->g->ranks[k]);
        if (seen < 0) c->gpu.there->shared = false;
        if (seen == 0) c->gpu.there->untried = true;
    }
}

ms_status ms__gpu_take(ms_coll *c)
{
    int device = c->out.storage ? c->out.storage->device : c->in.storage->device;
    if (c->g->far || !ms__is_cuda(device) || !on(c->in.storage, device)) return MS_OK;
    for (int i = 0; i < c->n_parts; i++)
        if (!on(c->parts[i].t->storage, device)) return MS_OK;
    struct ms_there *t = calloc(1, sizeof *t + (size_t)c->n_parts * sizeof *t->parts);
    if (!t) return ms__no_memory(sizeof *t, ROW(c->op)->name, "places of tensors");
    *t = (struct ms_there) { .index = ms__index(device),
                             .stream = c->stream,
                             .begin = -1,
                             .end = -1,
                             .parts = (ms_gpu_place *)(void *)(t + 1) };
    c->gpu.there = t;
    if (c->inline_) ms__coll_not_inline(c);
    place(c);
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

ms_status ms__gpu_begin(ms_coll *c)
{
    struct ms_there *t = c->gpu.there;
    ms__note_queued(MS_CUDA | t->index << 8, ROW(c->op)->name);
    return t->stream == MS_STREAM_COMPUTE ? MS_OK : ms__cuda()->record(t->index, MS_STREAM_COMPUTE, &t->ready);
}

// The event `begin` is recorded on the collective's stream, because an earlier collective of that stream, in another
// group, may have queued work that writes this rank's tensors.
void ms__gpu_publish(ms_coll *c, ms_slot *s)
{
    struct ms_there *t = c->gpu.there;
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
    const ms_slot *s = slot_of(c->g, k, c->seq);
    int index = c->gpu.there->index, rank = c->g->ranks[k];
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

ms_status ms__gpu_agree(ms_waiter *w, bool *all)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    bool untried = false, mapped = true;
    *all = c->gpu.there != NULL;
    for (int k = 0; k < g->n; k++) {
        uint32_t flags = slot_of(g, k, c->seq)->flags;
        *all = *all && (flags & SLOT_GPU);
        untried = untried || (flags & SLOT_UNTRIED);
    }
    if (*all && untried) {
        for (int k = 0; k < g->n; k++)
            if (k != g->me && mapped) mapped = map_member(c, k);
        if (!mapped) {
            fprintf(stderr, "moonshard: rank %d: collectives of tensors on cuda go through CPU memory: %s\n",
                    ms__world.rank, ms_error());
            atomic_store_explicit(&slot_of(g, g->me, c->seq)->refused, c->number, memory_order_release);
        }
        MS_TRY(ms__wait_round(w, ++w->round));
        for (int k = 0; k < g->n; k++)
            *all = *all && atomic_load_explicit(&slot_of(g, k, c->seq)->refused, memory_order_acquire) != c->number;
    }
    if (c->gpu.there) c->gpu.there->used = *all;
    return MS_OK;
}

// ---- on the stream ----

ms_status ms__gpu_start(ms_coll *c)
{
    struct ms_there *t = c->gpu.there;
    ms_group *g = c->g;
    for (int k = 0; k < g->n; k++)
        if (k != g->me) MS_TRY(ms__gpu_event_wait(t->index, t->stream, g->ranks[k], slot_of(g, k, c->seq)->begin));
    return c->delay > 0 ? ms__cuda()->ranks.pause(t->index, t->stream, c->delay) : MS_OK;
}

ms_status ms__gpu_moved(ms_coll *c)
{
    struct ms_there *t = c->gpu.there;
    ms_status st = ms__gpu_event_record(t->end, t->index, t->stream);
    return t->failed != MS_OK ? t->failed : st;
}

ms_status ms__gpu_finish(ms_coll *c, bool done)
{
    struct ms_there *t = c->gpu.there;
    ms_group *g = c->g;
    ms_status st = MS_OK;
    for (int k = 0; k < g->n && done; k++)
        if (k != g->me && st == MS_OK)
            st = ms__gpu_event_wait(t->index, t->stream, g->ranks[k], slot_of(g, k, c->seq)->end);
    if (done && st == MS_OK) st = ms__flight_queued(t->flight, c);
    atomic_store_explicit(&slot_of(g, g->me, c->seq)->left, c->number, memory_order_release);
    void *end;
    if (t->stream == MS_STREAM_COMPUTE) return st;
    ms_status recorded = ms__cuda()->record(t->index, t->stream, &end);
    if (recorded == MS_OK) ms__queued(MS_CUDA | t->index << 8, t->stream, end);
    return st != MS_OK ? st : recorded;
}

void ms__gpu_drop(ms_coll *c)
{
    struct ms_there *t = c->gpu.there;
    if (t->flight && t->used) {
        ms__flight_begin(t->flight, c);
    } else {
        if (t->begin >= 0) ms__gpu_event_drop(t->begin, NULL);
        if (t->end >= 0) ms__gpu_event_drop(t->end, NULL);
        if (t->flight) ms__flight_free(t->flight);
    }
    if (t->ready) ms__cuda()->drop(t->ready);
    free(t);
    c->gpu.there = NULL;
}

// ---- bytes ----

void ms__gpu_copy(ms_coll *c, void *dst, const void *src, size_t n, ms_direction way)
{
    struct ms_there *t = c->gpu.there;
    if (n && dst != src) keep_failure(t, ms__cuda()->copy(t->index, t->stream, dst, src, n, way));
}

void ms__gpu_lines(ms_coll *c, char *dst, size_t dst_line, const char *src, size_t line, size_t n)
{
    struct ms_there *t = c->gpu.there;
    ms_cuda_lines l = {
        .dst = dst, .src = src, .dst_line = dst_line, .src_line = line, .bytes = line, .lines = n / line
    };
    if (l.lines) keep_failure(t, ms__cuda()->ranks.copy_lines(t->index, t->stream, &l));
    ms__gpu_copy(c, dst + l.lines * dst_line, src + l.lines * line, n % line, MS_ON_DEVICE);
}

void ms__gpu_reduce(ms_coll *c, ms_cuda_reduction *r)
{
    struct ms_there *t = c->gpu.there;
    r->dtype = c->reducer.dtype;
    r->reduction = (int)c->reducer.reduction;
    r->n_ranks = c->reducer.n_ranks;
    r->scale = c->reducer.scale;
    keep_failure(t, ms__cuda()->ranks.reduce(t->index, t->stream, r));
}

ms_status ms__gpu_sync(ms_coll *c)
{
    struct ms_there *t = c->gpu.there;
    keep_failure(t, ms__cuda()->sync(t->index, t->stream));
    return t->failed;
}
