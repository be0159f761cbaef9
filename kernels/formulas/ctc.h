// SPDX-License-Identifier: MIT
// formulas/ctc.h -- connectionist temporal classification (Graves et al. 2006), for the CPU and the GPU, in double.
//
// The extended target of a sample has 2 S + 1 labels: blanks around S classes. alpha and beta are logarithms:
//   alpha[t][s] = logp[t][label s] + logsumexp(alpha[t-1][s], alpha[t-1][s-1], and alpha[t-1][s-2] if label s may
//     follow label s-2)
//   loss = -logsumexp(alpha[T-1][2 S], alpha[T-1][2 S - 1])
// beta[t][s] is computed likewise from the last time step back, including logp[t]. The gradient of logp[t][c] is
//     -sum over labels s that are c of exp(alpha[t][s] + beta[t][s] - logp[t][c] + loss)
#ifndef MS_FORMULAS_CTC
#define MS_FORMULAS_CTC

#define MS_CTC_NONE (-(double)INFINITY)  // the logarithm of 0

// One sample. Lengths are at most those of the tensors; a class outside of [0, classes) has probability 0.
typedef struct ms_ctc {
    const void *logp;       // of this sample
    bool wide;              // whether logp is float64; otherwise it is float32
    int64_t step, across;   // elements between time steps, between classes
    const int64_t *target;  // `target_step` elements apart
    int64_t target_step, times, length, classes, blank;
} ms_ctc;

MS_FN int64_t ms_ctc_class(const ms_ctc *c, int64_t s)
{
    return s & 1 ? c->target[(s >> 1) * c->target_step] : c->blank;
}
MS_FN double ms_ctc_logp(const ms_ctc *c, int64_t t, int64_t k)
{
    if (k < 0 || k >= c->classes) return MS_CTC_NONE;
    int64_t at = t * c->step + k * c->across;
    return c->wide ? ((const double *)c->logp)[at] : (double)((const float *)c->logp)[at];
}
MS_FN double ms_ctc_add(double a, double b)  // log(exp(a) + exp(b))
{
    double high = a > b ? a : b, low = a > b ? b : a;
    if (low == MS_CTC_NONE) return a != a ? a : high;
    return high + ms_log_f64(1 + ms_exp_f64(low - high));
}
// Whether label s may follow label s - 2: it is a class other than that of label s - 2.
MS_FN bool ms_ctc_skips(const ms_ctc *c, int64_t s)
{
    return (s & 1) && s > 1 && ms_ctc_class(c, s) != ms_ctc_class(c, s - 2);
}

// alpha[t][s], from the row before it (NULL at t = 0).
MS_FN double ms_ctc_alpha(const ms_ctc *c, int64_t t, int64_t s, const double *before)
{
    double p = ms_ctc_logp(c, t, ms_ctc_class(c, s));
    if (!before) return s < 2 ? p : MS_CTC_NONE;
    double sum = before[s];
    if (s > 0) sum = ms_ctc_add(sum, before[s - 1]);
    if (ms_ctc_skips(c, s)) sum = ms_ctc_add(sum, before[s - 2]);
    return sum + p;
}
// beta[t][s], from the row after it (NULL at the last time step).
MS_FN double ms_ctc_beta(const ms_ctc *c, int64_t t, int64_t s, const double *after)
{
    int64_t labels = 2 * c->length + 1;
    double p = ms_ctc_logp(c, t, ms_ctc_class(c, s));
    if (!after) return s >= labels - 2 ? p : MS_CTC_NONE;
    double sum = after[s];
    if (s + 1 < labels) sum = ms_ctc_add(sum, after[s + 1]);
    if (s + 2 < labels && ms_ctc_skips(c, s + 2)) sum = ms_ctc_add(sum, after[s + 2]);
    return sum + p;
}
// The loss, from alpha's last row. `last` is NULL if there are no time steps: the empty target then has probability 1,
// every other target 0.
MS_FN double ms_ctc_loss(const ms_ctc *c, const double *last)
{
    if (!last) return c->length ? -MS_CTC_NONE : 0;
    double sum = last[2 * c->length];
    if (c->length) sum = ms_ctc_add(sum, last[2 * c->length - 1]);
    return -sum;
}
// The alpha and beta of a time step, and the loss.
typedef struct ms_ctc_row {
    const double *alpha, *beta;
    double loss;
} ms_ctc_row;
// Stores the gradient of logp[t][class of label s] in *grad if label s is the first one of its class and the class
// exists, otherwise returns false: one label computes the sum, so its order is fixed.
MS_FN bool ms_ctc_gradient(const ms_ctc *c, int64_t t, int64_t s, const ms_ctc_row *row, double *grad)
{
    int64_t k = ms_ctc_class(c, s), labels = 2 * c->length + 1;
    if (k < 0 || k >= c->classes) return false;
    for (int64_t e = 0; e < s; e++)
        if (ms_ctc_class(c, e) == k) return false;
    double p = ms_ctc_logp(c, t, k), sum = 0;
    for (int64_t e = s; e < labels; e++)
        if (ms_ctc_class(c, e) == k) sum += ms_exp_f64(row->alpha[e] + row->beta[e] - p + row->loss);
    *grad = -sum;
    return true;
}
#endif
