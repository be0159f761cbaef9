// SPDX-License-Identifier: MIT
// train/clip.c -- the norm of all gradients over all ranks, and clipping by it.
//
// For a sharded parameter, each rank computes the norm of its local part of the gradient, and the results are combined
// over the ranks of the parameter's group. A gradient that every rank holds whole counts once. Sums are in double over
// fixed blocks, so results do not depend on the number of threads.
#include <math.h>

#include "base/activity.h"
#include "device/device.h"
#include "base/trace.h"
#include "shard/script.h"
#include "shard/unit.h"

enum { BLOCK = 1 << 14, GROUPS = 16 };

typedef struct {
    const void *g;
    int dtype, device;
    int64_t numel, block;
    double p, *partial;
} part;
typedef struct {
    part *parts;
    int n;
    double factor;
} part_list;

// The sum of |g|^p over one block, or the maximum of |g|. Uses 16 lanes on every instruction set.
#define NORM_BODY(LOAD)                                                      \
    double lane[16] = { 0 };                                                 \
    int64_t k = 0;                                                           \
    if (p == 2) {                                                            \
        for (; k + 16 <= n; k += 16)                                         \
            for (int l = 0; l < 16; l++) {                                   \
                double x = (double)LOAD(g[k + l]);                           \
                lane[l] += x * x;                                            \
            }                                                                \
        for (; k < n; k++) {                                                 \
            double x = (double)LOAD(g[k]);                                   \
            lane[k % 16] += x * x;                                           \
        }                                                                    \
    } else if (p == 1) {                                                     \
        for (; k < n; k++) lane[k % 16] += fabs((double)LOAD(g[k]));         \
    } else if (isinf(p)) {                                                   \
        for (; k < n; k++) {                                                 \
            double x = fabs((double)LOAD(g[k]));                             \
            lane[0] = x > lane[0] || x != x ? x : lane[0];                   \
        }                                                                    \
        return lane[0];                                                      \
    } else {                                                                 \
        for (; k < n; k++) lane[k % 16] += pow(fabs((double)LOAD(g[k])), p); \
    }                                                                        \
    double sum = 0;                                                          \
    for (int l = 0; l < 16; l++) sum += lane[l];                             \
    return sum;

#define SAME(x) (x)
static MS_KERNEL double norm_f32(const float *g, int64_t n, double p) { NORM_BODY(SAME) }
static MS_KERNEL double norm_f64(const double *g, int64_t n, double p) { NORM_BODY(SAME) }
static MS_KERNEL double norm_f16(const ms_f16 *g, int64_t n, double p) { NORM_BODY(ms_f16_to_float) }
static MS_KERNEL double norm_bf16(const ms_bf16 *g, int64_t n, double p) { NORM_BODY(ms_bf16_to_float) }

#define SCALE_BODY(LOAD, STORE) \
    for (int64_t k = 0; k < n; k++) g[k] = STORE(LOAD(g[k]) * f);
static MS_KERNEL void scale_f32(float *g, int64_t n, float f) { SCALE_BODY(SAME, SAME) }
static MS_KERNEL void scale_f64(double *g, int64_t n, double f) { SCALE_BODY(SAME, SAME) }
static MS_KERNEL void scale_f16(ms_f16 *g, int64_t n, float f) { SCALE_BODY(ms_f16_to_float, ms_float_to_f16) }
static MS_KERNEL void scale_bf16(ms_bf16 *g, int64_t n, float f) { SCALE_BODY(ms_bf16_to_float, ms_float_to_bf16) }

// The part that contains block b (the last part that begins at or before it), and the block's elements in that part.
// NULL for a part on a GPU.
static const part *part_of(const part_list *list, int64_t b, int64_t *from, int64_t *n)
{
    int low = 0, high = list->n - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (list->parts[mid].block <= b) low = mid;
        else high = mid - 1;
    }
    const part *t = &list->parts[low];
    *from = (b - t->block) * BLOCK;
    *n = t->numel - *from < BLOCK ? t->numel - *from : BLOCK;
    return ms__is_cuda(t->device) ? NULL : t;
}

