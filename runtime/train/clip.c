// SPDX-License-Identifier: MIT
// train/clip.c -- the norm of all gradients over all ranks, and clipping by it.
//
// For a sharded parameter, each rank computes the norm of its local part of the gradient, and the results are combined
// over the ranks of the parameter's group. A gradient that every rank holds whole counts once. Sums are in double over
// fixed blocks, so results do not depend on the number of threads. If all gradients of a rank are on one GPU and the
// collectives of their groups stay on GPUs, so does the norm, and the host waits for nothing.
#include <math.h>

#include "autograd/captured.h"
#include "base/activity.h"
#include "device/device.h"
#include "device/move.h"
#include "base/trace.h"
#include "ops/captured.h"
#include "ops/queued.h"
#include "shard/script.h"
#include "shard/unit.h"
#include "train/clip.h"
#include "train/parts.h"

enum { GROUPS = 16 };

// The gradients of a call: first those on the CPU, then those on each GPU in turn.
typedef struct {
    int n, n_cpu, n_groups, dtype;  // dtype: of the norm
    ms_norm_part *parts;
    int *devices;
    ms_group *groups[GROUPS];
    double sums[GROUPS + 1];  // [0]: gradients that are not sharded; then one sum per group
    ms_norm_job jobs[MS_CUDA_DEVICES];
    const ms_norm_part *there;  // a copy of `parts` in the memory of the GPU (ms_norm_job); NULL: none
} gradients;

// Adds x to *sum, or computes their maximum; NaN propagates.
static void fold_norm(double *sum, double x, bool maximum)
{
    if (maximum) *sum = x > *sum || x != x ? x : *sum;
    else *sum += x;
}

// Computes the sum (or maximum) of *value over the ranks of a group. Collective.
static ms_status over_ranks(ms_group *group, double *value, bool maximum)
{
    int64_t one = 1;
    ms_tensor *t = NULL;
    MS_TRY(ms__tensor_new(&t, MS_F64, MS_CPU, 1, &one, "clip_grad_norm_"));
    *(double *)ms__data(t) = *value;
    ms_request r = { .group = group,
                     .op = MS_DIST_ALL_REDUCE,
                     .reduction = maximum ? MS_MAX : MS_SUM,
                     .out = t,
                     .label.unit = "clip_grad_norm_" };
    ms_status st = ms__collective(&r, NULL);
    if (st == MS_OK) *value = *(double *)ms__data(t);
    ms__release(t);
    return st;
}

static ms_status collect_gradients(gradients *s, int n, const ms_id *leaves)
{
    for (int k = 0; k < n; k++) {
        ms_tensor *t = ms__tensor(leaves[k]);
        if (!t) return ms__failure();
        unit_param *managed = t->unit_param;
        int at = 0;
        if (managed) {  // the group counts even if this rank has no gradient: a peer may have one
            ms_group *group = managed->owner->group;
            for (at = 0; at < s->n_groups && s->groups[at] != group;) at++;
            if (at == GROUPS)
                return ms__fail(
                    MS_EUNSUPPORTED,
                    "clip_grad_norm_: the parameters belong to more process groups than the %d that are supported",
                    GROUPS);
            if (at == s->n_groups) s->groups[s->n_groups++] = group;
            at++;
        }
        if (ms__unit_unreduced(t)) return ms__unit_refuse_unreduced("clip_grad_norm_", k, t);
        if (managed) t = managed->local;
        ms_tensor *g = t->leaf ? t->leaf->grad : NULL;
        if (t->leaf) ms__grad_is_read(t->leaf);
        if (s->dtype < 0) s->dtype = t->dtype == MS_F64 ? MS_F64 : MS_F32;
        if (!g || g->numel == 0 || ms__device(g) == MS_META) continue;
        if (!ms__is_contiguous(g))
            return ms__fail(MS_EINVAL, "clip_grad_norm_: gradient %d (%s) is not contiguous", k + 1,
                            ms__tensor_text(g));
        MS_TRY(ms__storage_sync(g->storage, true));
        int place = s->n++;
        for (; place > 0 && s->devices[place - 1] > ms__device(g); place--) {
            s->devices[place] = s->devices[place - 1];
            s->parts[place] = s->parts[place - 1];
        }
        s->devices[place] = ms__device(g);
        s->parts[place] = (ms_norm_part) { .g = ms__data(g), .dtype = g->dtype, .owner = at, .numel = g->numel };
        if (MS_UNLIKELY(ms__capturing != NULL)) (void)ms__capture_tensor(ms__capturing, g);
    }
    if (s->dtype < 0) s->dtype = MS_F32;
    while (s->n_cpu < s->n && s->devices[s->n_cpu] == MS_CPU) s->n_cpu++;
    return MS_OK;
}

