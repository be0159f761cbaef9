// SPDX-License-Identifier: MIT
// train/scaler.c -- gradient scalers. In a captured step, a GPU that has the flags, the scale and the gradients decides
// whether an optimizer's step is skipped and adapts the scale; the host waits for nothing. Otherwise the host reads the
// flags. Outside of captured steps, the scale is adapted on its own device.
#include <float.h>

#include "base/activity.h"
#include "base/trace.h"
#include "device/device.h"
#include "device/move.h"
#include "ops/captured.h"
#include "ops/queued.h"
#include "train/flag.h"
#include "train/scaler.h"

// The scaler's flags: float32 tensors of one element, which is not 0 if a gradient was inf or NaN.
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

static void keep_flags(ms_captured *c, flags *f)
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
    *sum = ms__for_script(*sum);
    return MS_OK;
}

// ---- the decisions of a captured step -----------------------------------------------------------

// A piece of work that decides whether the pieces after it, up to `end`, are done.
typedef struct ms_unless {
    flags found;
    ms_captured_work *work, *end;  // this work; the mark after the optimizer's step (ms__capture_mark)
    uint64_t offset;               // the random generator's offset before the optimizer's step was recorded
    // Numbers of pieces. before: up to this one; between: after this one, up to `end`; passes: the optimizers'
    // steps among the latter.
    int before, between, passes;
    bool there;  // the GPU of the flag decides
    struct ms_unless *next;
} unless_work;

typedef struct adapt_work {
    ms_tensor *scale;
    flags found;
    ms_scale_rule *rule;
    ms_captured_work *work;
    bool there;       // the GPU that has the scale adapts it
    ms_tally *tally;  // if so: counts the steps with finite gradients
    struct adapt_work *next;
} adapt_work;

// Each list begins with its newest entry.
struct ms_choices {
    unless_work *open, *decisions;  // open: the one that is being recorded
    ms_pass *passes;
    adapt_work *adapts;
};

static struct ms_choices *choices_of(ms_captured *c)
{
    if (!c->choices && !(c->choices = calloc(1, sizeof *c->choices))) ms__capture_no_memory(c);
    return c->choices;
}

void ms__choices_pass(ms_captured *c, ms_pass *p)
{
    struct ms_choices *all = p ? choices_of(c) : NULL;
    if (!all) return;
    p->within = all->open;
    p->next = all->passes;
    all->passes = p;
    if (all->open) all->open->passes++;
}

void ms__choices_forget(ms_captured *c)
{
    free(c->choices);
    c->choices = NULL;
}

// ---- steps that may be skipped ------------------------------------------------------------------

static ms_status repeat_unless(void *arg, ms_captured *c)
{
    const unless_work *w = arg;
    double sum;
    if (w->there) return MS_OK;
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
    keep_flags(c, &f);
    struct ms_choices *all = choices_of(c);
    unless_work *w = all ? ms__capture_work(c, repeat_unless, NULL, sizeof *w) : NULL;
    if (!w) return MS_OK;
    *w = (unless_work) {
        .found = f, .work = c->last, .offset = ms__rng_offset(), .before = c->n_work, .next = all->decisions
    };
    all->open = all->decisions = w;
    return MS_OK;
}

ms_status ms_capture_unless_end(void)
{
    ms_captured *c = ms__capturing;
    unless_work *w = c && c->choices ? c->choices->open : NULL;
    if (!w) return MS_OK;
    c->choices->open = NULL;
    w->between = c->n_work - w->before;
    w->end = ms__capture_mark(c);
    if (ms__rng_offset() != w->offset)
        return ms__capture_refuse(
            "the optimizer's step draws random numbers, but a gradient scaler may skip the step; do not capture it");
    return MS_OK;
}

static bool decided_there(const ms_pass *p) { return p->within && p->within->there; }

// Selects the decisions that a GPU makes: those that skip only optimizers' steps on the GPU of the flag. Any other step
// that shares leaves with such a step must have the same leaves and be decided by a GPU, too, because the host does not
// know the leaves' counts of steps.
static void select_decisions(const struct ms_choices *all)
{
    for (unless_work *w = all->decisions; w; w = w->next)
        w->there =
            w->passes > 0 && w->passes == w->between && w->found.n == 1 && ms__is_cuda(ms__device(w->found.t[0]));
    for (const ms_pass *p = all->passes; p; p = p->next)
        if (decided_there(p) && !ms__pass_is_on(p, ms__device(p->within->found.t[0]))) p->within->there = false;
    bool changed = true;
    while (changed) {
        changed = false;
        for (const ms_pass *p = all->passes; p; p = p->next)
            for (const ms_pass *q = p->next; q; q = q->next) {
                if (!decided_there(p) && !decided_there(q)) continue;
                ms_pass_relation r = ms__pass_compare(p, q);
                if (r == MS_PASS_APART || (r == MS_PASS_EQUAL && decided_there(p) && decided_there(q))) continue;
                if (p->within) p->within->there = false;
                if (q->within) q->within->there = false;
                changed = true;
            }
    }
}

static ms_status decide_there(ms_captured *c, const struct ms_choices *all)
{
    for (unless_work *w = all->decisions; w; w = w->next) {
        if (!w->there) continue;
        ms__capture_fixed_at(c, w->work, ms__device(w->found.t[0]), NULL);
        ms__capture_fixed_at(c, w->end, ms__device(w->found.t[0]), NULL);
    }
    for (ms_pass *p = all->passes; p; p = p->next) {
        if (!decided_there(p)) continue;
        const ms_tensor *flag = p->within->found.t[0];
        ms_pass *q = all->passes;
        while (q && !(q->tally && ms__pass_compare(p, q) == MS_PASS_EQUAL)) q = q->next;
        ms_tally *tally = q ? ms__tally_hold(q->tally) : ms__tally_new(ms__device(flag), NULL);
        if (!tally) return ms__failure();
        ms_status st = ms__pass_decide(c, p, flag, tally);
        ms_tally_free(tally);
        MS_TRY(st);
    }
    return MS_OK;
}

