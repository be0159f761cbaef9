// SPDX-License-Identifier: MIT
// base/trace.c -- the profiler's recorder.
//
// A range is recorded when it ends, so on each thread inner ranges come before outer ones. Ranges of all threads share
// one list, whose capacity the script chooses; ranges that do not fit are only counted. Several recordings may be
// active at a time (one of the whole script, one of a part): each receives the ranges that began during it. While
// nothing is recorded, a range costs a load and a branch.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/trace.h"
#include "base/utf8.h"

typedef struct recording {
    ms_trace trace;  // first member: the public part
    int64_t room, n, dropped;
    int64_t begun;
    int what;
    bool active;
    struct recording *next;
} recording;

int32_t ms__trace_on;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static recording *active;  // list of active recordings; protected by lock
static int wanted;         // MS_TRACE_* bits of the active recordings; engine thread only
static __thread int lane;

void ms__trace_lane(int k) { lane = k; }
bool ms__trace_shapes(void) { return wanted & MS_TRACE_SHAPES; }
int ms_trace_wanted(void) { return wanted; }

// ---- texts ------------------------------------------------------------------------------------

// Interned texts of all recordings, freed with the last recording: a later recording includes no range that began
// before that recording, so none that refers to these texts.
typedef struct text {
    struct text *next;
    char s[];
} text;
static text *texts[4096];
static int n_recordings;

// Returns a copy of s that lives as long as the active recordings. The caller must hold the lock.
static const char *keep(const char *s)
{
    if (!s || !*s) return "";
    text **b = &texts[ms__hash(s) % (uint32_t)MS_COUNT(texts)];
    for (text *t = *b; t; t = t->next)
        if (strcmp(t->s, s) == 0) return t->s;
    size_t n = strlen(s) + 1;
    text *t = malloc(sizeof *t + n);
    if (!t) return "";
    memcpy(t->s, s, n);
    t->next = *b;
    *b = t;
    return t->s;
}

static void drop_texts(void)
{
    for (int k = 0; k < MS_COUNT(texts); k++)
        while (texts[k]) {
            text *t = texts[k];
            texts[k] = t->next;
            free(t);
        }
}

