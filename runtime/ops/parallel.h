// SPDX-License-Identifier: MIT
// ops/parallel.h -- loops on this rank's threads.
#ifndef MS_PARALLEL_H
#define MS_PARALLEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Runs fn over [0, n) in blocks on this rank's threads; a small n runs on the calling thread. The blocks, and so the
// result of a reduction over blocks, do not depend on the number of threads.
typedef void (*ms_range_fn)(void *arg, int64_t first, int64_t last, int64_t block);
void ms__parallel(int64_t n, int64_t block, ms_range_fn fn, void *arg);
// As ms__parallel, over n tasks, each large enough for a thread: calls fn(arg, k, k + 1, k).
void ms__parallel_tasks(int64_t n, ms_range_fn fn, void *arg);
int ms__thread_num(void);  // called inside fn: the number of this thread, from 0 to ms_num_threads() - 1

#ifdef __cplusplus
}
#endif

#endif
