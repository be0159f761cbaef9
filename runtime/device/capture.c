// SPDX-License-Identifier: MIT
// device/capture.c -- the list of a captured step's work, the events of what it queues, and CUDA graphs of fixed work.
#include <stdarg.h>
#include <stdio.h>

#include "device/capture.h"
#include "device/device.h"

enum { CHUNK = 1 << 16, ALIGN = 16 };

struct ms_captured_work {
    ms_captured_work *next;
    int gpu;      // fixed work: 1 + index of its GPU; 0: other work
    void *graph;  // CUDA graph of the work from here to before `after`; NULL: no graph begins here
    ms_captured_work *after;
    ms_repeat_fn repeat;
    void (*drop)(void *arg);
    size_t bytes;
    _Alignas(ALIGN) char arg[];
};

// Work is stored in the order in which it is repeated, so that the loop reads memory forwards.
struct ms_captured_chunk {
    ms_captured_chunk *older;
    size_t used, size;
    _Alignas(ALIGN) char bytes[];
};

ms_captured *ms__capturing, *ms__recording;
ms_status (*ms__capture_constant)(struct ms_tensor **t);

ms_captured *ms__capture_suspend(void)
{
    ms_captured *c = ms__capturing;
    ms__capturing = NULL;
    ms__pinning = NULL;
    return c;
}

void ms__capture_resume(ms_captured *c)
{
    ms__capturing = c;
    ms__pinning = c ? c->pins : NULL;
}

void ms__capture_no_memory(ms_captured *c)
{
    if (!c->refusal) c->refusal = strdup("captured step: no memory for the list of its work");
}

ms_status ms__capture_refuse(const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    ms_status st = ms__fail(MS_ESTATE, "captured step: %s", text);
    ms_captured *c = ms__recording;
    if (c && !c->refusal) c->refusal = strdup(ms_error());
    return st;
}

