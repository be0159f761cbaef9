// SPDX-License-Identifier: MIT
// rows/layers/attention.c -- scaled dot-product attention over [..., t, d] tensors of any strides.
#include "cpu/rows/layers.h"
#include "rows/attention.h"
#include "rows/grad.h"
#include "rows/layout.h"

// Allocates out[k] with t's shape, except that the last dimension has size `last`, and with the order of t's strides.
static ms_status out_laid_out_like(ms_call *c, int k, const ms_tensor *t, int64_t last)
{
    int order[MS_MAX_DIMS], n = t->ndim;
    int64_t shape[MS_MAX_DIMS] = { 0 }, sizes[MS_MAX_DIMS] = { 0 };
    memcpy(shape, t->shape, (size_t)n * sizeof *shape);
    shape[n - 1] = last;
    ms__order_of_strides(t, order);
    ms__in_order(n, order, shape, sizes);
    MS_TRY(ms__call_out(c, k, t->dtype, ms__device(t), n, sizes));
    ms__lay_out(c->out[k], order, shape);
    return MS_OK;
}

// Whether the batch dimensions of k are those of q, or its last one divides that of q.
static bool heads_fit(const ms_tensor *q, const ms_tensor *k)
{
    int n = q->ndim - 3;  // the position of the last one
    return n < 0 || (memcmp(q->shape, k->shape, (size_t)n * sizeof *q->shape) == 0 &&
                     (q->shape[n] == k->shape[n] || (k->shape[n] > 0 && q->shape[n] % k->shape[n] == 0)));
}

static ms_status options_check(ms_call *c)
{
    if (c->n_f > 0 && !(c->f[0] >= 0 && c->f[0] <= 1))
        return ms__call_fail(c, "dropout_p must be from 0 to 1, got %g", c->f[0]);
    if (c->n_f > 2 && !(c->f[2] >= 0)) return ms__call_fail(c, "softcap must be greater than 0, got %g", c->f[2]);
    for (int k = 1; k < c->n_i; k++) {
        const char *name = k == 1 ? "causal_offset" : "window";
        if (c->i[k] && !c->i[0]) return ms__call_fail(c, "%s needs is_causal", name);
        if (c->i[k] <= (k == 1 ? -MS_FAR : -1) || c->i[k] >= MS_FAR)
            return ms__call_fail(c, "%s is %lld, which is out of range", name, (long long)c->i[k]);
    }
    return MS_OK;
}

static ms_status attention_check(ms_call *c)
{
    const ms_tensor *q = c->in[0], *k = c->in[1], *v = c->in[2], *mask = c->n_in > 3 ? c->in[3] : NULL;
    int n = q->ndim;
    if (!ms__is_float(q->dtype) || k->dtype != q->dtype || v->dtype != q->dtype)
        return ms__call_fail(c, "query, key and value must have the same floating-point dtype, got %s, %s, %s",
                             ms__tensor_text(q), ms__tensor_text(k), ms__tensor_text(v));
    if (n < 2 || k->ndim != n || v->ndim != n || memcmp(k->shape, v->shape, (size_t)n * sizeof *k->shape) != 0 ||
        k->shape[n - 1] != q->shape[n - 1] || !heads_fit(q, k))
        return ms__call_fail(c, "expected query [..., t, d] and key, value [..., s, d], got %s, %s, %s",
                             ms__shape_text(n, q->shape), ms__shape_text(k->ndim, k->shape),
                             ms__shape_text(v->ndim, v->shape));
    if (q->shape[n - 1] == 0)
        return ms__call_fail(c, "the last dimension is the head's size and cannot be 0: query %s",
                             ms__shape_text(n, q->shape));
    if (mask) {
        bool fits = mask->ndim >= 2 && mask->ndim <= n;
        for (int d = 1; fits && d <= mask->ndim; d++) {
            int64_t have = mask->shape[mask->ndim - d], want = d == 1 ? k->shape[n - 2] : q->shape[n - d];
            fits = have == want || have == 1;
        }
        if (!fits)
            return ms__call_fail(c, "a mask must broadcast to [..., %lld, %lld], got %s", (long long)q->shape[n - 2],
                                 (long long)k->shape[n - 2], ms__shape_text(mask->ndim, mask->shape));
        if (mask->dtype != MS_BOOL && !ms__is_float(mask->dtype))
            return ms__call_fail(c, "a mask must be bool or floating point, got %s", ms__tensor_text(mask));
    }
    MS_TRY(options_check(c));
    c->saved_rng[0] = c->saved_rng[1] = 0;
    if (c->n_f > 0 && c->f[0] > 0) ms__rng_next(&c->saved_rng[0], &c->saved_rng[1]);
    MS_TRY(out_laid_out_like(c, 0, q, q->shape[n - 1]));
    return ms__call_out(c, 1, q->dtype == MS_F64 ? MS_F64 : MS_F32, ms__device(q), n - 1, q->shape);
}

// The dimension along which three tensors of one shape lie one after another in one tensor; -1 if they do not.
static int joined_along(ms_tensor *const *x)
{
    int n = x[0]->ndim;
    int64_t step = x[1]->offset - x[0]->offset;
    if (x[0]->numel == 0 || step <= 0) return -1;
    for (int k = 1; k < 3; k++)
        if (x[k]->storage != x[0]->storage || x[k]->offset != x[0]->offset + k * step ||
            memcmp(x[k]->shape, x[0]->shape, (size_t)n * sizeof *x[k]->shape) != 0 ||
            memcmp(x[k]->stride, x[0]->stride, (size_t)n * sizeof *x[k]->stride) != 0)
            return -1;
    for (int d = 0; d < n; d++)
        if (x[0]->shape[d] * x[0]->stride[d] == step) return d;
    return -1;
}

