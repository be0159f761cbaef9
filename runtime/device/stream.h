// SPDX-License-Identifier: MIT
// device/stream.h -- streams and events. The CPU's compute stream runs each record immediately on the calling thread;
// the gather, reduce and copy streams are queues, each with a worker thread.
//
// Only the engine thread changes reference counts: it drops a record's references when it reaps the record
// (ms__stream_reap, which every wait calls).
#ifndef MS_STREAM_H
#define MS_STREAM_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { MS_STREAM_COMPUTE, MS_STREAM_GATHER, MS_STREAM_REDUCE, MS_STREAM_COPY, MS_STREAMS } ms_stream_kind;
typedef struct ms_stream ms_stream;

// An event, reference-counted: pending until its record has run. It may carry a failure, which ms__event_wait returns.
// NULL is an event that is complete: the compute stream returns NULL, and all functions here but ms__event_number
// accept it.
typedef struct ms_pending ms_pending;

// A record consists of a function, a copied argument block of at most 192 bytes, and a function that retires it on the
// engine thread (drops references). fn runs on the stream's thread. It must not start a parallel loop, and must poll
// ms__stream_cancelled() in loops that may wait.
typedef ms_status (*ms_record_fn)(void *arg);
typedef void (*ms_retire_fn)(void *arg, ms_status result);

ms_stream *ms__stream(int device, ms_stream_kind kind);
ms_status ms__launch(ms_stream *s, ms_record_fn fn, ms_retire_fn retire, const void *arg, size_t bytes,
                     ms_pending **event /* may be NULL */);
// Makes later records of s wait for e; on the compute stream, waits at once.
ms_status ms__stream_wait(ms_stream *s, ms_pending *e);
// Blocks the engine thread until e is done, or until an interrupt (MS_EINTR). Returns the record's failure with its
// message.
ms_status ms__event_wait(ms_pending *e);
bool ms__event_done(ms_pending *e);
ms_pending *ms__event_retain(ms_pending *e);
void ms__event_release(ms_pending *e);
void ms__event_number(ms_pending *e, const void *step, int number);  // gives e its number in a captured step
// Called when the engine thread has waited for an event of a captured step. Set by device/capture.c.
extern void (*ms__stream_note_wait)(const void *step, int number);
// Work on a GPU. A record may only queue its work there: its function then calls ms__queued with `end`, a device event
// (ms_cuda_table.record) after that work, which the pending event owns from then on. The pending event is done as soon
// as the record has run. Waiting for it makes the compute stream of `device` wait for `end`, not the host: whatever
// uses the bytes later, also a copy to the CPU, is ordered by that stream.
void ms__queued(int device, int stream, void *end);
// Makes the compute stream wait for the work that e's record has queued on a GPU; does nothing if e is not done.
ms_status ms__event_join(ms_pending *e);
// Whether all work of e is complete, also on a GPU.
bool ms__event_reached(ms_pending *e);
// Whether e's record runs on a stream of this kind: later work of that stream runs after it.
bool ms__event_on(const ms_pending *e, ms_stream_kind kind);
// Registers a holder that will wait for e. Until it has waited, a record with work on a GPU is not retired: retiring it
// makes the compute stream, in whose order its memory may be reused, wait for that work.
void ms__event_hold(ms_pending *e);
void ms__event_unhold(ms_pending *e);
void ms__stream_reap(void);         // retires the records that have finished
ms_status ms__streams_drain(void);  // waits until every record has run
void ms__streams_join(void);        // retires all records that have run, after ms__event_join: their memory is freed
bool ms__stream_cancelled(void);    // the process is ending: waits must stop

// Hooks for collectives: comm/error.c sets them when the library is loaded.
typedef struct {
    uint64_t (*epoch)(void);  // stored with every record at its launch
    // Called when waiting for a record of this epoch has returned MS_ECOMM.
    void (*reported)(uint64_t epoch, const char *text);
    // Called repeatedly while the engine thread waits for a stream or a GPU. Fails if that wait cannot end.
    ms_status (*check)(void);
} ms_stream_observer;
extern ms_stream_observer ms__stream_observer;
// Number of collectives with peers' GPUs that this rank's GPUs have not completed, as far as the engine thread knows.
extern int ms__collectives_queued;

#ifndef __cplusplus
extern _Atomic int *ms__engine_waits;  // the kind of stream that the engine thread waits for; -1: none
#endif

#ifdef __cplusplus
}
#endif

#endif