static void measure(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const part_list *list = arg;
    for (int64_t b = first; b < last; b++) {
        int64_t from, n;
        const part *t = part_of(list, b, &from, &n);
        if (!t) continue;
        MS_CASE_FLOAT(t->dtype, t->partial[b] = norm_f32((const float *)t->g + from, n, t->p),
                      t->partial[b] = norm_f64((const double *)t->g + from, n, t->p),
                      t->partial[b] = norm_f16((const ms_f16 *)t->g + from, n, t->p),
                      t->partial[b] = norm_bf16((const ms_bf16 *)t->g + from, n, t->p))
    }
}

static void scale(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const part_list *list = arg;
    for (int64_t b = first; b < last; b++) {
        int64_t from, n;
        const part *t = part_of(list, b, &from, &n);
        if (!t) continue;
        void *g = (void *)t->g;
        double f = list->factor;
        MS_CASE_FLOAT(t->dtype, scale_f32((float *)g + from, n, (float)f), scale_f64((double *)g + from, n, f),
                      scale_f16((ms_f16 *)g + from, n, (float)f), scale_bf16((ms_bf16 *)g + from, n, (float)f))
    }
}

static void over_blocks(part_list *list, int64_t blocks, ms_range_fn fn)
{
    if (blocks <= 2) fn(list, 0, blocks, 0);
    else ms__parallel_tasks(blocks, fn, list);
}

// The norms of parts on GPUs: each part's result is computed on its GPU; then all results of a device are copied at
// once, to the partial sums of the parts' first blocks.
static ms_status measure_there(part_list *list)
{
    for (int k = 0; k < list->n;) {
        int device = list->parts[k].device, end = k;
        while (end < list->n && list->parts[end].device == device) end++;
        if (ms__is_cuda(device)) {
            ms_block *there;
            double *here = malloc((size_t)(end - k) * sizeof *here);
            if (!here) return ms__no_memory((size_t)(end - k) * sizeof *here, "clip_grad_norm_", "%d norms", end - k);
            ms_status st = ms__alloc(&there, device, (size_t)(end - k) * sizeof *here, "clip_grad_norm_");
            if (st == MS_OK) {
                for (int i = k; st == MS_OK && i < end; i++) {
                    const part *t = &list->parts[i];
                    st = ms__cuda()->norm(ms__index(device), t->dtype, t->g, t->numel, t->p,
                                          (double *)there->data + (i - k));
                }
                if (st == MS_OK) st = ms__move(MS_CPU, here, device, there->data, (size_t)(end - k) * sizeof *here);
                ms__free(there);
            }
            for (int i = k; st == MS_OK && i < end; i++) list->parts[i].partial[list->parts[i].block] = here[i - k];
            free(here);
            MS_TRY(st);
        }
        k = end;
    }
    return MS_OK;
}
static ms_status scale_there(const part_list *list)
{
    for (int k = 0; k < list->n; k++) {
        const part *t = &list->parts[k];
        if (ms__is_cuda(t->device))
            MS_TRY(ms__cuda()->scale(ms__index(t->device), t->dtype, (void *)t->g, t->numel, list->factor));
    }
    return MS_OK;
}

// Adds x to *sum, or computes their maximum; NaN propagates.
static void fold(double *sum, double x, bool maximum)
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

