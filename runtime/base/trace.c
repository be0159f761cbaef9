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
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/trace.h"
#include "base/utf8.h"

typedef struct recording {
    ms_trace trace;  // first member: the public part
    int64_t room, n, dropped;
    int n_collectives, cap_collectives, n_samples, cap_samples;
    double sampled;  // bytes in the latest sample
    int64_t begun;
    int what;
    bool active;
    struct recording *next;
} recording;

int32_t ms__trace_on;

typedef struct text {
    struct text *next;
    char s[];
} text;

static struct {
    pthread_mutex_t lock;
    recording *first;  // list of active recordings; protected by lock
    int wanted;        // MS_TRACE_* bits of the active recordings; engine thread only
    // Interned texts of all recordings, freed with the last recording. A later recording contains only ranges that
    // began after its start, and these do not refer to freed texts.
    text *texts[4096];
    int n;
    // The recording that is written if the process ends.
    ms_trace *at_exit;
    char exit_path[4096], exit_own[4096];
    int exit_rank;
} trace = { .lock = PTHREAD_MUTEX_INITIALIZER };
static __thread int lane;

void ms__trace_lane(int k) { lane = k; }
bool ms__trace_shapes(void) { return trace.wanted & MS_TRACE_SHAPES; }
int ms_trace_wanted(void) { return trace.wanted; }

// ---- texts ------------------------------------------------------------------------------------

// Returns a copy of s, which is freed with the last recording; "" if there is no memory. The caller must hold the lock.
static const char *keep_name(const char *s)
{
    if (!s || !*s) return "";
    text **b = &trace.texts[ms__hash(s) % (uint32_t)MS_COUNT(trace.texts)];
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
    for (int k = 0; k < MS_COUNT(trace.texts); k++)
        while (trace.texts[k]) {
            text *t = trace.texts[k];
            trace.texts[k] = t->next;
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
    pthread_mutex_lock(&trace.lock);
    const char *kept = trace.first ? keep_name(s) : "";
    pthread_mutex_unlock(&trace.lock);
    return kept;
}

// ---- ranges -----------------------------------------------------------------------------------

static double warn_no_memory(double *kinds)
{
    (void)kinds;
    return 0;
}
double (*ms__trace_memory)(double *kinds) = warn_no_memory;
// Only the engine thread allocates, so only its ranges report memory; other threads report 0.
static double allocated(void) { return lane == 0 ? ms__trace_memory(NULL) : 0; }

void ms__range_open(ms_open_range *r, ms_range_kind kind, const char *name, const char *detail)
{
    r->kind = kind;
    r->name = name;
    r->detail = detail;
    r->collective = NULL;
    r->allocated = allocated();
    r->from = ms__now_ns();
}

// Copies c into the recording and returns its place in the trace's `collectives`, from 1; 0: c is NULL, or there is no
// memory.
static int32_t keep_collective(recording *r, const ms_collective_range *c)
{
    if (!c || ms__grow(&r->trace.collectives, &r->cap_collectives, r->n_collectives, sizeof *c, "profiler",
                       "collectives") != MS_OK)
        return 0;
    r->trace.collectives[r->n_collectives] = *c;
    r->trace.collectives[r->n_collectives].unit = keep_name(c->unit);
    return ++r->n_collectives;
}

static void sample(recording *r, int64_t now, double bytes)
{
    if (bytes == r->sampled || ms__grow(&r->trace.samples, &r->cap_samples, r->n_samples, sizeof *r->trace.samples,
                                        "profiler", "samples") != MS_OK)
        return;
    ms_memory_sample *s = &r->trace.samples[r->n_samples++];
    s->time = (double)now * 1e-9;
    r->sampled = ms__trace_memory(s->bytes);
}

static void record_range(const ms_open_range *o, bool copy_name)
{
    int64_t end = ms__now_ns();
    pthread_mutex_lock(&trace.lock);
    for (recording *r = trace.first; r; r = r->next) {
        if (o->from < r->begun || (o->kind == MS_RANGE_MODULE && !(r->what & MS_TRACE_MODULES))) continue;
        if (r->n == r->room) {
            r->dropped++;
            continue;
        }
        double after = allocated();
        if (lane == 0) sample(r, end, after);
        bool detailed = o->kind != MS_RANGE_OP || r->what & MS_TRACE_SHAPES;
        r->trace.ranges[r->n++] = (ms_range) { .name = copy_name ? keep_name(o->name) : o->name,
                                               .detail = detailed ? keep_name(o->detail) : "",
                                               .start = (double)o->from * 1e-9,
                                               .duration = (double)(end - o->from) * 1e-9,
                                               .allocated = after,
                                               .memory = after - o->allocated,
                                               .kind = (int16_t)o->kind,
                                               .lane = (int16_t)lane,
                                               .collective = keep_collective(r, o->collective) };
    }
    pthread_mutex_unlock(&trace.lock);
}

void ms__range_close(ms_open_range *r) { record_range(r, false); }

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
    if (from != 0)
        record_range(&(ms_open_range) { (int64_t)from, before, name, detail, (ms_range_kind)kind, NULL }, true);
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
    r->sampled = -1;
    r->active = true;
    pthread_mutex_lock(&trace.lock);
    r->begun = ms__now_ns();
    r->next = trace.first;
    trace.first = r;
    trace.n++;
    pthread_mutex_unlock(&trace.lock);
    trace.wanted |= what;
    __atomic_store_n(&ms__trace_on, 1, __ATOMIC_RELAXED);
    return &r->trace;
}

