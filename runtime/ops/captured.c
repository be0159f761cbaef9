// SPDX-License-Identifier: MIT
// ops/captured.c -- calls of operators, fills and copies as work of a captured step, and its lasting tensors.
//
// Most tensors of a step die during the step, and their memory is used again. The step therefore keeps tensors of its
// own: those on pinned memory have a storage that points at it without owning it (several may point at the same bytes,
// one after the other in the step); those on memory from outside of the recording hold that memory's storage.
#include <stdio.h>

#include "base/trace.h"
#include "ops/captured.h"
#include "ops/queued.h"

typedef struct lasting {
    ms_tensor *t;
    struct lasting *next;
} lasting;

typedef struct {
    ms_storage *s;  // retained
    const void *data;
    size_t bytes;
    bool pinned;
    lasting *tensors;
} place;

typedef struct {
    ms_tensor *t;  // a parameter; retained
    const ms_storage *storage;
    int64_t offset;
    uint8_t dtype;
} watched;

// A storage from outside of the recording, and where its bytes were when it was recorded.
typedef struct {
    const ms_storage *s;
    const void *data;
} fixed;

struct ms_seen {
    place *places;
    int n, cap;
    fixed *outside;  // the storages of the places that are not pinned
    int n_outside, cap_outside;
    int *by_data;  // hash table of 1 + index of the place
    int size;
    watched *params;
    int n_params, cap_params;
};

// ---- lasting tensors ------------------------------------------------------------------------------

static bool is_pinned(const ms_captured *c, const ms_storage *s) { return s->block && s->block->pins == c->pins; }

bool ms__capture_outside(const ms_captured *c, const ms_tensor *t) { return !is_pinned(c, t->storage); }

static int slot_of_data(const struct ms_seen *k, const void *data)
{
    return (int)(ms__hash_value(1, (uint64_t)(uintptr_t)data) >> 24 & (uint64_t)(k->size - 1));
}

static bool rehash_seen(struct ms_seen *k)
{
    int size = k->size ? 2 * k->size : 256, *table = calloc((size_t)size, sizeof *table);
    if (!table) return false;
    free(k->by_data);
    k->by_data = table;
    k->size = size;
    for (int i = 0; i < k->n; i++) {
        int h = slot_of_data(k, k->places[i].data);
        while (table[h]) h = (h + 1) & (size - 1);
        table[h] = i + 1;
    }
    return true;
}

// A storage that points at s's pinned memory and does not own it. Its block is a copy of s's block, by which peers find
// the memory; on a GPU the copy leads to the pinned block (ms__owner_of).
static ms_storage *pointer_to(const ms_storage *s)
{
    ms_storage *p = NULL;
    if (ms__storage_new(&p, s->device, 0, "captured step") != MS_OK) return NULL;
    *p->block = *s->block;
    p->block->pins = NULL;
    p->block->size = 0;  // the ledger does not count it
    p->block->tag = 0;
    p->block->next = s->block;
    p->data = s->data;
    p->bytes = s->bytes;
    return p;
}

static place *place_of_storage(ms_captured *c, ms_storage *s)
{
    struct ms_seen *k = c->seen;
    if (!k && !(k = c->seen = calloc(1, sizeof *k))) return NULL;
    if (2 * (k->n + 1) > k->size && !rehash_seen(k)) return NULL;
    bool pinned = is_pinned(c, s);
    int h = slot_of_data(k, s->data);
    for (; k->by_data[h]; h = (h + 1) & (k->size - 1)) {
        place *p = &k->places[k->by_data[h] - 1];
        if (pinned ? p->pinned && p->data == s->data && p->bytes == s->bytes : p->s == s) return p;
    }
    if (ms__grow(&k->places, &k->cap, k->n, sizeof *k->places, "captured step", "storages")) return NULL;
    if (!pinned &&
        ms__grow(&k->outside, &k->cap_outside, k->n_outside, sizeof *k->outside, "captured step", "storages"))
        return NULL;
    ms_storage *kept = pinned ? pointer_to(s) : ms__storage_retain(s);
    if (!kept) return NULL;
    if (!pinned) k->outside[k->n_outside++] = (fixed) { s, s->data };
    k->places[k->n] = (place) { .s = kept, .data = s->data, .bytes = s->bytes, .pinned = pinned };
    k->by_data[h] = ++k->n;
    return &k->places[k->n - 1];
}

