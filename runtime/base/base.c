// SPDX-License-Identifier: MIT
// base/base.c -- status and error text, clock, signals, interned strings, growing arrays, numbers from the environment.
#define _GNU_SOURCE
#include "base/activity.h"
#include "base/base.h"
#include "base/env.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum { TEXT_SIZE = 4096 };

// The latest error of a thread.
static __thread struct {
    char text[TEXT_SIZE];
    ms_status code;
} failure;

ms_state ms__state = { .grad_mode = 1, .dist_failures = -1, .gc_limit = 64 << 20 };

typedef struct string {
    struct string *next;
    char text[];
} string;

static struct {
    ms_activity activity;    // used until ms__activity_share makes a page that peers can read
    string *interned[1024];  // by hash
} process;

ms_activity *ms__activity = &process.activity;

ms_state *ms_get_state(void) { return &ms__state; }
const char *ms_error(void) { return failure.text; }
int ms_error_code(void) { return failure.code; }
int ms_version(void) { return MS_VERSION; }
const char *ms_release_name(void) { return MS_RELEASE; }
void ms__clear_error(void)
{
    failure.text[0] = 0;
    failure.code = MS_OK;
}

ms_status ms__fail(ms_status code, const char *fmt, ...)
{
    va_list ap;
    char fresh[TEXT_SIZE];  // a buffer of its own, because an argument may point into the old text
    va_start(ap, fmt);
    vsnprintf(fresh, sizeof fresh, fmt, ap);
    va_end(ap);
    memcpy(failure.text, fresh, sizeof failure.text);
    failure.code = code;
    return code;
}

ms_status ms__no_memory(size_t bytes, const char *who, const char *fmt, ...)
{
    char what[TEXT_SIZE / 2];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return ms__fail(MS_ENOMEM, "%s: no memory for %zu bytes (%s)", who, bytes, what);
}

ms_status ms__fail_prefix(const char *fmt, ...)
{
    va_list ap;
    char fresh[TEXT_SIZE];
    va_start(ap, fmt);
    int n = vsnprintf(fresh, sizeof fresh, fmt, ap);
    va_end(ap);
    if (n < 0) n = 0;
    if (n < TEXT_SIZE) snprintf(fresh + n, (size_t)(TEXT_SIZE - n), "%s", failure.text);
    memcpy(failure.text, fresh, sizeof failure.text);
    return failure.code;
}

int64_t ms__now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void ms__nap(int64_t ns)
{
    struct timespec t = { ns / 1000000000, ns % 1000000000 };
    nanosleep(&t, NULL);
}

double ms_time(void) { return (double)ms__now_ns() * 1e-9; }

// ---- interrupt --------------------------------------------------------------------------------

void ms_interrupt(void) { __atomic_store_n(&ms__state.interrupted, 1, __ATOMIC_RELAXED); }

ms_status ms__check_interrupt(void)
{
    if (MS_LIKELY(!__atomic_load_n(&ms__state.interrupted, __ATOMIC_RELAXED))) return MS_OK;
    __atomic_store_n(&ms__state.interrupted, 0, __ATOMIC_RELAXED);
    return ms__fail(MS_EINTR, "interrupted");
}

static struct {
    struct sigaction previous;
    int catching;
    volatile int64_t first;
} sigint;

// Requests an interrupt. Kills the process if an earlier request has been pending for more than a second, because then
// no code is polling for interrupts. Pressing Ctrl-C twice in quick succession does not kill it.
static void on_sigint(int sig)
{
    int64_t now = ms__now_ns();
    if (!ms__state.interrupted) {
        sigint.first = now;
    } else if (now - sigint.first > 1000000000) {
        signal(sig, SIG_DFL);
        raise(sig);
    }
    ms__state.sigints++;
    ms_interrupt();
}

void ms_catch_sigint(int on)
{
    if (on && !sigint.catching) {
        struct sigaction sa = { .sa_handler = on_sigint };
        sigemptyset(&sa.sa_mask);
        sigaction(SIGINT, &sa, &sigint.previous);
        sigint.catching = 1;
    } else if (!on && sigint.catching) {
        sigaction(SIGINT, &sigint.previous, NULL);
        sigint.catching = 0;
    }
}

// ---- interned strings -------------------------------------------------------------------------

const char *ms__intern(const char *s)
{
    string **b = &process.interned[ms__hash(s) % MS_COUNT(process.interned)];
    for (string *e = *b; e; e = e->next)
        if (strcmp(e->text, s) == 0) return e->text;
    string *e = malloc(sizeof *e + strlen(s) + 1);
    if (!e) return "";
    strcpy(e->text, s);
    e->next = *b;
    *b = e;
    return e->text;
}

ms_status ms__grow(void *array, int *capacity, int n, size_t size, const char *who, const char *what)
{
    void *p;
    if (MS_LIKELY(n < *capacity)) return MS_OK;
    int more = *capacity ? 2 * *capacity : 16;
    memcpy(&p, array, sizeof p);
    if (!(p = realloc(p, (size_t)more * size))) return ms__no_memory((size_t)more * size, who, "%s", what);
    memcpy(array, &p, sizeof p);
    *capacity = more;
    return MS_OK;
}

void ms__append(char *to, size_t n, const char *fmt, ...)
{
    size_t at = strlen(to);
    va_list args;
    va_start(args, fmt);
    vsnprintf(to + at, n - at, fmt, args);
    va_end(args);
}

const char *ms__shape_text(int ndim, const int64_t *shape)
{
    static __thread char ring[8][128];
    static __thread int turn;
    char *s = ring[turn++ & 7];
    int n = 0;
    s[n++] = '[';
    for (int d = 0; d < ndim && n < 100; d++)
        n += snprintf(s + n, (size_t)(128 - n), d ? ", %lld" : "%lld", (long long)shape[d]);
    s[n++] = ']';
    s[n] = 0;
    return s;
}

// ---- environment --------------------------------------------------------------------------------

ms_status ms__env_number(const char *name, const char *expected, double *value)
{
    const char *s = getenv(name);
    if (!s || !*s) return MS_OK;
    char *end;
    double v = strtod(s, &end);
    if (*end || !(v > 0)) return ms__fail(MS_EINVAL, "%s is '%s', expected %s", name, s, expected);
    *value = v;
    return MS_OK;
}