void *ms__capture_work(ms_captured *c, ms_repeat_fn repeat, void (*drop)(void *arg), size_t bytes)
{
    size_t need = (sizeof(ms_captured_work) + bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    ms_captured_chunk *k = c->chunks;
    if (!k || k->size - k->used < need) {
        size_t size = need > CHUNK ? need : CHUNK;
        if (!(k = aligned_alloc(64, (sizeof *k + size + 63) & ~(size_t)63))) {
            ms__capture_no_memory(c);
            return NULL;
        }
        *k = (ms_captured_chunk) { .older = c->chunks, .size = size };
        c->chunks = k;
    }
    ms_captured_work *w = (ms_captured_work *)(k->bytes + k->used);
    k->used += need;
    *w = (ms_captured_work) { .repeat = repeat, .drop = drop, .bytes = bytes };
    memset(w->arg, 0, bytes);
    if (c->last) c->last->next = w;
    else c->first = w;
    c->last = w;
    c->n_work++;
    return w->arg;
}

static ms_status repeat_nothing(void *arg, ms_captured *c) { return (void)arg, (void)c, MS_OK; }

ms_captured_work *ms__capture_mark(ms_captured *c)
{
    return ms__capture_work(c, repeat_nothing, NULL, 0) ? c->last : NULL;
}

void ms__capture_skip_to(ms_captured *c, ms_captured_work *mark) { c->next = mark; }

void ms__capture_fixed(ms_captured *c, int device)
{
    if (c->last && ms__is_cuda(device)) c->last->gpu = 1 + ms__index(device);
}

// ---- events -------------------------------------------------------------------------------------

int ms__capture_event(ms_captured *c, ms_pending *e)
{
    if (ms__grow(&c->events, &c->cap_events, c->n_events, sizeof *c->events, "captured step", "events")) {
        ms__capture_no_memory(c);
        return 0;
    }
    c->events[c->n_events++] = NULL;
    ms__event_number(e, c, c->n_events);
    return c->n_events;
}

void ms__capture_queued(ms_captured *c, int number, ms_pending *e)
{
    if (number < 1) return;
    ms__event_release(c->events[number - 1]);
    c->events[number - 1] = ms__event_retain(e);
}

static ms_status repeat_wait(void *arg, ms_captured *c) { return ms__event_wait(c->events[*(int *)arg - 1]); }

void ms__capture_wait(int number)
{
    int *block = ms__recording ? ms__capture_work(ms__recording, repeat_wait, NULL, sizeof number) : NULL;
    if (block) *block = number;
}

// Waits for everything that the repetition has queued, also after a failure: peers use the memory of collectives in
// flight.
static ms_status settle(ms_captured *c, ms_status st)
{
    char text[2048] = "";
    if (MS_UNLIKELY(st != MS_OK)) snprintf(text, sizeof text, "%s", ms_error());
    for (int k = 0; k < c->n_events; k++) {
        ms_status now = ms__event_wait(c->events[k]);
        ms__event_release(c->events[k]);
        c->events[k] = NULL;
        if (st != MS_OK || now == MS_OK) continue;
        st = now;
        snprintf(text, sizeof text, "%s", ms_error());
    }
    return st == MS_OK ? MS_OK : ms__fail(st, "%s", text);
}

// ---- steps --------------------------------------------------------------------------------------

ms_captured *ms__captured_new(void)
{
    ms_captured *c = calloc(1, sizeof *c);
    if (c && (c->pins = ms__pins_new())) return c;
    free(c);
    return ms__null(ms__no_memory(sizeof *c, "captured step", "the step"));
}

// ---- graphs -------------------------------------------------------------------------------------

// Whether graphs are made. Not with MOONSHARD_CUDA_SYNC=1, which waits for each operator.
static bool graphs_on(void)
{
    static int on = -1;
    if (on < 0) {
        const char *s = getenv("MOONSHARD_CUDA_GRAPHS"), *sync = getenv("MOONSHARD_CUDA_SYNC");
        on = !(s && strcmp(s, "off") == 0) && !(sync && strcmp(sync, "1") == 0);
    }
    return on;
}

// Makes a graph of the fixed work from `first` on. The temporary memory of its kernels stays pinned as long as the
// graph exists; all work of the graph may use the same blocks, because it runs in order. False if there can be no
// graph; then nothing has run.
static bool make_graph(ms_captured *c, ms_captured_work *first)
{
    const ms_cuda_table *t = ms__cuda();
    ms_captured_work *w = first;
    int index = first->gpu - 1;
    if (!c->room && !(c->room = ms__pins_new())) return false;
    if (t->graphs.begin(index) != MS_OK) return false;
    ms__pinning = c->room;
    ms_status st = MS_OK;
    for (; w && w->gpu == first->gpu && st == MS_OK; w = w->next) st = w->repeat(w->arg, c);
    ms__pinning = NULL;
    void *graph = NULL;
    ms_status ended = t->graphs.end(index, &graph);
    if (st == MS_OK && ended == MS_OK) {
        first->graph = graph;
        first->after = w;
        return true;
    }
    if (ended == MS_OK) t->graphs.drop(index, graph);
    return false;
}

// Makes graphs of all sequences of two and more pieces of fixed work. Stops at the first failure: the work after it is
// queued piece by piece.
static void make_graphs(ms_captured *c)
{
    c->graphed = true;
    if (!graphs_on()) return;
    for (ms_captured_work *w = c->first; w; w = w->graph ? w->after : w->next)
        if (w->gpu && w->next && w->next->gpu == w->gpu && !make_graph(c, w)) return;
}

// ---- repetitions --------------------------------------------------------------------------------

ms_status ms__captured_repeat(ms_captured *c)
{
    ms_status st = MS_OK;
    if (MS_UNLIKELY(!c->graphed)) make_graphs(c);
    for (ms_captured_work *w = c->first; w && st == MS_OK; w = c->next) {
        if (MS_UNLIKELY(ms__state.interrupted) && (st = ms__check_interrupt()) != MS_OK) break;
        c->next = w->graph ? w->after : w->next;
        st = w->graph ? ms__cuda()->graphs.launch(w->gpu - 1, w->graph) : w->repeat(w->arg, c);
    }
    return c->n_events || st != MS_OK ? settle(c, st) : MS_OK;
}

void ms__captured_drop(ms_captured *c)
{
    for (ms_captured_work *w = c->first; w; w = w->next) {
        if (w->graph) ms__cuda()->graphs.drop(w->gpu - 1, w->graph);
        if (w->drop) w->drop(w->arg);
    }
    while (c->chunks) {
        ms_captured_chunk *older = c->chunks->older;
        free(c->chunks);
        c->chunks = older;
    }
    for (int k = 0; k < c->n_events; k++) ms__event_release(c->events[k]);
    free(c->events);
    free(c->refusal);
    if (c->room) ms__pins_free(c->room);
    ms__pins_free(c->pins);
    free(c);
}
