// SPDX-License-Identifier: MIT
// planted.c -- faults by which scripts/test checks that a sanitizer or valgrind works. The file is built with the
// sanitizer's flags. planted.lua and planted_fault.lua call one fault per process, which must end with a report.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define FAULT __attribute__((visibility("default"), noinline))

FAULT int leak(int n)
{
    char *volatile p = malloc(1000);
    p[0] = (char)n;
    int seen = p[0];
    p = NULL;
    return seen;
}

FAULT int overflow(int n)
{
    char *volatile p = malloc(16);
    memset(p, n, 16);
    int beyond = p[16 + n];
    free(p);
    return beyond;
}

FAULT int use_after_free(int n)
{
    char *volatile p = malloc(16);
    memset(p, n, 16);
    free(p);
    return p[n];
}

FAULT int undefined(int n) { return 1 << (n + 40); }

FAULT int uninitialised(int n)
{
    int *volatile p = malloc(4 * sizeof *p);
    int seen = p[n & 1] > 3 ? 1 : 2;
    free(p);
    return seen;
}

static int counter;

static void *count(void *arg)
{
    for (int k = 0; k < 100000; k++) counter++;
    return arg;
}

FAULT int race(int n)
{
    pthread_t other;
    if (pthread_create(&other, NULL, count, NULL)) return n;
    count(NULL);
    pthread_join(other, NULL);
    return counter;
}
