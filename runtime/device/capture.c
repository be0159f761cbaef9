// SPDX-License-Identifier: MIT
// device/capture.c -- the list of a captured step's work, and the events of what it queues.
#include <stdarg.h>
#include <stdio.h>

#include "device/capture.h"

enum { CHUNK = 1 << 16, ALIGN = 16 };

struct ms_captured_work {
    ms_captured_work *next;
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

ms_status ms__captured_repeat(ms_captured *c)
{
    ms_status st = MS_OK;
    for (ms_captured_work *w = c->first; w && st == MS_OK; w = w->next) {
        if (MS_UNLIKELY(ms__state.interrupted) && (st = ms__check_interrupt()) != MS_OK) break;
        st = w->repeat(w->arg, c);
    }
    return c->n_events || st != MS_OK ? settle(c, st) : MS_OK;
}

void ms__captured_drop(ms_captured *c)
{
    for (ms_captured_work *w = c->first; w; w = w->next)
        if (w->drop) w->drop(w->arg);
    while (c->chunks) {
        ms_captured_chunk *older = c->chunks->older;
        free(c->chunks);
        c->chunks = older;
    }
    for (int k = 0; k < c->n_events; k++) ms__event_release(c->events[k]);
    free(c->events);
    free(c->refusal);
    ms__pins_free(c->pins);
    free(c);
}
