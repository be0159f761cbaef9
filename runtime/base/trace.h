// SPDX-License-Identifier: MIT
// base/trace.h -- the profiler: named ranges of time on the script's thread and on the queues' workers.
#ifndef MS_TRACE_H
#define MS_TRACE_H

#include <stdbool.h>
#include "base/base.h"

extern int32_t ms__trace_on;  // 1 while something is recorded: written by the engine thread, read by all threads
static inline bool ms__tracing(void) { return MS_UNLIKELY(__atomic_load_n(&ms__trace_on, __ATOMIC_RELAXED) != 0); }

// Returns the bytes allocated on all devices: device/pool.c sets it when the library is loaded.
extern double (*ms__trace_memory)(void);

// An open range.
typedef struct {
    int64_t from;  // 0: not recorded
    double allocated;
    const char *name, *detail;
    ms_range_kind kind;
} ms_open_range;

// name: not copied, so a literal or an operator's name. detail (a unit's name, shapes) is copied at the end; NULL:
// none.
void ms__range_open(ms_open_range *r, ms_range_kind kind, const char *name, const char *detail);
void ms__range_close(ms_open_range *r);
// A text that lives as long as the active recordings; for the engine thread and workers.
const char *ms__trace_text(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
bool ms__trace_shapes(void);  // some recording wants shapes
// The script's loop over ms.steps begins this step; -1: the loop has ended.
void ms__trace_step(int64_t step);
// Does the work of ms_trace_save_at_exit: for exits that skip atexit handlers.
void ms__trace_save_now(void);
// Sets this thread's lane in the trace: 0 the script's thread, from 1 the queues.
void ms__trace_lane(int lane);

static inline void ms__range_end(ms_open_range *r)
{
    if (MS_UNLIKELY(r->from != 0)) ms__range_close(r);
}

// A range until the end of the block; at most one per block. name and detail are evaluated only while recording.
#define MS_RANGE(kind, name, detail) MS_RANGE_IF(true, kind, name, detail)
#define MS_RANGE_IF(when, kind, name, detail)                         \
    __attribute__((cleanup(ms__range_end))) ms_open_range range_here; \
    range_here.from = 0;                                              \
    if (ms__tracing() && (when)) ms__range_open(&range_here, (kind), (name), (detail))

#endif
