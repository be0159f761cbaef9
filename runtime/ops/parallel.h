// SPDX-License-Identifier: MIT
// ops/parallel.h -- loops on this rank's threads.
#ifndef MS_PARALLEL_H
#define MS_PARALLEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Runs body over [0, n) in fixed blocks on this rank's threads; small n stays on the caller.
// Blocks don't depend on the number of threads, so neither do the bits of a reduction made of them.
typedef void (*ms_range_fn)(void *arg, int64_t first, int64_t last, int64_t block);
void ms__parallel(int64_t n, int64_t block, ms_range_fn fn, void *arg);
// The same over n tasks that are worth a thread each: fn(arg, k, k + 1, k).
void ms__parallel_tasks(int64_t n, ms_range_fn fn, void *arg);
int ms__thread_num(void);  // inside fn: which of ms_num_threads() it is, from 0

#ifdef __cplusplus
}
#endif

#endif
