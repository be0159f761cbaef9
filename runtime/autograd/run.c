// SPDX-License-Identifier: MIT
// autograd/run.c -- runs: engine work that the script advances step by step, so that it can answer events in between.
//
// A run has an agenda: a stack of small tasks (push, step, pop) and, for a backward, the nodes to process (backward.c).
// Runs form a stack: only the innermost one can continue. While an event waits for its answer, the script may use the
// engine; each event has its own scope and modes, which end with it.
#include "base/activity.h"
#include "autograd/owner.h"
#include "autograd/backward.h"
#include "base/watched.h"
#include "device/capture.h"

static struct {
    ms_run *top, *spare;
    ms_stacked *spare_task;
} runs;

const ms_run_owner *ms__run_owner;

// ---- state of runs ----------------------------------------------------------------------------

ms_status ms__run_no_memory(size_t bytes) { return ms__no_memory(bytes, "backward", "the lists of pending work"); }

bool ms__run_is_backward(const ms_run *r) { return r->backward; }
bool ms__run_has_units(const ms_run *r) { return r->units; }

bool ms__run_in_backward(void)
{
    for (ms_run *r = runs.top; r; r = r->below)
        if (r->backward) return true;
    return false;
}

void ms__run_meets_unit(void)
{
    if (runs.top) runs.top->units = true;
}

bool ms__run_recomputing(void)
{
    for (ms_run *r = runs.top; r; r = r->below)
        if (r->event.out && r->event.kind == MS_EV_RECOMPUTE) return true;
    return false;
}

ms_run *ms_run_top(void) { return runs.top; }

ms_run *ms__run_new(void)
{
    ms_run *r = runs.spare;
    if (r) runs.spare = r->below;
    else if (!(r = calloc(1, sizeof *r))) return ms__null(ms__no_memory(sizeof *r, "backward", "a run"));
    r->units = r->backward = r->grad = r->retain = r->finished = r->final_done = r->event.out = false;
    r->range.from = 0;
    if (ms__tracing()) ms__range_open(&r->range, MS_RANGE_BACKWARD, "run", NULL);
    r->below = runs.top;
    runs.top = r;
    ms__state.run_depth++;
    return r;
}

ms_status ms__run_push(ms_run *r, const ms_task *t)
{
    ms_stacked *k = runs.spare_task;
    if (k) runs.spare_task = k->next;
    else if (!(k = malloc(sizeof *k))) return ms__run_no_memory(sizeof *k);
    k->t = *t;
    k->next = r->tasks;
    r->tasks = k;
    return MS_OK;
}

static void task_free(ms_stacked *k)
{
    if (k->t.drop) k->t.drop(&k->t);
    if (!MS_RECYCLE) {
        free(k);
        return;
    }
    k->next = runs.spare_task;
    runs.spare_task = k;
}

// ---- events -----------------------------------------------------------------------------------

void ms__run_drop_answers(ms_run *r)
{
    for (int k = 0; k < r->event.n_answers; k++) ms__release(r->event.answers[k]);
    r->event.n_answers = 0;
}

ms_run_state ms__run_event(ms_run *r, ms_event *ev, const ms_question *q)
{
    static const char *const names[] = {
        "run",        "tensor hook",         "backward of a Function", "module backward hook", "leaf hook",
        "checkpoint", "pre-all-gather hook", "post-all-gather hook",   "reduction hook",       "hook of the all-reduce"
    };
    // Tensor and leaf hooks may be called: DDP's hooks do only work of the engine, which is captured, and Lua refuses
    // all others (ms_capture_refuse).
    if (MS_UNLIKELY(ms__recording != NULL && q->kind != MS_EV_FUNCTION && q->kind != MS_EV_RECOMPUTE &&
                    q->kind != MS_EV_LEAF_HOOK && q->kind != MS_EV_TENSOR_HOOK)) {
        (void)ms__capture_refuse("it calls a %s, which repetitions would not call; remove it, or do not capture this "
                                 "step",
                                 names[q->kind]);
        *ev = (ms_event) { .kind = q->kind, .key = q->key, .unit = q->unit };
        return MS_RUN_FAILED;
    }
    ms__run_drop_answers(r);
    r->event.kind = q->kind;
    r->modes.grad_mode = ms__state.grad_mode;
    r->modes.autocast = ms__state.autocast;
    if (!(r->modes.scope = ms_scope_open(names[q->kind]))) return MS_RUN_FAILED;
    r->event.out = true;
    ms__state.grad_mode = q->kind == MS_EV_RECOMPUTE;
    ms__state.autocast = 0;
    if (q->kind == MS_EV_RECOMPUTE) ms_rng_get(&r->modes.rng[0], &r->modes.rng[1]);
    for (int k = 0; k < q->n; k++) {
        r->event.ids[k] = 0;
        if (q->in[k] && !(r->event.ids[k] = ms__name(ms__retain(q->in[k])))) return MS_RUN_FAILED;
    }
    *ev = (ms_event) {
        .kind = q->kind, .n = q->n, .key = q->key, .unit = q->unit, .in = r->event.ids, .n_first = q->n_first
    };
    return MS_RUN_EVENT;
}

