// SPDX-License-Identifier: MIT
// base/trace.h -- what ran when: named ranges of time on the script's thread and on the queues' workers, while a script
// records.
#ifndef MS_TRACE_H
#define MS_TRACE_H

#include <stdbool.h>
#include "base/base.h"

extern int32_t ms__trace_on;  // something is recorded
// Written by the engine thread, read by all.
static inline bool ms__tracing(void) { return MS_UNLIKELY(__atomic_load_n(&ms__trace_on, __ATOMIC_RELAXED) != 0); }

// Bytes allocated on all devices, which a range reports: device/pool.c sets it when the library is loaded.
extern double (*ms__trace_memory)(void);

// A range that is open; nothing when none is recorded.
typedef struct {
    int64_t from;  // 0: not recorded
    double allocated;
    const char *name, *detail;
    ms_range_kind kind;
} ms_open_range;

// name: of a literal or an operator's; detail: a unit's name, shapes; copied at the end, NULL: none.
void ms__range_open(ms_open_range *r, ms_range_kind kind, const char *name, const char *detail);
void ms__range_close(ms_open_range *r);
// A copy that lives as long as what is recorded now; engine thread and workers.
const char *ms__trace_text(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
bool ms__trace_shapes(void);  // the script asked for shapes
// The script's loop over ms.steps is at this step; -1: past it.
void ms__trace_step(int64_t step);
// Writes what ms_trace_save_at_exit wants written: for ends of a process that no atexit handler sees.
void ms__trace_save_now(void);
// Which queue this thread works for: lanes of the picture. The script's thread is 0.
void ms__trace_lane(int lane);

static inline void ms__range_end(ms_open_range *r)
{
    if (MS_UNLIKELY(r->from != 0)) ms__range_close(r);
}

// From here to the end of the block; one a block. name and detail are evaluated while something is recorded only.
#define MS_RANGE(kind, name, detail) MS_RANGE_IF(true, kind, name, detail)
#define MS_RANGE_IF(when, kind, name, detail)                         \
    __attribute__((cleanup(ms__range_end))) ms_open_range range_here; \
    range_here.from = 0;                                              \
    if (ms__tracing() && (when)) ms__range_open(&range_here, (kind), (name), (detail))

#endif
