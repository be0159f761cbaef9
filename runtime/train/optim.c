// SPDX-License-Identifier: MIT
// train/optim.c -- optimizers: one fused pass over all leaves that have a gradient.
//
// Every rank steps the leaves it holds: a sharded parameter stands for its local part. State lives in
// tensors of the script (so that it can be saved), made here at a leaf's first step: of the leaf's
// shape, in its dtype, float32 for half types. All leaves are cut into fixed blocks that share one
// parallel region, so bits don't depend on the number of threads.
#include <math.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/activity.h"
#include "device/device.h"
#include "base/trace.h"
#include "shard/script.h"

enum { BLOCK = 1 << 14 };

typedef ms_optim_job job;  // one leaf

// ---- the table ----

#define MS_OPTIM_ROWS
#include "formulas/optim/list.h"
#undef MS_OPTIM_ROWS

enum {
#define OPTIMIZER(NAME, FORMULA) KIND_##NAME,
#include "formulas/optim/list.h"
    KINDS
};
_Static_assert((int)KIND_SGD == MS_SGD && (int)KIND_Adam == MS_ADAM && (int)KIND_AdamW == MS_ADAMW,
               "numbers that C programs use");

static const optimizer *const optimizers[] = {
#define OPTIMIZER(NAME, FORMULA) &ms__optim_##NAME,
#include "formulas/optim/list.h"
};

static const optimizer *optimizer_at(int kind) { return kind >= 0 && kind < KINDS ? optimizers[kind] : NULL; }

const ms_optim_row *ms_optim_at(int kind) { return optimizer_at(kind) ? &optimizers[kind]->row : NULL; }

ms_status ms_optim_check(const ms_optim_options *o)
{
    const optimizer *row = optimizer_at(o->kind);
    if (!row) return ms__fail(MS_EINVAL, "unknown optimizer kind %d", o->kind);
    return row->check ? row->check(o) : MS_OK;
}

int ms_optim_is_plain(const ms_optim_options *o)
{
    const optimizer *row = optimizer_at(o->kind);
    return row && row->is_plain && row->is_plain(o);
}

// ---- passes ----

#define MS_OPTIM_FORMULAS
#define REAL float
#define R(name) name##_real32
#define R_SQRT sqrtf
#include "formulas/optim/list.h"
#undef REAL
#undef R
#undef R_SQRT
#define REAL double
#define R(name) name##_real64
#define R_SQRT sqrt
#include "formulas/optim/list.h"
#undef REAL
#undef R
#undef R_SQRT
#undef MS_OPTIM_FORMULAS

#define T float
#define REAL float
#define R(name) name##_real32
#define LOAD(x) (x)
#define STORE(x) (x)
#define N(name) name##_f32
#include "train/optim_body.h"
#define T double
#define REAL double
#define R(name) name##_real64
#define LOAD(x) (x)
#define STORE(x) (x)
#define N(name) name##_f64
#include "train/optim_body.h"
#define T ms_f16
#define REAL float
#define R(name) name##_real32
#define LOAD(x) ms_f16_to_float(x)
#define STORE(x) ms_float_to_f16(x)
#define N(name) name##_f16
#include "train/optim_body.h"
#define T ms_bf16
#define REAL float
#define R(name) name##_real32
#define LOAD(x) ms_bf16_to_float(x)
#define STORE(x) ms_float_to_bf16(x)
#define N(name) name##_bf16
#include "train/optim_body.h"

typedef struct {
    const job *jobs;
    int n;
} job_list;

// Squares of small gradients fall below the smallest normal number, where arithmetic is a hundred times slower: they
// count as zero here, and only here.
static unsigned flush_tiny(void)
{
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero
    return before;
#else
    return 0;
#endif
}

static void keep_tiny(unsigned before)
{
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

// Blocks [first, last) of all leaves together.
static void run_blocks(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const job_list *list = arg;
    int low = 0, high = list->n - 1;  // the last job that begins at or before `first`
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (list->jobs[mid].block <= first) low = mid;
        else high = mid - 1;
    }
    unsigned mode = flush_tiny();
    for (int64_t b = first; b < last; b++) {
        while (low + 1 < list->n && list->jobs[low + 1].block <= b) low++;
        const job *j = &list->jobs[low];
        int64_t at = (b - j->block) * BLOCK, n = j->numel - at < BLOCK ? j->numel - at : BLOCK;
        MS_CASE_FLOAT(j->dtype, run_f32(j, at, n), run_f64(j, at, n), run_f16(j, at, n), run_bf16(j, at, n))
    }
    keep_tiny(mode);
}

// A leaf's state tensors, as many as `keeps` has bits: checked, or made when there is none. made[] collects what a
// failure takes back.
static ms_status take_state(unsigned keeps, const ms_tensor *p, ms_id *state, job *j, ms_id *made, int *n_made)
{
    int dtype = ms__is_half(p->dtype) ? MS_F32 : p->dtype;
    for (int s = 0; s < MS_OPTIM_STATES; s++) {
        if (!(keeps >> s & 1)) continue;
        if (state[s] == 0) {
            ms_tensor *t = NULL;
            MS_TRY(ms__zeros(&t, dtype, ms__device(p), p->ndim, p->shape));
            if (!(state[s] = ms__name_unscoped(t))) return ms__failure();
            made[(*n_made)++] = state[s];
        }
        ms_tensor *t = ms__tensor(state[s]);
        if (!t) return ms__failure();
        if (t->dtype != dtype || t->numel != p->numel || !ms__is_contiguous(t))
            return ms__fail(MS_EINVAL, "optimizer: state %s does not fit the parameter %s", ms__tensor_text(t),
                            ms__tensor_text(p));
        MS_TRY(ms__storage_sync(t->storage, true));
        j->state[s] = ms__data(t);
        t->version->count++;
    }
    return MS_OK;
}

