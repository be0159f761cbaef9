// SPDX-License-Identifier: MIT
// cpu/order/search.c -- searchsorted and nonzero on the CPU.
#include "cpu/cpu.h"
#include "cpu/elementwise/loops.h"
#include "formulas/order.h"

// ---- searchsorted ----

typedef struct {
    const void *sorted;  // in the computing type
    const char *x;
    ms_tensor *o;
    int64_t n, per_line;  // boundaries of a line; numbers looked up in it (all, if there is one line)
    int cls, dtype;
    bool right;
} search_job;

static void search_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const search_job *j = arg;
    union {
        float f[MS_CHUNK];
        double d[MS_CHUNK];
        int64_t i[MS_CHUNK];
    } v;
    int size = ms__dtype_size(j->dtype);
    for (int64_t k = first; k < last; k += MS_CHUNK) {
        int64_t n = last - k < MS_CHUNK ? last - k : MS_CHUNK;
        ms__load(j->cls, j->dtype, n, &v, j->x + k * size, size);
        for (int64_t e = 0; e < n; e++) {
            int64_t line = (k + e) / j->per_line * j->n, low = 0, high = j->n;
            while (low < high) {
                int64_t middle = low + (high - low) / 2;
                bool after =
                    j->cls == MS_C_F32   ? ms_after_f64(((const float *)j->sorted)[line + middle], v.f[e], j->right)
                    : j->cls == MS_C_F64 ? ms_after_f64(((const double *)j->sorted)[line + middle], v.d[e], j->right)
                                         : ms_after_i64(((const int64_t *)j->sorted)[line + middle], v.i[e], j->right);
                if (after) low = middle + 1;
                else high = middle;
            }
            if (j->o->dtype == MS_I32) ((int32_t *)ms__data(j->o))[k + e] = (int32_t)low;
            else ((int64_t *)ms__data(j->o))[k + e] = low;
        }
    }
}
// Inputs: boundaries, numbers. Integers: whether a number's place is after the boundaries that equal it (else before).
ms_status ms__cpu_searchsorted(ms_call *c)
{
    ms_tensor *sorted = NULL, *x = NULL, *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    ms_status st = ms__contiguous(&sorted, c->in[0]);
    if (!st) st = ms__contiguous(&x, c->in[1]);
    void *wide = NULL;
    int cls = sorted ? ms__class_of(sorted->dtype) : 0, size = sorted ? ms__dtype_size(sorted->dtype) : 0;
    if (cls == MS_C_BOOL) cls = MS_C_I64;
    if (!st && sorted->dtype != ms__class_dtype(cls)) {
        size_t bytes = (size_t)(sorted->numel * ms__class_size(cls));
        wide = malloc(bytes + 1);
        if (!wide) st = ms__no_memory(bytes, c->op->name, "%lld boundaries", (long long)sorted->numel);
        else ms__load(cls, sorted->dtype, sorted->numel, wide, ms__data(sorted), size);
    }
    if (!st) {
        search_job j = {
            wide ? wide : ms__data(sorted), ms__data(x), o, sorted->shape[sorted->ndim - 1], o->numel, cls, x->dtype,
            c->n_i > 0 && c->i[0]
        };
        if (sorted->ndim > 1) j.per_line = x->shape[x->ndim - 1];
        ms__parallel(o->numel, 4096, search_range, &j);
    }
    free(wide);
    ms__release(x);
    ms__release(sorted);
    return st;
}

// ---- nonzero ----

enum { BLOCK = 16384 };
typedef struct {
    const char *x;
    int dtype;
    int64_t n, wanted, *out;
    int64_t *first;  // per block: the number of its elements that are not 0, later the sum over the blocks before it
} nonzero_job;

static void count_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    const nonzero_job *j = arg;
    uint8_t is[MS_CHUNK];
    int size = ms__dtype_size(j->dtype);
    int64_t count = 0;
    for (int64_t k = first; k < last; k += MS_CHUNK) {
        int64_t n = last - k < MS_CHUNK ? last - k : MS_CHUNK;
        ms__load(MS_C_BOOL, j->dtype, n, is, j->x + k * size, size);
        for (int64_t e = 0; e < n; e++) count += is[e];
    }
    j->first[block] = count;
}
static void place_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    const nonzero_job *j = arg;
    uint8_t is[MS_CHUNK];
    int64_t at[MS_CHUNK + 1], to = j->first[block];
    int size = ms__dtype_size(j->dtype);
    for (int64_t k = first; k < last && to < j->wanted; k += MS_CHUNK) {
        int64_t n = last - k < MS_CHUNK ? last - k : MS_CHUNK, count = 0;
        ms__load(MS_C_BOOL, j->dtype, n, is, j->x + k * size, size);
        for (int64_t e = 0; e < n; e++) {
            at[count] = k + e;
            count += is[e];
        }
        if (count > j->wanted - to) count = j->wanted - to;
        memcpy(j->out + to, at, (size_t)count * sizeof *at);
        to += count;
    }
}
ms_status ms__cpu_nonzero(ms_call *c)
{
    ms_tensor *x;
    int64_t wanted = c->i[0], found = 0;
    if (wanted == 0) return MS_OK;
    MS_TRY(ms__contiguous(&x, c->in[0]));
    int64_t blocks = (x->numel + BLOCK - 1) / BLOCK;
    nonzero_job j = { ms__data(x), x->dtype, x->numel, wanted, ms__data(c->out[0]), NULL };
    j.first = malloc((size_t)(blocks + 1) * sizeof *j.first);
    if (!j.first) {
        ms__release(x);
        return ms__no_memory((size_t)(blocks + 1) * sizeof *j.first, c->op->name, "counts of %lld blocks",
                             (long long)blocks);
    }
    ms__parallel(j.n, BLOCK, count_range, &j);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t here = j.first[b];
        j.first[b] = found;
        found += here;
    }
    ms__parallel(j.n, BLOCK, place_range, &j);
    for (int64_t k = found; k < wanted; k++) j.out[k] = -1;
    free(j.first);
    ms__release(x);
    return MS_OK;
}
