// SPDX-License-Identifier: MIT
// base/trace.h -- the profiler: named ranges of time on the script's thread and on the workers of the CPU's streams.
#ifndef MS_TRACE_H
#define MS_TRACE_H

#include <stdbool.h>
#include "base/base.h"

extern int32_t ms__trace_on;  // 1 while a recording is active: written by the engine thread, read by all threads
static inline bool ms__tracing(void) { return MS_UNLIKELY(__atomic_load_n(&ms__trace_on, __ATOMIC_RELAXED) != 0); }

// Returns the bytes allocated on all devices, and stores them by kind unless kinds is NULL. device/pool.c sets this
// pointer when the library is loaded.
extern double (*ms__trace_memory)(double *kinds);

// The job's clock is rank 0's clock. ahead[k]: by how much it was ahead of this process's clock at time at[k]. n:
// number of measurements; two of them also give the drift. In ns.
typedef struct {
    int64_t at[2], ahead[2];
    int n;
} ms_job_clock;
extern ms_job_clock ms__job_clock;
int64_t ms__job_time(int64_t ns);  // converts a time of this process's clock to the job's clock

// The key of the job's common trace file; "": this process has joined no job. comm/job/start.c sets it.
extern char ms__trace_key[24];

// A range that has begun and not ended.
typedef struct {
    int64_t from;  // start time; 0: the range is not recorded
    double allocated;
    const char *name, *detail;
    ms_range_kind kind;
    const ms_collective_range *collective;  // NULL: none; to be set by the owner of the range
} ms_open_range;

// Begins a range. name is not copied: it must be a literal or an operator's name. detail (a unit's name, shapes) is
// copied when the range ends; it may be NULL.
void ms__range_open(ms_open_range *r, ms_range_kind kind, const char *name, const char *detail);
void ms__range_close(ms_open_range *r);
// Formats a text, which is freed with the last recording; "" if none is active. For the engine thread and workers.
const char *ms__trace_text(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
bool ms__trace_shapes(void);                // whether an active recording includes shapes
const char *ms__range_kind_name(int kind);  // NULL if there is none
const char *ms__range_lane_name(int lane);
// Ends the range of the previous step and begins that of `step`; -1: the loop over ms.steps has ended.
void ms__trace_step(int64_t step);
// Does the work of ms_trace_save_at_exit, for exits that skip atexit handlers.
void ms__trace_save_now(void);
// Sets this thread's lane in the trace: 0 for the script's thread, 1 and up for the CPU's streams.
void ms__trace_lane(int lane);

static inline void ms__range_end(ms_open_range *r)
{
    if (MS_UNLIKELY(r->from != 0)) ms__range_close(r);
}

// Records a range until the end of the block; at most one per block. name and detail are evaluated only while
// recording.
#define MS_RANGE(kind, name, detail) MS_RANGE_IF(true, kind, name, detail)
#define MS_RANGE_IF(when, kind, name, detail)                         \
    __attribute__((cleanup(ms__range_end))) ms_open_range range_here; \
    range_here.from = 0;                                              \
    if (ms__tracing() && (when)) ms__range_open(&range_here, (kind), (name), (detail))

#endif
