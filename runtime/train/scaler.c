// SPDX-License-Identifier: MIT
// train/scaler.c -- gradient scalers. In a captured step the host reads the flags, also those on a GPU, to skip the
// optimizer's step if a gradient was not finite, and to adapt the scale. Outside of captured steps, the scale is
// adapted on its own device; on a GPU the host does not wait for that.
#include <float.h>

#include "base/activity.h"
#include "base/trace.h"
#include "device/device.h"
#include "ops/captured.h"
#include "ops/queued.h"
#include "train/flag.h"

// The scaler's flags: float32 tensors of one element that the host reads; not 0 if a gradient was inf or NaN.
typedef struct {
    int n;
    ms_tensor *t[MS_CUDA_DEVICES + 1];
} flags;

static ms_status flags_of(flags *f, int n, const ms_id *ids)
{
    *f = (flags) { .n = n };
    if (n < 1 || n > MS_CUDA_DEVICES + 1)
        return ms__fail(MS_EINVAL, "captured step: %d flags of a gradient scaler, expected 1 to %d", n,
                        MS_CUDA_DEVICES + 1);
    for (int k = 0; k < n; k++) {
        if (!(f->t[k] = ms__tensor(ids[k]))) return ms__failure();
        if (f->t[k]->dtype != MS_F32 || f->t[k]->numel != 1)
            return ms__fail(MS_EINVAL,
                            "captured step: flag %d of a gradient scaler is %s, expected one float32 element", k + 1,
                            ms__tensor_text(f->t[k]));
    }
    return MS_OK;
}

static void keep(ms_captured *c, flags *f)
{
    for (int k = 0; k < f->n; k++) f->t[k] = ms__capture_tensor(c, f->t[k]);
}

static ms_status read(const ms_tensor *t, float *value)
{
    MS_TRY(ms__storage_sync(t->storage, false));
    return ms__move(MS_CPU, value, ms__device(t), ms__data(t), sizeof *value);
}

static ms_status sum_of(const flags *f, double *sum)
{
    *sum = 0;
    for (int k = 0; k < f->n; k++) {
        float value;
        MS_TRY(read(f->t[k], &value));
        *sum += (double)value;
    }
    return MS_OK;
}

// ---- steps that may be skipped ------------------------------------------------------------------

typedef struct {
    flags found;
    ms_captured_work *end;  // the mark after the optimizer's step (ms__capture_mark)
    uint64_t offset;        // the random generator's offset before the optimizer's step was recorded
} unless_work;

static ms_status repeat_unless(void *arg, ms_captured *c)
{
    const unless_work *w = arg;
    double sum;
    MS_TRY(sum_of(&w->found, &sum));
    if (sum != 0) ms__capture_skip_to(c, w->end);
    return MS_OK;
}

void ms_capture_leave(void)
{
    ms_captured *c = ms__recording;
    if (!c) return;
    c->left = true;
    ms__recording = NULL;
    (void)ms__capture_suspend();
}

ms_status ms_capture_unless(int n, const ms_id *found, double *sum)
{
    ms_captured *c = ms__capture_suspend();
    flags f;
    ms_status st = flags_of(&f, n, found);
    if (st == MS_OK) st = sum_of(&f, sum);
    ms__capture_resume(c);
    if (st != MS_OK || !c) return st;
    if (*sum != 0) return ms_capture_leave(), MS_OK;
    keep(c, &f);
    unless_work *w = ms__capture_work(c, repeat_unless, NULL, sizeof *w);
    if (w) *w = (unless_work) { .found = f, .offset = ms__rng_offset() };
    c->unless = w;
    return MS_OK;
}

ms_status ms_capture_unless_end(void)
{
    ms_captured *c = ms__capturing;
    unless_work *w = c ? c->unless : NULL;
    if (!w) return MS_OK;
    c->unless = NULL;
    w->end = ms__capture_mark(c);
    if (ms__rng_offset() != w->offset)
        return ms__capture_refuse("the optimizer's step draws random numbers, and a gradient scaler may skip it");
    return MS_OK;
}

// ---- the scale ----------------------------------------------------------------------------------

typedef struct {
    ms_tensor *scale;
    flags found;
    ms_scale_rule *rule;
} adapt_work;

// The new scale, by PyTorch's rule. The scale is not raised beyond the largest float32.
static double adapted(ms_scale_rule *r, double scale, bool finite)
{
    if (!finite) return r->growth_tracker = 0, scale * r->backoff_factor;
    if (++r->growth_tracker != r->growth_interval) return scale;
    r->growth_tracker = 0;
    return scale * r->growth_factor <= FLT_MAX ? scale * r->growth_factor : scale;
}

static ms_status repeat_adapt(void *arg, ms_captured *c)
{
    const adapt_work *w = arg;
    double sum;
    float scale;
    (void)c;
    MS_TRY(sum_of(&w->found, &sum));
    MS_TRY(read(w->scale, &scale));
    double now = adapted(w->rule, scale, sum == 0);
    return now == scale ? MS_OK : ms__fill_data(w->scale, now);
}

ms_status ms_capture_adapt(ms_id scale, int n, const ms_id *found, ms_scale_rule *rule)
{
    adapt_work w = { .scale = ms__tensor(scale), .rule = rule };
    if (!w.scale) return ms__failure();
    MS_TRY(flags_of(&w.found, n, found));
    ms_captured *c = ms__capture_suspend();
    ms_status st = repeat_adapt(&w, c);
    ms__capture_resume(c);
    if (st != MS_OK || !c) return st;
    w.scale->version->count++;
    w.scale = ms__capture_tensor(c, w.scale);
    keep(c, &w.found);
    adapt_work *kept = ms__capture_work(c, repeat_adapt, NULL, sizeof *kept);
    if (kept) *kept = w;
    return MS_OK;
}

// ---- outside of captured steps ------------------------------------------------------------------

ms_status ms_adapt_scale(ms_id scale, ms_id found, double bad, double good)
{
    MS_BUSY;
    ms_tensor *s = ms__tensor(scale), *f = s ? ms__tensor(found) : NULL;
    if (!f) return ms__failure();
    MS_TRY(ms__flag_check("update: the scale", s));
    MS_TRY(ms__flag_check("update: found_inf", f));
    if (ms__device(s) != ms__device(f))
        return ms__fail(MS_EINVAL, "update: the scale is %s and found_inf is %s, expected the same device",
                        ms__tensor_text(s), ms__tensor_text(f));
    MS_TRY(ms__storage_sync(f->storage, false));
    MS_TRY(ms__storage_sync(s->storage, true));
    s->version->count++;
    float *value = ms__data(s);
    const float *flag = ms__data(f);
    if (ms__is_cuda(ms__device(s))) {
        ms__note_queued(ms__device(s), "update");
        return ms__cuda()->gradients.adapt(ms__index(ms__device(s)), value, flag, bad, good);
    }
    double now = *value, grown = now * good;
    if (*flag > 0) *value = (float)(now * bad);
    else if (grown <= FLT_MAX) *value = (float)grown;
    return MS_OK;
}
