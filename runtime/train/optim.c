// SPDX-License-Identifier: MIT
// train/optim.c -- optimizers: one fused pass over all leaves that have a gradient. The leaves are divided into blocks
// of fixed size and processed in one parallel loop, so the results do not depend on the number of threads.
#include <math.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "device/device.h"
#include "ops/queued.h"
#include "train/optim.h"

enum { BLOCK = MS_OPTIM_BLOCK, PIECE = 1 << 10 };

typedef ms_optim_job job;  // the work on one leaf

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
               "the numbers of ms_optim_kind are those of the table");

static const optimizer *const optimizers[] = {
#define OPTIMIZER(NAME, FORMULA) &ms__optim_##NAME,
#include "formulas/optim/list.h"
};

// Whether the optimizer has the option master_weights.
static const bool masters[] = {
#define OPTIMIZER(NAME, FORMULA) (MS_KEEPS_##FORMULA & MS_KEEPS_MASTERS) != 0,
#include "formulas/optim/list.h"
};

static const optimizer *optimizer_at(int kind) { return kind >= 0 && kind < KINDS ? optimizers[kind] : NULL; }

const ms_optim_row *ms_optim_at(int kind) { return optimizer_at(kind) ? &optimizers[kind]->row : NULL; }

ms_status ms_optim_check(const ms_optim_options *o)
{
    const optimizer *row = optimizer_at(o->kind);
    if (!row) return ms__fail(MS_EINVAL, "optimizer kind is %d, expected 0 to %d", o->kind, KINDS - 1);
    if (o->master_weights && !masters[o->kind])
        return ms__fail(MS_EINVAL, "optimizer %s: master_weights is %d, expected 0: it keeps no master weights",
                        row->row.name, o->master_weights);
    return row->check ? row->check(o) : MS_OK;
}

int ms_optim_is_plain(const ms_optim_options *o)
{
    const optimizer *row = optimizer_at(o->kind);
    return row && row->is_plain && row->is_plain(o);
}

// ---- passes ----

// On x86-64 and ARM64, flush_tiny makes subnormal numbers count as 0 during the step: squares of small gradients are
// often subnormal, and arithmetic with subnormals can take a hundred times as long. keep_tiny ends that for
// conversions of half types, which compute with subnormals (tensor/dtype.h). Both return the previous mode, which
// set_tiny restores.
#if defined(__x86_64__)
enum { TINY = 0x8040 };  // bits: flush to zero, denormals are zero
static void set_tiny(unsigned mode) { _mm_setcsr(mode); }
static unsigned change_tiny(unsigned bits)
{
    unsigned before = _mm_getcsr();
    _mm_setcsr((before & ~(unsigned)TINY) | bits);
    return before;
}
#elif defined(__aarch64__)
enum { TINY = 1 << 24 };  // bit: flush to zero, of operands and results
static void set_tiny(unsigned mode) { __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode) : "memory"); }
static unsigned change_tiny(unsigned bits)
{
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before) : : "memory");
    set_tiny(((unsigned)before & ~(unsigned)TINY) | bits);
    return (unsigned)before;
}
#else
enum { TINY };
static void set_tiny(unsigned mode) { (void)mode; }
static unsigned change_tiny(unsigned bits) { return bits; }
#endif
static unsigned flush_tiny(void) { return change_tiny(TINY); }
static unsigned keep_tiny(void) { return change_tiny(0); }

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
#define HALF
#define REAL float
#define R(name) name##_real32
#define LOAD(x) ms_f16_to_float(x)
#define STORE(x) ms_float_to_f16(x)
#define N(name) name##_f16
#include "train/optim_body.h"
#define T ms_bf16
#define HALF
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

// Processes blocks [first, last); blocks are numbered across all leaves.
static void run_blocks(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const job_list *list = arg;
    int low = 0, high = list->n - 1;  // search for the last job that begins at or before `first`
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
    set_tiny(mode);
}

void ms__factors_compute(ms_factors *last, const ms_optim_options *o, double steps)
{
    optimizer_at(o->kind)->factors(o, steps + 1, last->values);
    last->values[MS_OPTIM_SIGN] = o->maximize ? -1 : 1;
    last->options = o;
    last->steps = steps;
}

unsigned ms__optim_keeps(const ms_optim_options *o) { return optimizer_at(o->kind)->keeps(o); }

const char *ms__optim_range(int kind) { return optimizer_at(kind)->range; }

ms_status ms__optim_run(job *jobs, int n, const job *there, const ms_cuda_step *reads)
{
    for (int k = 0; k < n;) {
        int end = k;
        int64_t first = jobs[k].block, count = 0, size = 0;
        for (; end < n && jobs[end].device == jobs[k].device && jobs[end].kind == jobs[k].kind; end++) {
            jobs[end].block -= first;
            count = jobs[end].block + (jobs[end].numel + BLOCK - 1) / BLOCK;
            size += jobs[end].numel;
        }
        job_list list = { jobs + k, end - k };
        if (ms__is_cuda(jobs[k].device)) {
            ms__note_queued(jobs[k].device, optimizer_at(jobs[k].kind)->range);
            ms_optim_pass p = { list.n, list.jobs, there ? there + k : NULL, count, BLOCK };
            MS_TRY(ms__cuda()->optim(ms__index(jobs[k].device), &p, reads));
        } else if (size <= 2 * BLOCK) run_blocks(&list, 0, count, 0);
        else ms__parallel_tasks(count, run_blocks, &list);
        k = end;
    }
    return MS_OK;
}