static void watch(ms_captured *c, ms_tensor *t)
{
    struct ms_seen *k = c->seen;
    for (int i = 0; i < k->n_params; i++)
        if (k->params[i].t == t) return;
    if (ms__grow(&k->params, &k->cap_params, k->n_params, sizeof *k->params, "captured step", "parameters")) {
        ms__capture_no_memory(c);
        return;
    }
    k->params[k->n_params++] = (watched) { ms__retain(t), t->storage, t->offset, t->dtype };
}

static bool alike(const ms_tensor *a, const ms_tensor *b)
{
    size_t n = (size_t)b->ndim * sizeof *b->shape;
    return a->dtype == b->dtype && a->offset == b->offset && a->ndim == b->ndim && !memcmp(a->shape, b->shape, n) &&
           !memcmp(a->stride, b->stride, n);
}

ms_storage *ms__capture_storage(ms_captured *c, ms_storage *s)
{
    ms_captured *was = ms__capture_suspend();
    place *p = s ? place_of_storage(c, s) : NULL;
    if (s && !p) ms__capture_no_memory(c);
    ms__capture_resume(was);
    return p ? p->s : NULL;
}

ms_tensor *ms__capture_tensor(ms_captured *c, ms_tensor *t)
{
    if (!t) return NULL;
    ms_captured *was = ms__capture_suspend();
    place *p = place_of_storage(c, t->storage);
    lasting *l = p ? p->tensors : NULL;
    while (l && !alike(l->t, t)) l = l->next;
    if (p && !l && (l = malloc(sizeof *l))) {
        l->t = ms__tensor_on(p->s, t->dtype, t->ndim, t->shape, t->offset);
        memcpy(l->t->stride, t->stride, sizeof t->stride);
        l->next = p->tensors;
        p->tensors = l;
    }
    if (!l) ms__capture_no_memory(c);
    // Parameters of units are not watched: their memory changes when they are gathered, by work of the step.
    else if (t->is_param && !t->unit_param && !p->pinned) watch(c, t);
    ms__capture_resume(was);
    return l ? l->t : NULL;
}

ms_status ms__captured_check(const ms_captured *c)
{
    const struct ms_seen *k = c->seen;
    for (int i = 0; k && i < k->n_params; i++) {
        const watched *w = &k->params[i];
        if (MS_LIKELY(w->t->storage == w->storage && w->t->offset == w->offset && w->t->dtype == w->dtype &&
                      w->t->slot))
            continue;
        return ms__fail(MS_ESTATE,
                        "captured step: parameter '%s' (%s) was %s after the step was recorded; capture the step again",
                        w->t->name ? w->t->name : "?", ms__tensor_text(w->t),
                        w->t->slot ? "moved to other memory or another dtype" : "released");
    }
    for (int i = 0; k && i < k->n_outside; i++) {
        const fixed *f = &k->outside[i];
        if (MS_LIKELY(f->s->data == f->data)) continue;
        return ms__fail(MS_ESTATE,
                        "captured step: %s (%zu bytes), which the step uses, was moved or vacated after the step was "
                        "recorded; capture the step again",
                        f->s->owner ? f->s->owner : "the memory of a tensor", f->s->bytes);
    }
    return MS_OK;
}

void ms__captured_forget(ms_captured *c)
{
    struct ms_seen *k = c->seen;
    if (!k) return;
    for (int i = 0; i < k->n; i++) {
        place *p = &k->places[i];
        while (p->tensors) {
            lasting *l = p->tensors;
            p->tensors = l->next;
            ms__release(l->t);
            free(l);
        }
        if (p->pinned) {
            p->s->block->segment = NULL;
            p->s->block->data = NULL;
        }
        ms__storage_release(p->s);
    }
    for (int i = 0; i < k->n_params; i++) ms__release(k->params[i].t);
    free(k->places);
    free(k->outside);
    free(k->by_data);
    free(k->params);
    free(k);
    c->seen = NULL;
}

// ---- calls ----------------------------------------------------------------------------------------

typedef struct {
    ms_status (*run)(ms_call *);
    ms_tensor *written;  // the input that the call changes, if it is from outside of the recording; otherwise NULL
    uint64_t after;      // random numbers: the call's offset minus the generator's at the start of the step
    bool draws, seeded;  // draws: draws random numbers; seeded: uses an earlier call's numbers (MS_OP_SEEDED)
    int gpu;             // the device of all its tensors, if that is a GPU; else MS_CPU
    ms_call call;
} call_work;

