// SPDX-License-Identifier: MIT
// comm/process/thread.h -- threads that watch the job.
#ifndef MS_COMM_PROCESS_THREAD_H
#define MS_COMM_PROCESS_THREAD_H

#include <stdbool.h>

// Starts a detached thread that receives no signals. False: no thread could start; a failed job then ends later.
bool ms__comm_thread(void *(*fn)(void *));

#endif
