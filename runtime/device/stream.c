// SPDX-License-Identifier: MIT
// device/stream.c -- streams and events of the CPU.
//
// A worker thread starts at the first use of its queue. It runs a record, puts the record on the finished list and
// marks its event done. The engine thread retires finished records, because only it may touch reference counts.
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>
#include "base/activity.h"
#include "base/thread.h"
#include "device/device.h"
#include "device/stream.h"
#include "base/trace.h"
#include "base/watched.h"

enum { ARG_BYTES = 192, TEXT_BYTES = 1024 };

struct ms_pending {
    int refs;  // used by the engine thread only
    atomic_int done;
    ms_stream_kind kind;
    ms_status status;  // written before `done`
    char *text;        // message of a failure; allocated by the worker
    // The epoch of errors (ms__stream_observer) when the record was launched. If the record failed only because a
    // record that it waited for had failed: the epoch of that record.
    uint64_t epoch;
    const void *step;  // the captured step during whose recording it was queued; NULL: none
    int number;        // its number in that step
    // The work that the record has queued on a GPU (ms__queued). end: the event after it, written before `done`; NULL:
    // there is no such work. joined: ms__event_join has been called. holders: how many there are (ms__event_hold). Both
    // are used by the engine thread only.
    int device, gpu_stream;
    void *end;
    bool joined;
    int holders;
};

typedef struct ms_record {
    ms_record_fn fn;
    ms_retire_fn retire;
    ms_pending *event;
    ms_pending **waits;  // events to wait for before running
    int n_waits;
    struct ms_record *next;
    _Alignas(16) char arg[ARG_BYTES];
} ms_record;

struct ms_stream {
    ms_stream_kind kind;
    bool started;
    pthread_t thread;
    ms_record *first, *last;  // the queue; protected by lock
    pthread_cond_t work_there;
    ms_pending **waits;  // events that the next record waits for
    int n_waits, cap_waits;
};

static ms_stream streams[MS_STREAMS] = { { .kind = MS_STREAM_COMPUTE },
                                         { .kind = MS_STREAM_GATHER, .work_there = PTHREAD_COND_INITIALIZER },
                                         { .kind = MS_STREAM_REDUCE, .work_there = PTHREAD_COND_INITIALIZER },
                                         { .kind = MS_STREAM_COPY, .work_there = PTHREAD_COND_INITIALIZER } };
static struct {
    pthread_mutex_t lock;
    pthread_cond_t work_done;
    ms_record *finished, *finished_last;  // oldest first; protected by lock
    atomic_int n_finished;                // finished records, not reaped yet
    atomic_int n_queued;                  // records waiting or running
    atomic_bool cancelled;
    atomic_int waits;     // used until comm points ms__engine_waits at the board
    ms_record *spare;     // free list; used by the engine thread only
    ms_record *unjoined;  // finished, but holders (ms__event_hold) have not waited for them yet; engine thread only
} queues = { .lock = PTHREAD_MUTEX_INITIALIZER, .work_done = PTHREAD_COND_INITIALIZER };
static _Thread_local ms_pending *running;  // the event of the record that this worker runs

// comm points ms__engine_waits at a field of the board, where peers read whether this rank is blocked or busy.
atomic_int *ms__engine_waits = &queues.waits;
static uint64_t no_epoch(void) { return 0; }
static void no_report(uint64_t epoch, const char *text) { (void)epoch, (void)text; }
static ms_status no_check(void) { return MS_OK; }
ms_stream_observer ms__stream_observer = { no_epoch, no_report, no_check };
int ms__collectives_queued;
void (*ms__stream_note_wait)(const void *step, int number);

bool ms__stream_cancelled(void) { return atomic_load_explicit(&queues.cancelled, memory_order_relaxed); }

ms_stream *ms__stream(int device, ms_stream_kind kind)
{
    (void)device;  // meta tensors need no work; CUDA has its own streams
    return &streams[kind];
}

static ms_status run_record(ms_record *r)
{
    ms_pending *bad = NULL;
    for (int i = 0; i < r->n_waits; i++) {
        ms_pending *e = r->waits[i];
        if (!atomic_load_explicit(&e->done, memory_order_acquire)) {
            pthread_mutex_lock(&queues.lock);
            while (!atomic_load_explicit(&e->done, memory_order_acquire))
                pthread_cond_wait(&queues.work_done, &queues.lock);
            pthread_mutex_unlock(&queues.lock);
        }
        if (e->status != MS_OK) bad = e;
    }
    // The record runs even if an earlier one failed, because peers wait for this rank's part of a collective. Its
    // result is then invalid.
    running = r->event;
    ms_status status = r->fn(r->arg);
    running = NULL;
    if (status == MS_OK && bad) {
        status = ms__fail(bad->status, "%s", bad->text ? bad->text : "earlier queued work failed");
        r->event->epoch = bad->epoch;
    }
    return status;
}

