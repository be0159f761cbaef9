// SPDX-License-Identifier: MIT
// rows/int8.c -- int8_linear: x W^T + b, where W is int8 and each of its rows has a factor, its scale. Sums are
// float32, or float64 for x in float64.
//
// Sizes: x [..., in], W [out, in], b [out], scale [out]. W and scale get no gradient. Inputs are in linear's order, so
// that linear's code computes the products (rows/linear_body.h); the scale is the last one of both operators.
#include "cpu/elementwise/loops.h"
#include "cpu/product/product.h"
#include "rows/grad.h"
#include "rows/product.h"

enum { X, W, BIAS, SCALE };

static ms_status int8_linear_check(ms_call *c)
{
    const ms_tensor *x = c->in[X], *w = c->in[W], *bias = c->in[BIAS], *scale = c->in[SCALE];
    int64_t shape[MS_MAX_DIMS];
    if (c->n_in <= SCALE || !scale) return ms__call_fail(c, "argument %d, the scale, is missing", SCALE + 1);
    if (!ms__is_float(x->dtype))
        return ms__call_fail(c, "the input must be floating point, got %s", ms__tensor_text(x));
    if (w->dtype != MS_I8 || w->ndim != 2)
        return ms__call_fail(c, "the weight must be int8 [out, in], got %s", ms__tensor_text(w));
    if (x->ndim < 1 || x->shape[x->ndim - 1] != w->shape[1])
        return ms__call_fail(c, "the input's last dimension must be the weight's %lld column%s: input %s, weight %s",
                             (long long)w->shape[1], w->shape[1] == 1 ? "" : "s", ms__shape_text(x->ndim, x->shape),
                             ms__shape_text(2, w->shape));
    if (!ms__is_float(scale->dtype) || scale->ndim != 1 || scale->shape[0] != w->shape[0])
        return ms__call_fail(c,
                             "the scale must be floating point [%lld], one number for each row of the weight, got %s",
                             (long long)w->shape[0], ms__tensor_text(scale));
    if (scale->requires_grad && ms__state.grad_mode)
        return ms__call_fail(c, "the scale requires a gradient, but gets none; detach() it");
    if (bias && (bias->dtype != x->dtype || bias->ndim != 1 || bias->shape[0] != w->shape[0]))
        return ms__call_fail(c, "the bias must be %s [%lld], as the input, got %s", ms__dtype_name(x->dtype),
                             (long long)w->shape[0], ms__tensor_text(bias));
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = w->shape[0];
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim, shape);
}

// Computes p by a copy of W [n, k], which is contiguous, in float64.
static ms_status multiply_f64(ms_gemm *p, int64_t n, int64_t k, const double *scale)
{
    ms_block *copy;
    MS_TRY(ms__alloc_scratch(&copy, (size_t)(n * k) * sizeof(double), p->what));
    double *to = copy->data;
    ms__load(MS_C_F64, MS_I8, n * k, to, p->b, 1);
    for (int64_t j = 0; j < n; j++)
        for (int64_t q = 0; q < k; q++) to[j * k + q] *= scale[j];
    p->b = to;
    ms_status st = ms__gemm(p);
    ms__free(copy);
    return st;
}

// Computes the product p of a call c of int8_linear, or of its backward, whose last integer is a mask.
static ms_status multiply_by_int8(const ms_call *c, ms_gemm *p)
{
    bool backward = c->n_i > 0, wide = p->dtype == MS_F64;
    ms_tensor *w = NULL, *scale = c->in[SCALE];
    int64_t n = c->in[backward ? 2 : W]->shape[0], k = c->in[backward ? 2 : W]->shape[1];
    ms_block *numbers = NULL;
    ms_status st = ms__contiguous(&w, c->in[backward ? 2 : W]);
    if (st == MS_OK) st = ms__alloc_scratch(&numbers, (size_t)n * (wide ? 8 : 4), p->what);
    if (st == MS_OK) {
        int64_t step = scale->stride[0] * ms__dtype_size(scale->dtype);
        ms__load(wide ? MS_C_F64 : MS_C_F32, scale->dtype, n, numbers->data, ms__data(scale), step);
        p->b = ms__data(w);
        p->b_rs = backward ? k : 1;
        p->b_cs = backward ? 1 : k;
        p->scale = wide ? NULL : numbers->data;
        p->scales_rows = backward;
        st = wide ? multiply_f64(p, n, k, numbers->data) : ms__gemm(p);
        ms__free(numbers);
    }
    ms__release(w);
    return st;
}

#define PRODUCT ms_gemm
#define PRODUCT_OF ms__gemm_of
#define MULTIPLY(y, p) multiply_by_int8(c, p)
#define MULTIPLY_AND_ADD_ROWS(y, p, out, summed) multiply_by_int8(c, p)  // W gets no gradient
#define ADD_ROWS ms__sum_rows
#define ACCUMULATE(p, on) ((void)0)
#include "rows/linear_body.h"

// Inputs: the gradient, none, W, the scale. Integer: mask. Outputs: those of dx and db that the mask selects.
static ms_status int8_linear_backward_check(ms_call *c)
{
    const ms_tensor *g = c->in[0], *w = c->in[2];
    int64_t mask = c->i[c->n_i - 1], shape[MS_MAX_DIMS];
    int k = 0;
    memcpy(shape, g->shape, sizeof shape);
    shape[g->ndim - 1] = w->shape[1];
    if (mask >> X & 1) MS_TRY(ms__call_out(c, k++, g->dtype, ms__device(g), g->ndim, shape));
    if (mask >> BIAS & 1) MS_TRY(ms__call_out(c, k++, g->dtype, ms__device(g), 1, w->shape));
    return MS_OK;
}
static const ms_op op_int8_linear_backward = MS_ROW("int8_linear_backward", 1, 4, .check = int8_linear_backward_check,
                                                    .run = { [MS_CPU] = run_linear_backward });

static ms_status int8_linear_backward(ms_backward_call *b)
{
    ms_tensor *in[] = { b->gout[0], NULL, b->in[W], b->in[SCALE] };
    return ms__grad_op(b, &op_int8_linear_backward, 4, in, false);
}

static const ms_op op_int8_linear =
    MS_ROW("int8_linear", 2, 4, .takes = "weight, bias?, scale |",
           .doc = "x w^T + b, with w stored as int8 and a scale for each of its rows.", .flags = MS_OP_LOW,
           .save_in = 1 << W | 1 << SCALE, .check = int8_linear_check, .run = { [MS_CPU] = run_linear },
           .backward = int8_linear_backward,
           .samples = "[3,4] [5,4]q [5] [5]c; [2,3,4] [5,4]q - [5]c; [4] [2,4]q [2] [2]c; [20,19] [33,19]q [33] [33]c; "
                      "[1,7] [3,7]q - [3]c; [0,4] [5,4]q [5] [5]c; [3,0] [2,0]q [2] [2]c; [70,33] [65,33]q [65] [65]c");

MS_OPERATORS = { &op_int8_linear, &op_int8_linear_backward };
