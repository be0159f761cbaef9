// SPDX-License-Identifier: MIT
// cpu/special/ctc.c -- the CTC loss on the CPU (formulas/ctc.h): a thread computes a sample.
#include <math.h>

#include "cpu/cpu.h"
#include "cpu/special/special.h"
#include "formulas/math32.h"
#include "formulas/ctc.h"
#include "rows/special/ctc.h"

// Checks the lengths and classes of all samples. Memory is safe without this: ms__ctc_sample cuts lengths, and classes
// that do not exist are not read.
static ms_status check_values(const ms_call *c, const ms_ctc_call *j)
{
    int64_t used = 0;
    for (int64_t n = 0; n < j->batch; n++) {
        int64_t times = j->input_lengths.at[n * j->input_lengths.step];
        int64_t length = j->target_lengths.at[n * j->target_lengths.step];
        if (times < 0 || times > j->times)
            return ms__call_fail(c, "the input length of sample %lld is %lld, expected 0 to %lld, the first size of %s",
                                 (long long)n + 1, (long long)times, (long long)j->times, ms__tensor_text(c->in[0]));
        int64_t most = j->concatenated >= 0 ? j->concatenated - used : j->longest;
        if (most > j->longest) most = j->longest;
        if (length < 0 || length > most)
            return ms__call_fail(c,
                                 "the target length of sample %lld is %lld, expected 0 to %lld, the number of targets "
                                 "left for it in %s",
                                 (long long)n + 1, (long long)length, (long long)most, ms__tensor_text(c->in[1]));
        ms_ctc s = ms__ctc_sample(j, n);
        for (int64_t k = 0; k < s.length; k++) {
            int64_t target = s.target[k * s.target_step];
            if (target < 0 || target >= s.classes || target == s.blank)
                return ms__call_fail(c, "target %lld of sample %lld is %lld, expected 0 to %lld except the blank, %lld",
                                     (long long)k + 1, (long long)n + 1, (long long)target, (long long)s.classes - 1,
                                     (long long)s.blank);
        }
        used += length;
    }
    return MS_OK;
}

static void put_log(const ms_ctc *s, void *to, int64_t at, double value)
{
    if (s->wide) ((double *)to)[at] = value;
    else ((float *)to)[at] = (float)value;
}

static void loss_task(void *arg, int64_t begin, int64_t end, int64_t n)
{
    (void)begin;
    (void)end;
    const ms_ctc_call *j = arg;
    ms_ctc s = ms__ctc_sample(j, n);
    double *row = j->alpha + n * j->times * j->wide, *before = NULL;
    for (int64_t t = 0; t < s.times; t++, row += j->wide) {
        for (int64_t k = 0; k < 2 * s.length + 1; k++) row[k] = ms_ctc_alpha(&s, t, k, before);
        before = row;
    }
    double loss = ms_ctc_loss(&s, before);
    put_log(&s, j->loss, n, j->zero_infinity && loss == INFINITY ? 0 : loss);
}

ms_status ms__cpu_ctc_loss(ms_call *c)
{
    ms_ctc_call j;
    ms__ctc_call(&j, c, 0);
    j.loss = ms__data(c->out[0]), j.alpha = ms__data(c->out[1]);
    MS_TRY(check_values(c, &j));
    ms__parallel_tasks(j.batch, loss_task, &j);
    return MS_OK;
}

static void gradient_task(void *arg, int64_t begin, int64_t end, int64_t n)
{
    (void)begin;
    (void)end;
    const ms_ctc_call *j = arg;
    ms_ctc s = ms__ctc_sample(j, n);
    const double *alpha = j->alpha + n * j->times * j->wide;
    double *rows = j->scratch + ms__thread_num() * 2 * j->wide, *after = NULL, grad;
    double loss = ms_ctc_loss(&s, s.times ? alpha + (s.times - 1) * j->wide : NULL);
    if (j->zero_infinity && loss == INFINITY) return;
    int64_t labels = 2 * s.length + 1, at = n * j->grad_loss_step;
    double g = s.wide ? ((const double *)j->grad_loss)[at] : (double)((const float *)j->grad_loss)[at];
    for (int64_t t = s.times - 1; t >= 0; t--) {
        double *beta = rows + (t & 1) * j->wide;
        for (int64_t k = 0; k < labels; k++) beta[k] = ms_ctc_beta(&s, t, k, after);
        for (int64_t k = 0; k < labels; k++)
            if (ms_ctc_gradient(&s, t, k, &(ms_ctc_row) { alpha + t * j->wide, beta, loss }, &grad))
                put_log(&s, j->grad, (t * j->batch + n) * s.classes + ms_ctc_class(&s, k), g * grad);
        after = beta;
    }
}

ms_status ms__cpu_ctc_loss_backward(ms_call *c)
{
    ms_ctc_call j;
    ms__ctc_call(&j, c, 1);
    j.grad_loss = ms__data(c->in[0]), j.grad_loss_step = c->in[0]->stride[0];
    j.alpha = ms__data(c->in[5]), j.grad = ms__data(c->out[0]);
    if (c->out[0]->numel == 0) return MS_OK;
    memset(j.grad, 0, ms__nbytes(c->out[0]));
    size_t bytes = (size_t)ms_num_threads() * 2 * (size_t)j.wide * sizeof *j.scratch;
    if (!(j.scratch = malloc(bytes))) return ms__no_memory(bytes, "ctc_loss", "rows of the gradient");
    ms__parallel_tasks(j.batch, gradient_task, &j);
    free(j.scratch);
    return MS_OK;
}
