// SPDX-License-Identifier: MIT
// rows/order.c -- operators that depend on the order of elements, or on which of them are not 0: sort, topk,
// searchsorted, nonzero; and the scans along a dimension (formulas/scan.h): cumprod, cummax, cummin, logcumsumexp
// (cumsum is one of the reductions). For sort and topk NaN is larger than every number, and equal elements keep their
// order; searchsorted places NaN behind all boundaries.
#include "cpu/cpu.h"
#include "rows/grad.h"

// Allocates values and positions, of x's shape but n elements in dimension d.
static ms_status pair_out(ms_call *c, int d, int64_t n)
{
    const ms_tensor *x = c->in[0];
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    if (x->ndim) shape[d] = n;
    MS_TRY(ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim, shape));
    return ms__call_out(c, 1, MS_I64, ms__device(x), x->ndim, shape);
}
static ms_status check_sort(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    MS_TRY(ms__call_last_dim(c, &d));
    return pair_out(c, d, x->ndim ? x->shape[d] : 1);
}
static ms_status check_topk(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    int64_t n = x->ndim ? x->shape[d] : 1;
    if (x->ndim == 0 && c->i[1] != 1)
        return ms__call_fail(c, "k is %lld, expected 1 for %s", (long long)c->i[1], ms__tensor_text(x));
    if (c->i[1] < 0 || c->i[1] > n)
        return ms__call_fail(c, "k is %lld, expected 0 to %lld, the size of dimension %d of %s", (long long)c->i[1],
                             (long long)n, d + 1, ms__tensor_text(x));
    return pair_out(c, d, c->i[1]);
}

// The gradient of a value goes to the position from which it came.
static ms_status order_grad(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    if (!b->gout[0]) return MS_OK;
    if (m->ndim == 0) {
        b->gin[0] = ms__retain(b->gout[0]);
        return MS_OK;
    }
    ms_tensor *zeros;
    MS_TRY(ms__zeros_of(&zeros, m));
    ms_status st =
        ms__run_op(ms__op_by_name("scatter_"),
                   &(ms_op_args) { 3, (ms_tensor *[]) { zeros, b->out[1], b->gout[0] }, .n_i = 1, .i = b->i }, 1,
                   b->gin);
    ms__release(zeros);
    return st;
}

// Inputs: boundaries, sorted along the last dimension; numbers. Integers: whether to take the last place among equal
// boundaries; whether the result is int32.
static ms_status check_searchsorted(ms_call *c)
{
    const ms_tensor *sorted = c->in[0], *x = c->in[1];
    if (sorted->dtype != x->dtype)
        return ms__call_fail(c, "boundaries and numbers must have the same dtype, got %s and %s",
                             ms__tensor_text(sorted), ms__tensor_text(x));
    bool fits = sorted->ndim == 1 || (sorted->ndim == x->ndim && sorted->ndim > 0);
    for (int d = 0; fits && sorted->ndim > 1 && d < x->ndim - 1; d++) fits = sorted->shape[d] == x->shape[d];
    if (!fits)
        return ms__call_fail(c,
                             "boundaries must have 1 dimension, or the numbers' shape except for the last dimension; "
                             "boundaries %s, numbers %s",
                             ms__tensor_text(sorted), ms__tensor_text(x));
    return ms__call_out(c, 0, c->n_i > 1 && c->i[1] ? MS_I32 : MS_I64, ms__device(x), x->ndim, x->shape);
}

// Integer: n. The result has the positions, counted in row-major order, of the first n elements that are not 0, and -1
// where there are fewer.
static ms_status check_nonzero(ms_call *c)
{
    if (c->i[0] < 0) return ms__call_fail(c, "the number of positions is negative, %lld", (long long)c->i[0]);
    return ms__call_out(c, 0, MS_I64, ms__device(c->in[0]), 1, c->i);
}

static const ms_op sort_row =
    MS_ROW("sort", 1, 1, .takes = "dim=-1, descending?",
           .doc = "The elements in order along a dimension, and their positions before.", .flags = MS_OP_DIFFERENTIABLE,
           .save_out = 2, .check = check_sort, .run = { [MS_CPU] = ms__cpu_sort }, .backward = order_grad,
           .samples = "[3,4] i=0;[2,3,4] i=-1,1;[2,3,4] i=1;[64] i=0,1;[]+ i=0;[5]i9 i=0;[4]b i=0,1");
static const ms_op topk_row =
    MS_ROW("topk", 1, 1, .takes = "dim, k, largest=1",
           .doc = "The k largest or smallest elements along a dimension, in order, and their positions.",
           .flags = MS_OP_DIFFERENTIABLE, .save_out = 2, .check = check_topk, .run = { [MS_CPU] = ms__cpu_topk },
           .backward = order_grad,
           .samples = "[3,4] i=0,2;[2,3,4] i=-1,1,0;[2,3,4] i=1,3,1;[64] i=0,5;[5]i9 i=0,2,1;[5,3] i=1,0");