// Allocates dq, dk and dv as consecutive parts of one tensor along dimension d, as q, k and v are parts of one. If a
// split made q, k and v, its backward then returns that tensor without a copy.
static ms_status outs_joined(ms_call *c, int d)
{
    const ms_tensor *q = c->in[1];
    ms_tensor *whole;
    int order[MS_MAX_DIMS], n = q->ndim;
    int64_t shape[MS_MAX_DIMS] = { 0 }, sizes[MS_MAX_DIMS] = { 0 };
    memcpy(shape, q->shape, (size_t)n * sizeof *shape);
    shape[d] *= 3;
    ms__order_of_strides(q, order);
    ms__in_order(n, order, shape, sizes);
    MS_TRY(ms__tensor_new(&whole, q->dtype, ms__device(q), n, sizes, c->op->name));
    ms__lay_out(whole, order, shape);
    for (int k = 0; k < 3; k++) ms__call_view(c, k, ms__part_of(whole, d, k * q->shape[d], q->shape[d]));
    ms__release(whole);
    return MS_OK;
}

// Inputs: gradient, q, k, v, mask (optional), out, lse, and optionally the gradient of lse. The last integers: seed,
// offset, and the bits of the needed gradients (rows/grad.h). Outputs: those that are needed of dq, dk and dv and, if
// the attention mask needs a gradient, that of the scores [..., t, s], float32 or float64.
static ms_status attention_backward_check(ms_call *c)
{
    int64_t mask = c->i[c->n_i - 1];
    int k = 0, d = (mask & 7) == 7 ? joined_along(c->in + 1) : -1;
    if (d >= 0) {
        MS_TRY(outs_joined(c, d));
        k = 3;
    }
    for (int in = 0; d < 0 && in < 3; in++)
        if (mask >> in & 1) {
            MS_TRY(out_laid_out_like(c, k, c->in[in + 1], c->in[in + 1]->shape[c->in[in + 1]->ndim - 1]));
            k++;
        }
    if (!(mask & 8)) return MS_OK;
    const ms_tensor *q = c->in[1];
    int n = q->ndim;
    int64_t shape[MS_MAX_DIMS] = { 0 };
    memcpy(shape, q->shape, (size_t)n * sizeof *shape);
    shape[n - 1] = c->in[2]->shape[n - 2];
    return ms__call_out(c, k, q->dtype == MS_F64 ? MS_F64 : MS_F32, ms__device(q), n, shape);
}

static const ms_op op_attention_backward =
    MS_ROW("attention_backward", 7, 8, .flags = MS_OP_SEEDED, .check = attention_backward_check,
           .run = { [MS_CPU] = ms__cpu_attention_backward });

static ms_status attention_backward(ms_backward_call *b)
{
    ms_tensor *in[] = { b->gout[0], b->in[0],  b->in[1],  b->in[2], b->n_in > 3 ? b->in[3] : NULL,
                        b->out[0],  b->out[1], b->gout[1] },
              *none = NULL;
    if (!in[0]) {  // only the logsumexp was used
        MS_TRY(ms__zeros_of(&none, &b->out_meta[0]));
        in[0] = b->gout[0] = none;
    }
    ms_status st = ms__grad_op(b, &op_attention_backward, 8, in, true);
    if (none) b->gout[0] = NULL;
    ms__release(none);
    if (st == MS_OK && b->n_in > 3 && b->gin[3]) {
        ms_tensor *scores = b->gin[3];
        b->gin[3] = NULL;
        st = ms__grad_to(&b->gin[3], scores, &b->in_meta[3]);
    }
    return st;
}

// out[1] is the logsumexp of each row of scores, in float32 or float64.
static const ms_op op_attention =
    MS_ROW("attention", 3, 4, .takes = "k, v, attn_mask? | causal?, offset=0, window=0; dropout_p=0, scale=0, cap=0",
           .doc = "Scaled dot product attention of q, k and v, with an optional mask. 0: no window, no cap, the scale "
                  "1 / sqrt(size of a head).",
           .flags = MS_OP_RANDOM | MS_OP_LOW, .save_in = 15, .save_out = 3, .check = attention_check,
           .run = { [MS_CPU] = ms__cpu_attention }, .backward = attention_backward,
           .samples =
               "[2,3,5,4] [2,3,5,4] [2,3,5,4] i=0 f=0,0; [2,3,5,4] [2,3,5,4] [2,3,5,4] i=1 f=0,0; [5,4] [7,4] [7,4] "
               "i=0 f=0,0.7; [5,4] [3,4] [3,4] i=1 f=0,0; "
               "[2,5,4] [2,7,4] [2,7,4] [5,7]b i=0 f=0,0; [2,5,4] [2,7,4] [2,7,4] [2,5,7] i=0 f=0,0; [2,2,5,4] "
               "[2,2,7,4] [2,2,7,4] [2,1,1,7] i=0 f=0,0; "
               "[2,40,20] [2,40,20] [2,40,20] i=1 f=0.2,0; [0,5,4] [0,5,4] [0,5,4] i=1 f=0,0; [2,0,4] [2,0,4] [2,0,4] "
               "i=1 f=0,0; [1,70,16] [1,530,16] [1,530,16] i=0 f=0,0; "
               "[1,20,33] [1,20,33] [1,20,33] i=1 f=0,0; [1,4,3,4] [1,2,5,4] [1,2,5,4] i=1,2,2 f=0,0,1.5; "
               "[2,6,20,5] [2,2,70,5] [2,2,70,5] i=1,50,30 f=0.2,0,2");

MS_OPERATORS = { &op_attention, &op_attention_backward };