// Queues the norms of the gradients on GPUs.
static ms_status measure_there(gradients *s, double p)
{
    for (int k = s->n_cpu, end; k < s->n; k = end) {
        for (end = k; end < s->n && s->devices[end] == s->devices[k];) end++;
        int index = ms__index(s->devices[k]);
        ms__note_queued(s->devices[k], "clip_grad_norm_");
        s->jobs[index] = (ms_norm_job) { .n = end - k, .owners = s->n_groups + 1, .p = p, .there = s->there };
        MS_TRY(ms__cuda()->gradients.norms(index, &s->jobs[index], s->parts + k));
    }
    return MS_OK;
}

// Adds the sums of GPUs to those of the CPU; for maxima, takes the larger ones.
static ms_status take_sums(gradients *s, bool maximum)
{
    for (int index = 0; index < MS_CUDA_DEVICES; index++) {
        double sums[GROUPS + 1];
        if (!s->jobs[index].room) continue;
        MS_TRY(ms__move(MS_CPU, sums, MS_CUDA | index << 8, s->jobs[index].room->data,
                        (size_t)(s->n_groups + 1) * sizeof *sums));
        for (int k = 0; k <= s->n_groups; k++) fold_norm(&s->sums[k], sums[k], maximum);
    }
    return MS_OK;
}

// As over_ranks, for the sums (or maxima) of all groups, which are on a GPU and stay there. Collective.
static ms_status over_ranks_there(const gradients *s, int device, bool maximum)
{
    int64_t n = s->n_groups + 1, one = 1;
    ms_tensor *all;
    ms_block *room = s->jobs[ms__index(device)].room;
    MS_TRY(ms__tensor_new(&all, MS_F64, device, 1, &n, "clip_grad_norm_"));
    ms_status st = ms__move(device, ms__data(all), device, room->data, (size_t)n * sizeof(double));
    for (int k = 0; k < s->n_groups && st == MS_OK; k++) {
        if (ms__group_size(s->groups[k]) == 1) continue;
        ms_tensor *sum = ms__tensor_on(all->storage, MS_F64, 1, &one, k + 1);
        st = ms__collective(&(ms_request) { .group = s->groups[k],
                                            .op = MS_DIST_ALL_REDUCE,
                                            .reduction = maximum ? MS_MAX : MS_SUM,
                                            .out = sum,
                                            .label.unit = "clip_grad_norm_" },
                            NULL);
        ms__release(sum);
    }
    if (st == MS_OK) st = ms__move(device, room->data, device, ms__data(all), (size_t)n * sizeof(double));
    ms__release(all);
    return st;
}

// ---- clipping ----

struct ms_clip {
    gradients s;
    ms_part_list list;  // the gradients on the CPU
    int64_t blocks;
    double max_norm, total;
    ms_tensor *norm;  // the result: on the gradients' device if they share one, else on the CPU
    bool there;       // all gradients of this rank are on one GPU, where their norm stays, too
    bool alone;       // no other rank has parts of the gradients
};

static void free_rooms(gradients *s)
{
    for (int k = 0; k < MS_CUDA_DEVICES; k++) {
        ms__free(s->jobs[k].room);
        s->jobs[k].room = NULL;
    }
}

void ms__clip_free(ms_clip *c)
{
    if (!c) return;
    free_rooms(&c->s);
    ms__release(c->norm);
    free(c->list.partial);
    free(c->s.parts);
    free(c->s.devices);
    free(c);
}

