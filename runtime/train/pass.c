// SPDX-License-Identifier: MIT
// train/pass.c -- optimizers' steps as work of captured steps.
//
// Where it can, the GPU decides whether a step with a gradient scaler is skipped. The host then does not know how many
// steps the leaves have taken when it queues the next one, but the factors depend on that count. The host computes the
// factors for every possible count; a kernel of the step selects the true count's (ms_optim_choice). The factors are
// not computed on the GPU, because its powers differ from the CPU's in the last bit.
#include "train/pass.h"

#include "base/trace.h"
#include "shard/script.h"

// ---- steps that are always made, or about which the host decides --------------------------------

static void set_all_factors(const ms_pass *p)
{
    ms_factors last = { 0 };
    for (int k = 0; k < p->n_stepped; k++)
        if (p->stepped[k].job >= 0) ms__factors_of(&last, &p->stepped[k], p->jobs[p->stepped[k].job].factors);
}

// Increments the versions of leaves and states, even for a step that is skipped and changes none, which is harmless.
static void count_changes(const ms_pass *p)
{
    for (int k = 0; k < p->n_managed; k++) ms__unit_stepped(p->managed[k]);
    for (int k = 0; k < p->n_versions; k++) p->versions[k]->count++;
}

static void count_steps(const ms_pass *p)
{
    for (int k = 0; k < p->n_stepped; k++) ++*p->stepped[k].steps;
    count_changes(p);
}

// Queues the step into a CUDA graph. there: the jobs on the GPU, which get new factors for each repetition (advance).
static ms_status queue_pass(void *arg, ms_captured *c, void *there)
{
    const ms_pass *p = arg;
    (void)c;
    return ms__optim_run(p->jobs, p->n_jobs, there, NULL);
}

static ms_status advance(void *arg, ms_captured *c, void *here)
{
    const ms_pass *p = arg;
    (void)c;
    set_all_factors(p);
    memcpy(here, p->jobs, (size_t)p->n_jobs * sizeof *p->jobs);
    count_steps(p);
    return MS_OK;
}

// ---- steps about which a GPU decides ------------------------------------------------------------

enum { DEPTH = 32, FACTORS = MS_OPTIM_FACTORS + 1 };

// Where the parts of the data of how_choice (ms_fixed) begin, in host memory or on the GPU.
typedef struct {
    ms_optim_sets *sets;
    ms_optim_job *jobs;
    double *factors;
    int32_t *group;
} layout;

static layout layout_of(const ms_pass *p, void *base)
{
    layout l = { .sets = base };
    l.jobs = (ms_optim_job *)(l.sets + 1);
    l.factors = (double *)(l.jobs + p->n_jobs);
    l.group = (int32_t *)(l.factors + (size_t)p->n_sets * FACTORS);
    return l;
}

static size_t bytes_of(const ms_pass *p)
{
    size_t job = sizeof(ms_optim_job) + sizeof(int32_t), set = FACTORS * sizeof(double);
    return sizeof(ms_optim_sets) + (size_t)p->n_jobs * job + (size_t)p->n_sets * set;
}

// Divides the jobs into groups of equal options and step counts: group[k] is job k's group, p->first[g] the first leaf
// of group g. Returns the number of groups.
static int divide_groups(const ms_pass *p, int32_t *group)
{
    const ms_stepped **first = p->first;
    int n = 0;
    for (int k = 0; k < p->n_stepped; k++) {
        const ms_stepped *l = &p->stepped[k];
        if (l->job < 0) continue;
        int g = n - 1;  // most leaves belong to the newest group
        while (g >= 0 && (first[g]->options != l->options || *first[g]->steps != *l->steps)) g--;
        if (g < 0) first[g = n++] = l;
        group[l->job] = g;
    }
    return n;
}

static ms_status queue_choice(void *arg, ms_captured *c, void *there)
{
    const ms_pass *p = arg;
    layout l = layout_of(p, there);
    (void)c;
    ms_optim_choice choice = { .n = p->n_jobs,
                               .jobs = l.jobs,
                               .sets = l.sets,
                               .factors = l.factors,
                               .group = l.group,
                               .skip = p->skip,
                               .tally = ms__tally_place(p->tally) };
    MS_TRY(ms__cuda()->gradients.choose(ms__index(p->device), &choice));
    return ms__optim_run(p->jobs, p->n_jobs, l.jobs, &(ms_cuda_step) { .skip = p->skip });
}

static ms_status advance_choice(void *arg, ms_captured *c, void *here)
{
    const ms_pass *p = arg;
    layout l = layout_of(p, here);
    (void)c;
    int groups = divide_groups(p, l.group), depth = groups > 0 ? p->n_sets / groups : DEPTH;
    if (depth > DEPTH) depth = DEPTH;
    uint32_t pending;
    MS_TRY(ms__tally_begin(p->tally, depth > 0 ? (uint32_t)depth : 1, &pending, &l.sets->base));
    l.sets->depth = depth;
    if (depth == 0) set_all_factors(p);
    memcpy(l.jobs, p->jobs, (size_t)p->n_jobs * sizeof *p->jobs);
    for (int g = 0; g < groups && depth > 0; g++)
        for (uint32_t k = 0; k <= pending; k++) {
            ms_factors now = { 0 };
            ms__factors_compute(&now, p->first[g]->options, *p->first[g]->steps + k);
            memcpy(l.factors + ((size_t)g * (size_t)depth + k) * FACTORS, now.values, sizeof now.values);
        }
    count_changes(p);
    return MS_OK;
}