void ms_trace_stop(ms_trace *t)
{
    recording *r = (recording *)t;
    if (!r->active) return;
    pthread_mutex_lock(&trace.lock);
    recording **at = &trace.first;
    while (*at != r) at = &(*at)->next;
    *at = r->next;
    trace.wanted = 0;
    for (recording *k = trace.first; k; k = k->next) trace.wanted |= k->what;
    __atomic_store_n(&ms__trace_on, trace.first != NULL, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&trace.lock);
    r->active = false;
    // A script may keep many profiles: free the unused capacity of this one.
    ms_range *fitting = realloc(r->trace.ranges, (size_t)(r->n ? r->n : 1) * sizeof *fitting);
    if (fitting) r->trace.ranges = fitting;
    r->trace.n = (double)r->n;
    r->trace.dropped = (double)r->dropped;
    r->trace.n_collectives = r->n_collectives;
    r->trace.n_samples = r->n_samples;
    r->trace.begun = (double)r->begun * 1e-9;
    r->trace.ended = (double)ms__now_ns() * 1e-9;
}

void ms_trace_free(ms_trace *t)
{
    if (!t) return;
    ms_trace_stop(t);
    pthread_mutex_lock(&trace.lock);
    if (--trace.n == 0) drop_texts();
    pthread_mutex_unlock(&trace.lock);
    free(t->ranges);
    free(t->collectives);
    free(t->samples);
    free(t);
}

// ---- the job's clock ---------------------------------------------------------------------------

ms_job_clock ms__job_clock;
char ms__trace_key[24];

int64_t ms__job_time(int64_t ns)
{
    const ms_job_clock *c = &ms__job_clock;
    int64_t span = c->n == 2 ? c->at[1] - c->at[0] : 0;
    double drift = span > 0 ? (double)(c->ahead[1] - c->ahead[0]) / (double)span : 0;
    return c->n ? ns + c->ahead[0] + (int64_t)(drift * (double)(ns - c->at[0])) : ns;
}

// ---- Chrome's trace format ---------------------------------------------------------------------

// The format is defined in the document "Trace Event Format"; chrome://tracing and ui.perfetto.dev display it.