// ---- the scale ----------------------------------------------------------------------------------

// The new scale, by PyTorch's rule. The scale is not raised beyond the largest float32.
static double adapted(ms_scale_rule *r, double scale, bool finite)
{
    if (!finite) return r->growth_tracker = 0, scale * r->backoff_factor;
    if (++r->growth_tracker != r->growth_interval) return scale;
    r->growth_tracker = 0;
    return scale * r->growth_factor <= FLT_MAX ? scale * r->growth_factor : scale;
}

static ms_status adapt(const adapt_work *w)
{
    double sum;
    float scale;
    MS_TRY(sum_of(&w->found, &sum));
    MS_TRY(read(w->scale, &scale));
    double now = adapted(w->rule, scale, sum == 0);
    return now == scale ? MS_OK : ms__fill_data(w->scale, now);
}

static ms_status queue_adapt(void *arg, ms_captured *c, void *there)
{
    const adapt_work *w = arg;
    ms_scale_change change = {
        .n = w->found.n, .scale = ms__data(w->scale), .rule = there, .tracker = ms__tally_tracker(w->tally)
    };
    (void)c;
    for (int k = 0; k < w->found.n; k++) change.found[k] = ms__data(w->found.t[k]);
    ms__note_queued(ms__device(w->scale), "update");
    return ms__cuda()->gradients.adapt_by(ms__index(ms__device(w->scale)), &change);
}

static ms_status advance_adapt(void *arg, ms_captured *c, void *here)
{
    const adapt_work *w = arg;
    ms_scale_rule *rule = here;
    (void)c;
    *rule = *w->rule;
    rule->growth_tracker = ms__tally_next(w->tally);
    return MS_OK;
}

static const ms_fixed how_adapt = { queue_adapt, advance_adapt, sizeof(ms_scale_rule) };

static ms_status repeat_adapt(void *arg, ms_captured *c)
{
    adapt_work *w = arg;
    return w->tally ? ms__fixed_repeat(w, c, ms__device(w->scale), &how_adapt) : adapt(w);
}

static void drop_adapt(void *arg) { ms_tally_free(((adapt_work *)arg)->tally); }

ms_status ms_capture_adapt(ms_id scale, int n, const ms_id *found, ms_scale_rule *rule)
{
    adapt_work w = { .scale = ms__tensor(scale), .rule = rule };
    if (!w.scale) return ms__failure();
    MS_TRY(flags_of(&w.found, n, found));
    ms_captured *c = ms__capture_suspend();
    ms_status st = adapt(&w);
    ms__capture_resume(c);
    if (st != MS_OK || !c) return st;
    w.scale->version->count++;
    w.scale = ms__capture_tensor(c, w.scale);
    keep_flags(c, &w.found);
    struct ms_choices *all = choices_of(c);
    adapt_work *kept = all ? ms__capture_work(c, repeat_adapt, drop_adapt, sizeof *kept) : NULL;
    if (!kept) return MS_OK;
    *kept = w;
    kept->work = c->last;
    kept->next = all->adapts;
    all->adapts = kept;
    return MS_OK;
}

// Makes a GPU adapt a scale if the scale and all flags are there, and if that holds for every change of the scale by
// this scaler in the captured step, because these changes share a count of steps.
static ms_status adapt_there(ms_captured *c, const struct ms_choices *all)
{
    for (adapt_work *w = all->adapts; w; w = w->next) {
        w->there = ms__is_cuda(ms__device(w->scale));
        for (int k = 0; k < w->found.n; k++) w->there = w->there && ms__device(w->found.t[k]) == ms__device(w->scale);
    }
    for (adapt_work *w = all->adapts; w; w = w->next)
        for (adapt_work *v = all->adapts; v && !w->there; v = v->next)
            if (v->rule == w->rule) v->there = false;
    for (adapt_work *w = all->adapts; w; w = w->next) {
        adapt_work *v = all->adapts;
        if (!w->there) continue;
        while (v && !(v->tally && v->rule == w->rule)) v = v->next;
        w->tally = v ? ms__tally_hold(v->tally) : ms__tally_new(ms__device(w->scale), w->rule);
        if (!w->tally) return ms__failure();
        ms__capture_fixed_at(c, w->work, ms__device(w->scale), &how_adapt);
    }
    return MS_OK;
}

ms_status ms__choices_end(ms_captured *c)
{
    if (!c->choices) return MS_OK;
    select_decisions(c->choices);
    MS_TRY(decide_there(c, c->choices));
    return adapt_there(c, c->choices);
}

ms_status ms__choices_ready(const ms_captured *c)
{
    for (const ms_pass *p = c->choices ? c->choices->passes : NULL; p; p = p->next)
        if (MS_UNLIKELY(p->tally != NULL)) MS_TRY(ms__tally_ready(p->tally));
    return MS_OK;
}

ms_tally *ms_capture_tally(const ms_captured *c, const void *counts, double bytes)
{
    const struct ms_choices *all = c->choices;
    for (const ms_pass *p = all ? all->passes : NULL; p; p = p->next)
        if (p->tally && ms__tally_updates(p->tally, counts, (size_t)bytes)) return ms__tally_hold(p->tally);
    for (const adapt_work *w = all ? all->adapts : NULL; w; w = w->next)
        if (w->tally && ms__tally_updates(w->tally, counts, (size_t)bytes)) return ms__tally_hold(w->tally);
    return NULL;
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
