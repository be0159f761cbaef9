// SPDX-License-Identifier: MIT
// base/thread.h -- starts threads that block all signals: signals such as Ctrl-C must reach the engine thread.
#ifndef MS_THREAD_H
#define MS_THREAD_H

#include <pthread.h>
#include <signal.h>

// Returns 0 or an error number, as pthread_create does.
static inline int ms__thread_start(pthread_t *thread, void *(*fn)(void *), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

#endif
