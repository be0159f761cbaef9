// SPDX-License-Identifier: MIT
// comm/issue/issue.c -- issues collectives, which comm/issue/make.c has made.
//
// A collective gets its number when it is issued. Synchronous collectives run on the calling thread, others on the
// workers of the gather, reduce and copy streams; these poll independently, so none delays another. Only the engine
// thread changes reference counts: it takes references when it issues a collective and drops them when it retires the
// collective's record (device/stream.h).
#include <stdio.h>
#include "comm/issue/issue.h"
#include "base/trace.h"
#include "base/watched.h"
#include "device/capture.h"
#include "device/device.h"
#include "comm/agree/exchange.h"
#include "comm/issue/make.h"
#include "comm/issue/recording.h"
#include "comm/memory/board.h"
#include "comm/movers/alone.h"
#include "comm/movers/mover.h"

struct ms_work {
    int refs;
    ms_pending *event;
};

// ---- works ----------------------------------------------------------------------------------------

ms_pending *ms__work_event(const ms_work *w) { return w ? w->event : NULL; }
ms_status ms_work_wait(ms_work *w) { return w ? ms__event_wait(w->event) : MS_OK; }
int ms_work_done(ms_work *w) { return !w || ms__event_reached(w->event); }
void ms_work_free(ms_work *w)
{
    if (!w || --w->refs > 0) return;
    ms__event_unhold(w->event);
    ms__event_release(w->event);
    free(w);
}

// ---- issuing --------------------------------------------------------------------------------------

static ms_status run_collective(ms_coll *c)
{
    ms_status status = ms__coll_run(c);
    return c->mover && c->mover->leave ? c->mover->leave(c, status) : status;
}
static ms_status run_queued(void *arg) { return run_collective(*(ms_coll **)arg); }
static void retire_queued(void *arg, ms_status result)
{
    ms_coll *c = *(ms_coll **)arg;
    c->g->in_flight--;
    if (result != MS_OK) c->g->told = c->epoch + 1;  // the script receives the error when it waits for c
    ms__coll_drop(c);
}

// Retains c's storages while c is queued.
static void retain_storages(ms_coll *c)
{
    if (c->in.storage) ms__storage_retain(c->in.storage);
    if (c->out.storage) ms__storage_retain(c->out.storage);
}

// Makes c wait for e, the event of earlier work on one of c's storages. If c's tensors stay on a GPU, e may be done
// when the earlier work is only queued there. Work queued on c's own stream runs before c in any case. For other work
// ms__event_wait makes the compute stream wait for that work, and c waits for the compute stream.
static ms_status order_event(const ms_coll *c, ms_pending *e)
{
    if (c->device && !ms__event_on(e, c->stream)) return ms__event_wait(e);
    return ms__stream_wait(ms__stream(MS_CPU, c->stream), e);
}

static ms_status order_storage(const ms_coll *c, ms_storage *st, bool write)
{
    if (st->vacated) return ms__storage_sync(st, write);  // fails, with a message that names the sharded parameter
    MS_TRY(order_event(c, st->event));
    // A reader also waits for earlier readers: the storage keeps one event of readers, which must cover all of them.
    // One on the CPU that has ended needs no wait; if it has failed, that does not concern c.
    if (!c->device && ms__event_done(st->readers)) return MS_OK;
    return order_event(c, st->readers);
}

static void mark_storage(ms_storage *st, ms_pending *e, bool write)
{
    ms_pending **at = write ? &st->event : &st->readers;
    ms__event_release(*at);
    *at = ms__event_retain(e);
}

uint64_t ms__comm_issued;
double ms__comm_delays[OPS];

// Gives c the next number of its group.
static void take_number(ms_coll *c)
{
    ms_group *g = c->g;
    ms__comm_issued++;
    c->epoch = ms__comm_epoch();
    if (g->epoch != c->epoch) {
        g->epoch = c->epoch;
        g->seq = g->refused = 0;
    }
    c->seq = g->seq++;
    c->number = (c->epoch << 32) + c->seq + 1;
    c->before = g->issued[c->seq % RING];
    g->issued[c->seq % RING] = c->number;
    g->refused += c->op == OP_REFUSED;
    c->fingerprint.refused = g->refused;
    c->hash = ms__fingerprint_hash(&c->fingerprint, c->op != OP_SEND_RECV);
    c->delay = ms__comm_delays[c->op];
    c->lines = atomic_load_explicit(&ms__board_me()->lines, memory_order_relaxed);
    g->heads[g->me].executor[c->seq % RING] = (uint8_t)c->stream;
    atomic_store_explicit(&g->heads[g->me].issued, c->number, memory_order_release);
    ms_waiting *last = &ms__board_me()->last;
    last->group = g->id;
    last->number = c->number;
    last->fingerprint = c->fingerprint;
    if (c->mover && c->mover->enter) c->mover->enter(c);
}

