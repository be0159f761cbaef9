// SPDX-License-Identifier: MIT
// device/capture.c -- the list of a captured step's work, the events of what it queues, and CUDA graphs of fixed work.
#include <stdio.h>

#include "device/capture.h"
#include "device/device.h"
#include "device/move.h"

enum { CHUNK = 1 << 16, ALIGN = 16 };

typedef struct {
    void *graph;              // the CUDA graph
    ms_captured_work *after;  // the piece of work that follows the graph's last piece
    ms_captured_work *first;  // first piece with an `advance` function; `later` links the others. NULL: none
    // What changes between launches: the numbers (ms_fixed) of all pieces of work in the graph, one after the other.
    // here: where the host writes them; there: their copy on the device. bytes: their size; 0: there are none
    char *here;
    ms_block *there;
    size_t bytes;
} graph;

typedef struct {
    int index;  // of the GPU
    ms_fixed how;
    size_t at;  // where in the graph's `here` and `there` the bytes begin that change for this work
    ms_captured_work *later;
    graph *graph;  // the graph that begins with this work; NULL: none
} fixed;

struct ms_captured_work {
    ms_captured_work *next;
    ms_repeat_fn repeat;
    void (*drop)(void *arg);
    fixed *fixed;  // NULL: the work is not fixed (ms__capture_fixed)
    _Alignas(ALIGN) char arg[];
};

// Memory for pieces of work, in the order in which they are repeated, so that a repetition reads it sequentially.
struct ms_captured_chunk {
    ms_captured_chunk *older;
    size_t used, size;
    _Alignas(ALIGN) char bytes[];
};

ms_status (*ms__capture_constant)(struct ms_tensor **t);

static size_t aligned(size_t bytes) { return (bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1); }

// Memory for `bytes` bytes, which lives as long as the step. NULL: there is none, and the step is refused.
static void *take_memory(ms_captured *c, size_t bytes)
{
    size_t need = aligned(bytes);
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
    void *p = k->bytes + k->used;
    k->used += need;
    return memset(p, 0, need);
}