static ms_fixed how_choice(const ms_pass *p) { return (ms_fixed) { queue_choice, advance_choice, bytes_of(p) }; }

ms_status ms__pass_decide(ms_captured *c, ms_pass *p, const ms_tensor *flag, ms_tally *tally)
{
    size_t n = (size_t)p->n_stepped;
    int32_t *group = malloc(n * sizeof *group);
    double **counts = malloc(n * sizeof *counts);
    ms_status st = MS_OK;
    if ((p->first = malloc(n * sizeof *p->first)) && group && counts) {
        // Room for the factors of 8 pending decisions of all groups. There may be more groups later, because steps
        // outside of the captured step may leave out some leaves.
        int sets = 8 * divide_groups(p, group);
        p->n_sets = sets > DEPTH ? sets : DEPTH;
        for (size_t k = 0; k < n; k++) counts[k] = p->stepped[k].steps;
        if (!ms__tally_updates(tally, counts[0], sizeof *counts[0])) st = ms__tally_adds(tally, p->n_stepped, counts);
    } else st = ms__no_memory(n * sizeof *counts, "captured step", "the list of %d parameters", p->n_stepped);
    free(group);
    free(counts);
    MS_TRY(st);
    p->tally = ms__tally_hold(tally);
    ms__tally_use(tally, DEPTH);
    p->device = ms__device(flag);
    p->skip = ms__data(flag);
    ms_fixed how = how_choice(p);
    ms__capture_fixed_at(c, p->work, p->device, &how);
    return MS_OK;
}

// ---- recording ----------------------------------------------------------------------------------

static ms_status repeat_pass(void *arg, ms_captured *c)
{
    ms_pass *p = arg;
    MS_RANGE(MS_RANGE_OPTIMIZER, ms__optim_range(p->stepped[0].options->kind), NULL);
    if (MS_UNLIKELY(p->tally != NULL)) {
        ms_fixed how = how_choice(p);
        return ms__fixed_repeat(p, c, p->device, &how);
    }
    set_all_factors(p);
    MS_TRY(ms__optim_run(p->jobs, p->n_jobs, NULL, NULL));
    count_steps(p);
    return MS_OK;
}

static void drop_pass(void *arg)
{
    ms_pass *p = arg;
    for (int k = 0; k < p->n_stepped; k++) {
        ms__release(p->stepped[k].leaf);
        for (int i = 0; i < MS_OPTIM_STATES; i++) ms__release(p->stepped[k].state[i]);
    }
    free(p->jobs);
    free(p->stepped);
    free(p->versions);
    free(p->managed);
    free(p->first);
    ms_tally_free(p->tally);
}

ms_pass *ms__pass_add(ms_captured *c, int n_jobs, ms_optim_job *jobs, int n_stepped, ms_stepped *stepped)
{
    ms_pass *p = n_stepped ? ms__capture_work(c, repeat_pass, drop_pass, sizeof *p) : NULL;
    if (!p) {
        free(jobs);
        free(stepped);
        return NULL;
    }
    *p = (ms_pass) { .n_jobs = n_jobs, .n_stepped = n_stepped, .jobs = jobs, .stepped = stepped, .work = c->last };
    p->versions = malloc((size_t)p->n_stepped * (MS_OPTIM_STATES + 1) * sizeof *p->versions);
    p->managed = malloc((size_t)p->n_stepped * sizeof *p->managed);
    if (!p->versions || !p->managed) ms__capture_no_memory(c);
    for (int k = 0; k < p->n_stepped; k++) {
        const ms_stepped *l = &p->stepped[k];
        ms__retain(l->leaf);
        bool room = p->versions && p->managed;
        if (room && l->leaf->unit_param) p->managed[p->n_managed++] = l->leaf;
        else if (room) p->versions[p->n_versions++] = l->leaf->version;
        for (int i = 0; i < MS_OPTIM_STATES; i++)
            if (ms__retain(l->state[i]) && room) p->versions[p->n_versions++] = l->state[i]->version;
    }
    ms_fixed how = { queue_pass, advance, (size_t)n_jobs * sizeof *jobs };
    if (n_jobs > 0 && ms__pass_is_on(p, jobs[0].device)) ms__capture_fixed(c, jobs[0].device, &how);
    return p;
}

bool ms__pass_is_on(const ms_pass *p, int device)
{
    for (int k = 0; k < p->n_jobs; k++)
        if (p->jobs[k].device != device) return false;
    return true;
}

ms_pass_relation ms__pass_compare(const ms_pass *a, const ms_pass *b)
{
    bool equal = a->n_stepped == b->n_stepped;
    for (int k = 0; equal && k < a->n_stepped; k++) equal = a->stepped[k].steps == b->stepped[k].steps;
    if (equal) return MS_PASS_EQUAL;
    for (int k = 0; k < a->n_stepped; k++)
        for (int i = 0; i < b->n_stepped; i++)
            if (a->stepped[k].steps == b->stepped[i].steps) return MS_PASS_OVERLAP;
    return MS_PASS_APART;
}
