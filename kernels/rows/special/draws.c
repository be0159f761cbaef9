// SPDX-License-Identifier: MIT
// rows/special/draws.c -- random numbers whose parameter is a tensor: gamma numbers with rate 1, or their logarithms,
// and Poisson's, float64. Input: the parameters, repeated for the leading dimensions of the result. c->i: the
// position of the result's first element in a larger tensor, whether logarithms are wanted, and the sizes of the
// leading dimensions. Each call uses one offset of the generator.
#include "cpu/special/special.h"
#include "rows/grad.h"

static ms_status check_draw(ms_call *c)
{
    const ms_tensor *a = c->in[0];
    if (c->i[0] < 0)
        return ms__call_fail(c, "the position of the first element must be 0 or more, got %lld", (long long)c->i[0]);
    if (a->dtype != MS_F32 && a->dtype != MS_F64)
        return ms__call_fail(c, "the parameter is %s, expected float32 or float64", ms__tensor_text(a));
    int64_t shape[MS_MAX_DIMS];
    int more = c->n_i - 2;
    if (more + a->ndim > MS_MAX_DIMS)
        return ms__call_fail(c, "the result has %d dimensions, expected at most %d", more + a->ndim, MS_MAX_DIMS);
    for (int d = 0; d < more; d++) {
        shape[d] = c->i[2 + d];
        if (shape[d] < 0) return ms__call_fail(c, "a size is %lld, expected 0 or more", (long long)shape[d]);
    }
    for (int d = 0; d < a->ndim; d++) shape[more + d] = a->shape[d];
    MS_TRY(ms__call_out(c, 0, MS_F64, ms__device(a), more + a->ndim, shape));
    ms__rng_next(&c->saved_rng[0], &c->saved_rng[1]);
    return MS_OK;
}

// Inputs: the gradient of the draws, the concentrations, and the draws.
static ms_status check_draw_gradient(ms_call *c) { return ms__call_out_like(c, 0, c->in[2]); }
static const ms_op gamma_draw_backward_row = MS_ROW("gamma_draw_backward", 3, 3, .check = check_draw_gradient,
                                                    .run = { [MS_CPU] = ms__cpu_gamma_draw_backward });
static ms_status gamma_grad(ms_backward_call *b)
{
    ms_tensor *in[] = { b->gout[0], b->in[0], b->out[0] }, *grad;
    if (!b->gout[0]) return MS_OK;
    MS_TRY(ms__run_op(&gamma_draw_backward_row, &(ms_op_args) { 3, in, .n_i = b->n_i, .i = b->i }, 1, &grad));
    return ms__grad_to(&b->gin[0], grad, &b->in_meta[0]);
}

static const ms_op gamma_draw_row = MS_ROW(
    "gamma_draw", 1, 1, .takes = "place, logarithm, size...",
    .doc =
        "Numbers of gamma distributions, or their logarithms; size...: of new leading dimensions; place: as for rand_.",
    .flags = MS_OP_RANDOM | MS_OP_DIFFERENTIABLE, .save_in = 1, .save_out = 1, .check = check_draw,
    .run = { [MS_CPU] = ms__cpu_gamma_draw }, .backward = gamma_grad,
    .samples = "[3,4]+ i=0,0; [5]+ i=7,1; [4]+ i=0,0,3; []+ i=0,1,2,3");
static const ms_op poisson_draw_row =
    MS_ROW("poisson_draw", 1, 1, .takes = "place, logarithm, size...",
           .doc = "Numbers of Poisson distributions; size...: of new leading dimensions; place: as for rand_.",
           .flags = MS_OP_RANDOM, .check = check_draw, .run = { [MS_CPU] = ms__cpu_poisson_draw },
           .backward = ms__zero_gradient, .samples = "[3,4]+ i=0,0; [5]+ i=7,0; [4]+ i=0,0,3; []+ i=0,0,2,3");

MS_OPERATORS = { &gamma_draw_row, &gamma_draw_backward_row, &poisson_draw_row };
