// SPDX-License-Identifier: MIT
// train/captured.c -- captured steps for scripts: recording, inputs and results, repetition (device/capture.h).
#include "autograd/captured.h"
#include "base/activity.h"
#include "base/trace.h"
#include "comm/recover.h"
#include "ops/captured.h"
#include "ops/queued.h"
#include "train/scaler.h"

struct ms_ends {
    int n_in, n_out;
    const ms_op *clone;  // copies the results
    ms_tensor *in[MS_MAX_IN], *out[MS_MAX_OUT];
};

static ms_status check_step_input(const ms_tensor *t, int k)
{
    if (t->requires_grad)
        return ms__fail(MS_EINVAL,
                        "captured step: argument %d, %s, requires grad; the step copies its arguments, so pass "
                        "detach() of it",
                        k + 1, ms__tensor_text(t));
    return MS_OK;
}

static void forget_step(ms_captured *c)
{
    if (ms__recording == c) {
        ms__recording = NULL;
        (void)ms__capture_suspend();
    }
    for (int k = 0; c->ends && k < c->ends->n_in; k++) ms__release(c->ends->in[k]);
    free(c->ends);
    ms__captured_grads_forget(c);
    ms__captured_forget(c);
    ms__choices_forget(c);
    ms__captured_drop(c);
}

// Makes the step's own input k, in memory that the step keeps, with the argument's values.
static ms_status take_input(ms_captured *c, int k, ms_id id, ms_id *own)
{
    ms_tensor *t = ms__tensor(id), *mine;
    if (!t) return ms__failure();
    MS_TRY(check_step_input(t, k));
    ms__capture_resume(c);
    ms_status st = ms__tensor_like(&mine, t, "captured step");
    (void)ms__capture_suspend();
    MS_TRY(st);
    c->ends->in[c->ends->n_in++] = mine;
    MS_TRY(ms__copy(mine, t));
    own[k] = ms__name(ms__retain(mine));
    return own[k] ? MS_OK : ms__failure();
}

ms_captured *ms_capture_begin(int n, const ms_id *in, ms_id *own)
{
    if (ms__recording)
        return ms__null(
            ms__capture_refuse("another step begins inside it; steps cannot be captured inside each other"));
    if (n < 0 || n > MS_MAX_IN)
        return ms__null(ms__fail(MS_EINVAL, "captured step: %d tensors, expected at most %d", n, MS_MAX_IN));
    if (ms__state.run_depth)
        return ms__null(ms__fail(MS_ESTATE, "captured step: a step cannot be captured inside a backward or its hooks"));
    ms_captured *c = ms__captured_new();
    if (!c) return NULL;
    ms_status st = MS_OK;
    if (!(c->ends = calloc(1, sizeof *c->ends))) st = ms__no_memory(sizeof *c->ends, "captured step", "its arguments");
    else c->ends->clone = ms__op_by_name("clone");
    for (int k = 0; k < n && st == MS_OK; k++) st = take_input(c, k, in[k], own);
    if (st != MS_OK) {
        forget_step(c);
        return NULL;
    }
    c->seed = ms__rng_seed();
    c->offset = ms__rng_offset();
    c->first_node = ms__next_node();
    ms__recording = c;
    ms__capture_resume(c);
    return c;
}

ms_status ms_capture_results(ms_captured *c, int n, const ms_id *results, ms_id *out)
{
    if (n < 0 || n > MS_MAX_OUT) return ms__capture_refuse("it returns %d tensors, expected at most %d", n, MS_MAX_OUT);
    for (int k = 0; k < n; k++) {
        ms_tensor *t = ms__tensor(results[k]), *copy;
        if (!t) return ms__failure();
        if (t->node && !t->node->freed && t->node->keeps)
            return ms__capture_refuse("result %d, %s, has a graph without a backward; call backward in the step, or "
                                      "return detach() of it",
                                      k + 1, ms__tensor_text(t));
        if (!(c->ends->out[k] = ms__capture_tensor(c, t))) return MS_ENOMEM;
        c->ends->n_out = k + 1;
        ms_captured *was = ms__capture_suspend();
        ms_status st = ms__op1(&copy, c->ends->clone, t);
        ms__capture_resume(was);
        MS_TRY(st);
        if (!(out[k] = ms__name(copy))) return ms__failure();
    }
    return MS_OK;
}

