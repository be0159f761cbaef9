// SPDX-License-Identifier: MIT
// base/activity.h -- whether the script's thread makes progress in the engine. Peers read this struct
// (comm/process/peer.c): at the start and end of a job they wait for a rank that computes, and give up on a rank that
// only executes Lua.
#ifndef MS_ACTIVITY_H
#define MS_ACTIVITY_H

#include <stdint.h>

typedef struct {
    uint64_t calls;    // number of long engine calls begun
    int32_t inside;    // nesting depth of long engine calls
    int32_t joined;    // 0: before dist.init, or after it has failed; 1: in dist.init; 2: it has succeeded
    uint64_t error;    // hash of the error that ended the script; 0 if none did
    int64_t error_at;  // when `error` was set (ms__now_ns)
} ms_activity;
extern ms_activity *ms__activity;

static inline int ms__busy_begin(void)
{
    __atomic_store_n(&ms__activity->calls, ms__activity->calls + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&ms__activity->inside, ms__activity->inside + 1, __ATOMIC_RELAXED);
    return 0;
}
static inline void ms__busy_end(int *begun)
{
    (void)begun;
    __atomic_store_n(&ms__activity->inside, ms__activity->inside - 1, __ATOMIC_RELAXED);
}

// Marks the engine thread as busy until the end of the block; at most one per block.
#define MS_BUSY __attribute__((cleanup(ms__busy_end))) int busy_here __attribute__((unused)) = ms__busy_begin()

#endif