static void *worker(void *arg)
{
    ms_stream *s = arg;
    ms__trace_lane((int)s->kind);
    pthread_mutex_lock(&queues.lock);
    for (;;) {
        while (!s->first) pthread_cond_wait(&s->work_there, &queues.lock);
        ms_record *r = s->first;
        pthread_mutex_unlock(&queues.lock);

        ms_status status = run_record(r);
        ms_pending *e = r->event;
        e->status = status;
        if (status != MS_OK) e->text = strdup(ms_error());

        pthread_mutex_lock(&queues.lock);
        s->first = r->next;
        if (!s->first) s->last = NULL;
        r->next = NULL;
        if (queues.finished_last) queues.finished_last->next = r;
        else queues.finished = r;
        queues.finished_last = r;
        atomic_fetch_add_explicit(&queues.n_finished, 1, memory_order_release);
        atomic_fetch_sub_explicit(&queues.n_queued, 1, memory_order_release);
        atomic_store_explicit(&e->done, 1, memory_order_release);
        pthread_cond_broadcast(&queues.work_done);
    }
    return NULL;
}

static ms_status start_stream(ms_stream *s)
{
    int rc = ms__thread_start(&s->thread, worker, s);
    if (rc != 0) return ms__fail(MS_ENOMEM, "stream: cannot start a worker thread: %s", strerror(rc));
    pthread_detach(s->thread);
    s->started = true;
    return MS_OK;
}

ms_pending *ms__event_retain(ms_pending *e)
{
    if (e) e->refs++;
    return e;
}

void ms__event_release(ms_pending *e)
{
    if (!e || --e->refs > 0) return;
    if (e->end) ms__cuda()->drop(e->end);
    free(e->text);
    free(e);
}

void ms__event_number(ms_pending *e, const void *step, int number)
{
    e->step = step;
    e->number = number;
}

// The retirement of a record counts as a wait: afterwards the record's memory may be in use again.
static void note_record_wait(const ms_pending *e)
{
    if (MS_UNLIKELY(e->step != NULL)) ms__stream_note_wait(e->step, e->number);
}

// ---- work on a GPU ----

void ms__queued(int device, int stream, void *end)
{
    if (!running || running->end) {  // no record is running, or it has an event already
        ms__cuda()->drop(end);
        return;
    }
    running->device = device;
    running->gpu_stream = stream;
    running->end = end;
}

ms_status ms__event_join(ms_pending *e)
{
    if (!e || !ms__event_done(e) || !e->end || e->joined) return MS_OK;
    e->joined = true;
    return ms__cuda()->stream_wait(ms__index(e->device), MS_STREAM_COMPUTE, e->end);
}

bool ms__event_reached(ms_pending *e)
{
    return !e || (ms__event_done(e) && (!e->end || e->joined || ms__cuda()->done(e->end) != 0));
}

bool ms__event_on(const ms_pending *e, ms_stream_kind kind) { return e && e->kind == kind; }
void ms__event_hold(ms_pending *e)
{
    if (e) e->holders++;
}
void ms__event_unhold(ms_pending *e)
{
    if (e) e->holders--;
}

static void drop_waits(ms_pending **waits, int n)
{
    for (int i = 0; i < n; i++) ms__event_release(waits[i]);
    free(waits);
}

static void recycle_record(ms_record *r)
{
    if (!MS_RECYCLE) {
        free(r);
        return;
    }
    r->next = queues.spare;
    queues.spare = r;
}

ms_status ms__launch(ms_stream *s, ms_record_fn fn, ms_retire_fn retire, const void *arg, size_t bytes,
                     ms_pending **event)
{
    if (bytes > ARG_BYTES)
        return ms__fail(MS_EINVAL, "ms__launch: the argument block has %zu bytes, expected at most %d", bytes,
                        ARG_BYTES);
    if (s->kind == MS_STREAM_COMPUTE) {
        _Alignas(16) char block[ARG_BYTES];
        memcpy(block, arg, bytes);
        ms_status status = fn(block);
        if (retire) retire(block, status);
        if (event) *event = NULL;
        return status;
    }
    if (!s->started) MS_TRY(start_stream(s));
    ms_record *r = queues.spare;
    if (r) queues.spare = r->next;
    else r = malloc(sizeof *r);
    ms_pending *e = calloc(1, sizeof *e);
    if (!r || !e) {
        if (r) recycle_record(r);
        free(e);
        return ms__no_memory(sizeof *r + sizeof *e, "stream", "a record");
    }
    e->refs = 1;
    e->kind = s->kind;
    e->epoch = ms__stream_observer.epoch();
    r->fn = fn;
    r->retire = retire;
    r->event = e;
    r->waits = s->waits;
    r->n_waits = s->n_waits;
    r->next = NULL;
    memcpy(r->arg, arg, bytes);
    s->waits = NULL;
    s->n_waits = s->cap_waits = 0;
    if (event) *event = ms__event_retain(e);
    atomic_fetch_add_explicit(&queues.n_queued, 1, memory_order_relaxed);
    pthread_mutex_lock(&queues.lock);
    if (s->last) s->last->next = r;
    else s->first = r;
    s->last = r;
    pthread_cond_signal(&s->work_there);
    pthread_mutex_unlock(&queues.lock);
    return MS_OK;
}

