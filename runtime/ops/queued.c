// SPDX-License-Identifier: MIT
// ops/queued.c -- a ring of the latest work for each GPU; results of operators, written to a file.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/capture.h"
#include "device/device.h"
#include "device/move.h"
#include "ops/engine.h"
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
typedef struct {
    entry entries[KEPT];
    uint64_t n;  // entries so far
} ring;
static struct {
    ring rings[MS_CUDA_DEVICES];
    FILE *results;  // of MOONSHARD_CUDA_RESULTS
    bool asked, busy;
    uint64_t inputs;  // the hash of the running call's
} queued;

static inline entry *next_entry(int device, const char *what)
{
    int index = ms__index(device);
    entry *e = &queued.rings[index].entries[queued.rings[index].n++ % KEPT];
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
    uint64_t last = queued.rings[index].n, listed = 0;
    *text = 0;
    for (uint64_t k = last; k > 0 && k + KEPT > last; k--) {
        const entry *e = &queued.rings[index].entries[(k - 1) % KEPT];
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

// ---- results (MOONSHARD_CUDA_RESULTS) -----------------------------------------------------------

// A line of text for each call: the operator, a hash of all that it computes from, and for each output its dtype,
// shape, hash and first bytes. Devices that give the same bits write the same lines for one program; the hash of the
// inputs tells whether a call that differs is itself at fault.
// WHOLE_LINE: buffer, so that a line is written at once: the executor of PTX adds lines to the file, too.
enum { SHOWN_BYTES = 256, WHOLE_LINE = 1 << 20 };  // SHOWN_BYTES: of an output

bool ms__results_wanted(void)
{
    if (MS_UNLIKELY(!queued.asked)) {
        const char *path = getenv("MOONSHARD_CUDA_RESULTS");
        queued.asked = true;
        if (path && *path && !(queued.results = fopen(path, "ae")))
            fprintf(stderr, "moonshard: MOONSHARD_CUDA_RESULTS: cannot write '%s': %s\n", path, strerror(errno));
        if (queued.results) setvbuf(queued.results, malloc(WHOLE_LINE), _IOFBF, WHOLE_LINE);
    }
    return queued.results && !queued.busy && !ms__capturing;
}

// GPUs don't promise the bits of NaNs, and LuaJIT takes some for values of other types: each becomes the same.
static void make_nans_equal(ms_tensor *t)
{
    static const uint64_t infinities[] = {
        [MS_F64] = 0x7ff0000000000000, [MS_F32] = 0x7f800000, [MS_F16] = 0x7c00, [MS_BF16] = 0x7f80
    };
    if (!ms__is_float(t->dtype)) return;
    uint64_t infinity = infinities[t->dtype], size = (uint64_t)ms__dtype_size(t->dtype), sign = 1ull << (8 * size - 1);
    uint8_t *at = ms__data(t);
    for (int64_t k = 0; k < t->numel; k++, at += size) {
        uint64_t bits = 0;
        memcpy(&bits, at, size);
        bits &= ~sign;
        if (bits <= infinity) continue;
        bits = sign - 1;
        memcpy(at, &bits, size);
    }
}
// Makes *out, owned by the caller: the values of t on the CPU; NULL if t has none.
static ms_status values_of(ms_tensor **out, ms_tensor *t)
{
    *out = NULL;
    if (!t || t->sharded || t->storage->vacated || ms__is_meta(ms__device(t))) return MS_OK;
    queued.busy = true;  // copying calls operators
    ms_status st = ms__on_cpu(out, t, "results");
    if (st == MS_OK && ms__is_cuda(ms__device(t))) st = ms__cuda_sync(ms__device(t), -1);
    queued.busy = false;
    return st;
}
static uint64_t hash_of_values(const ms_tensor *t)
{
    return ms__hash_bytes(MS_HASH_START, ms__data(t), (size_t)t->numel * ms__dtype_size(t->dtype));
}

ms_status ms__results_before(const ms_call *c)
{
    uint64_t h = ms__hash_bytes(MS_HASH_START, c->i, (size_t)c->n_i * sizeof *c->i);
    h = ms__hash_bytes(h, c->f, (size_t)c->n_f * sizeof *c->f);
    if (c->op->flags & MS_OP_RANDOM) h = ms__hash_value(ms__hash_value(h, ms__rng_seed()), ms__rng_offset());
    for (int k = 0; k < c->n_in; k++) {
        ms_tensor *t;
        MS_TRY(values_of(&t, c->in[k]));
        h = ms__hash_value(h, t ? (uint64_t)t->dtype + 1 : 0);
        if (!t) continue;
        h = ms__hash_bytes(h, t->shape, (size_t)t->ndim * sizeof *t->shape);
        h = ms__hash_value(h, hash_of_values(t));
        ms__release(t);
    }
    queued.inputs = h;
    return MS_OK;
}

ms_status ms__results_after(const ms_call *c)
{
    fprintf(queued.results, "%s %016llx", c->op->name, (unsigned long long)queued.inputs);
    for (int k = 0; k < c->n_out; k++) {
        ms_tensor *t;
        MS_TRY(values_of(&t, c->out[k]));
        if (!t) continue;
        if (ms__is_cuda(ms__device(c->out[k]))) make_nans_equal(t);
        int64_t size = ms__dtype_size(t->dtype), most = SHOWN_BYTES / size, n = t->numel < most ? t->numel : most;
        fprintf(queued.results, " | %s", ms__dtype_name(t->dtype));
        for (int d = 0; d < t->ndim; d++) fprintf(queued.results, "%c%lld", d ? 'x' : ' ', (long long)t->shape[d]);
        fprintf(queued.results, "%s %016llx ", t->ndim ? "" : " -", (unsigned long long)hash_of_values(t));
        for (int64_t e = 0; e < n; e++)
            for (int64_t i = 0; i < size; i++)
                fprintf(queued.results, "%02x", ((const uint8_t *)ms__data(t))[e * t->numel / n * size + i]);
        ms__release(t);
    }
    fprintf(queued.results, "\n");
    fflush(queued.results);
    return MS_OK;
}
