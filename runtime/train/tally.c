// SPDX-License-Identifier: MIT
// train/tally.c -- counts that a GPU keeps for a captured step with a gradient scaler, because the GPU alone knows
// which steps are skipped: the steps of an optimizer's leaves, or a scaler's steps with finite gradients.
//
// The numbers of the script are brought up to date by ms_tally_read, which waits. A count of steps is also stored in
// pinned memory at each decision, where the host finds the latest count without waiting: it computes the factors of a
// step for each count that is then possible (train/pass.c).
#include <math.h>

#include "device/move.h"
#include "train/tally.h"

#include "base/activity.h"
#include "device/capture.h"
#include "device/gpu_pool.h"
#include "ops/op.h"

struct ms_tally {
    int references, device;
    ms_tensor *there;     // on the GPU: ms_tally_counts, or a double for a scaler
    ms_scale_rule *rule;  // of a scaler; NULL: the tally counts steps
    bool current;         // for a scaler: the valid count is the one on the GPU; false: the one in *rule
    // For counts of steps. issued: decisions that were queued; known: the counts that have been added to the script's
    // `numbers`; event: is reached after the decisions before number `marked`.
    uint64_t *pinned;
    double **numbers;
    int n_numbers;
    uint32_t issued, marked, depth, users;  // depth: pending decisions allowed; users: decisions in a repetition
    ms_tally_counts known;
    void *event;
};

// Pinned memory of tallies that were freed.
typedef struct spare {
    uint64_t *pinned;
    struct spare *next;
} spare;
static spare *spares;

static ms_status take_pinned_counts(ms_tally *t)
{
    spare *s = spares;
    if (!s) {
        void *p;
        MS_TRY(ms__cuda()->host_alloc(sizeof *t->pinned, &p));
        t->pinned = p;
    } else {
        // Work of a step that was freed may still store its counts there.
        MS_TRY(ms__cuda_settle(ms__index(t->device)));
        spares = s->next;
        t->pinned = s->pinned;
        free(s);
    }
    *t->pinned = 0;
    return MS_OK;
}

ms_tally *ms__tally_new(int device, ms_scale_rule *rule)
{
    ms_tally *t = calloc(1, sizeof *t);
    if (!t) return ms__null(ms__no_memory(sizeof *t, "captured step", "the counts of a gradient scaler"));
    *t = (ms_tally) { .references = 1, .device = device, .rule = rule };
    ms_captured *c = ms__capture_suspend();
    ms__gpu_lasting = true;
    ms_status st = ms__zeros(&t->there, rule ? MS_F64 : MS_I64, device, 0, NULL);
    ms__gpu_lasting = false;
    ms__capture_resume(c);
    if (st == MS_OK && !rule) st = take_pinned_counts(t);
    if (st == MS_OK) return t;
    ms_tally_free(t);
    return NULL;
}

ms_tally *ms__tally_hold(ms_tally *t) { return t->references++, t; }

void ms_tally_free(ms_tally *t)
{
    if (!t || --t->references > 0) return;
    spare *s = t->pinned ? malloc(sizeof *s) : NULL;  // without memory, 8 bytes of pinned memory are lost
    if (s) {
        *s = (spare) { t->pinned, spares };
        spares = s;
    }
    if (t->event) ms__cuda()->drop(t->event);
    ms__release(t->there);
    free(t->numbers);
    free(t);
}

ms_status ms__tally_adds(ms_tally *t, int n, double *const *to)
{
    double **all = realloc(t->numbers, (size_t)(t->n_numbers + n + 1) * sizeof *all);
    if (!all) return ms__no_memory((size_t)n * sizeof *all, "captured step", "the list of %d counts of steps", n);
    t->numbers = all;
    for (int k = 0; k < n; k++) all[t->n_numbers++] = to[k];
    return MS_OK;
}

bool ms__tally_updates(const ms_tally *t, const void *counts, size_t bytes)
{
    const char *first = counts;
    for (int k = 0; k < t->n_numbers; k++) {
        const char *at = (const char *)t->numbers[k];
        if (at >= first && at < first + bytes) return true;
    }
    return t->rule && (const char *)t->rule >= first && (const char *)t->rule < first + bytes;
}

// ---- steps ----

ms_tally_place ms__tally_place(const ms_tally *t)
{
    return (ms_tally_place) { .there = ms__data(t->there), .host = t->pinned };
}

// Adds to the script's numbers the steps that the GPU has made, as far as the host can see now.
static void add_known(ms_tally *t)
{
    uint64_t both = __atomic_load_n(t->pinned, __ATOMIC_ACQUIRE);
    ms_tally_counts now = { .done = (uint32_t)both, .value = (uint32_t)(both >> 32) };
    uint32_t made = now.value - t->known.value;
    for (int k = 0; made > 0 && k < t->n_numbers; k++) *t->numbers[k] += made;
    t->known = now;
}

static ms_status settle_tally(ms_tally *t)
{
    if (t->issued == t->known.done) return MS_OK;
    MS_TRY(ms__cuda_settle(ms__index(t->device)));
    add_known(t);
    t->issued = t->known.done;  // a repetition that failed may have queued fewer decisions
    return MS_OK;
}

static uint32_t pending(const ms_tally *t) { return t->issued - t->known.done; }

// Waits until at most `most` decisions are pending, and adds the steps that the GPU has made to the script's numbers.
static ms_status wait_until(ms_tally *t, uint32_t most)
{
    add_known(t);
    if (MS_LIKELY(pending(t) <= most)) return MS_OK;
    if (t->event) MS_TRY(ms__cuda_await(t->event));
    add_known(t);
    return pending(t) <= most ? MS_OK : settle_tally(t);
}

void ms__tally_use(ms_tally *t, uint32_t depth)
{
    t->users++;
    t->depth = depth;
}

ms_status ms__tally_ready(ms_tally *t) { return wait_until(t, t->depth > t->users ? t->depth - t->users : 0); }

ms_status ms__tally_begin(ms_tally *t, uint32_t depth, uint32_t *n, uint32_t *base)
{
    const ms_cuda_table *gpu = ms__cuda();
    MS_TRY(wait_until(t, depth - 1));
    t->depth = depth;
    *n = pending(t);
    *base = t->known.value;
    if (!t->event || t->issued - t->marked >= depth / 2) {
        if (t->event) gpu->drop(t->event);
        t->event = NULL;
        MS_TRY(gpu->record(ms__index(t->device), MS_STREAM_COMPUTE, &t->event));
        t->marked = t->issued;
    }
    t->issued++;
    return MS_OK;
}

// ---- steps with finite gradients ----

double *ms__tally_tracker(const ms_tally *t) { return ms__data(t->there); }

double ms__tally_next(ms_tally *t)
{
    if (t->current) return NAN;
    t->current = true;
    return t->rule->growth_tracker;
}

ms_status ms_tally_read(ms_tally *t)
{
    MS_BUSY;
    if (!t->rule) return settle_tally(t);
    if (!t->current) return MS_OK;
    MS_TRY(ms__move(MS_CPU, &t->rule->growth_tracker, t->device, ms__data(t->there), sizeof(double)));
    t->current = false;
    return MS_OK;
}