static ms_status clip_begin(ms_clip *c, int n, const ms_id *leaves)
{
    size_t places = (size_t)(n > 0 ? n : 1);
    gradients *s = &c->s;
    if (!(c->list.p > 0))
        return ms__fail(MS_EINVAL, "clip_grad_norm_: norm_type is %g, expected a number above 0", c->list.p);
    s->parts = malloc(places * sizeof *s->parts);
    s->devices = malloc(places * sizeof(int));
    if (!s->parts || !s->devices)
        return ms__no_memory(places * (sizeof *s->parts + sizeof(int)), "clip_grad_norm_", "the list of %d parameters",
                             n);
    MS_TRY(collect_gradients(s, n, leaves));
    for (int k = 0; k < s->n_cpu; k++) {
        s->parts[k].block = c->blocks;
        c->blocks += (s->parts[k].numel + MS_PART_BLOCK - 1) / MS_PART_BLOCK;
    }
    c->list.n = s->n_cpu;
    c->list.parts = s->parts;
    c->list.partial = calloc((size_t)(c->blocks > 0 ? c->blocks : 1), sizeof *c->list.partial);
    if (!c->list.partial)
        return ms__no_memory((size_t)c->blocks * sizeof(double), "clip_grad_norm_", "%lld partial sums",
                             (long long)c->blocks);
    // Allocate the result before gradients change and before the collectives, in which peers wait for this rank. If all
    // gradients are on one device, the norm is there, too.
    int device = s->n > 0 && s->devices[0] == s->devices[s->n - 1] ? s->devices[0] : MS_CPU;
    return ms__tensor_new(&c->norm, s->dtype, device, 0, NULL, "clip_grad_norm_");
}

ms_status ms__clip_new(ms_clip **out, int n, const ms_id *leaves, double max_norm, double p)
{
    ms_clip *c = *out = calloc(1, sizeof *c);
    if (!c) return ms__no_memory(sizeof *c, "clip_grad_norm_", "the norm of %d parameters", n);
    *c = (ms_clip) { .s.dtype = -1, .list.p = p, .list.factor = 1, .max_norm = max_norm };
    ms_status st = clip_begin(c, n, leaves);
    if (st == MS_OK) return MS_OK;
    ms__clip_free(c);
    *out = NULL;
    return st;
}

ms_status ms__clip_measure(ms_clip *c)
{
    gradients *s = &c->s;
    double p = c->list.p, *own = c->list.partial;
    bool maximum = isinf(p);
    MS_TRY(ms__names_reserve(1, "clip_grad_norm_"));  // for ms__clip_result
    if (c->blocks > 0) ms__parts_run(&c->list, c->blocks, ms__parts_measure);
    MS_TRY(measure_there(s, p));
    c->there = ms__is_cuda(ms__device(c->norm));
    c->alone = true;
    for (int k = 0; k < s->n_groups; k++) {
        c->alone = c->alone && ms__group_size(s->groups[k]) == 1;
        c->there = c->there && ms__group_stays(s->groups[k]);
    }
    if (c->there) return c->alone ? MS_OK : over_ranks_there(s, ms__device(c->norm), maximum);
    for (int k = 0; k < s->n_cpu; k++) {
        int64_t end = k + 1 < s->n_cpu ? s->parts[k + 1].block : c->blocks;
        for (int64_t b = s->parts[k].block; b < end; b++) fold_norm(&s->sums[s->parts[k].owner], own[b], maximum);
    }
    MS_TRY(take_sums(s, maximum));
    double total = s->sums[0];
    for (int k = 0; k < s->n_groups; k++) {
        double *sum = &s->sums[k + 1];
        if (ms__group_size(s->groups[k]) > 1) MS_TRY(over_ranks(s->groups[k], sum, maximum));
        fold_norm(&total, *sum, maximum);
    }
    if (!maximum) total = p == 2 ? sqrt(total) : p == 1 ? total : pow(total, 1 / p);
    c->total = total;
    double factor = c->max_norm / (total + 1e-6);
    if (!isinf(c->max_norm) && !(factor >= 1)) c->list.factor = factor;  // a NaN factor scales, too, as in PyTorch
    return MS_OK;
}

// Calls the clip function of the CUDA plugin for each GPU with gradients: it scales them if max_norm is finite, and
// stores the norm if c->norm is on this GPU.
static ms_status clip_on_gpus(ms_clip *c, double max_norm)
{
    int home = ms__device(c->norm);
    for (int index = 0; index < MS_CUDA_DEVICES; index++) {
        ms_norm_job *job = &c->s.jobs[index];
        bool here = home == (MS_CUDA | index << 8);
        if (job->room && (here || !isinf(max_norm)))
            MS_TRY(ms__cuda()->gradients.clip(index, job, c->there ? NULL : &c->total, max_norm, c->s.dtype,
                                              here ? ms__data(c->norm) : NULL));
    }
    return MS_OK;
}

double ms__clip_factor(const ms_clip *c, ms_cuda_step *room, const ms_cuda_step **there)
{
    *there = NULL;
    if (!c->there) return c->list.factor;
    *room = (ms_cuda_step) { .job = &c->s.jobs[ms__index(ms__device(c->norm))],
                             .max_norm = c->max_norm,
                             .dtype = c->s.dtype,
                             .norm = ms__data(c->norm) };
    *there = room;
    return 1;
}