void ms__run_leave_event(ms_run *r)
{
    r->event.out = false;
    ms__state.grad_mode = r->modes.grad_mode;
    ms__state.autocast = r->modes.autocast;
    if (r->event.kind == MS_EV_RECOMPUTE) ms_rng_set(r->modes.rng[0], r->modes.rng[1]);
    ms_scope_close(r->modes.scope, NULL, 0);
}

ms_status ms_run_answer(ms_run *r, const ms_id *ids, int n)
{
    if (r != runs.top || !r->event.out)
        return ms__fail(MS_ESTATE, "backward: the result of a hook, a Function's backward or a recomputation is "
                                   "refused: another backward, begun during it in another coroutine, was not "
                                   "finished or was aborted");
    if (n < 0 || n > MS_MAX_IN)
        return ms__fail(MS_EINVAL,
                        "backward: a hook, a Function's backward or a recomputation returned %d tensors, "
                        "expected at most %d",
                        n, MS_MAX_IN);
    ms__run_drop_answers(r);
    for (int k = 0; k < n; k++) {
        ms_tensor *t = NULL;
        if (ids[k] != 0 && !(t = ms__tensor(ids[k]))) {
            ms__run_drop_answers(r);
            return ms__failure();
        }
        r->event.answers[r->event.n_answers++] = ms__retain(t);
    }
    return MS_OK;
}

int ms__run_answers(ms_run *r, ms_tensor *const **t)
{
    *t = r->event.answers;
    return r->event.n_answers;
}

ms_status ms_checkpoint_inputs(ms_run *r, int n, const ms_id *detached)
{
    if (r != runs.top || !r->event.out || r->event.kind != MS_EV_RECOMPUTE)
        return ms__fail(MS_ESTATE,
                        "checkpoint: inputs can only be given while the checkpointed region is being recomputed");
    ms_node *node = r->at.node;
    if (n != node->n_in)
        return ms__fail(MS_EINVAL, "checkpoint: the number of inputs is %d, expected %d, as when it was recorded", n,
                        node->n_in);
    for (int k = 0; k < n; k++) {
        if (detached[k] == 0) continue;
        ms_tensor *t = ms__tensor(detached[k]);
        if (!t) return ms__failure();
        if (t->node || !t->requires_grad)
            return ms__fail(MS_EINVAL, "checkpoint: input %d, %s, must be a leaf that requires grad", k + 1,
                            ms__tensor_text(t));
        ms_leaf *l = ms__leaf_of(t);
        if (!l) return MS_ENOMEM;
        MS_TRY(ms__grow(&r->forwards, &r->cap_forwards, r->n_forwards, sizeof *r->forwards, "backward",
                        "the lists of pending work"));
        l->forward = &node->edges[k];
        l->refs++;
        r->forwards[r->n_forwards++] = l;
    }
    return MS_OK;
}

// ---- running ----------------------------------------------------------------------------------

void ms__node_drop_gouts(ms_node *n)
{
    for (int k = 0; k < n->n_out; k++) ms__drop(&n->gout[k]);
}