// Called when a collective that has a number cannot be run: breaks the group, and lets a later collective use its
// slots.
static void break_numbered(ms_coll *c)
{
    c->g->issued[c->seq % RING] = c->before;
    ms__break_by_me(c->g, c->epoch, ms_error());
}

ms_status ms__coll_issue(ms_coll *c, ms_work **work)
{
    ms_group *g = c->g;
    ms_status status = MS_OK;
    if (work) *work = NULL;
    ms__stream_reap();
    if (MS_UNLIKELY(ms__capturing != NULL)) {
        status = ms__capture_refuse("%s: this collective cannot be captured", ms__request_name(&c->fingerprint));
        goto drop;
    }
    if (g->freed) {
        status = ms__fail(MS_EINVAL, "%s: this group was freed by dist.free_group", ms__request_name(&c->fingerprint));
        goto drop;
    }
    if (g->me < 0) {
        status = ms__fail(MS_EINVAL, "%s: rank %d is not a member of this group", ms__request_name(&c->fingerprint),
                          ms__world.rank);
        goto drop;
    }
    if (g->n == 1) {
        status = ms__coll_sync(c);
        if (status == MS_OK) status = ms__record_collective(c);
        if (status == MS_OK) status = ms__move_alone(c);
        goto drop;
    }
    if (ms__world.stopped) {
        status = ms__fail(MS_ESTATE, "%s: dist.finalize has already been called", ms__request_name(&c->fingerprint));
        goto drop;
    }
    if ((status = ms__group_whole(g, ms__request_name(&c->fingerprint))) != MS_OK) goto drop;
    if (ms__coll_on_device(c) && (status = ms__mover_prepare(c)) != MS_OK) goto drop;
    if (c->stream == MS_STREAM_COMPUTE) {
        status = ms__coll_sync(c);
    } else {
        if (c->in.storage) status = order_storage(c, c->in.storage, false);
        for (int i = 0; i < c->n_parts && status == MS_OK; i++)
            status = order_storage(c, c->parts[i].t->storage, false);
        if (status == MS_OK && c->out.storage) status = order_storage(c, c->out.storage, true);
    }
    if (status == MS_OK && c->mover && c->mover->ready) status = c->mover->ready(c);
    if (status != MS_OK) goto drop;

    take_number(c);
    if ((status = ms__record_collective(c)) != MS_OK) {
        break_numbered(c);
        goto drop;
    }
    if (c->stream == MS_STREAM_COMPUTE) {
        if ((status = run_collective(c)) != MS_OK) {
            if (status == MS_EINTR) ms__fail(status, "interrupted (Ctrl-C)");
            ms__group_received(g);
        }
        goto drop;
    }
    // c retains its storages until it is retired; later users of the storages wait for its event.
    ms_storage *in = c->in.storage, *out = c->out.storage, *marked = c->marked, *parts[MS_PARTS];
    int n_parts = c->n_parts;
    for (int i = 0; i < n_parts; i++) parts[i] = c->parts[i].t->storage;
    retain_storages(c);
    ms_pending *event = NULL;
    status = ms__launch(ms__stream(MS_CPU, c->stream), run_queued, retire_queued, &c, sizeof c, &event);
    if (status != MS_OK) {
        break_numbered(c);
        ms__coll_drop(c);
        return status;
    }
    g->in_flight++;
    if (in) mark_storage(in, event, false);
    for (int i = 0; i < n_parts; i++) mark_storage(parts[i], event, false);
    if (out) mark_storage(out, event, true);
    if (marked) mark_storage(marked, event, true);
    ms_work *w = work ? malloc(sizeof *w) : NULL;
    if (w) {
        *w = (ms_work) { .refs = 1, .event = event };
        ms__event_hold(event);
        *work = w;
    } else {
        if (work) status = ms__event_wait(event);  // there is no memory for a work: wait here
        ms__event_release(event);
    }
    return status;
drop:
    c->in.storage = c->out.storage = NULL;  // c has not retained them
    ms__coll_drop(c);
    return status;
}

ms_status ms__coll_request(const ms_request *r, ms_work **work)
{
    ms_coll *c = NULL;
    if (work) *work = NULL;
    MS_TRY(ms__coll_make(r, &c));
    return ms__coll_issue(c, work);
}

// ---- errors of queued work ----------------------------------------------------------------------------

static void note_failed_work(uint64_t epoch, const char *text)
{
    if (epoch == ms__comm_epoch()) ms__received(text ? text : "queued work failed");
}

__attribute__((constructor)) static void observe_streams(void)
{
    ms__stream_observer =
        (ms_stream_observer) { .epoch = ms__comm_epoch, .reported = note_failed_work, .check = ms__movers_check };
}