bool ms__event_done(ms_pending *e) { return !e || atomic_load_explicit(&e->done, memory_order_acquire); }

static void retire(ms_record *r)
{
    note_record_wait(r->event);
    if (r->retire) r->retire(r->arg, r->event->status);
    drop_waits(r->waits, r->n_waits);
    ms__event_release(r->event);
    recycle_record(r);
}

// Retires the records of `unjoined` for whose GPU work the compute stream waits already, or that have no holder left.
static void retire_joined(void)
{
    for (ms_record **at = &queues.unjoined; *at;) {
        ms_record *r = *at;
        if (!r->event->joined && r->event->holders > 0) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        (void)ms__event_join(r->event);
        retire(r);
    }
}

void ms__stream_reap(void)
{
    if (MS_UNLIKELY(queues.unjoined != NULL)) retire_joined();
    if (MS_LIKELY(atomic_load_explicit(&queues.n_finished, memory_order_acquire) == 0)) return;
    pthread_mutex_lock(&queues.lock);
    ms_record *r = queues.finished;
    queues.finished = queues.finished_last = NULL;
    atomic_store_explicit(&queues.n_finished, 0, memory_order_relaxed);
    pthread_mutex_unlock(&queues.lock);
    while (r) {
        ms_record *next = r->next;
        if (MS_UNLIKELY(r->event->end != NULL)) {
            r->next = queues.unjoined;
            queues.unjoined = r;
        } else retire(r);
        r = next;
    }
    if (MS_UNLIKELY(queues.unjoined != NULL)) retire_joined();
}

// Waits for e, or for all queued records if e is NULL.
static ms_status wait_for_record(ms_pending *e)
{
    MS_BUSY;
    // Yield first: the worker may need this core. Sleep if the wait takes longer.
    int64_t since = 0;
    for (;;) {
        if (e ? ms__event_done(e) : atomic_load_explicit(&queues.n_queued, memory_order_acquire) == 0) return MS_OK;
        MS_TRY(ms__check_interrupt());
        if (MS_UNLIKELY(ms__collectives_queued > 0)) MS_TRY(ms__stream_observer.check());
        int64_t now = ms__now_ns();
        if (!since) since = now;
        if (now - since < 50 * 1000) {
            sched_yield();
            continue;
        }
        if (now - since < 2000 * 1000) {
            ms__nap(20 * 1000);
            continue;
        }
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 5 * 1000 * 1000;  // after that, check for an interrupt again
        if (until.tv_nsec >= 1000000000L) {
            until.tv_nsec -= 1000000000L;
            until.tv_sec++;
        }
        pthread_mutex_lock(&queues.lock);
        if (!(e ? ms__event_done(e) : atomic_load(&queues.n_queued) == 0))
            pthread_cond_timedwait(&queues.work_done, &queues.lock, &until);
        pthread_mutex_unlock(&queues.lock);
    }
}

ms_status ms__event_wait(ms_pending *e)
{
    if (!e) return MS_OK;
    e->refs++;  // reaping may release the last other reference
    static const char *const names[] = { "", "waiting for the gather queue", "waiting for the reduce queue",
                                         "waiting for the copy queue" };
    MS_RANGE(MS_RANGE_WAIT, names[e->kind], NULL);
    if (!ms__event_done(e)) atomic_store_explicit(ms__engine_waits, (int)e->kind, memory_order_release);
    note_record_wait(e);
    ms_status status = wait_for_record(e);
    atomic_store_explicit(ms__engine_waits, -1, memory_order_release);
    if (status == MS_OK) status = ms__event_join(e);
    ms__stream_reap();
    if (status == MS_OK && e->status != MS_OK) {
        status = ms__fail(e->status, "%s", e->text ? e->text : "queued work failed");
        if (status == MS_ECOMM) ms__stream_observer.reported(e->epoch, e->text);
    }
    ms__event_release(e);
    return status;
}

ms_status ms__stream_wait(ms_stream *s, ms_pending *e)
{
    if (!e) return MS_OK;
    if (s->kind == MS_STREAM_COMPUTE) return ms__event_wait(e);
    if (ms__event_done(e) && e->status == MS_OK) return MS_OK;
    MS_TRY(ms__grow(&s->waits, &s->cap_waits, s->n_waits, sizeof *s->waits, "stream", "events"));
    s->waits[s->n_waits++] = ms__event_retain(e);
    return MS_OK;
}

ms_status ms__streams_drain(void)
{
    ms_status status = wait_for_record(NULL);
    ms__stream_reap();
    return status;
}

void ms__streams_join(void)
{
    for (ms_record *r = queues.unjoined; r; r = r->next) (void)ms__event_join(r->event);
    ms__stream_reap();
}

// Makes waiting records stop when the process ends.
__attribute__((destructor)) static void streams_end(void) { atomic_store(&queues.cancelled, true); }