ms_id ms_clip_grad_norm(int n, const ms_id *leaves, double max_norm, double p)
{
    MS_BUSY;
    MS_RANGE(MS_RANGE_OPTIMIZER, "clip_grad_norm_", NULL);
    if (!(p > 0)) return ms__no_id(ms__fail(MS_EINVAL, "clip_grad_norm_: norm_type %g is not positive", p));
    bool maximum = isinf(p);
    ms_id result = 0;
    ms_tensor *total_t = NULL;
    int n_parts = 0, n_groups = 0, out_dtype = -1;
    int64_t blocks = 0;
    double *partial = NULL, sums[GROUPS + 1] = { 0 };  // [0]: gradients that are not sharded; then one sum per group
    ms_group *groups[GROUPS];
    part *parts = malloc((size_t)(n > 0 ? n : 1) * sizeof *parts);
    int *owner = malloc((size_t)(n > 0 ? n : 1) * sizeof *owner);
    if (!parts || !owner) {
        ms__no_memory((size_t)n * (sizeof *parts + sizeof *owner), "clip_grad_norm_", "the list of %d parameters", n);
        goto out;
    }
    for (int k = 0; k < n; k++) {
        ms_tensor *t = ms__tensor(leaves[k]);
        if (!t) goto out;
        unit_param *managed = t->unit_param;
        int at = 0;
        if (managed) {  // the group counts even if this rank has no gradient: a peer may have one
            ms_group *group = managed->owner->group;
            for (at = 0; at < n_groups && groups[at] != group;) at++;
            if (at == GROUPS) {
                ms__fail(MS_EUNSUPPORTED, "clip_grad_norm_: the parameters belong to more than %d process groups",
                         GROUPS);
                goto out;
            }
            if (at == n_groups) groups[n_groups++] = group;
            at++;
            if (ms__unit_unreduced(t)) {
                ms__fail(MS_ESTATE,
                         "clip_grad_norm_: the gradient of parameter %d, '%s', has not been reduced: it comes from a "
                         "backward inside no_sync; run a backward outside of no_sync first",
                         k + 1, t->name ? t->name : "?");
                goto out;
            }
            t = managed->local;
        }
        ms_tensor *g = t->leaf ? t->leaf->grad : NULL;
        if (out_dtype < 0) out_dtype = t->dtype == MS_F64 ? MS_F64 : MS_F32;
        if (!g || g->numel == 0 || ms__device(g) == MS_META) continue;
        if (!ms__is_contiguous(g)) {
            ms__fail(MS_EINVAL, "clip_grad_norm_: gradient %d (%s) is not contiguous", k + 1, ms__tensor_text(g));
            goto out;
        }
        if (ms__storage_sync(g->storage, true)) goto out;
        owner[n_parts] = at;
        parts[n_parts++] = (part) {
            .g = ms__data(g), .dtype = g->dtype, .device = ms__device(g), .numel = g->numel, .block = blocks, .p = p
        };
        blocks += (g->numel + BLOCK - 1) / BLOCK;
        g->version->count++;
    }
    partial = calloc((size_t)(blocks > 0 ? blocks : 1), sizeof *partial);
    if (!partial) {
        ms__no_memory((size_t)blocks * sizeof *partial, "clip_grad_norm_", "%lld partial sums", (long long)blocks);
        goto out;
    }
    // Allocate everything before gradients change and before the collectives, in which peers wait for this rank.
    if (out_dtype < 0) out_dtype = MS_F32;
    if (ms__names_reserve(1, "clip_grad_norm_") ||
        ms__tensor_new(&total_t, out_dtype, MS_CPU, 0, NULL, "clip_grad_norm_"))
        goto out;
    for (int k = 0; k < n_parts; k++) parts[k].partial = partial;
    part_list list = { parts, n_parts, 1 };
    if (n_parts > 0) over_blocks(&list, blocks, measure);
    if (measure_there(&list)) goto out;
    for (int k = 0; k < n_parts; k++) {
        double *sum = &sums[owner[k]];
        int64_t end = k + 1 < n_parts ? parts[k + 1].block : blocks;
        for (int64_t b = parts[k].block; b < end; b++) fold(sum, partial[b], maximum);
    }
    double total = sums[0];
    for (int k = 0; k < n_groups; k++) {
        double *sum = &sums[k + 1];
        if (ms__group_size(groups[k]) > 1 && over_ranks(groups[k], sum, maximum)) goto out;
        fold(&total, *sum, maximum);
    }
    if (!maximum) total = p == 2 ? sqrt(total) : p == 1 ? total : pow(total, 1 / p);
    double coefficient = max_norm / (total + 1e-6);
    if (!isinf(max_norm) && !(coefficient >= 1) && n_parts > 0) {  // a NaN coefficient scales, too, as in PyTorch
        list.factor = coefficient;
        over_blocks(&list, blocks, scale);
        if (scale_there(&list)) goto out;
    }
    if (out_dtype == MS_F64) *(double *)ms__data(total_t) = total;
    else *(float *)ms__data(total_t) = (float)total;
    result = ms__name(total_t);
    total_t = NULL;
out:
    ms__release(total_t);
    free(partial);
    free(parts);
    free(owner);
    return result;
}
