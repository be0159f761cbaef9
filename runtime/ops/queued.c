// SPDX-License-Identifier: MIT
// ops/queued.c -- a ring of the latest work for each GPU.
#include <stdio.h>

#include "device/device.h"
#include "device/move.h"
#include "ops/queued.h"

// KEPT: number of entries of a ring; LISTED: most entries that a message lists; SHOWN: most tensors of a call in an
// entry; DIMS: most dimensions of such a tensor. Every call on a GPU writes an entry, so SHOWN and DIMS are small.
enum { KEPT = 16, LISTED = 8, SHOWN = 3, DIMS = 6 };
typedef struct {
    uint8_t dtype, ndim;
    int64_t shape[DIMS];
} shown;
typedef struct {
    const char *what;
    uint64_t waits;  // how often the host had waited for the GPU
    int n_in;
    shown in[SHOWN];
} entry;
static struct {
    entry entries[KEPT];
    uint64_t n;  // entries so far
} rings[MS_CUDA_DEVICES];

static inline entry *next_entry(int device, const char *what)
{
    int index = ms__index(device);
    entry *e = &rings[index].entries[rings[index].n++ % KEPT];
    e->what = what;
    e->waits = ms__cuda_waits[index];
    return e;
}

void ms__note_queued(int device, const char *what)
{
    if (ms__is_cuda(device)) next_entry(device, what)->n_in = 0;
}

void ms__note_call(int device, const ms_call *c)
{
    entry *e = next_entry(device, c->op->name);
    int n = 0;
    shown *to = e->in;
    for (ms_tensor *const *in = c->in, *const *end = in + c->n_in; in < end && n < SHOWN; in++) {
        const ms_tensor *t = *in;
        if (!t) continue;
        to->dtype = t->dtype;
        to->ndim = t->ndim;
        memcpy(to->shape, t->shape, sizeof to->shape);
        to++, n++;
    }
    e->n_in = n;
}

static void append(const entry *e, char *text, size_t n)
{
    ms__append(text, n, "%s", e->what);
    for (int k = 0; k < e->n_in; k++) {
        int shown = e->in[k].ndim < DIMS ? e->in[k].ndim : DIMS;
        ms__append(text, n, "%s%s %s%s", k ? ", " : "(", ms__dtype_name(e->in[k].dtype),
                   ms__shape_text(shown, e->in[k].shape), e->in[k].ndim > DIMS ? " and more" : "");
    }
    if (e->n_in) ms__append(text, n, ")");
}

void ms__queued_text(int index, char *text, size_t n)
{
    uint64_t last = rings[index].n, listed = 0;
    *text = 0;
    for (uint64_t k = last; k > 0 && k + KEPT > last; k--) {
        const entry *e = &rings[index].entries[(k - 1) % KEPT];
        if (e->waits != ms__cuda_waits[index]) break;
        if (listed++ == LISTED) {
            ms__append(text, n, ", earlier ones");
            break;
        }
        if (listed > 1) ms__append(text, n, ", ");
        append(e, text, n);
    }
}

ms_status ms__call_named(const ms_call *c, ms_status st)
{
    char why[3000], given[600] = "";
    snprintf(why, sizeof why, "%s", ms_error());
    for (int k = 0; k < c->n_in; k++)
        if (c->in[k]) ms__append(given, sizeof given, "%s%s", *given ? ", " : "", ms__tensor_text(c->in[k]));
    return ms__fail(st, "%s(%s): %s", c->op->name, given, why);
}

ms_status ms__call_failed(const ms_call *c, ms_status st)
{
    return strncmp(ms_error(), "cuda:", 5) == 0 ? ms__call_named(c, st) : st;
}