void *ms__capture_work(ms_captured *c, ms_repeat_fn repeat, void (*drop)(void *arg), size_t bytes)
{
    ms_captured_work *w = take_memory(c, sizeof *w + bytes);
    if (!w) return NULL;
    w->repeat = repeat;
    w->drop = drop;
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

void ms__capture_fixed_at(ms_captured *c, ms_captured_work *w, int device, const ms_fixed *how)
{
    fixed *f = w && ms__is_cuda(device) ? take_memory(c, sizeof *f) : NULL;
    if (!f) return;
    f->index = ms__index(device);
    if (how) f->how = *how;
    w->fixed = f;
}

void ms__capture_fixed(ms_captured *c, int device, const ms_fixed *how)
{
    ms__capture_fixed_at(c, c->last, device, how);
}

// Copies what changes between launches (ms_fixed) to the device. In a copy of at most 64 KB from pageable memory CUDA
// does not make the host wait for the stream, so larger copies are divided.
static ms_status send(int index, void *there, const void *here, size_t bytes)
{
    enum { MOST = 1 << 16 };
    for (size_t at = 0; at < bytes; at += MOST) {
        size_t n = bytes - at < MOST ? bytes - at : MOST;
        MS_TRY(
            ms__cuda()->copy(index, MS_STREAM_COMPUTE, (char *)there + at, (const char *)here + at, n, MS_TO_DEVICE));
    }
    return MS_OK;
}

ms_status ms__fixed_repeat(void *arg, ms_captured *c, int device, const ms_fixed *how)
{
    ms_block *there = NULL;
    void *here = calloc(1, how->bytes);
    if (!here) return ms__no_memory(how->bytes, "captured step", "the numbers of a piece of work");
    ms_status st = ms__alloc(&there, device, how->bytes, "captured step");
    if (st == MS_OK) st = how->advance(arg, c, here);
    if (st == MS_OK) st = send(ms__index(device), there->data, here, how->bytes);
    if (st == MS_OK) st = how->queue(arg, c, there->data);
    ms__free(there);
    free(here);
    return st;
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

// Called when the script's thread waits for an event of a captured step: if the step is being recorded, its repetitions
// wait for the event, too.
static void note_step_wait(const void *step, int number)
{
    int *block = step == ms__recording ? ms__capture_work(ms__recording, repeat_wait, NULL, sizeof number) : NULL;
    if (block) *block = number;
}

__attribute__((constructor)) static void set_note_wait(void) { ms__stream_note_wait = note_step_wait; }

// Waits for the events of all work that the repetition has queued, also after a failure: peers use the memory of
// collectives in flight.
static ms_status settle_recording(ms_captured *c, ms_status st)
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

static bool same_gpu(const ms_captured_work *a, const ms_captured_work *b)
{
    return a && b && a->fixed && b->fixed && a->fixed->index == b->fixed->index;
}

static void drop_graph(graph *g)
{
    free(g->here);
    ms__free(g->there);
    *g = (graph) { 0 };
}

// Lists the pieces of g that have an `advance` function, and makes room for what changes between launches (`bytes` of
// ms_fixed) in all its pieces. first: g's first piece. False: no memory.
static bool plan_graph(graph *g, ms_captured_work *first)
{
    ms_captured_work *w = first, **end = &g->first;
    for (; same_gpu(first, w); w = w->next) {
        fixed *f = w->fixed;
        f->at = g->bytes;
        g->bytes += aligned(f->how.bytes);
        if (!f->how.advance) continue;
        *end = w;
        end = &f->later;
    }
    *end = NULL;
    g->after = w;
    if (!g->bytes) return true;
    int device = MS_CUDA | first->fixed->index << 8;
    return (g->here = calloc(1, g->bytes)) && ms__alloc(&g->there, device, g->bytes, "captured step") == MS_OK;
}

static ms_status queue_work(ms_captured_work *w, ms_captured *c, const graph *g)
{
    const fixed *f = w->fixed;
    if (!f->how.queue) return w->repeat(w->arg, c);
    return f->how.queue(w->arg, c, f->how.bytes ? (char *)g->there->data + f->at : NULL);
}

// Makes a CUDA graph of the fixed work (ms__capture_fixed) from `first` on. All memory that this allocates stays pinned
// as long as the graph exists: `there` of the graph, and temporary memory of its kernels. All work of the graph may use
// the same temporary blocks, because it runs in order. False if there can be no graph; then nothing has run.
static bool make_graph(ms_captured *c, ms_captured_work *first)
{
    const ms_cuda_table *t = ms__cuda();
    int index = first->fixed->index, n = 0;
    graph *g = take_memory(c, sizeof *g);
    if (!g || (!c->room && !(c->room = ms__pins_new()))) return false;
    ms__pinning = c->room;
    bool made = plan_graph(g, first) && t->graphs.begin(index) == MS_OK;
    if (made) {
        ms_status st = MS_OK;
        for (ms_captured_work *w = first; w != g->after && st == MS_OK; w = w->next, n++) st = queue_work(w, c, g);
        made = t->graphs.end(index, &g->graph) == MS_OK && st == MS_OK;
    }
    ms__pinning = NULL;
    if (made) {
        first->fixed->graph = g;
        c->gpu = MS_CUDA | index << 8;
        c->n_graphs++;
        c->n_graphed += n;
        return true;
    }
    if (g->graph) t->graphs.drop(index, g->graph);
    drop_graph(g);
    return false;
}

// Makes CUDA graphs of all sequences of two or more pieces of fixed work (ms__capture_fixed) on one GPU. Stops at the
// first failure: the work after it is queued piece by piece.
static void make_graphs(ms_captured *c)
{
    c->graphed = true;
    if (!graphs_on()) return;
    for (ms_captured_work *w = c->first; w; w = w->fixed && w->fixed->graph ? w->fixed->graph->after : w->next)
        if (same_gpu(w, w->next) && !make_graph(c, w)) return;
}

// Launches the graph that begins with w. The host does not wait until g->here has been copied to the device: the
// driver has read it when `send` returns.
static ms_status launch_graph(ms_captured *c, const ms_captured_work *w)
{
    const ms_cuda_table *t = ms__cuda();
    const graph *g = w->fixed->graph;
    int index = w->fixed->index;
    for (ms_captured_work *k = g->first; k; k = k->fixed->later)
        MS_TRY(k->fixed->how.advance(k->arg, c, g->here + k->fixed->at));
    if (g->bytes) MS_TRY(send(index, g->there->data, g->here, g->bytes));
    return t->graphs.launch(index, g->graph);
}

// ---- repetitions --------------------------------------------------------------------------------

ms_status ms__captured_repeat(ms_captured *c)
{
    ms_status st = MS_OK;
    if (MS_UNLIKELY(!c->graphed)) make_graphs(c);
    for (ms_captured_work *w = c->first; w && st == MS_OK; w = c->next) {
        if (MS_UNLIKELY(ms__state.interrupted) && (st = ms__check_interrupt()) != MS_OK) break;
        if (MS_UNLIKELY(w->fixed && w->fixed->graph)) {
            c->next = w->fixed->graph->after;
            st = launch_graph(c, w);
        } else {
            c->next = w->next;
            st = w->repeat(w->arg, c);
        }
    }
    return c->n_events || st != MS_OK ? settle_recording(c, st) : MS_OK;
}

void ms__captured_drop(ms_captured *c)
{
    for (ms_captured_work *w = c->first; w; w = w->next) {
        graph *g = w->fixed ? w->fixed->graph : NULL;
        // If a launched graph never ends, because a peer's GPU hangs, it is not destroyed: the job is ending.
        if (g && ms__cuda_settle(w->fixed->index) != MS_ECOMM) ms__cuda()->graphs.drop(w->fixed->index, g->graph);
        if (g) drop_graph(g);
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
