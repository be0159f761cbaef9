// SPDX-License-Identifier: MIT
// other_clock.c -- preloaded by specs: gives rank OTHER_CLOCK and all higher ranks a monotonic clock that is 5 s ahead
// and 1000 ppm fast, a worse case than the clock of another node.
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *t)
{
    static long long begun;
    int failed = (int)syscall(SYS_clock_gettime, id, t);
    const char *rank = getenv("PMIX_RANK"), *from = getenv("OTHER_CLOCK");
    if (id != CLOCK_MONOTONIC || failed || !rank || !from || atoi(rank) < atoi(from)) return failed;
    long long ns = t->tv_sec * 1000000000ll + t->tv_nsec;
    if (!begun) begun = ns;
    ns += 5000000000ll + (ns - begun) / 1000;
    t->tv_sec = ns / 1000000000;
    t->tv_nsec = ns % 1000000000;
    return 0;
}