// A call that its operator has prepared (ms_op.prepare).
typedef struct {
    const ms_op *op;
    ms_status (*run)(void *args);
    _Alignas(16) char args[];
} prepared_work;

static ms_status repeat_prepared(void *arg, ms_captured *c)
{
    prepared_work *w = arg;
    (void)c;
    MS_RANGE(MS_RANGE_OP, w->op->name, NULL);
    return w->run(w->args);
}

// Adds a call on the step's tensors in its prepared form. False if there is none.
static bool add_prepared(ms_captured *c, ms_call *call)
{
    ms_prepared p;
    if (!call->op->prepare || ms__device(call->out[0]) != MS_CPU) return false;
    ms_captured *was = ms__capture_suspend();
    bool prepared = call->op->prepare(call, &p);
    ms__capture_resume(was);
    if (!prepared) return false;
    prepared_work *w = ms__capture_work(c, repeat_prepared, NULL, sizeof *w + p.bytes);
    if (!w) return true;  // no memory: the step is refused when its recording ends
    w->op = call->op;
    w->run = p.run;
    memcpy(w->args, p.args, p.bytes);
    return true;
}

// Sets the call's seed and offset for this repetition, and increments the version of w->written.
static ms_status advance_call(void *arg, ms_captured *c, void *here)
{
    call_work *w = arg;
    uint64_t *rng = w->call.saved_rng;
    if (w->draws || w->seeded) {
        rng[0] = c->seed_now;
        rng[1] = c->offset_now + w->after;
        if (w->seeded) {
            w->call.i[w->call.n_i - 3] = (int64_t)rng[0];
            w->call.i[w->call.n_i - 2] = (int64_t)rng[1];
        }
        if (here) memcpy(here, rng, sizeof w->call.saved_rng);
    }
    if (w->written) w->written->version->count++;
    return MS_OK;
}

static ms_status repeat_call(void *arg, ms_captured *c)
{
    call_work *w = arg;
    MS_RANGE(MS_RANGE_OP, w->call.op->name, NULL);
    (void)advance_call(w, c, NULL);
    if (MS_UNLIKELY(w->gpu != MS_CPU)) ms__note_call(w->gpu, &w->call);
    ms_status st = w->run(&w->call);
    return MS_LIKELY(st == MS_OK) ? MS_OK : ms__call_failed(&w->call, st);
}

// Queues the call's launches (ms_fixed). there: a seed and an offset, if the call draws or is seeded.
static ms_status queue_call(void *arg, ms_captured *c, void *there)
{
    call_work *w = arg;
    (void)c;
    w->call.rng_there = there;
    ms_status st = w->run(&w->call);
    w->call.rng_there = NULL;
    return st;
}

static void drop_call(void *arg) { ms__release(((call_work *)arg)->written); }

// Adds t's device to *all: the GPU of all tensors so far; -1: no tensors yet; -2: several devices, or one that is no
// GPU.
static void add_device(int *all, const ms_tensor *t)
{
    if (!t) return;
    int device = ms__device(t);
    *all = !ms__is_cuda(device) || (*all != -1 && *all != device) ? -2 : device;
}

// Marks a call as fixed work (ms__capture_fixed) if all of its tensors are on one GPU.
static void mark_fixed(ms_captured *c, call_work *w)
{
    bool draws = w->draws || w->seeded;
    ms_fixed how = { queue_call, advance_call, draws ? sizeof w->call.saved_rng : 0 };
    int device = -1;
    for (int k = 0; k < w->call.n_in; k++) add_device(&device, w->call.in[k]);
    for (int k = 0; k < w->call.n_out; k++) add_device(&device, w->call.out[k]);
    w->gpu = device >= 0 ? device : MS_CPU;
    ms__capture_fixed(c, w->gpu, draws || w->written ? &how : NULL);
}

