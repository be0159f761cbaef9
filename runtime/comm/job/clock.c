// SPDX-License-Identifier: MIT
// comm/job/clock.c -- the clocks of nodes, compared with rank 0's.
//
// The processes of a node share CLOCK_MONOTONIC. Between nodes the first rank of a node asks rank 0 for its time,
// several times, and keeps the answer with the shortest round trip: rank 0 sent it in the middle of that trip, to
// within half of the trip. Two measurements give the drift as well (ms__job_time).
#include <sched.h>
#include "base/trace.h"
#include "comm/job/job.h"
#include "comm/memory/board.h"
#include "comm/world/message.h"

enum { ROUNDS = 100, TAG_CLOCK = 7 };

static ms_status transfer_time(void *p, int peer, bool send, int64_t until)
{
    ms__transport_lock();
    void *r = send ? ms__world.transport->isend(p, sizeof(int64_t), peer, TAG_CLOCK)
                   : ms__world.transport->irecv(p, sizeof(int64_t), peer, TAG_CLOCK);
    ms__transport_unlock();
    if (!r) return ms__fail(MS_ECOMM, "dist: MPI could not start the exchange of times with rank %d", peer);
    for (;;) {
        ms__transport_lock();
        int rc = ms__world.transport->test(&r);
        ms__transport_unlock();
        if (rc == 1) return MS_OK;
        if (rc < 0 || ms__now_ns() > until)
            return ms__fail(MS_ECOMM,
                            "dist: exchanging time stamps with rank %d failed or took longer than the timeout", peer);
        sched_yield();
    }
}

static ms_status answer_times(int rank, int64_t until)
{
    for (int k = 0; k < ROUNDS; k++) {
        int64_t now;
        MS_TRY(transfer_time(&now, rank, false, until));
        now = ms__now_ns();
        MS_TRY(transfer_time(&now, rank, true, until));
    }
    return MS_OK;
}

static ms_status ask_times(int64_t until)
{
    int64_t shortest = INT64_MAX;
    for (int k = 0; k < ROUNDS; k++) {
        int64_t from = ms__now_ns(), theirs = from;
        MS_TRY(transfer_time(&theirs, 0, true, until));
        MS_TRY(transfer_time(&theirs, 0, false, until));
        int64_t to = ms__now_ns();
        if (to - from >= shortest) continue;
        shortest = to - from;
        ms__world.board->clock_at = from + shortest / 2;
        ms__world.board->clock_ahead = theirs - ms__world.board->clock_at;
    }
    return MS_OK;
}

ms_status ms__clock_measure(void)
{
    ms_world *w = &ms__world;
    double limit = w->timeout < 1e9 ? w->timeout : 1e9;
    int64_t until = ms__now_ns() + (int64_t)(limit * 1e9);
    if (w->rank > 0) return w->local_rank == 0 && w->node != w->node_of[0] ? ask_times(until) : MS_OK;
    for (int node = 0; node < w->nodes; node++) {
        int first = 0;
        while (w->node_of[first] != node) first++;
        if (first > 0) MS_TRY(answer_times(first, until));
    }
    return MS_OK;
}

void ms__clock_take(void)
{
    const ms_world *w = &ms__world;
    ms_job_clock *c = &ms__job_clock;
    if (w->nodes == 1 || w->node == w->node_of[0]) return;
    int k = c->n < 2 ? c->n++ : 1;
    c->at[k] = w->board->clock_at;
    c->ahead[k] = w->board->clock_ahead;
}
