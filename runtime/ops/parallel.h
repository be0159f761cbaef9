// SPDX-License-Identifier: MIT
// ops/parallel.h -- loops on this rank's threads.
#ifndef MS_PARALLEL_H
#define MS_PARALLEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Runs fn over [0, n) in fixed blocks on this rank's threads; a small n stays on the calling thread.
// Blocks do not depend on the number of threads, so neither do the bits of a reduction over them.
typedef void (*ms_range_fn)(void *arg, int64_t first, int64_t last, int64_t block);
void ms__parallel(int64_t n, int64_t block, ms_range_fn fn, void *arg);
// The same over n tasks large enough for a thread each: fn(arg, k, k + 1, k).
void ms__parallel_tasks(int64_t n, ms_range_fn fn, void *arg);
int ms__thread_num(void);  // inside fn: the thread's number, from 0 and below ms_num_threads()

#ifdef __cplusplus
}
#endif

#endif