// Writes a JSON string. Names may contain any bytes; invalid UTF-8 is replaced by U+FFFD.
static void put_json_string(FILE *f, const char *s)
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

const char *ms__range_kind_name(int k) { return k >= 0 && k < (int)MS_COUNT(categories) ? categories[k] : NULL; }
const char *ms__range_lane_name(int k) { return k >= 0 && k < (int)MS_COUNT(lanes) ? lanes[k] : NULL; }

static double micro(double seconds) { return (double)ms__job_time((int64_t)llround(seconds * 1e9)) * 1e-3; }

// Returns the id of the collective's flow events (arrows between ranks): the same number on every member.
static uint64_t flow_of(const ms_collective_range *c)
{
    double key[2] = { c->group, c->number };
    return ms__hash_bytes(MS_HASH_START, key, sizeof key) >> 12;  // viewers read numbers as doubles: exact to 2^53
}

static void put_arguments(FILE *f, const ms_range *r, const ms_collective_range *c)
{
    fputs(",\"args\":{", f);
    if (*r->detail) {
        fputs("\"detail\":", f);
        put_json_string(f, r->detail);
    }
    if (c) {
        fprintf(f, "%s\"op\":\"%s\",\"bytes\":%.0f,\"group\":%.0f,\"number\":%.0f,\"ranks\":%d", *r->detail ? "," : "",
                r->name, c->bytes, c->group, c->number, c->members);
        if (*c->unit) {
            fputs(",\"unit\":", f);
            put_json_string(f, c->unit);
        }
        if (c->last >= 0)
            fprintf(f, ",\"last_rank\":%d,\"last_after_us\":%.3f,\"first_waited_us\":%.3f", c->last,
                    c->last_after * 1e6, c->waited * 1e6);
    }
    fputc('}', f);
}

// Writes this rank's flow event. The arrows lead from the rank that arrived last to the end of the collective on every
// other rank.
static void put_flow(FILE *f, const ms_range *r, const ms_collective_range *c, int rank)
{
    if (c->last < 0) return;
    bool begins = c->last == rank;
    double at = begins ? micro(r->start) : fmax(micro(r->start), micro(r->start + r->duration) - 0.001);
    fprintf(f,
            ",\n{\"ph\":\"%s\",\"id\":%llu,\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"cat\":\"collective\",\"name\":\"%s\"%s}",
            begins ? "s" : "f", (unsigned long long)flow_of(c), rank, (int)r->lane, at, r->name,
            begins ? "" : ",\"bp\":\"e\"");
}

static void put_events(FILE *f, const ms_trace *t, int rank)
{
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    char name[320];
    snprintf(name, sizeof name, "rank %d (%s)", rank, host);
    fprintf(f, "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_name\",\"args\":{\"name\":", rank);
    put_json_string(f, name);
    fprintf(f, "}},\n{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}",
            rank, rank);
    for (int k = 0; k < MS_COUNT(lanes); k++)
        fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}", rank,
                k, lanes[k]);
    for (int64_t k = 0; k < (int64_t)t->n; k++) {
        const ms_range *r = &t->ranges[k];
        const ms_collective_range *c = r->collective ? &t->collectives[r->collective - 1] : NULL;
        double from = micro(r->start);
        fprintf(f, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"cat\":\"%s\",\"name\":", rank,
                (int)r->lane, from, micro(r->start + r->duration) - from, ms__range_kind_name(r->kind));
        put_json_string(f, r->name);
        if (*r->detail || c) put_arguments(f, r, c);
        fputc('}', f);
        if (c) put_flow(f, r, c, rank);
    }
    static const char *const kinds[] = { "other", "parameters", "gradients", "optimizer", "gathered" };
    for (int64_t k = 0; k < (int64_t)t->n_samples; k++) {
        const ms_memory_sample *s = &t->samples[k];
        fprintf(f, ",\n{\"ph\":\"C\",\"pid\":%d,\"tid\":0,\"ts\":%.3f,\"name\":\"memory\",\"args\":{", rank,
                micro(s->time));
        for (int i = 0; i < MS_MEMORY_KINDS; i++) fprintf(f, "%s\"%s\":%.0f", i ? "," : "", kinds[i], s->bytes[i]);
        fputs("}}", f);
    }
}

