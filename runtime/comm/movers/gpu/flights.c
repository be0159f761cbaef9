// SPDX-License-Identifier: MIT
// comm/movers/gpu/flights.c -- waits of this rank for a GPU on which collectives are queued.
//
// A collective that stays on GPUs is done for the host when its work is queued. If a peer's GPU never finishes its
// part, this rank's streams wait for an event of the peer forever, and so would a host that blocks in the driver. So
// the rank lists the collectives that its GPU has not passed yet. While there are any, the engine thread polls when it
// waits for a GPU (ms__cuda_sync), and looks at the oldest of them every few milliseconds: if this rank's GPU has
// reached it and waits there for longer than the timeout, the rank reports the peers whose GPUs have not reached it, or
// else those whose GPUs have not finished their part, and the job ends.
//
// While a collective is listed, no other one is given its events, so their state is that of the listed collective.
#include <stdio.h>
#include "comm/movers/gpu/flights.h"
#include "device/device.h"
#include "device/move.h"
#include "comm/movers/gpu/memory.h"
#include "comm/process/process.h"
#include "comm/watch/watch.h"

struct ms_flight {
    ms_group *g;  // held (ms__group_hold)
    uint64_t seq, number;
    int begin, end;  // this rank's events
    void *passed;    // an event of this rank's stream, after the waits for all members; NULL: the work was not queued
    ms_fingerprint fingerprint;
    ms_flight *next;
    struct {
        uint32_t begin, end;
    } of[];  // the members' events
};

static struct {
    ms_flight *first, *last;  // the list, oldest first
} flights;

ms_flight *ms__flight_new(ms_group *g)
{
    ms_flight *f = calloc(1, sizeof *f + (size_t)g->n * sizeof *f->of);
    if (f) f->g = ms__group_hold(g);
    else ms__no_memory(sizeof *f, "dist", "a collective on GPUs");
    return f;
}

void ms__flight_free(ms_flight *f)
{
    if (f->passed) ms__cuda()->drop(f->passed);
    ms__group_release(f->g);
    free(f);
}

static void end_flight(ms_flight *f)
{
    const ms_event_use used = { f->g->freed ? NULL : f->g, f->seq, f->number };
    ms__gpu_event_drop(f->begin, &used);
    ms__gpu_event_drop(f->end, &used);
    ms__flight_free(f);
}

ms_status ms__flight_queued(ms_flight *f, const ms_coll *c, int index)
{
    for (int k = 0; k < f->g->n; k++) {
        const ms_slot *s = member_slot(f->g, k, c->seq);
        f->of[k].begin = s->begin;
        f->of[k].end = s->end;
    }
    return ms__cuda()->record(index, c->stream, &f->passed);
}

void ms__flight_begin(ms_flight *f, const ms_coll *c, const int events[2])
{
    f->seq = c->seq;
    f->number = c->number;
    f->fingerprint = c->fingerprint;
    f->begin = events[0];
    f->end = events[1];
    if (!f->passed) {
        end_flight(f);
        return;
    }
    if (flights.last) flights.last->next = f;
    else flights.first = f;
    flights.last = f;
    ms__collectives_queued++;
}

void ms__flights_land(void)
{
    while (flights.first && ms__cuda()->done(flights.first->passed) != 0) {
        ms_flight *f = flights.first;
        flights.first = f->next;
        if (!flights.first) flights.last = NULL;
        ms__collectives_queued--;
        end_flight(f);
    }
}

// Lists the members whose GPUs have not reached their events at the beginning of f, or at its end. Returns their
// number.
static int list_missing(const ms_flight *f, bool begin, char *text, size_t n)
{
    int found = 0;
    char where[WHERE];
    for (int k = 0; k < f->g->n; k++) {
        int rank = f->g->ranks[k];
        if (ms__gpu_event_reached((int)(begin ? f->of[k].begin : f->of[k].end), rank)) continue;
        ms__rank_text(rank, where, sizeof where);
        ms__append(text, n, "%sthe GPU of rank %d has not %s (its script is %s)", found++ ? "; " : "", rank,
                   begin ? "reached this collective" : "finished its part", where);
    }
    return found;
}

static ms_status report_hung(const ms_flight *f, double seconds)
{
    char text[TEXT];
    snprintf(text, sizeof text, "%.1f s have passed and ", seconds);
    if (!list_missing(f, true, text, sizeof text) && !list_missing(f, false, text, sizeof text))
        ms__append(text, sizeof text, "this rank's GPU has not finished its part");
    ms__request_fail(f->g, f->number, &f->fingerprint, text);
    ms__break_by_me(f->g, ms__comm_epoch(), ms_error());
    return ms__fail_job(MS_ECOMM, -1);
}

ms_status ms__flights_check(void)
{
    enum { MS = 1000000 };
    static int64_t looked, last_call, since;  // since: when this rank's GPU was first seen waiting; 0: it was not
    static uint64_t number;                   // number of the oldest collective at the latest check
    static const ms_group *group;
    if (MS_LIKELY(!flights.first)) return MS_OK;
    int64_t now = ms__now_ns();
    // Half a second without a call: the script did something else between two waits, or the process was stopped. The
    // waiting time then starts at 0 again.
    if (now - last_call > 500 * MS) since = 0;
    last_call = now;
    if (now - looked < 5 * MS) return MS_OK;
    looked = now;
    if (ms__comm_is_lost(flights.first->g, ms__comm_epoch()))
        return ms__group_whole(flights.first->g, ROW(flights.first->fingerprint.op)->name);
    for (int k = 0; k < flights.first->g->n; k++)  // a peer that raised an error has printed it, and the job is ending
        if (atomic_load(&ms__world.board->rank[flights.first->g->ranks[k]].state) == RANK_RAISED) ms__end_stay(1);
    ms__flights_land();
    if (!flights.first) return MS_OK;
    if (flights.first->number != number || flights.first->g != group) since = 0;
    number = flights.first->number;
    group = flights.first->g;
    if (!since && ms__gpu_event_reached(flights.first->begin, ms__world.rank)) since = now;
    double seconds = since ? (double)(now - since) * 1e-9 : 0;
    return seconds > ms__world.timeout ? report_hung(flights.first, seconds) : MS_OK;
}

// PLENTY: once there are this many events, the events of collectives that have ended are taken back before a new one is
// made.
enum { PLENTY = 64 };

ms_status ms__flight_event(int index, int *number)
{
    bool taken = ms__gpu_event_take(index, number);
    if (!taken && ms__gpu_events() >= PLENTY) {
        ms__flights_land();
        taken = ms__gpu_event_take(index, number);
    }
    while (!taken && ms__gpu_events() == GPU_EVENTS) {  // the collectives in flight use all events
        MS_TRY(ms__check_interrupt());
        MS_TRY(ms__flights_check());
        ms__stream_reap();
        ms__flights_land();
        ms__nap(50 * 1000);
        taken = ms__gpu_event_take(index, number);
    }
    return taken ? MS_OK : ms__gpu_event_make(index, number);
}
