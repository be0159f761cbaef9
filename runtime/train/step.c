// SPDX-License-Identifier: MIT
// train/step.c -- a step of an optimizer: the work on each leaf that has a gradient, its state, clipping, skipping.
//
// Every rank steps its own leaves; for a sharded parameter, its local part. The script holds the state tensors, so that
// it can save them. They are made at a leaf's first step, with the leaf's shape and dtype (float32 for half types).
#include "autograd/captured.h"
#include "base/activity.h"
#include "device/gpu_pool.h"
#include "device/move.h"
#include "base/trace.h"
#include "ops/captured.h"
#include "shard/script.h"
#include "train/clip.h"
#include "train/flag.h"
#include "train/optim.h"
#include "train/scaler.h"

// A step over all leaves of some groups: its jobs, and what must be undone or released at its end.
typedef struct {
    int n_jobs, n_stepped, n_made, n_copies;
    int64_t blocks;
    ms_optim_job *jobs;
    ms_stepped *stepped;
    ms_id *made;         // states that this step made
    ms_tensor **copies;  // the leaves' gradients, or copies that are contiguous and have the leaf's dtype; retained
    ms_factors factors;
} step;

static ms_status step_begin(step *s, int n)
{
    *s = (step) { .jobs = malloc((size_t)n * sizeof *s->jobs),
                  .stepped = malloc((size_t)n * sizeof *s->stepped),
                  .made = malloc((size_t)n * MS_OPTIM_STATES * sizeof *s->made),
                  .copies = malloc((size_t)n * sizeof *s->copies) };
    if (s->jobs && s->stepped && s->made && s->copies) return MS_OK;
    return ms__no_memory((size_t)n * (sizeof *s->jobs + sizeof *s->stepped + MS_OPTIM_STATES * sizeof *s->made +
                                      sizeof *s->copies),
                         "optimizer", "the list of %d parameters", n);
}

static void step_end(step *s)
{
    for (int k = 0; k < s->n_made; k++) ms_release(s->made[k]);
    for (int k = 0; k < s->n_copies; k++) ms__release(s->copies[k]);
    free(s->jobs);
    free(s->stepped);
    free(s->made);
    free(s->copies);
}

// Checks a leaf's state tensors (one per bit of `keeps`) and makes those that do not exist yet: zeros, but the master
// weights (bit `master`) get the parameter's values.
static ms_status take_state(step *s, unsigned keeps, unsigned master, ms_tensor *p, ms_id *state, ms_stepped *l)
{
    int dtype = ms__is_half(p->dtype) ? MS_F32 : p->dtype;
    for (int k = 0; k < MS_OPTIM_STATES; k++) {
        if (!(keeps >> k & 1)) continue;
        if (state[k] == 0) {
            ms_tensor *t = NULL;
            ms_captured *c = ms__capture_suspend();  // a captured step does not make state again
            ms__gpu_lasting = true;
            ms_status st = ms__zeros(&t, dtype, ms__device(p), p->ndim, p->shape);
            ms__gpu_lasting = false;
            if (st == MS_OK && (master >> k & 1)) st = ms__or_drop(ms__copy(t, p), &t);
            ms__capture_resume(c);
            MS_TRY(st);
            if (!(state[k] = ms__name_unscoped(t))) return ms__failure();
            s->made[s->n_made++] = state[k];
        }
        ms_tensor *t = ms__tensor(state[k]);
        if (!t) return ms__failure();
        if (t->dtype != dtype || t->numel != p->numel || !ms__is_contiguous(t))
            return ms__fail(
                MS_EINVAL,
                "optimizer: a state is %s, expected a contiguous %s tensor with as many elements as its parameter, %s",
                ms__tensor_text(t), ms__dtype_name(dtype), ms__tensor_text(p));
        MS_TRY(ms__storage_sync(t->storage, true));
        ms__storage_hold(t->storage, MS_MEMORY_OPTIMIZER);
        l->state[k] = t;
        t->version->count++;
    }
    return MS_OK;
}

// *out: the leaf's gradient, contiguous and in the leaf's dtype; step_end releases it.
static ms_status take_gradient(step *s, const ms_tensor *p, ms_tensor *g, int number, ms_tensor **out)
{
    bool cast = g->dtype != p->dtype && ms__is_float(g->dtype) && ms__is_float(p->dtype);
    if ((g->dtype != p->dtype && !cast) || g->numel != p->numel || ms__device(g) != ms__device(p))
        return ms__fail(
            MS_EINVAL,
            "optimizer: gradient %s of parameter %d, %s: expected the parameter's size, device and dtype; only "
            "floating-point dtypes may differ",
            ms__tensor_text(g), number, ms__tensor_text(p));
    if (cast)  // a gradient kept in low precision is converted, as arithmetic between both dtypes would do
        MS_TRY(ms__tensor_new(out, p->dtype, ms__device(g), g->ndim, g->shape, "optimizer: gradient"));
    else MS_TRY(ms__contiguous(out, g));
    s->copies[s->n_copies++] = *out;
    return cast ? ms__copy(*out, g) : MS_OK;
}

