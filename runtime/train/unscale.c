// SPDX-License-Identifier: MIT
// train/unscale.c -- unscaling of gradients, with a search for numbers that are not finite.
#include <math.h>

#include "base/activity.h"
#include "base/trace.h"
#include "ops/captured.h"
#include "ops/queued.h"
#include "train/parts.h"

// Checks the gradients, and lists those that are not empty.
static ms_status list_gradients(ms_part_list *list, int n, const ms_id *gradients, int device)
{
    for (int k = 0; k < n; k++) {
        ms_tensor *g = ms__tensor(gradients[k]);
        if (!g) return ms__failure();
        if (g->dtype > MS_BF16 || ms__device(g) != device || !ms__is_contiguous(g))
            return ms__fail(
                MS_EINVAL,
                "unscale_: gradient %d is %s, expected a contiguous floating-point tensor on the scale's device", k + 1,
                ms__tensor_text(g));
        g->version->count++;
        if (g->numel == 0) continue;
        MS_TRY(ms__storage_sync(g->storage, true));
        list->parts[list->n] =
            (ms_norm_part) { .g = ms__data(g), .dtype = g->dtype, .owner = list->n, .numel = g->numel };
        list->n++;
    }
    return MS_OK;
}

static ms_status unscale_here(ms_part_list *list, float inverse, float *found, bool stop)
{
    int64_t blocks = 0;
    for (int k = 0; k < list->n; k++) {
        list->parts[k].block = blocks;
        blocks += (list->parts[k].numel + MS_PART_BLOCK - 1) / MS_PART_BLOCK;
    }
    list->partial = calloc((size_t)blocks, sizeof *list->partial);
    if (!list->partial)
        return ms__no_memory((size_t)blocks * sizeof(double), "unscale_", "%lld partial results", (long long)blocks);
    ms__parts_run(list, blocks, ms__parts_measure);
    for (int64_t b = 0; b < blocks; b++) {
        if (isfinite(list->partial[b])) continue;
        *found = 1;
        if (!stop) break;
        int64_t from, length;
        const ms_norm_part *bad = ms__part_of(list, b, &from, &length);
        list->n = (int)(bad - list->parts);
        blocks = bad->block;
    }
    list->factor = inverse;
    if (blocks > 0) ms__parts_run(list, blocks, ms__parts_scale);
    free(list->partial);
    return MS_OK;
}

// A call of unscale_, which a captured step repeats.
typedef struct {
    ms_part_list list;
    ms_tensor *factor, *flag;
    bool stop;
    const ms_norm_part *there;  // the list on the GPU, in a CUDA graph; NULL: it is copied there
} unscale_work;

static ms_status unscale(const unscale_work *w)
{
    ms_part_list list = w->list;
    int device = ms__device(w->factor);
    const float *inverse = ms__data(w->factor);
    float *found = ms__data(w->flag);
    if (list.n == 0) return MS_OK;
    if (!ms__is_cuda(device)) return unscale_here(&list, *inverse, found, w->stop);
    ms_norm_job job = { .n = list.n, .owners = w->stop ? list.n : 1, .p = INFINITY, .there = w->there };
    ms__note_queued(device, "unscale_");
    ms_status st = ms__cuda()->gradients.unscale(ms__index(device), &job, list.parts, inverse, found, w->stop);
    ms__free(job.room);
    return st;
}

static ms_status repeat_unscale(void *arg, ms_captured *c)
{
    (void)c;
    MS_RANGE(MS_RANGE_OPTIMIZER, "unscale_", NULL);
    return unscale(arg);
}

static ms_status queue_unscale(void *arg, ms_captured *c, void *there)
{
    unscale_work *w = arg;
    w->there = there;
    ms_status st = repeat_unscale(arg, c);
    w->there = NULL;
    return st;
}

static ms_status advance_unscale(void *arg, ms_captured *c, void *here)
{
    const ms_part_list *list = &((unscale_work *)arg)->list;
    (void)c;
    memcpy(here, list->parts, (size_t)list->n * sizeof *list->parts);
    return MS_OK;
}

static void drop_unscale(void *arg) { free(((unscale_work *)arg)->list.parts); }

// Unscales, and adds the call to the step that is being recorded, if any, which then owns the list.
static ms_status unscale_or_capture(unscale_work *w, int n, const ms_id *gradients)
{
    ms_captured *c = ms__capture_suspend();
    ms_status st = unscale(w);
    ms__capture_resume(c);
    unscale_work *kept = c && st == MS_OK ? ms__capture_work(c, repeat_unscale, drop_unscale, sizeof *kept) : NULL;
    if (!kept) return st;
    for (int k = 0; k < n; k++) (void)ms__capture_tensor(c, ms__tensor(gradients[k]));
    *kept = *w;
    kept->factor = ms__capture_tensor(c, w->factor);
    kept->flag = ms__capture_tensor(c, w->flag);
    w->list.parts = NULL;
    ms_fixed how = { queue_unscale, advance_unscale, (size_t)kept->list.n * sizeof *kept->list.parts };
    ms__capture_fixed(c, ms__device(kept->factor), &how);
    return MS_OK;
}

ms_status ms_unscale_gradients(int n, const ms_id *gradients, ms_id inverse, ms_id found, int32_t stop)
{
    MS_BUSY;
    MS_RANGE(MS_RANGE_OPTIMIZER, "unscale_", NULL);
    unscale_work w = { .factor = ms__tensor(inverse), .flag = ms__tensor(found), .stop = stop != 0 };
    const ms_tensor *factor = w.factor, *flag = w.flag;
    if (!factor || !flag) return ms__failure();
    int device = ms__device(factor);
    if (factor->dtype != MS_F32 || factor->numel != 1 || flag->dtype != MS_F32 || flag->numel != 1 ||
        ms__device(flag) != device)
        return ms__fail(MS_EINVAL,
                        "unscale_: the inverse scale is %s and found_inf %s, expected float32 tensors of one "
                        "element on one device",
                        ms__tensor_text(factor), ms__tensor_text(flag));
    size_t bytes = (size_t)(n > 0 ? n : 1) * sizeof(ms_norm_part);
    w.list = (ms_part_list) { .p = INFINITY, .parts = malloc(bytes) };
    if (!w.list.parts) return ms__no_memory(bytes, "unscale_", "the list of %d gradients", n);
    ms_status st = list_gradients(&w.list, n, gradients, device);
    if (st == MS_OK) st = ms__storage_sync(factor->storage, false);
    if (st == MS_OK) st = ms__storage_sync(flag->storage, true);
    if (st == MS_OK) st = unscale_or_capture(&w, n, gradients);
    flag->version->count++;
    free(w.list.parts);
    return st;
}