// The file ends with ENDING after every save; another process that adds its events overwrites the ENDING.
#define HEAD "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"key\":\"%s\"},\"traceEvents\":[\n"
#define ENDING "\n]}\n"

// Returns whether the file is a complete trace with this key. If so, sets the file's position to the start of ENDING.
static bool continues(int fd, const char *key)
{
    enum { N = sizeof ENDING - 1 };
    char head[256], begins[256], ends[N];
    off_t size = lseek(fd, 0, SEEK_END);
    int n = snprintf(head, sizeof head, HEAD, key);
    return *key && size >= n + N && pread(fd, begins, (size_t)n, 0) == n && memcmp(begins, head, (size_t)n) == 0 &&
           pread(fd, ends, N, size - N) == N && memcmp(ends, ENDING, N) == 0 && lseek(fd, size - N, SEEK_SET) > 0;
}

// Opens and locks the file; to_add: for reading too. Fails for a pipe without a reader, instead of waiting for one.
static FILE *open_file(const char *path, bool to_add)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0666);
    struct stat st;
    if (fd >= 0 && to_add && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        close(fd);
        fd = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
    }
    if (fd < 0) return NULL;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    // The lock is held until the file is closed. On file systems that have no locks, the file is written without one.
    while (flock(fd, LOCK_EX) != 0 && errno == EINTR) {}
    FILE *f = fdopen(fd, to_add ? "r+" : "w");
    if (!f) close(fd);
    return f;
}

ms_status ms_trace_save(const ms_trace *t, const char *path, int rank, const char *key)
{
    FILE *f = open_file(path, *key != 0);
    if (!f) return ms__fail(MS_EIO, "profiler: cannot write '%s': %s", path, strerror(errno));
    if (continues(fileno(f), key)) {
        fputs(",\n", f);
    } else {
        rewind(f);
        if (ftruncate(fileno(f), 0) != 0 && errno != EINVAL) {  // EINVAL: pipes and devices have no size
            int e = errno;
            fclose(f);
            return ms__fail(MS_EIO, "profiler: cannot empty '%s': %s", path, strerror(e));
        }
        fprintf(f, HEAD, key);
    }
    put_events(f, t, rank);
    fputs(ENDING, f);
    bool bad = ferror(f) != 0;
    if (fclose(f) != 0 || bad) return ms__fail(MS_EIO, "profiler: cannot write '%s': %s", path, strerror(errno));
    return MS_OK;
}

void ms__trace_save_now(void)
{
    ms_trace *t = trace.at_exit;
    trace.at_exit = NULL;
    if (!t) return;
    ms_trace_stop(t);
    const char *path = *ms__trace_key ? trace.exit_path : trace.exit_own;
    if (ms_trace_save(t, path, trace.exit_rank, ms__trace_key) != MS_OK) fprintf(stderr, "%s\n", ms_error());
    else if (t->dropped > 0)
        fprintf(stderr, "profile: %s, %.0f ranges; %.0f were dropped (limit reached)\n", path, t->n, t->dropped);
    else fprintf(stderr, "profile: %s, %.0f ranges\n", path, t->n);
    ms_trace_free(t);
}

void ms_trace_save_at_exit(ms_trace *t, const char *path, const char *own, int rank)
{
    if (!trace.exit_path[0]) atexit(ms__trace_save_now);
    snprintf(trace.exit_path, sizeof trace.exit_path, "%s", path);
    snprintf(trace.exit_own, sizeof trace.exit_own, "%s", own);
    trace.exit_rank = rank;
    trace.at_exit = t;
}