// The index of the master weights among a leaf's states: after the states that the optimizer's row lists.
static int master_at(const ms_optim_row *row)
{
    int k = 0;
    while (row->states[k]) k++;
    return k;
}

// Makes the captured step keep the memory that a leaf's job uses.
static void keep_leaf(ms_captured *c, ms_tensor *p, ms_tensor *g, const ms_stepped *l)
{
    (void)ms__capture_tensor(c, p);
    (void)ms__capture_tensor(c, g);
    for (int k = 0; k < MS_OPTIM_STATES; k++) (void)ms__capture_tensor(c, l->state[k]);
}

// Adds the job of leaf k of a group if the leaf has a gradient. An empty shard is stepped too: there is no work, but
// its step count must agree with its peers'.
static ms_status add_leaf(step *s, const ms_optim_group *of, int k)
{
    ms_tensor *p = ms__tensor(of->leaves[k]), *leaf = p;
    if (!p) return ms__failure();
    bool unreduced = ms__unit_unreduced(p);
    p = ms__unit_local(p);
    ms_tensor *g = p->leaf ? p->leaf->grad : NULL;
    if (p->leaf) ms__grad_is_read(p->leaf);
    if (!g || ms__device(p) == MS_META) return MS_OK;
    if (unreduced) return ms__unit_refuse_unreduced("step", k, leaf);
    if (!ms__is_contiguous(p))
        return ms__fail(MS_EINVAL, "optimizer: parameter %d (%s) is not contiguous", k + 1, ms__tensor_text(p));
    ms_optim_job *j = &s->jobs[s->n_jobs];
    memset(j, 0, sizeof *j);
    ms_stepped *l = &s->stepped[s->n_stepped];
    *l = (ms_stepped) { .leaf = leaf, .steps = &of->steps[k], .options = of->options, .job = -1 };
    MS_TRY(take_gradient(s, p, g, k + 1, &g));
    unsigned keeps = ms__optim_keeps(of->options), master = 0;
    int at = master_at(ms_optim_at(of->options->kind));
    if (of->options->master_weights && ms__is_half(p->dtype)) keeps |= master = 1u << at;
    MS_TRY(take_state(s, keeps, master, p, of->state + MS_OPTIM_STATES * k, l));
    for (int i = 0; i < MS_OPTIM_STATES; i++) j->state[i] = l->state[i] ? ms__data(l->state[i]) : NULL;
    if (master) {
        j->master = j->state[at];
        j->state[at] = NULL;
    }
    MS_TRY(ms__storage_sync(g->storage, false));
    MS_TRY(ms__storage_sync(p->storage, true));
    j->kind = of->options->kind;
    j->p = ms__data(p);
    j->g = ms__data(g);
    j->dtype = p->dtype;
    j->numel = p->numel;
    j->scale = 1;
    j->block = s->blocks;
    j->device = ms__device(p);
    s->blocks += (p->numel + MS_OPTIM_BLOCK - 1) / MS_OPTIM_BLOCK;
    ms__factors_of(&s->factors, l, j->factors);
    if (MS_UNLIKELY(ms__capturing != NULL)) keep_leaf(ms__capturing, p, g, l);
    if (p->numel > 0) l->job = s->n_jobs++;
    s->n_stepped++;
    return MS_OK;
}

// Adds the step to the captured step, which then owns the lists.
static void capture_step(ms_captured *c, step *s)
{
    ms__choices_pass(c, ms__pass_add(c, s->n_jobs, s->jobs, s->n_stepped, s->stepped));
    s->jobs = NULL;
    s->stepped = NULL;
    s->n_stepped = 0;
}

static ms_status run_clipped(step *s, ms_clip *clip)
{
    ms_cuda_step room;
    const ms_cuda_step *there;
    double scale = ms__clip_factor(clip, &room, &there);
    for (int k = 0; k < s->n_jobs; k++) s->jobs[k].scale = scale;
    return ms__optim_run(s->jobs, s->n_jobs, NULL, there);
}

// Runs the jobs unless *skip is not 0. Where the GPU of `skip` has all jobs, it decides and the host does not wait. If
// some state was made for this step, the host decides, because a step that is skipped must drop it.
static ms_status run_unless(step *s, ms_tensor *skip, bool *skipped)
{
    bool there = ms__is_cuda(ms__device(skip)) && s->n_made == 0;
    float value = 0;
    for (int k = 0; k < s->n_jobs; k++) there = there && s->jobs[k].device == ms__device(skip);
    MS_TRY(ms__storage_sync(skip->storage, false));
    if (there) return ms__optim_run(s->jobs, s->n_jobs, NULL, &(ms_cuda_step) { .skip = ms__data(skip) });
    MS_TRY(ms__move(MS_CPU, &value, ms__device(skip), ms__data(skip), sizeof value));
    *skipped = value != 0;
    return *skipped ? MS_OK : ms__optim_run(s->jobs, s->n_jobs, NULL, NULL);
}