const char *ms__trace_text(const char *fmt, ...)
{
    char s[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(s, sizeof s, fmt, ap);
    va_end(ap);
    pthread_mutex_lock(&lock);
    const char *kept = active ? keep(s) : "";
    pthread_mutex_unlock(&lock);
    return kept;
}

// ---- ranges -----------------------------------------------------------------------------------

// Only the engine thread allocates, so only its ranges report memory; other threads report 0.
static double no_memory(void) { return 0; }
double (*ms__trace_memory)(void) = no_memory;
static double allocated(void) { return lane == 0 ? ms__trace_memory() : 0; }

void ms__range_open(ms_open_range *r, ms_range_kind kind, const char *name, const char *detail)
{
    r->kind = kind;
    r->name = name;
    r->detail = detail;
    r->allocated = allocated();
    r->from = ms__now_ns();
}

static void record(const ms_open_range *o, bool copy_name)
{
    int64_t end = ms__now_ns();
    pthread_mutex_lock(&lock);
    for (recording *r = active; r; r = r->next) {
        if (o->from < r->begun || (o->kind == MS_RANGE_MODULE && !(r->what & MS_TRACE_MODULES))) continue;
        if (r->n == r->room) {
            r->dropped++;
            continue;
        }
        double after = allocated();
        bool detailed = o->kind != MS_RANGE_OP || r->what & MS_TRACE_SHAPES;
        r->trace.ranges[r->n++] = (ms_range) { .name = copy_name ? keep(o->name) : o->name,
                                               .detail = detailed ? keep(o->detail) : "",
                                               .start = (double)o->from * 1e-9,
                                               .duration = (double)(end - o->from) * 1e-9,
                                               .allocated = after,
                                               .memory = after - o->allocated,
                                               .kind = o->kind,
                                               .lane = lane };
    }
    pthread_mutex_unlock(&lock);
}

void ms__range_close(ms_open_range *r) { record(r, false); }

void ms__trace_step(int64_t step)
{
    static ms_open_range open;
    ms__range_end(&open);
    open.from = 0;
    if (step >= 0 && ms__tracing())
        ms__range_open(&open, MS_RANGE_STEP, ms__trace_text("step %lld", (long long)step), NULL);
}

double ms_range_open(double *before)
{
    if (!ms__tracing()) return 0;
    *before = allocated();
    return (double)ms__now_ns();
}

void ms_range_close(double from, double before, int kind, const char *name, const char *detail)
{
    if (from != 0) record(&(ms_open_range) { (int64_t)from, before, name, detail, (ms_range_kind)kind }, true);
}

// ---- recordings -------------------------------------------------------------------------------

ms_trace *ms_trace_start(double room, int what)
{
    if (!(room >= 1 && room <= 1e9))
        return ms__null(ms__fail(MS_EINVAL, "profiler: limit is %.17g ranges, expected a number from 1 to 1e9", room));
    recording *r = calloc(1, sizeof *r);
    if (r) r->trace.ranges = malloc((size_t)room * sizeof *r->trace.ranges);
    if (!r || !r->trace.ranges) {
        free(r);
        ms__no_memory((size_t)room * sizeof(ms_range), "profiler", "%.0f ranges", room);
        return NULL;
    }
    r->room = (int64_t)room;
    r->what = what;
    r->active = true;
    pthread_mutex_lock(&lock);
    r->begun = ms__now_ns();
    r->next = active;
    active = r;
    n_recordings++;
    pthread_mutex_unlock(&lock);
    wanted |= what;
    __atomic_store_n(&ms__trace_on, 1, __ATOMIC_RELAXED);
    return &r->trace;
}

void ms_trace_stop(ms_trace *t)
{
    recording *r = (recording *)t;
    if (!r->active) return;
    pthread_mutex_lock(&lock);
    recording **at = &active;
    while (*at != r) at = &(*at)->next;
    *at = r->next;
    wanted = 0;
    for (recording *k = active; k; k = k->next) wanted |= k->what;
    __atomic_store_n(&ms__trace_on, active != NULL, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    r->active = false;
    // A script may keep many profiles: free the unused capacity of this one.
    ms_range *fitting = realloc(r->trace.ranges, (size_t)(r->n ? r->n : 1) * sizeof *fitting);
    if (fitting) r->trace.ranges = fitting;
    r->trace.n = (double)r->n;
    r->trace.dropped = (double)r->dropped;
    r->trace.begun = (double)r->begun * 1e-9;
    r->trace.ended = (double)ms__now_ns() * 1e-9;
}

void ms_trace_free(ms_trace *t)
{
    if (!t) return;
    ms_trace_stop(t);
    pthread_mutex_lock(&lock);
    if (--n_recordings == 0) drop_texts();
    pthread_mutex_unlock(&lock);
    free(t->ranges);
    free(t);
}

// ---- Chrome's trace format ---------------------------------------------------------------------

// The format is defined in the document "Trace Event Format"; chrome://tracing and ui.perfetto.dev display it.

// Writes a JSON string. Names may contain any bytes; invalid UTF-8 is replaced by U+FFFD.
static void put_string(FILE *f, const char *s)
{
    const unsigned char *p = (const unsigned char *)s, *end = p + strlen(s), *wrong = ms__utf8_error(p, end);
    fputc('"', f);
    for (; p < end; p++) {
        if (p == wrong) {
            fputs("\\ufffd", f);
            wrong = ms__utf8_error(p + 1, end);
        } else if (*p == '"' || *p == '\\') {
            fprintf(f, "\\%c", *p);
        } else if (*p < 0x20 || *p == 0x7f) {
            fprintf(f, "\\u%04x", *p);
        } else {
            fputc(*p, f);
        }
    }
    fputc('"', f);
}

static const char *const categories[] = { "operator", "backward",  "module", "collective", "wait",
                                          "fsdp",     "optimizer", "step",   "user" };
static const char *const lanes[] = { "script", "gather queue", "reduce queue", "copy queue" };

const char *ms_range_category(int kind)
{
    return kind >= 0 && kind < (int)MS_COUNT(categories) ? categories[kind] : "?";
}
const char *ms_range_lane(int k) { return k >= 0 && k < MS_COUNT(lanes) ? lanes[k] : "?"; }

ms_status ms_trace_save(const ms_trace *t, const char *path, int rank)
{
    // Without O_NONBLOCK, opening a pipe without a reader would block; with it, that is an error.
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0666);
    if (fd >= 0) fcntl(fd, F_SETFL, O_WRONLY);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    if (!f && fd >= 0) close(fd);
    if (!f) return ms__fail(MS_EIO, "profiler: cannot write '%s': %s", path, strerror(errno));
    fprintf(f,
            "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
            "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d\"}}",
            rank, rank);
    for (int k = 0; k < MS_COUNT(lanes); k++)
        fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}", rank,
                k, lanes[k]);
    for (int64_t k = 0; k < (int64_t)t->n; k++) {
        const ms_range *r = &t->ranges[k];
        // Times are microseconds of the machine's monotonic clock, so traces of ranks on one node share a time line.
        fprintf(f, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"cat\":\"%s\",\"name\":", rank,
                (int)r->lane, r->start * 1e6, r->duration * 1e6, ms_range_category(r->kind));
        put_string(f, r->name);
        if (*r->detail) {
            fputs(",\"args\":{\"detail\":", f);
            put_string(f, r->detail);
            fputc('}', f);
        }
        fputc('}', f);
        if (r->memory != 0)
            fprintf(
                f,
                ",\n{\"ph\":\"C\",\"pid\":%d,\"tid\":0,\"ts\":%.3f,\"name\":\"allocated\",\"args\":{\"bytes\":%.0f}}",
                rank, (r->start + r->duration) * 1e6, r->allocated);
    }
    fputs("\n]}\n", f);
    bool bad = ferror(f) != 0;
    if (fclose(f) != 0 || bad) return ms__fail(MS_EIO, "profiler: cannot write '%s': %s", path, strerror(errno));
    return MS_OK;
}

static ms_trace *at_exit;
static char exit_path[4096];
static int exit_rank;

void ms__trace_save_now(void)
{
    ms_trace *t = at_exit;
    at_exit = NULL;
    if (!t) return;
    ms_trace_stop(t);
    if (ms_trace_save(t, exit_path, exit_rank) != MS_OK) fprintf(stderr, "%s\n", ms_error());
    else if (t->dropped > 0)
        fprintf(stderr, "profile: %s, %.0f ranges; %.0f were dropped (limit reached)\n", exit_path, t->n, t->dropped);
    else fprintf(stderr, "profile: %s, %.0f ranges\n", exit_path, t->n);
    ms_trace_free(t);
}

void ms_trace_save_at_exit(ms_trace *t, const char *path, int rank)
{
    if (!exit_path[0]) atexit(ms__trace_save_now);
    snprintf(exit_path, sizeof exit_path, "%s", path);
    exit_rank = rank;
    at_exit = t;
}
