// SPDX-License-Identifier: MIT
// device/stream.h -- streams and events. The CPU's compute stream runs a record at once on the calling
// thread; its gather, reduce and copy streams are worker queues. An event waits for the latest record
// at the time of the call, never for one still to come.
//
// Only the engine thread touches reference counts: a record's references are dropped when the engine
// thread reaps it (ms__stream_reap, called by waits and now and then by dispatch).
#ifndef MS_STREAM_H
#define MS_STREAM_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { MS_STREAM_COMPUTE, MS_STREAM_GATHER, MS_STREAM_REDUCE, MS_STREAM_COPY, MS_STREAMS } ms_stream_kind;
typedef struct ms_stream ms_stream;

// Reference-counted; pending until its record has run. An event may carry a failure, which waiting reports.
// NULL is an event long past: what the compute stream hands out, and what every function here takes.
typedef struct ms_pending ms_pending;

// A launch is self-contained: function, argument block by value (<= 192 bytes), and what to do on the
// engine thread when it has run (drop references). fn runs on the stream's thread, never opens an
// parallel loop, and polls ms__stream_cancelled() in loops that may wait.
typedef ms_status (*ms_record_fn)(void *arg);
typedef void (*ms_retire_fn)(void *arg, ms_status result);

ms_stream *ms__stream(int device, ms_stream_kind kind);
ms_status ms__launch(ms_stream *s, ms_record_fn fn, ms_retire_fn retire, const void *arg, size_t bytes,
                     ms_pending **event /* may be NULL */);
// Makes later records of s wait for e.
ms_status ms__stream_wait(ms_stream *s, ms_pending *e);
// Blocks the engine thread (polling interrupt, deadline, progress). Returns the record's failure with its text.
ms_status ms__event_wait(ms_pending *e);
bool ms__event_done(ms_pending *e);
ms_pending *ms__event_retain(ms_pending *e);
void ms__event_release(ms_pending *e);  // NULL allowed
void ms__stream_reap(void);
ms_status ms__streams_drain(void);  // waits for everything queued
bool ms__stream_cancelled(void);    // the process ends: give up

// What collectives add to streams: comm/error.c sets it when the library is loaded.
typedef struct {
    uint64_t (*epoch)(void);                             // kept with every record that is launched
    void (*reported)(uint64_t epoch, const char *text);  // a wait returned MS_ECOMM of a record of this epoch
} ms_stream_observer;
extern ms_stream_observer ms__stream_observer;

#ifndef __cplusplus
extern _Atomic int *ms__engine_waits;  // stream kind the engine thread waits for, -1: none
#endif

#ifdef __cplusplus
}
#endif

#endif
