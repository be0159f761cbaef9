// SPDX-License-Identifier: MIT
// comm/agree/exchange.c -- one collective on one rank, from its ready flag to its completion.
//
//  1 publish   write fingerprint, places of input and output, and a small input as payload; then set `ready`
//  2 agree     wait for every member's `ready` and compare fingerprints: a difference fails on every rank
//  3 commit    one compare-and-swap decides for all members of the node: commit, or abandon because a member left
//  4 move      the bytes (comm/movers/mover.h)
//  5 complete  set `done`; wait for the `done` of peers that access this rank's tensors
//
// A rank may leave a collective (an error elsewhere, Ctrl-C) before the commit. It may leave after the commit only if
// the group has members on several nodes and the engine itself moves the bytes: such members send messages and do not
// access each other's tensors.
#include <stdio.h>
#include "comm/agree/exchange.h"
#include "base/trace.h"
#include "comm/agree/mismatch.h"
#include "comm/memory/arena.h"
#include "comm/movers/bytes.h"
#include "comm/movers/far.h"

// ---- steps ----------------------------------------------------------------------------------------

static bool locate_parts(ms_coll *c, ms_slot *s)
{
    ms_part_place *places = (ms_part_place *)s->payload;
    for (int i = 0; i < c->n_parts; i++) {
        uint32_t arena = 0;
        places[i] = (ms_part_place) { 0 };
        if (c->parts[i].total == 0) continue;
        if (!ms__comm_locate(c->parts[i].t->storage, ms__data(c->parts[i].t), &arena, &places[i].at)) return false;
        places[i].arena = arena;
        places[i].stride = c->parts[i].stride;
    }
    return true;
}

// Fills this rank's slot and sets its `ready`.
static ms_status publish_slot(ms_coll *c, int64_t arrived)
{
    ms_group *g = c->g;
    ms_slot *s = own_slot(c);
    // Peers may still read what this slot held for a collective that failed: see still_holds.
    if (MS_UNLIKELY(c->before != g->committed[c->seq % RING])) ms__slot_open(s);
    s->fingerprint = c->fingerprint;
    s->hash = c->hash;
    s->flags = 0;
    s->bytes = 0;
    s->arrived = arrived;
    atomic_store_explicit(&s->round, 0, memory_order_relaxed);
    if (c->inline_) {
        s->flags |= SLOT_INLINE;
        s->bytes = (uint32_t)c->in.bytes;
        if (c->in.bytes) memcpy(s->payload, c->in.data, c->in.bytes);  // empty tensors have no address
    } else if (MS_UNLIKELY(c->mover && c->mover->publish)) {
        c->mover->publish(c, s);
    } else if (!c->final) {
        uint32_t ia = 0, oa = 0;
        uint64_t ip = 0, op = 0;
        bool pushes = c->op == MS_DIST_ALL_REDUCE || (c->op == MS_DIST_REDUCE && c->root == g->me);
        bool direct = !g->far &&
                      (c->n_parts ? locate_parts(c, s)
                                  : c->in.bytes == 0 || ms__comm_locate(c->in.storage, c->in.data, &ia, &ip)) &&
                      (!pushes || ms__comm_locate(c->out.storage, c->out.data, &oa, &op));
        s->in_arena = ia;
        s->in_at = ip;
        s->out_arena = oa;
        s->out_at = op;
        if (direct) s->flags |= SLOT_DIRECT;
    }
    atomic_store(&s->ready, c->number);
    return MS_OK;
}

static void pause_for(double seconds)
{
    int64_t until = ms__now_ns() + (int64_t)(seconds * 1e9);
    while (ms__now_ns() < until) ms__nap(100 * 1000);
}

// Whether what was just read from the slot of member k is k's request for c. A member does not wait for others to read
// its slot before it leaves a collective that fails, and may use the slot for a later call.
static bool still_holds(const ms_coll *c, int k)
{
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&member_slot(c->g, k, c->seq)->ready, memory_order_relaxed) == c->number;
}

// Fails c because a peer has left it, after the group was broken.
static ms_status fail_abandoned(ms_coll *c)
{
    if (ms__is_broken(c->g, c->epoch)) return ms__broken_fail(c);
    return ms__coll_fail(c, "a peer left this collective after an error");
}

// Waits for the requests of all members, and compares them.
static ms_status agree_on_request(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    bool leads = g->far && g->me == g->leader;
    int last = -1;  // the member that was waited for most recently
    MS_RANGE(MS_RANGE_WAIT, "waiting for ranks", NULL);
    for (int k = 0; k < g->n; k++) {
        ms_slot *s = member_slot(g, k, c->seq);
        uint64_t ready;
        while ((ready = atomic_load_explicit(&s->ready, memory_order_acquire)) < c->number) {
            if (leads) MS_TRY(ms__far_ready(c));
            if (atomic_load_explicit(&s->ready, memory_order_acquire) >= c->number) continue;
            // If this node's leader failed its own argument checks, it does not wait, so it may never copy the slot of
            // a member on another node to this node.
            if (ms__is_refused(c)) return ms__mismatch(w);
            last = k;
            MS_TRY(ms__wait_poll(w));
        }
        // The member has advanced, either past a refused call or into a later epoch.
        if (MS_UNLIKELY(ready != c->number))
            return ready >> 32 == c->number >> 32 ? ms__mismatch(w) : fail_abandoned(c);
        if (MS_LIKELY(s->hash == c->hash)) continue;
        if (still_holds(c, k)) return ms__mismatch(w);
        k--;  // look at `ready` again
    }
    if (MS_UNLIKELY(range_here.from != 0) && last >= 0)
        range_here.detail = ms__trace_text("rank %d arrived last", g->ranks[last]);
    // Other nodes wait for this node's slots, which may not have been sent yet.
    return leads ? ms__far_ready(c) : MS_OK;
}

