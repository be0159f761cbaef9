// SPDX-License-Identifier: MIT
// comm/watch/wait.c -- waiting for the members of a collective, and reports of members that do not arrive.
//
// A wait polls flags. It yields first, and sleeps after 50 us (20 ms while a collective moves data between nodes).
// Every few milliseconds it checks whether the wait can still succeed: the group may be broken, a peer may have left or
// died; ranks may wait for each other in a cycle; the timeout may have passed. On one node a rank may leave a
// collective only before it is committed (comm/agree/exchange.c); afterwards peers may be reading and writing its
// tensors.
#include <sched.h>
#include <stdio.h>
#include "comm/process/process.h"
#include "comm/watch/watch.h"

// ---- waiting --------------------------------------------------------------------------------------

void ms__wait_begin(ms_waiter *w, ms_coll *c) { *w = (ms_waiter) { .c = c }; }

// Publishes this wait on the board; called only after a millisecond of waiting.
static void post_on_board(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_waiting *b = &ms__world.board->rank[ms__world.rank].wait[c->stream];
    uint64_t next = (atomic_load(&b->version) + 1) | 1;
    atomic_store_explicit(&b->version, next - 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);  // a reader that sees a new field below also sees that version
    b->group = c->g->id;
    b->number = c->number;
    b->since = w->begun;
    b->fingerprint = c->fingerprint;
    atomic_store(&b->version, next);
    if (c->stream == MS_STREAM_COMPUTE)
        atomic_store(&ms__world.board->rank[ms__world.rank].engine_waits, MS_STREAM_COMPUTE);
}

void ms__wait_end(ms_waiter *w)
{
    if (!w->checked) return;  // the wait was not published
    ms_board_rank *me = &ms__world.board->rank[ms__world.rank];
    ms_waiting *b = &me->wait[w->c->stream];
    if (w->c->stream == MS_STREAM_COMPUTE) atomic_store(&me->engine_waits, -1);
    if (atomic_load(&b->version) & 1) atomic_fetch_add(&b->version, 1);
    w->checked = 0;
}

static bool is_missing(const ms_waiter *w, int member)
{
    ms_coll *c = w->c;
    ms_slot *s = member_slot(c->g, member, c->seq);
    return atomic_load(w->committed ? &s->done : &s->ready) < c->number;
}

typedef struct {
    int rank;
    char where[WHERE];
} asked_rank;

// Asks the first missing members on other nodes what they wait for, and lists those that answer within 100 ms.
static int ask_others(const ms_waiter *w, asked_rank *list, int room)
{
    int asked = 0, n = 0, from;
    const ms_group *g = w->c->g;
    for (int k = 0; k < g->n && asked < room; k++)
        if (ms__world.local_of[g->ranks[k]] < 0 && is_missing(w, k)) {
            ms__far_ask(g->ranks[k]);
            asked++;
        }
    for (int64_t until = ms__now_ns() + 100 * 1000 * 1000; n < asked && ms__now_ns() < until;) {
        if ((from = ms__far_answered(list[n].where, sizeof list[n].where)) >= 0) list[n++].rank = from;
        else ms__nap(100 * 1000);
    }
    return n;
}

// For a collective that a library moves between GPUs: lists the members of this node whose GPUs have not reached it.
static int list_unreached(const ms_waiter *w, char *text, size_t n)
{
    const ms_coll *c = w->c;
    int found = 0;
    for (int k = 0; k < c->g->n; k++)
        if (ms__world.local_of[c->g->ranks[k]] >= 0 && atomic_load(&member_slot(c->g, k, c->seq)->reached) < c->number)
            ms__append(text, n, "%sthe GPU of rank %d has not reached this collective", found++ ? "; " : "",
                       c->g->ranks[k]);
    return found;
}

static ms_status report_absence(ms_waiter *w)
{
    enum { ASKED = 8 };
    char text[TEXT], where[WHERE];
    asked_rank others[ASKED];
    snprintf(text, sizeof text, "%.1f s have passed and ", (double)(w->now - w->begun) * 1e-9);
    int named = w->committed && w->c->final ? list_unreached(w, text, sizeof text) : 0, list = !named;
    int n_others = ms__world.nodes > 1 && list ? ask_others(w, others, ASKED) : 0;
    for (int k = 0; k < w->c->g->n && list; k++) {
        if (k == w->c->g->me || !is_missing(w, k)) continue;
        int rank = w->c->g->ranks[k];
        ms__rank_text(rank, where, sizeof where);
        for (int j = 0; j < n_others; j++)
            if (others[j].rank == rank) ms__append(where, sizeof where, ", %s", others[j].where);
        ms__append(text, sizeof text, "%srank %d %s (it is %s)", named++ ? "; " : "", rank,
                   w->committed ? "has not finished its part" : "has not arrived", where);
    }
    if (!named) ms__append(text, sizeof text, "this rank's GPU has not finished its part");
    ms__coll_fail(w->c, text);
    return ms__fail_job(MS_ECOMM, -1);
}

// Whether a rank of another node waits in dist.recover, and this rank has not called it yet.
static bool is_in_recover(int rank)
{
    return atomic_load(&ms__world.board->rank[rank].recovers) >
           atomic_load(&ms__meeting->heads[ms__meeting->me].issued);
}

