// SPDX-License-Identifier: MIT
// comm/process/thread.c -- threads that watch the job.
#include <pthread.h>
#include <signal.h>
#include "comm/process/process.h"

bool ms__comm_thread(void *(*fn)(void *))
{
    sigset_t all, before;
    pthread_t t;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals must reach the engine thread
    bool started = pthread_create(&t, &small, fn, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small);
    return started;
}