// Decides, once for all members on this node, whether the collective is committed (`go`) or abandoned. Returns whether
// it is committed: another member may have decided first. If members use the slot for a later collective already, they
// have abandoned c, and their decision must not be overwritten: a member that has committed waits for all others.
static bool decide_commit(ms_coll *c, bool go)
{
    _Atomic uint64_t *commit = &member_slot(c->g, c->g->leader, c->seq)->commit;
    uint64_t was = atomic_load_explicit(commit, memory_order_acquire), want = c->number * 2 + go;
    while (was >> 1 < c->number)
        if (atomic_compare_exchange_weak(commit, &was, want)) return go;
    return was == c->number * 2 + 1;
}

// Returns what a profile says about the collective. To be called before `done` is set, while no member reuses its slot.
static ms_collective_range in_profile(const ms_coll *c)
{
    ms_group *g = c->g;
    ms_collective_range r = {
        .group = g->id, .number = (double)c->number, .unit = c->fingerprint.unit, .members = g->n
    };
    double larger = c->in.numel > c->out.numel ? c->in.numel : c->out.numel;
    r.bytes = larger * ms__dtype_size(c->reducer.dtype);
    int64_t first = INT64_MAX, last = INT64_MIN, before = INT64_MIN;
    for (int k = 0; k < g->n; k++) {
        int64_t at = member_slot(g, k, c->seq)->arrived;
        if (at < first) first = at;
        if (at > last) {
            before = last;
            last = at;
            r.last = g->ranks[k];
        } else if (at > before) {
            before = at;
        }
    }
    r.last_after = (double)(last - before) * 1e-9;
    r.waited = (double)(last - first) * 1e-9;
    if (first == 0) r.last = -1;
    return r;
}

// ---- all steps ------------------------------------------------------------------------------------

// Steps 4 (move) and 5 (complete).
static ms_status move_and_complete(ms_waiter *w)
{
    ms_coll *c = w->c;
    const ms_mover *m;
    MS_TRY(ms__mover_choose(w, &m));
    if (MS_UNLIKELY(c->delay > 0) && !(c->device && m == c->mover)) pause_for(c->delay);  // a GPU pauses by itself
    return m->finish(w, m->move(w));
}

// Runs all steps of the collective. While a profile is recorded, arrived is the time at which this rank arrived, and
// *seen receives the record of the collective; otherwise arrived is 0 and seen is not used.
static ms_status run_steps(ms_waiter *w, int64_t arrived, ms_collective_range *seen)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    int k = (int)(c->seq % RING);
    if (MS_UNLIKELY(ms__is_broken(g, c->epoch))) return ms__broken_fail(c);
    // Entry k of the ring of slots is free when this rank's earlier collective in it has finished and no peer reads the
    // payload of that collective.
    while (atomic_load_explicit(&g->finished[k], memory_order_acquire) < c->before) MS_TRY(ms__wait_poll(w));
    if (g->committed[k]) MS_TRY(ms__wait_done(w, g->committed[k]));

    MS_TRY(publish_slot(c, arrived));
    // A refused call matches no request, so the peers' calls fail, and this rank need not wait for them.
    if (c->op == OP_REFUSED) return g->far && g->me == g->leader ? ms__far_ready(c) : MS_OK;
    ms_status status = agree_on_request(w);
    if (status != MS_OK) {
        ms__coll_failed(c, status);  // peers that see the decision find the reason
        // If all members had arrived, a peer may have committed already and rely on this rank. The error then belongs
        // to later work: this collective succeeds here too, and the next one raises the error.
        if (!decide_commit(c, false)) return status;
        if (atomic_exchange(&c->raised, false)) status = MS_OK;
        else if (status != MS_EINTR) return status;
    } else if (!decide_commit(c, true)) {
        return fail_abandoned(c);
    }
    w->committed = true;
    g->committed[k] = c->number;
    if (MS_UNLIKELY(arrived != 0)) *seen = in_profile(c);
    ms_status moved = move_and_complete(w);
    return status != MS_OK ? status : moved;
}

// The detail (ms_open_range) of the collective's range in a profile.
static const char *collective_text(const ms_coll *c)
{
    const ms_fingerprint *p = &c->fingerprint;
    return ms__trace_text("%llu %s%s%s", (unsigned long long)p->count, ms__dtype_name(p->dtype),
                          p->unit[0] ? ", unit " : "", p->unit);
}

ms_status ms__coll_run(ms_coll *c)
{
    ms_waiter w;
    ms_collective_range seen;
    seen.members = 0;  // set when the collective is committed; a refused call is never committed
    int k = (int)(c->seq % RING);
    MS_RANGE(MS_RANGE_COLLECTIVE, ROW(c->op)->name, NULL);
    // Format the text after the range has begun, so that it belongs to that recording; texts of earlier recordings may
    // have been freed.
    if (MS_UNLIKELY(range_here.from != 0)) range_here.detail = collective_text(c);
    ms__wait_begin(&w, c);
    ms_status status = run_steps(&w, range_here.from ? ms__job_time(range_here.from) : 0, &seen);
    if (MS_UNLIKELY(status != MS_OK)) ms__coll_failed(c, status);
    ms__wait_end(&w);
    if (MS_UNLIKELY(range_here.from != 0) && status == MS_OK && seen.members) range_here.collective = &seen;
    uint64_t was = atomic_load(&c->g->finished[k]);
    while (was < c->number && !atomic_compare_exchange_weak(&c->g->finished[k], &was, c->number)) {}
    ms__far_end(c);
    return status;
}