void ms__run_finish(ms_run *r)
{
    if (r->event.out) ms__run_leave_event(r);
    ms__run_drop_answers(r);
    while (r->tasks) {
        ms_stacked *k = r->tasks;
        r->tasks = k->next;
        task_free(k);
    }
    if (r->at.node) {
        for (int k = 0; k < r->at.node->n_in; k++) ms__release(r->at.gin[k]);
        memset(r->at.gin, 0, (size_t)r->at.node->n_in * sizeof *r->at.gin);
        ms__node_drop_gouts(r->at.node);
        r->at.node->run = NULL;
        r->at.node = NULL;
    }
    for (int i = 0; i < r->n_agenda; i++) {
        ms__node_drop_gouts(r->agenda[i].node);
        r->agenda[i].node->run = NULL;
    }
    r->n_agenda = 0;
    for (int i = 0; i < r->n_leaves; i++) {
        ms__drop(&r->leaves[i]->total);
        r->leaves[i]->run = NULL;
    }
    while (r->asides) {
        ms_aside *a = r->asides;
        r->asides = a->next;
        if (a->node) {
            a->node->run = a->run;
            a->node->needed = a->needed;
            for (int k = 0; k < a->node->n_out; k++) a->node->gout[k] = a->gout[k];
            free(a->gout);
        } else {
            a->leaf->run = a->run;
            a->leaf->pending = a->pending;
            a->leaf->total = a->total;
        }
        free(a);
    }
    for (int i = 0; i < r->n_leaves; i++) ms__leaf_release(r->leaves[i]);
    r->n_leaves = 0;
    for (int i = 0; i < r->n_forwards; i++) {
        r->forwards[i]->forward = NULL;
        ms__leaf_release(r->forwards[i]);
    }
    r->n_forwards = 0;
    for (int i = 0; i < r->n_held; i++) ms__node_release(r->held[i]);
    r->n_held = 0;
    r->finished = true;
    r->range.name = r->grad ? "grad" : r->backward ? "backward" : "gather";
    ms__range_end(&r->range);
    r->at.hook = NULL;
    r->event.kind = 0;
    runs.top = r->below;
    ms__state.run_depth--;
}

ms_run_state ms__run_step_task(ms_run *r, ms_event *ev)
{
    ms_stacked *k = r->tasks, *under = k->next;
    r->tasks = under;
    k->t.again = false;
    ms_run_state st = k->t.step(&k->t, r, ev);
    if (st == MS_RUN_DONE && !k->t.again) {
        task_free(k);
        return MS_RUN_DONE;
    }
    // Move the task below the tasks that it pushed.
    ms_stacked **at = &r->tasks;
    while (*at != under) at = &(*at)->next;
    k->next = under;
    *at = k;
    return st;
}

ms_id ms_run_result(ms_run *r, int k)
{
    if (k < 0 || k >= r->n_captures || !r->captures[k].value) return 0;
    return ms__name(ms__retain(r->captures[k].value));
}

void ms__run_recycle(ms_run *r)
{
    for (int k = 0; k < r->n_captures; k++) {
        ms_capture *c = &r->captures[k];
        ms__release(c->value);
        if (c->node) ms__node_release(c->node);
        if (c->leaf) ms__leaf_release(c->leaf);
    }
    free(r->captures);
    r->captures = NULL;
    r->n_captures = 0;
    if (!MS_RECYCLE) {
        free(r->agenda);
        free(r->leaves);
        free(r->forwards);
        free(r->held);
        free(r);
        return;
    }
    r->below = runs.spare;
    runs.spare = r;
}

void ms_run_free(ms_run *r)
{
    if (!r) return;
    if (!r->finished) ms_run_abort(r, NULL);
    else ms__run_recycle(r);
}

void ms_run_abort(ms_run *r, const char *why)
{
    if (!r) return;
    bool open = false;
    for (ms_run *k = runs.top; k; k = k->below) open |= k == r;
    if (!open) return;
    // ms_error() keeps the error that caused the abort.
    ms_status code = ms__failure();
    char text[4096];
    snprintf(text, sizeof text, "%s", ms_error());
    bool units = false, backward = false;  // backward: the outermost backward is among the aborted runs
    for (ms_run *k = runs.top; k; k = k == r ? NULL : k->below) {
        units |= k->units;
        backward |= k->backward;
    }
    for (ms_run *k = r->below; k; k = k->below) backward &= !k->backward;
    if (units) ms__run_owner->failed(why ? why : code != MS_OK ? text : "a backward or gather was aborted", backward);
    for (bool last = false; !last;) {
        ms_run *k = runs.top;
        last = k == r;
        ms__run_finish(k);
        if (ms__run_owner) ms__run_owner->abort(k);
        ms__run_recycle(k);
    }
    if (code != MS_OK) ms__fail(code, "%s", text);
}