ms_status ms_optim_step(const ms_optim_options *o, int n, const ms_id *leaves, ms_id *state, double *steps)
{
    MS_TRY(ms_optim_check(o));
    const optimizer *row = optimizer_at(o->kind);
    unsigned keeps = row->keeps(o);
    if (n <= 0) return MS_OK;
    MS_BUSY;
    MS_RANGE(MS_RANGE_OPTIMIZER, row->range, NULL);
    ms_status st = MS_OK;
    int n_jobs = 0, n_stepped = 0, n_made = 0, n_copies = 0;
    int64_t blocks = 0;
    job *jobs = malloc((size_t)n * sizeof *jobs);
    int *stepped = malloc((size_t)n * sizeof *stepped);
    ms_id *made = malloc((size_t)n * MS_OPTIM_STATES * sizeof *made);
    ms_tensor **copies = malloc((size_t)n * 2 * sizeof *copies);  // contiguous gradients
    if (!jobs || !stepped || !made || !copies) {
        st = ms__no_memory((size_t)n *
                               (sizeof *jobs + sizeof *stepped + MS_OPTIM_STATES * sizeof *made + 2 * sizeof *copies),
                           "optimizer", "the list of %d parameters", n);
        goto out;
    }
    for (int k = 0; k < n; k++) {
        ms_tensor *p = ms__tensor(leaves[k]);
        if (!p) {
            st = ms__failure();
            goto out;
        }
        bool unreduced = ms__unit_unreduced(p);
        p = ms__unit_local(p);
        ms_tensor *g = p->leaf ? p->leaf->grad : NULL;
        if (!g) continue;
        if (ms__device(p) == MS_META) continue;
        if (unreduced) {
            st = ms__fail(MS_ESTATE,
                          "step: the gradient of parameter %d, '%s', has not been reduced: it comes from a backward "
                          "inside no_sync; run one outside first",
                          k + 1, p->name ? p->name : "?");
            goto out;
        }
        if (!ms__is_contiguous(p)) {
            st = ms__fail(MS_EINVAL, "optimizer: parameter %d (%s) is not contiguous", k + 1, ms__tensor_text(p));
            goto out;
        }
        bool cast = g->dtype != p->dtype && ms__is_float(g->dtype) && ms__is_float(p->dtype);
        if ((g->dtype != p->dtype && !cast) || g->numel != p->numel || ms__device(g) != ms__device(p)) {
            st = ms__fail(MS_EINVAL, "optimizer: gradient %s does not fit parameter %d, %s", ms__tensor_text(g), k + 1,
                          ms__tensor_text(p));
            goto out;
        }
        job *j = &jobs[n_jobs];
        memset(j, 0, sizeof *j);
        if (cast) {  // kept in low precision: promoted, as arithmetic between the two would
            if ((st = ms__tensor_new(&copies[n_copies], p->dtype, ms__device(g), g->ndim, g->shape,
                                     "optimizer: gradient")))
                goto out;
            st = ms__copy(copies[n_copies], g);
        } else if ((st = ms__contiguous(&copies[n_copies], g))) goto out;
        g = copies[n_copies++];
        if (st != MS_OK) goto out;
        if ((st = take_state(keeps, p, state + MS_OPTIM_STATES * k, j, made, &n_made))) goto out;
        if ((st = ms__storage_sync(g->storage, false)) || (st = ms__storage_sync(p->storage, true))) goto out;
        j->kind = o->kind;
        j->p = ms__data(p);
        j->g = ms__data(g);
        j->dtype = p->dtype;
        j->numel = p->numel;
        j->block = blocks;
        j->device = ms__device(p);
        row->factors(o, steps[k] + 1, j->factors);
        blocks += (p->numel + BLOCK - 1) / BLOCK;
        stepped[n_stepped++] = k;  // an empty shard, too: it has no work, but its peers' parts change
        if (p->numel > 0) n_jobs++;
    }
    // Nothing has changed so far: a step that fails for lack of memory can be repeated. From here on only a device can
    // fail.
    for (int k = 0; st == MS_OK && k < n_jobs;) {  // a list for every run of leaves on one device
        int end = k;
        int64_t first = jobs[k].block, count = 0, size = 0;
        for (; end < n_jobs && jobs[end].device == jobs[k].device; end++) {
            jobs[end].block -= first;
            count = jobs[end].block + (jobs[end].numel + BLOCK - 1) / BLOCK;
            size += jobs[end].numel;
        }
        job_list list = { jobs + k, end - k };
        if (ms__is_cuda(jobs[k].device))
            st = ms__cuda()->optim(ms__index(jobs[k].device), list.n, list.jobs, count, BLOCK);
        else if (size <= 2 * BLOCK) run_blocks(&list, 0, count, 0);
        else ms__parallel_tasks(count, run_blocks, &list);
        k = end;
    }
    if (st != MS_OK) goto out;
    for (int k = 0; k < n_stepped; k++) {
        steps[stepped[k]]++;
        ms__unit_stepped(ms__tensor(leaves[stepped[k]]));
    }
    n_made = 0;
out:
    for (int k = 0; k < n_made; k++) ms_release(made[k]);
    for (int k = 0; k < n_copies; k++) ms__release(copies[k]);
    if (st != MS_OK && made)
        for (int k = 0; k < n; k++)
            for (int s = MS_OPTIM_STATES * k; s < MS_OPTIM_STATES * (k + 1); s++)
                if (state[s] && !ms_is_alive(state[s])) state[s] = 0;
    free(jobs);
    free(stepped);
    free(made);
    free(copies);
    return st;
}