// What a step depends on; norm and skipped are set by the step.
typedef struct {
    const double *max_norm;  // limits the norm of order p of the gradients; NULL: no limit
    double p;
    ms_id norm;       // the norm before clipping, if max_norm is given
    ms_tensor *skip;  // if *skip is not 0, nothing changes except counts of steps; NULL: the step is made
    bool skipped;     // the host knows that the step was skipped
} terms;

// Steps all leaves of the groups. clip: limits the norm of their gradients to *of->max_norm; NULL: no limit.
static ms_status step_groups(step *s, int n_groups, const ms_optim_group *groups, ms_clip *clip, terms *of)
{
    for (int i = 0; i < n_groups; i++)
        for (int k = 0; k < groups[i].n; k++) MS_TRY(add_leaf(s, &groups[i], k));
    if (clip) MS_TRY(ms__clip_measure(clip));
    // Up to here no leaf has changed: a step that failed for lack of memory can be repeated. From here on a step
    // fails only if a device does.
    MS_TRY(clip       ? run_clipped(s, clip)
           : of->skip ? run_unless(s, of->skip, &of->skipped)
                      : ms__optim_run(s->jobs, s->n_jobs, NULL, NULL));
    for (int k = 0; k < s->n_stepped; k++) {
        ++*s->stepped[k].steps;
        ms__unit_stepped(s->stepped[k].leaf);
    }
    if (!of->skipped) s->n_made = 0;
    if (MS_UNLIKELY(ms__capturing != NULL)) capture_step(ms__capturing, s);
    return MS_OK;
}

static ms_status new_clip(ms_clip **out, int n_groups, const ms_optim_group *groups, int n, double max_norm, double p)
{
    ms_id *all = malloc((size_t)(n > 0 ? n : 1) * sizeof *all);
    int at = 0;
    *out = NULL;
    if (!all) return ms__no_memory((size_t)n * sizeof *all, "optimizer", "the list of %d parameters", n);
    for (int i = 0; i < n_groups; i++)
        for (int k = 0; k < groups[i].n; k++) all[at++] = groups[i].leaves[k];
    ms_status st = ms__clip_new(out, n, all, max_norm, p);
    free(all);
    return st;
}

static ms_status step_all(int n_groups, const ms_optim_group *groups, terms *of)
{
    int n = 0;
    for (int i = 0; i < n_groups; i++) {
        MS_TRY(ms_optim_check(groups[i].options));
        n += groups[i].n;
    }
    if (n <= 0 && !of->max_norm) return MS_OK;
    if (of->max_norm && ms__capturing)
        return ms__capture_refuse("step_clipped cannot be captured; call clip_grad_norm_, then step");
    MS_BUSY;
    MS_RANGE(MS_RANGE_OPTIMIZER, n_groups > 0 ? ms__optim_range(groups[0].options->kind) : "step", NULL);
    step s;
    ms_clip *clip = NULL;
    ms_status status = step_begin(&s, n > 0 ? n : 1);
    if (status == MS_OK && of->max_norm) status = new_clip(&clip, n_groups, groups, n, *of->max_norm, of->p);
    if (status == MS_OK) status = step_groups(&s, n_groups, groups, clip, of);
    step_end(&s);
    for (int i = 0; i < n_groups && (status != MS_OK || of->skipped); i++)
        for (int k = 0; k < MS_OPTIM_STATES * groups[i].n; k++)
            if (groups[i].state[k] && !ms_is_alive(groups[i].state[k])) groups[i].state[k] = 0;
    if (status == MS_OK && clip && !(of->norm = ms__clip_result(clip))) status = ms__failure();
    ms__clip_free(clip);
    return status;
}

ms_status ms_optim_step_groups(int n_groups, const ms_optim_group *groups, ms_step_terms *given)
{
    terms of = { 0 };
    if (!given) return step_all(n_groups, groups, &of);
    if (given->clips) of = (terms) { .max_norm = &given->max_norm, .p = given->p };
    if (given->skip) {
        if (!(of.skip = ms__tensor(given->skip))) return ms__failure();
        MS_TRY(ms__flag_check("step_unless: the flag", of.skip));
    }
    MS_TRY(step_all(n_groups, groups, &of));
    given->norm = of.norm;
    return MS_OK;
}

ms_status ms_optim_step(const ms_optim_options *o, int n, const ms_id *leaves, ms_id *state, double *steps)
{
    return ms_optim_step_groups(1, &(ms_optim_group) { o, n, leaves, state, steps }, NULL);
}
