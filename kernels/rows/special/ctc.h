// SPDX-License-Identifier: MIT
// rows/special/ctc.h -- a call of ctc_loss or of its gradient as plain numbers and pointers, and its samples
// (formulas/ctc.h), for the CPU and the GPU.
#ifndef MS_ROWS_CTC_H
#define MS_ROWS_CTC_H

#include "ops/op.h"

// A strided vector of int64. step: elements from one number to the next.
typedef struct ms_ctc_vector {
    const int64_t *at;
    int64_t step;
} ms_ctc_vector;
typedef struct ms_ctc_call {
    ms_ctc sample;                        // what samples share: steps, classes, blank; logp and target of sample 0
    int64_t batch, times, longest, wide;  // wide: elements of a row of alpha
    int64_t next_logp, next_target;       // elements from one sample to the next
    int64_t concatenated;                 // number of targets, stored one after the other; -1 if each sample has a row
    ms_ctc_vector input_lengths, target_lengths;
    bool zero_infinity;
    void *loss, *grad;        // [N]; [T, N, C], contiguous
    double *alpha, *scratch;  // [N, T, wide]; rows of beta
    const void *grad_loss;
    int64_t grad_loss_step;
} ms_ctc_call;

static inline ms_ctc_vector ms__ctc_vector(const ms_tensor *t)
{
    ms_ctc_vector v = { (const int64_t *)ms__data(t), t->stride[0] };
    return v;
}
// Sets what forward and backward have in common: the inputs from number `first` on, and the integers.
static inline void ms__ctc_call(ms_ctc_call *j, const ms_call *c, int first)
{
    const ms_tensor *x = c->in[first], *y = c->in[first + 1];
    memset(j, 0, sizeof *j);
    j->sample.logp = ms__data(x);
    j->sample.wide = x->dtype == MS_F64;
    j->sample.step = x->stride[0], j->next_logp = x->stride[1], j->sample.across = x->stride[2];
    j->times = x->shape[0], j->batch = x->shape[1], j->sample.classes = x->shape[2];
    j->sample.target = (const int64_t *)ms__data(y);
    j->sample.target_step = y->stride[y->ndim - 1];
    j->next_target = y->stride[0];
    j->concatenated = y->ndim == 1 ? y->numel : -1;
    j->input_lengths = ms__ctc_vector(c->in[first + 2]), j->target_lengths = ms__ctc_vector(c->in[first + 3]);
    j->sample.blank = c->i[0], j->zero_infinity = c->i[1] != 0, j->longest = c->i[2];
    j->wide = 2 * j->longest + 1;
}

// Sample n. A length that is negative or too large becomes the largest possible: all time steps or, for a target, the
// length of the longest one, but no more than what is left of concatenated targets.
MS_FN ms_ctc ms__ctc_sample(const ms_ctc_call *j, int64_t n)
{
    ms_ctc s = j->sample;
    s.logp = (const char *)s.logp + n * j->next_logp * (s.wide ? 8 : 4);
    s.times = j->input_lengths.at[n * j->input_lengths.step];
    if (s.times < 0 || s.times > j->times) s.times = j->times;
    s.length = j->target_lengths.at[n * j->target_lengths.step];
    if (s.length < 0 || s.length > j->longest) s.length = j->longest;
    if (j->concatenated < 0) {
        s.target += n * j->next_target;
        return s;
    }
    int64_t from = 0;
    for (int64_t k = 0; k < n; k++) {
        int64_t length = j->target_lengths.at[k * j->target_lengths.step];
        if (length > 0 && length <= j->concatenated - from) from += length;
    }
    if (s.length > j->concatenated - from) s.length = j->concatenated - from;
    s.target += from * s.target_step;
    return s;
}

#endif