// Fails if a peer has left, died or ended its line at the prompt, if the timeout has passed, or in a deadlock. Called
// every few milliseconds during a long wait.
static ms_status check_peers(ms_waiter *w)
{
    ms_coll *c = w->c;
    char text[CAUSE];
    if (ms__world.nodes > 1) ms__far_poll();
    // A rank that has raised has printed its traceback, and the job is ending: a second error would hide the first.
    // This comes before the deaths, because the launcher may have killed other peers since.
    for (int r = 0; r < ms__world.size; r++)
        if (ms__is_here(r) && ms__rank_state(r) == RANK_RAISED) ms__end_stay(1);
    for (int k = 0; k < c->g->n; k++) {
        int rank = c->g->ranks[k];
        if (k == c->g->me) continue;
        if (!w->committed && is_in_recover(rank) && is_missing(w, k)) {
            snprintf(text, sizeof text, "rank %d waits in dist.recover", rank);
            ms__coll_fail(c, text);
            ms__coll_failed(c, MS_ECOMM);
            return ms__broken_fail(c);
        }
        if (ms__world.local_of[rank] < 0 && !ms__rank_dead(rank)) continue;
        int state = atomic_load(&ms__world.board->rank[rank].state);
        if (state == RANK_LEFT && is_missing(w, k)) {
            snprintf(text, sizeof text, "rank %d has left: its script has ended", rank);
            ms__coll_fail(c, text);
            return ms__fail_job(MS_ECOMM, -1);
        }
        if (atomic_load(&ms__world.board->rank[rank].lines) > c->lines && is_missing(w, k)) {
            snprintf(text, sizeof text, "rank %d has ended its line at the prompt", rank);
            ms__coll_fail(c, text);
            ms__coll_failed(c, MS_ECOMM);
            return ms__broken_fail(c);
        }
        if (state == RANK_RUNNING && ms__rank_dead(rank)) {
            ms__death_text(rank, text, sizeof text);
            ms__coll_fail(c, text);
            return ms__fail_job(MS_ECOMM, rank);
        }
    }
    if ((double)(w->now - w->begun) * 1e-9 > ms__world.timeout) return report_absence(w);
    // Within a node, checks for deadlocks find ranks that wait in other collectives.
    if (c->g == ms__meeting && c->g->far && !w->told && w->now - w->begun > 200 * 1000 * 1000) {
        w->told = true;
        ms__far_recovers(c);
    }
    return w->committed ? MS_OK : ms__wait_deadlock(w->c);
}

// Resets the waiter. Otherwise later slices of a long collective would be polled as rarely as a collective that hangs.
void ms__wait_moved(ms_waiter *w)
{
    w->begun = 0;
    w->polls = 0;
}

ms_status ms__wait_poll(ms_waiter *w)
{
    ms_coll *c = w->c;
    w->now = ms__now_ns();
    if (!w->begun) w->begun = w->last = w->now;
    // After a gap of half a second, assume that this process was stopped (Ctrl-Z, a debugger), usually together with
    // its peers. That time does not count towards the timeout.
    if (w->now - w->last > 500000000) w->begun += w->now - w->last;
    w->last = w->now;
    int64_t for_ns = w->now - w->begun;
    // Messages between nodes make progress only while both sides poll, so a sleep would delay the transfer.
    if (for_ns < (w->committed && c->g->far ? 20000 : 50) * 1000 || w->polls++ < 4) {
        sched_yield();
        return MS_OK;
    }
    ms__nap(for_ns < 2000000 ? 10000 : for_ns < 100000000 ? 100000 : 500000);
    // In a group over several nodes peers access only windows, so even a committed collective may be abandoned, unless
    // a library (NCCL) moves the tensors.
    if (!w->committed || (c->g->far && !c->final)) {
        if (MS_UNLIKELY(ms__is_broken(c->g, c->epoch))) return ms__broken_fail(c);
        if (c->stream == MS_STREAM_COMPUTE && !w->committed && c->g != ms__meeting) {
            ms_status status = ms__check_interrupt();
            if (status != MS_OK) return status;
        }
        if (ms__stream_cancelled()) return ms__fail(MS_ECOMM, "%s: the process is exiting", ROW(c->op)->name);
    }
    if (w->now - w->checked < 5 * 1000 * 1000 || for_ns < 1000000) return MS_OK;
    if (!w->checked) post_on_board(w);
    w->checked = w->now;
    return check_peers(w);
}

ms_status ms__wait_round(ms_waiter *w, uint64_t round)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    atomic_store_explicit(&own_slot(c)->round, round, memory_order_release);
    for (int k = 0; k < g->n; k++) {
        if (g->far && !ms__is_here(g->ranks[k])) continue;
        ms_slot *s = member_slot(g, k, c->seq);
        while (atomic_load_explicit(&s->round, memory_order_acquire) < round) MS_TRY(ms__wait_poll(w));
    }
    ms__wait_moved(w);
    return MS_OK;
}

ms_status ms__wait_done(ms_waiter *w, uint64_t number)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    for (int k = 0; k < g->n; k++) {
        if (g->far && !ms__is_here(g->ranks[k])) continue;
        ms_slot *s = member_slot(g, k, c->seq);
        while (atomic_load_explicit(&s->done, memory_order_acquire) < number) MS_TRY(ms__wait_poll(w));
    }
    return MS_OK;
}