ms_status ms_capture_end(ms_captured *c)
{
    int grads = 0;
    ms_status st = ms__streams_drain();
    ms__stream_reap();
    if (st == MS_OK) st = ms__captured_grads_end(c, &grads);
    uint64_t offset = ms__rng_offset();
    if (ms__rng_seed() != c->seed || offset < c->offset)
        (void)ms__capture_refuse("it sets the random generator; call manual_seed outside of the step");
    c->draws = offset - c->offset;
    int inputs = 0;
    for (int k = 0; k < c->ends->n_in; k++) inputs += c->ends->in[k]->numel > 0;
    int left = ms__pins_in_use(c->pins) - grads - inputs;
    if (left > 0)
        (void)ms__capture_refuse("%d tensor%s made inside %s still in use after it: kept, stored in a field, or in a "
                                 "graph without a backward. Repetitions would not make %s again; return what is needed "
                                 "outside",
                                 left, left > 1 ? "s" : "", left > 1 ? "are" : "is", left > 1 ? "them" : "it");
    ms__recording = NULL;
    (void)ms__capture_suspend();
    if (st == MS_OK && !c->refusal) st = ms__choices_end(c);
    if (st == MS_OK && c->refusal) st = ms__fail(MS_ESTATE, "%s", c->refusal);
    return st;
}

static ms_status fill_inputs(const ms_captured *c, int n, const ms_id *in)
{
    if (n != c->ends->n_in)
        return ms__fail(MS_EINVAL, "captured step: the number of tensors is %d, expected %d, as when it was recorded",
                        n, c->ends->n_in);
    for (int k = 0; k < n; k++) {
        ms_tensor *t = ms__tensor(in[k]);
        const ms_tensor *mine = c->ends->in[k];
        if (!t) return ms__failure();
        if (MS_UNLIKELY(t->dtype != mine->dtype || !ms__has_shape(t, mine->ndim, mine->shape) ||
                        ms__device(t) != ms__device(mine)))
            return ms__fail(MS_EINVAL,
                            "captured step: argument %d is %s, expected %s, as when the step was recorded: shapes, "
                            "dtypes and devices are fixed",
                            k + 1, ms__tensor_text(t), ms__tensor_text(mine));
        if (MS_UNLIKELY(t->requires_grad)) MS_TRY(check_step_input(t, k));
    }
    for (int k = 0; k < n; k++) MS_TRY(ms__copy(c->ends->in[k], ms__tensor(in[k])));
    return MS_OK;
}

static ms_status repeat_step(ms_captured *c, int n, const ms_id *in, ms_id *out)
{
    MS_TRY(ms__names_reserve(c->ends->n_out ? c->ends->n_out : 1, "captured step"));
    MS_TRY(ms__captured_check(c));
    MS_TRY(ms__captured_grads_check(c));
    MS_TRY(ms__choices_ready(c));
    MS_TRY(fill_inputs(c, n, in));
    c->seed_now = ms__rng_seed();
    c->offset_now = ms__rng_offset();
    ms__note_queued(c->gpu, "captured step");
    MS_TRY(ms__captured_repeat(c));
    ms__rng_rewind(c->offset_now + c->draws);
    ms__captured_grads_set(c, ms__leaf_set_grad);
    for (int k = 0; k < c->ends->n_out; k++) {
        ms_tensor *copy;
        MS_TRY(ms__op1(&copy, c->ends->clone, c->ends->out[k]));
        if (!(out[k] = ms__name(copy))) return ms__failure();
    }
    return MS_OK;
}

ms_status ms_capture_repeat(ms_captured *c, int n, const ms_id *in, ms_id *out)
{
    MS_BUSY;
    MS_RANGE(MS_RANGE_USER, "captured step", NULL);
    if (MS_UNLIKELY(ms__recording != NULL))
        return ms__capture_refuse("another step runs inside it; steps cannot be captured inside each other");
    if (MS_UNLIKELY(ms__state.run_depth))
        return ms__fail(MS_ESTATE, "captured step: it cannot run inside a backward or its hooks");
    ms_status st = repeat_step(c, n, in, out);
    // Peers may wait for this rank in the step's collectives, so they must learn of the failure.
    if (MS_UNLIKELY(st != MS_OK && c->sends)) ms__comm_failed(ms_error(), true);
    return st;
}

void ms_capture_info(const ms_captured *c, ms_captured_info *out)
{
    *out = (ms_captured_info) { .bytes = (double)ms__pins_bytes(c->pins),
                                .work = c->n_work,
                                .graphs = c->n_graphs,
                                .graphed = c->n_graphed,
                                .sends = c->sends };
}

ms_status ms_capture_refuse(const char *text) { return ms__capture_refuse("%s", text); }

void ms_capture_free(ms_captured *c)
{
    if (c) forget_step(c);
}