static void add_call(ms_captured *c, const ms_call *call, ms_status (*run)(ms_call *), uint64_t drawn)
{
    const ms_op *op = call->op;
    call_work w = { .run = run,
                    .draws = op->flags & MS_OP_RANDOM && ms__rng_offset() > drawn,
                    .seeded = op->flags & MS_OP_SEEDED && call->n_f > 0 && call->f[0] > 0 };
    if (w.draws || w.seeded) {
        uint64_t seed = w.seeded ? (uint64_t)call->i[call->n_i - 3] : call->saved_rng[0];
        uint64_t offset = w.seeded ? (uint64_t)call->i[call->n_i - 2] : call->saved_rng[1];
        if (seed != c->seed || offset < c->offset) {
            (void)ms__capture_refuse("%s uses random numbers that were drawn before the step, or a generator that was "
                                     "seeded or restored inside it",
                                     ms__op_title(op->name));
            return;
        }
        w.after = offset - c->offset;
    }
    ms_call *k = &w.call;
    k->op = op;
    k->n_in = call->n_in;
    k->n_out = call->n_out;
    k->n_i = call->n_i;
    k->n_f = call->n_f;
    for (int i = 0; i < call->n_in; i++) k->in[i] = ms__capture_tensor(c, call->in[i]);
    for (int i = 0; i < call->n_out; i++) k->out[i] = ms__capture_tensor(c, call->out[i]);
    if (c->refusal) return;
    memcpy(k->i, call->i, (size_t)call->n_i * sizeof *k->i);
    memcpy(k->f, call->f, (size_t)call->n_f * sizeof *k->f);
    memcpy(k->saved_rng, call->saved_rng, sizeof k->saved_rng);
    bool changes = op->flags & MS_OP_INPLACE && ms__capture_outside(c, call->in[0]);
    if (!changes && !w.draws && !w.seeded && add_prepared(c, k)) return;
    call_work *kept = ms__capture_work(c, repeat_call, drop_call, sizeof *kept);
    if (!kept) return;
    if (changes) w.written = ms__retain(call->in[0]);
    *kept = w;
    mark_fixed(c, kept);
}

static ms_status record_call(ms_call *call, ms_status (*run)(ms_call *), uint64_t drawn)
{
    ms_captured *c = ms__capture_suspend();
    ms_status st = run(call);
    ms__capture_resume(c);
    bool view = call->op->flags & MS_OP_VIEW && call->out[0]->storage == call->in[0]->storage;
    if (st == MS_OK && !view) add_call(c, call, run, drawn);
    return st;
}

// ---- fills and copies -----------------------------------------------------------------------------

typedef struct {
    ms_tensor *dst;
    const ms_tensor *src;
    double value;
} copy_work;

static ms_status repeat_fill(void *arg, ms_captured *c)
{
    const copy_work *w = arg;
    (void)c;
    return ms__fill_data(w->dst, w->value);
}

static ms_status repeat_copy(void *arg, ms_captured *c)
{
    const copy_work *w = arg;
    (void)c;
    return ms__copy_data(w->dst, w->src);
}

static ms_status add_copy(ms_captured *c, const copy_work *w, ms_repeat_fn repeat)
{
    copy_work *kept = ms__capture_work(c, repeat, NULL, sizeof *kept);
    if (!kept) return MS_OK;
    *kept = (copy_work) { ms__capture_tensor(c, w->dst), ms__capture_tensor(c, (ms_tensor *)w->src), w->value };
    int device = -1;
    add_device(&device, w->dst);
    add_device(&device, w->src);
    if (device >= 0) ms__capture_fixed(c, device, NULL);
    return MS_OK;
}

static ms_status record_fill(ms_tensor *t, double value)
{
    ms_captured *c = ms__capture_suspend();
    ms_status st = ms__fill_data(t, value);
    ms__capture_resume(c);
    return st == MS_OK ? add_copy(c, &(copy_work) { t, NULL, value }, repeat_fill) : st;
}

static ms_status record_copy(ms_tensor *dst, const ms_tensor *src)
{
    ms_captured *c = ms__capture_suspend();
    ms_status st = ms__copy_data(dst, src);
    ms__capture_resume(c);
    return st == MS_OK ? add_copy(c, &(copy_work) { dst, src, 0 }, repeat_copy) : st;
}

// Replaces *t, a new tensor of values that the script gave, by a copy. Each repetition copies the values again, from
// the old *t, which no call of the step changes.
static ms_status constant_input(ms_tensor **t)
{
    ms_tensor *values = *t, *mine = NULL;
    ms_status st = ms__tensor_like(&mine, values, "tensor");
    *t = mine;
    if (st == MS_OK) st = ms__or_drop(ms__copy(mine, values), t);
    ms__release(values);
    return st;
}

__attribute__((constructor)) static void set_recorder(void)
{
    ms__step_recorder = (ms_step_recorder) { record_call, record_fill, record_copy };
    ms__capture_constant = constant_input;
}