static void store_norm(ms_clip *c)
{
    if (ms__device(c->norm) != MS_CPU) return;
    if (c->s.dtype == MS_F64) *(double *)ms__data(c->norm) = c->total;
    else *(float *)ms__data(c->norm) = (float)c->total;
}

ms_id ms__clip_result(ms_clip *c)
{
    if (!c->there && clip_on_gpus(c, INFINITY)) return 0;
    store_norm(c);
    ms_id id = ms__name(c->norm);
    c->norm = NULL;
    return id;
}

// Computes the norm of all gradients, and scales the gradients unless the norm is within max_norm.
static ms_status clip_all(ms_clip *c)
{
    c->list.factor = 1;
    memset(c->s.sums, 0, sizeof c->s.sums);
    MS_TRY(ms__clip_measure(c));
    if (c->list.factor != 1 && c->blocks > 0) ms__parts_run(&c->list, c->blocks, ms__parts_scale);
    MS_TRY(clip_on_gpus(c, c->max_norm));
    store_norm(c);
    return MS_OK;
}

// ---- captured steps ----

// A call of clip_grad_norm_ as work of a captured step; it stores the norm in a tensor that lives as long as the step.
static ms_status repeat_clip(void *arg, ms_captured *c)
{
    ms_clip *mine = *(ms_clip **)arg;
    (void)c;
    MS_RANGE(MS_RANGE_OPTIMIZER, "clip_grad_norm_", NULL);
    ms_status st = clip_all(mine);
    free_rooms(&mine->s);
    return st;
}

// Queues the call into a CUDA graph. there: the list of gradients, in GPU memory.
static ms_status queue_clip(void *arg, ms_captured *c, void *there)
{
    ms_clip *mine = *(ms_clip **)arg;
    mine->s.there = there;
    ms_status st = repeat_clip(arg, c);
    mine->s.there = NULL;
    return st;
}

static ms_status advance_clip(void *arg, ms_captured *c, void *here)
{
    const gradients *s = &(*(ms_clip **)arg)->s;
    (void)c;
    memcpy(here, s->parts, (size_t)s->n * sizeof *s->parts);
    return MS_OK;
}

static void drop_clip(void *arg)
{
    ms_clip *c = *(ms_clip **)arg;
    for (int k = 0; k < c->s.n_groups; k++) ms__group_release(c->s.groups[k]);
    c->norm = NULL;
    ms__clip_free(c);
}

// Clips, and adds the call to the step that is being recorded. The step then owns *call, which becomes NULL; on failure
// the caller still owns it.
static ms_status capture_clip(ms_clip **call)
{
    ms_clip *c = *call;
    ms_captured *step = ms__capture_suspend();
    ms_status st = clip_all(c);
    free_rooms(&c->s);
    ms__capture_resume(step);
    ms_clip **work = st == MS_OK ? ms__capture_work(step, repeat_clip, drop_clip, sizeof *work) : NULL;
    if (!work) return st;
    ms_tensor *lasting = ms__capture_tensor(step, c->norm);
    ms__release(c->norm);
    c->norm = lasting;
    for (int k = 0; k < c->s.n_groups; k++) step->sends |= ms__group_size(ms__group_hold(c->s.groups[k])) > 1;
    *work = c;
    *call = NULL;
    ms_fixed how = { queue_clip, advance_clip, (size_t)c->s.n * sizeof *c->s.parts };
    if (c->there && c->alone) ms__capture_fixed(step, ms__device(c->norm), &how);
    return MS_OK;
}

ms_id ms_clip_grad_norm(int n, const ms_id *leaves, double max_norm, double p)
{
    MS_BUSY;
    MS_RANGE(MS_RANGE_OPTIMIZER, "clip_grad_norm_", NULL);
    ms_clip *c;
    if (ms__clip_new(&c, n, leaves, max_norm, p)) return 0;
    for (int k = 0; k < n; k++) {
        ms_tensor *t = ms__unit_local(ms__tensor(leaves[k])), *g = t->leaf ? t->leaf->grad : NULL;
        if (g) g->version->count++;
    }
    ms_tensor *norm = ms__retain(c->norm);
    ms_status st = MS_UNLIKELY(ms__capturing != NULL) ? capture_clip(&c) : clip_all(c);
    ms__clip_free(c);
    if (st == MS_OK) return ms__name(norm);
    ms__release(norm);
    return 0;
}