static const ms_op searchsorted_row =
    MS_ROW("searchsorted", 2, 2, .takes = "right?, int32?",
           .doc = "The place of each element of u among the sorted boundaries t; right: behind equal boundaries.",
           .check = check_searchsorted, .run = { [MS_CPU] = ms__cpu_searchsorted },
           .samples = "[5] [3,4];[2,6] [2,3] i=1;[5]i9 [4]i9 i=0,1;[3] [] i=1;[0] [2]");
static const ms_op nonzero_row =
    MS_ROW("nonzero", 1, 1, .takes = "count",
           .doc =
               "The positions in row-major order of the first count elements that are not 0; -1 where there are fewer.",
           .check = check_nonzero, .run = { [MS_CPU] = ms__cpu_nonzero },
           .samples = "[3,4]b i=5;[2,3]i3 i=6;[5] i=5;[4]b i=0");

// ---- scans ----

static ms_status check_dim(ms_call *c)
{
    int d;
    return ms__call_last_dim(c, &d);
}
static ms_status check_cumprod(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    MS_TRY(check_dim(c));
    return ms__call_out(c, 0, ms__is_float(x->dtype) ? x->dtype : MS_I64, ms__device(x), x->ndim, x->shape);
}
static ms_status check_cummax(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    MS_TRY(check_dim(c));
    MS_TRY(ms__call_out_like(c, 0, x));
    return ms__call_out(c, 1, MS_I64, ms__device(x), x->ndim, x->shape);
}
static ms_status check_logcumsumexp(ms_call *c)
{
    MS_TRY(check_dim(c));
    if (!ms__is_float(c->in[0]->dtype))
        return ms__call_fail(c, "needs a floating-point dtype, got %s; cast it first", ms__tensor_text(c->in[0]));
    return ms__call_out_like(c, 0, c->in[0]);
}

static ms_status check_order_like_second(ms_call *c) { return ms__call_out_like(c, 0, c->in[1]); }
static const ms_op cumprod_backward_row =
    MS_ROW("cumprod_backward", 3, 3, .check = check_order_like_second, .run = { [MS_CPU] = ms__cpu_cumprod_backward });
static const ms_op logcumsumexp_backward_row = MS_ROW("logcumsumexp_backward", 3, 3, .check = check_order_like_second,
                                                      .run = { [MS_CPU] = ms__cpu_logcumsumexp_backward });

static ms_status by(ms_backward_call *b, const ms_op *row)
{
    return ms__run_op(row,
                      &(ms_op_args) { 3, (ms_tensor *[]) { b->gout[0], b->in[0], b->out[0] }, .n_i = 1, .i = b->i }, 1,
                      b->gin);
}
static ms_status cumprod_grad(ms_backward_call *b) { return by(b, &cumprod_backward_row); }
static ms_status logcumsumexp_grad(ms_backward_call *b) { return by(b, &logcumsumexp_backward_row); }

// The gradient of each result is added to that of the element from which the result came.
static ms_status running_extreme_grad(ms_backward_call *b)
{
    if (!b->gout[0]) return MS_OK;
    ms_tensor *zeros;
    MS_TRY(ms__zeros_of(&zeros, &b->in_meta[0]));
    ms_status st =
        ms__run_op(ms__op_by_name("scatter_add_"),
                   &(ms_op_args) { 3, (ms_tensor *[]) { zeros, b->out[1], b->gout[0] }, .n_i = 1, .i = b->i }, 1,
                   b->gin);
    ms__release(zeros);
    return st;
}

#define SAMPLES "[3,4] i=0;[2,3,4] i=-1;[2,3,4] i=1;[40] i=0;[]+ i=0"
#define ROW(NAME, CHECK, BACKWARD, IN, OUT, FLAGS, TAKES, SAMPLES, DOC)                                           \
    static const ms_op NAME##_row = MS_ROW(#NAME, 1, 1, .flags = MS_OP_DIFFERENTIABLE | FLAGS, .save_in = IN,     \
                                           .save_out = OUT, .check = CHECK, .run = { [MS_CPU] = ms__cpu_##NAME }, \
                                           .backward = BACKWARD, .takes = TAKES, .samples = SAMPLES, .doc = DOC);
// clang-format off
ROW(cumprod, check_cumprod, cumprod_grad, 1, 1, MS_OP_WIDE | MS_OP_METHOD, "dim=-1", "[3,4] i=0;[2,3,4]a i=-1;[2,3,4] i=1;[]+ i=0;[4]i5 i=0", "Running products along a dimension; int64 for integers and bools.")
ROW(cummax,       check_cummax,       running_extreme_grad,      0, 2, 0,          "dim=-1", SAMPLES ";[6]i9 i=0", "The largest element so far along a dimension, and its position.")
ROW(cummin,       check_cummax,       running_extreme_grad,      0, 2, 0,          "dim=-1", SAMPLES ";[6]i9 i=0", "The smallest element so far along a dimension, and its position.")
ROW(logcumsumexp, check_logcumsumexp, logcumsumexp_grad, 1, 1, MS_OP_WIDE | MS_OP_METHOD, "dim=-1", SAMPLES, "`log(cumsum(exp(t)))` along a dimension, computed without overflow.")
// clang-format on

MS_OPERATORS = { &sort_row,    &topk_row,   &searchsorted_row, &nonzero_row,
                 &cumprod_row, &cummax_row, &cummin_row,       &logcumsumexp_row };
