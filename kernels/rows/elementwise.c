// SPDX-License-Identifier: MIT
// rows/elementwise.c -- rows of the elementwise operators: what they accept, what comes out, and their
// gradients. The formulas are in formulas/elementwise.h, the CPU loops in cpu/elementwise/elementwise.c.
#include "cpu/cpu.h"
#include "rows/ops.h"

// ---- checks -----------------------------------------------------------------------------------

static ms_status no_bool(const ms_call *c, const ms_tensor *t)
{
    return ms__call_fail(c, "a bool tensor has no arithmetic sign or order here: got %s; cast it first",
                         ms__tensor_text(t));
}

// Same dtype out; real, integer.
static ms_status check_number(ms_call *c)
{
    if (MS_UNLIKELY(c->in[0]->dtype == MS_BOOL)) return no_bool(c, c->in[0]);
    return ms__call_out_like(c, 0, c->in[0]);
}
static ms_status check_same(ms_call *c) { return ms__call_out_like(c, 0, c->in[0]); }
// Real out: integers become the default dtype.
static ms_status check_real(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    if (MS_LIKELY(ms__is_float(x->dtype))) return ms__call_out_like(c, 0, x);
    return ms__call_out(c, 0, ms__state.default_dtype, ms__device(x), x->ndim, x->shape);
}
static ms_status check_truth(ms_call *c)
{
    return ms__call_out(c, 0, MS_BOOL, ms__device(c->in[0]), c->in[0]->ndim, c->in[0]->shape);
}

static ms_status binary_out(ms_call *c, const ms_tensor *a, const ms_tensor *b, int dtype)
{
    if (MS_LIKELY(ms__same_shape(a, b))) return ms__call_out(c, 0, dtype, ms__device(a), a->ndim, a->shape);
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(ms__broadcast(c, a, b, &ndim, shape));
    return ms__call_out(c, 0, dtype, ms__device(a), ndim, shape);
}
// alpha of add and sub
static ms_status check_alpha(const ms_call *c, int dtype)
{
    if (c->n_f && !ms__is_float(dtype) && c->f[0] != (double)(int64_t)c->f[0])
        return ms__call_fail(c, "alpha %g is a fraction, but the result is %s", c->f[0], ms__dtype_name(dtype));
    return MS_OK;
}
static ms_status check_add(ms_call *c)
{
    int dtype = ms__result_dtype(c->in[0], c->in[1]);
    if (MS_UNLIKELY(c->n_f)) MS_TRY(check_alpha(c, dtype));
    return binary_out(c, c->in[0], c->in[1], dtype);
}
static ms_status check_sub(ms_call *c)
{
    if (MS_UNLIKELY(c->in[0]->dtype == MS_BOOL && c->in[1]->dtype == MS_BOOL)) return no_bool(c, c->in[0]);
    return check_add(c);
}
static ms_status check_binary(ms_call *c)
{
    return binary_out(c, c->in[0], c->in[1], ms__result_dtype(c->in[0], c->in[1]));
}
static ms_status check_div(ms_call *c)
{
    int dtype = ms__result_dtype(c->in[0], c->in[1]);
    if (!ms__is_float(dtype)) dtype = ms__state.default_dtype;
    return binary_out(c, c->in[0], c->in[1], dtype);
}
static ms_status check_compare(ms_call *c) { return binary_out(c, c->in[0], c->in[1], MS_BOOL); }
// in: g, a, b…: like g, all of one broadcast shape
static ms_status check_like_first(ms_call *c) { return ms__call_out_like(c, 0, c->in[0]); }

static ms_status not_once(const ms_call *c, const ms_tensor *t)
{
    return ms__call_fail(
        c,
        "%s is an expanded view: several of its elements are one place in memory; clone() it before writing in place",
        ms__tensor_text(t));
}
// Makes in[0] the output; b must broadcast to it, and a result of this dtype must be storable in it.
static ms_status in_place(ms_call *c, const ms_tensor *b, int dtype)
{
    const ms_tensor *a = c->in[0];
    for (int d = 0; d < a->ndim; d++)
        if (MS_UNLIKELY(a->stride[d] == 0 && a->shape[d] > 1)) return not_once(c, a);
    if (MS_UNLIKELY(dtype != a->dtype)) {
        int have = ms__is_float(a->dtype) ? 2
                   : a->dtype == MS_BOOL  ? 0
                                          : 1,
            want = ms__is_float(dtype) ? 2
                   : dtype == MS_BOOL  ? 0
                                       : 1;
        if (want > have)
            return ms__call_fail(c, "result type %s can't be cast to the %s tensor that is changed in place: %s",
                                 ms__dtype_name(dtype), ms__dtype_name(a->dtype), ms__tensor_text(a));
    }
    if (b && MS_UNLIKELY(!ms__same_shape(a, b))) {
        int64_t shape[MS_MAX_DIMS];
        int ndim;
        MS_TRY(ms__broadcast(c, a, b, &ndim, shape));
        if (ndim != a->ndim || memcmp(shape, a->shape, (size_t)ndim * 8) != 0)
            return ms__call_fail(c, "%s does not broadcast to %s, which is changed in place", ms__tensor_text(b),
                                 ms__tensor_text(a));
    }
    ms__call_inplace(c, 0, 0);
    return MS_OK;
}
static ms_status check_number_(ms_call *c)
{
    if (MS_UNLIKELY(c->in[0]->dtype == MS_BOOL)) return no_bool(c, c->in[0]);
    return in_place(c, NULL, c->in[0]->dtype);
}
static ms_status check_real_(ms_call *c)
{
    return in_place(c, NULL, ms__is_float(c->in[0]->dtype) ? c->in[0]->dtype : ms__state.default_dtype);
}
static ms_status check_add_(ms_call *c)
{
    int dtype = ms__result_dtype(c->in[0], c->in[1]);
    if (MS_UNLIKELY(c->n_f)) MS_TRY(check_alpha(c, dtype));
    return in_place(c, c->in[1], dtype);
}
static ms_status check_sub_(ms_call *c)
{
    if (MS_UNLIKELY(c->in[0]->dtype == MS_BOOL && c->in[1]->dtype == MS_BOOL)) return no_bool(c, c->in[0]);
    return check_add_(c);
}
static ms_status check_mul_(ms_call *c) { return in_place(c, c->in[1], ms__result_dtype(c->in[0], c->in[1])); }
static ms_status check_div_(ms_call *c)
{
    int dtype = ms__result_dtype(c->in[0], c->in[1]);
    return in_place(c, c->in[1], ms__is_float(dtype) ? dtype : ms__state.default_dtype);
}

static ms_status need_number(const ms_call *c) { return c->n_f < 1 ? ms__call_fail(c, "a number is missing") : MS_OK; }
// A number takes the tensor's dtype: whole with integers; bool counts as int64.
static ms_status scalar_dtype(const ms_call *c, int *dtype)
{
    MS_TRY(need_number(c));
    *dtype = c->in[0]->dtype;
    if (MS_LIKELY(ms__is_float(*dtype))) return MS_OK;
    double f = c->f[0];
    if (!(f >= -0x1p63 && f < 0x1p63) || f != (double)(int64_t)f)
        return ms__call_fail(c, "%g is not a whole number, but the tensor is %s; cast the tensor first", f,
                             ms__tensor_text(c->in[0]));
    if (*dtype == MS_BOOL) *dtype = MS_I64;
    if (!ms__holds(*dtype, f < 0 && *dtype == MS_U8 ? -f : f))  // a negative number with uint8 wraps, as in C
        return ms__call_fail(c, "%.17g is beyond what %s holds; cast the tensor first", f, ms__tensor_text(c->in[0]));
    return MS_OK;
}
static ms_status check_scalar(ms_call *c)
{
    int dtype;
    MS_TRY(scalar_dtype(c, &dtype));
    return ms__call_out(c, 0, dtype, ms__device(c->in[0]), c->in[0]->ndim, c->in[0]->shape);
}
static ms_status check_scalar_(ms_call *c)
{
    int dtype;
    MS_TRY(scalar_dtype(c, &dtype));
    return in_place(c, NULL, dtype);
}
static ms_status check_pow_scalar(ms_call *c)
{
    MS_TRY(need_number(c));
    if (!ms__is_float(c->in[0]->dtype) && c->f[0] < 0)
        return ms__call_fail(c, "an integer tensor to the negative power %g is no integer; cast %s first", c->f[0],
                             ms__tensor_text(c->in[0]));
    return check_scalar(c);
}
static ms_status check_pow_scalar_(ms_call *c)
{
    MS_TRY(need_number(c));
    if (!ms__is_float(c->in[0]->dtype) && c->f[0] < 0)
        return ms__call_fail(c, "an integer tensor to the negative power %g is no integer; cast %s first", c->f[0],
                             ms__tensor_text(c->in[0]));
    return check_scalar_(c);
}
static ms_status check_real_scalar(ms_call *c)
{
    MS_TRY(need_number(c));
    const ms_tensor *x = c->in[0];
    int dtype = ms__is_float(x->dtype) ? x->dtype : ms__state.default_dtype;
    return ms__call_out(c, 0, dtype, ms__device(x), x->ndim, x->shape);
}
static ms_status check_real_scalar_(ms_call *c)
{
    MS_TRY(need_number(c));
    return in_place(c, NULL, ms__is_float(c->in[0]->dtype) ? c->in[0]->dtype : ms__state.default_dtype);
}
static ms_status check_compare_scalar(ms_call *c)
{
    MS_TRY(need_number(c));
    return check_truth(c);
}
static ms_status clamp_bounds(const ms_call *c)
{
    if (c->n_f < 2) return ms__call_fail(c, "needs two bounds, got %d", c->n_f);
    if (c->in[0]->dtype == MS_BOOL) return no_bool(c, c->in[0]);
    if (ms__is_float(c->in[0]->dtype)) return MS_OK;
    for (int k = 0; k < 2; k++)
        if (__builtin_isfinite(c->f[k]) && c->f[k] != __builtin_floor(c->f[k]))
            return ms__call_fail(c, "bound %g is not a whole number, but the tensor is %s", c->f[k],
                                 ms__tensor_text(c->in[0]));
    return MS_OK;
}
static ms_status check_clamp(ms_call *c)
{
    MS_TRY(clamp_bounds(c));
    return ms__call_out_like(c, 0, c->in[0]);
}
static ms_status check_clamp_(ms_call *c)
{
    MS_TRY(clamp_bounds(c));
    return in_place(c, NULL, c->in[0]->dtype);
}

static ms_status check_equal(ms_call *c) { return ms__call_out(c, 0, MS_BOOL, ms__device(c->in[0]), 0, NULL); }
static ms_status check_allclose(ms_call *c)
{
    if (c->n_f < 2) return ms__call_fail(c, "rtol and atol are missing");
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(ms__broadcast(c, c->in[0], c->in[1], &ndim, shape));
    return check_equal(c);
}
static ms_status check_where(ms_call *c)
{
    const ms_tensor *m = c->in[0], *a = c->in[1], *b = c->in[2];
    if (m->dtype != MS_BOOL) return ms__call_fail(c, "the condition must be a bool tensor, got %s", ms__tensor_text(m));
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(ms__broadcast(c, a, b, &ndim, shape));
    ms_tensor both = { .ndim = (uint8_t)ndim };
    memcpy(both.shape, shape, sizeof shape);
    MS_TRY(ms__broadcast(c, m, &both, &ndim, shape));
    return ms__call_out(c, 0, ms__result_dtype(a, b), ms__device(a), ndim, shape);
}
static ms_status check_where_backward(ms_call *c) { return ms__call_out_like(c, 0, c->in[1]); }
static ms_status mask_of(const ms_call *c)
{
    MS_TRY(need_number(c));
    if (c->in[1]->dtype != MS_BOOL)
        return ms__call_fail(c, "the mask must be a bool tensor, got %s", ms__tensor_text(c->in[1]));
    if (!ms__is_float(c->in[0]->dtype) && c->f[0] != __builtin_floor(c->f[0]))
        return ms__call_fail(c, "%g is not a whole number, but the tensor is %s", c->f[0], ms__tensor_text(c->in[0]));
    if (!ms__holds(c->in[0]->dtype, c->f[0]))
        return ms__call_fail(c, "%.17g is beyond what %s holds", c->f[0], ms__tensor_text(c->in[0]));
    return MS_OK;
}
static ms_status check_masked_fill(ms_call *c)
{
    MS_TRY(mask_of(c));
    return binary_out(c, c->in[0], c->in[1], c->in[0]->dtype);
}
static ms_status check_masked_fill_(ms_call *c)
{
    MS_TRY(mask_of(c));
    return in_place(c, c->in[1], c->in[0]->dtype);
}

// ---- backwards --------------------------------------------------------------------------------

// gin[k] = *g, owned, brought to input k; st: of the call that made it.
static ms_status give(ms_backward_call *b, int k, ms_status st, ms_tensor **g)
{
    MS_TRY(st);
    return ms__grad_to(&b->gin[k], *g, &b->in_meta[k]);
}

static ms_status same_backward(ms_backward_call *b)
{
    if (b->need[0]) MS_TRY(ms__grad_to(&b->gin[0], ms__retain(b->gout[0]), &b->in_meta[0]));
    return MS_OK;
}
static ms_status neg_backward(ms_backward_call *b)
{
    ms_tensor *g;
    return give(b, 0, ms__op1(&g, &ms__op_neg, b->gout[0]), &g);
}
static ms_status add_backward(ms_backward_call *b)
{
    if (b->need[0]) MS_TRY(ms__grad_to(&b->gin[0], ms__retain(b->gout[0]), &b->in_meta[0]));
    if (b->need[1]) {
        double alpha = (b->n_f ? b->f[0] : 1) * (strncmp(b->op->name, "sub", 3) == 0 ? -1 : 1);
        ms_tensor *g = b->gout[0];
        if (alpha == 1) MS_TRY(ms__grad_to(&b->gin[1], ms__retain(g), &b->in_meta[1]));
        else {
            ms_tensor *sum, *scaled;  // sum first: there is less to scale
            MS_TRY(ms__sum_to(&sum, g, b->in_meta[1].ndim, b->in_meta[1].shape));
            ms_status st =
                alpha == -1 ? ms__op1(&scaled, &ms__op_neg, sum) : ms__op1f(&scaled, &ms__op_mul_scalar, sum, alpha);
            ms__release(sum);
            MS_TRY(give(b, 1, st, &scaled));
        }
    }
    return MS_OK;
}
static ms_status mul_backward(ms_backward_call *b)
{
    ms_tensor *g;
    if (b->need[0]) MS_TRY(give(b, 0, ms__op2(&g, &ms__op_mul, b->gout[0], b->in[1]), &g));
    if (b->need[1]) MS_TRY(give(b, 1, ms__op2(&g, &ms__op_mul, b->gout[0], b->in[0]), &g));
    return MS_OK;
}
#define INTERNAL(NAME, N, CHECK)                                                                          \
    static const ms_op NAME##_row = {                                                                     \
        .name = #NAME, .n_in_min = N, .n_in_max = N, .check = CHECK, .run = { [MS_CPU] = ms__cpu_##NAME } \
    };
// clang-format off
INTERNAL(abs_backward, 2, check_like_first)
INTERNAL(sqrt_backward, 2, check_like_first)
INTERNAL(rsqrt_backward, 2, check_like_first)
INTERNAL(sin_backward, 2, check_like_first)
INTERNAL(cos_backward, 2, check_like_first)
INTERNAL(silu_backward, 2, check_like_first)
INTERNAL(tanh_backward, 2, check_like_first)
INTERNAL(sigmoid_backward, 2, check_like_first)
INTERNAL(reciprocal_backward, 2, check_like_first)
INTERNAL(gelu_backward, 2, check_like_first)
INTERNAL(pow_scalar_backward, 2, check_like_first)
INTERNAL(rdiv_scalar_backward, 2, check_like_first)
INTERNAL(rpow_scalar_backward, 2, check_like_first)
INTERNAL(pow_base_backward, 3, check_like_first)
INTERNAL(pow_exponent_backward, 3, check_like_first)
INTERNAL(div_other_backward, 3, check_like_first)
INTERNAL(maximum_backward, 3, check_like_first)
INTERNAL(minimum_backward, 3, check_like_first)
INTERNAL(clamp_backward, 2, check_like_first)
INTERNAL(where_backward, 2, check_where_backward)
// clang-format on
const ms_op ms__op_relu_backward = { .name = "relu_backward",
                                     .n_in_min = 2,
                                     .n_in_max = 2,
                                     .check = check_like_first,
                                     .run = { [MS_CPU] = ms__cpu_relu_backward } };

static ms_status div_backward(ms_backward_call *b)
{
    ms_tensor *g;
    if (b->need[0]) MS_TRY(give(b, 0, ms__op2(&g, &ms__op_div, b->gout[0], b->in[1]), &g));
    if (b->need[1]) MS_TRY(give(b, 1, ms__op3(&g, &div_other_backward_row, b->gout[0], b->in[0], b->in[1]), &g));
    return MS_OK;
}
static ms_status pow_backward(ms_backward_call *b)
{
    ms_tensor *g;
    if (b->need[0]) MS_TRY(give(b, 0, ms__op3(&g, &pow_base_backward_row, b->gout[0], b->in[0], b->in[1]), &g));
    if (b->need[1]) MS_TRY(give(b, 1, ms__op3(&g, &pow_exponent_backward_row, b->gout[0], b->in[0], b->in[1]), &g));
    return MS_OK;
}
static ms_status order_backward(ms_backward_call *b, const ms_op *row)
{
    ms_tensor *g;
    for (int k = 0; k < 2; k++)
        if (b->need[k]) MS_TRY(give(b, k, ms__op3(&g, row, b->gout[0], b->in[k], b->in[1 - k]), &g));
    return MS_OK;
}
static ms_status maximum_backward(ms_backward_call *b) { return order_backward(b, &maximum_backward_row); }
static ms_status minimum_backward(ms_backward_call *b) { return order_backward(b, &minimum_backward_row); }

// One input, one kept tensor.
static ms_status kept_backward(ms_backward_call *b, const ms_op *row, ms_tensor *kept)
{
    ms_tensor *in[2] = { b->gout[0], kept };
    return ms__run_op(row, 2, in, b->n_i, b->i, b->n_f, b->f, 1, &b->gin[0]);
}
#define KEEPS_IN(NAME) \
    static ms_status NAME##_grad(ms_backward_call *b) { return kept_backward(b, &NAME##_backward_row, b->in[0]); }
#define KEEPS_OUT(NAME) \
    static ms_status NAME##_grad(ms_backward_call *b) { return kept_backward(b, &NAME##_backward_row, b->out[0]); }
// clang-format off
KEEPS_IN(abs)
KEEPS_IN(sin)
KEEPS_IN(cos)
KEEPS_IN(silu)
KEEPS_IN(gelu)
KEEPS_IN(clamp)
KEEPS_IN(pow_scalar)
KEEPS_IN(rdiv_scalar)
KEEPS_OUT(rpow_scalar)
KEEPS_OUT(sqrt)
KEEPS_OUT(rsqrt)
KEEPS_OUT(tanh)
KEEPS_OUT(sigmoid)
KEEPS_OUT(reciprocal)
// clang-format on
static ms_status relu_grad(ms_backward_call *b) { return kept_backward(b, &ms__op_relu_backward, b->out[0]); }
static ms_status exp_grad(ms_backward_call *b) { return ms__op2(&b->gin[0], &ms__op_mul, b->gout[0], b->out[0]); }
static ms_status log_grad(ms_backward_call *b) { return ms__op2(&b->gin[0], &ms__op_div, b->gout[0], b->in[0]); }
static ms_status zero_grad(ms_backward_call *b)
{
    return ms__zeros(&b->gin[0], b->in_meta[0].dtype, b->in_meta[0].device, b->in_meta[0].ndim, b->in_meta[0].shape);
}
static ms_status div_scalar_backward(ms_backward_call *b)
{
    return ms__op1f(&b->gin[0], &ms__op_div_scalar, b->gout[0], b->f[0]);
}
static ms_status mul_scalar_backward(ms_backward_call *b)
{
    return ms__op1f(&b->gin[0], &ms__op_mul_scalar, b->gout[0], b->f[0]);
}
static ms_status masked_fill_grad(ms_backward_call *b)
{
    ms_tensor *g;
    if (b->need[0])
        MS_TRY(give(b, 0,
                    ms__run_op(&ms__op_masked_fill, 2, (ms_tensor *[]) { b->gout[0], b->in[1] }, 0, NULL, 1,
                               (double[]) { 0 }, 1, &g),
                    &g));
    return MS_OK;
}
static ms_status where_grad(ms_backward_call *b)
{
    ms_tensor *g;
    for (int k = 1; k < 3; k++)
        if (b->need[k])
            MS_TRY(give(b, k,
                        ms__run_op(&where_backward_row, 2, (ms_tensor *[]) { b->in[0], b->gout[0] }, 1,
                                   (int64_t[]) { k - 1 }, 0, NULL, 1, &g),
                        &g));
    return MS_OK;
}

// ---- rows -------------------------------------------------------------------------------------

enum { A = 1, B = 2, C = 4, NONE = 0 };  // bits of save_in, save_out

#define ROW(NAME, N, CHECK, KERNEL, BACKWARD, IN, OUT, FLAGS, SAMPLES)    \
    const ms_op ms__op_##NAME = { .name = #NAME,                          \
                                  .n_in_min = N,                          \
                                  .n_in_max = N,                          \
                                  .flags = (FLAGS) | MS_OP_EACH,          \
                                  .save_in = IN,                          \
                                  .save_out = OUT,                        \
                                  .check = CHECK,                         \
                                  .run = { [MS_CPU] = ms__cpu_##KERNEL }, \
                                  .backward = BACKWARD,                   \
                                  .samples = SAMPLES };
#define D MS_OP_DIFFERENTIABLE
#define W (MS_OP_DIFFERENTIABLE | MS_OP_WIDE)
#define INPLACE (MS_OP_DIFFERENTIABLE | MS_OP_INPLACE)

#define ONE "[3,4];[2,3,5]"
#define TWO "[3,4] [3,4];[3,4] [4];[2,1,4] [3,1];[2,3] []"
//  name         inputs check         kernel       backward           saves       flags    samples
// clang-format off
ROW(neg,          1, check_number,    neg,         neg_backward,      NONE, NONE, D, ONE)
ROW(abs,          1, check_number,    abs,         abs_grad,          A,    NONE, D, ONE)
ROW(exp,          1, check_real,      exp,         exp_grad,          NONE, A,    W, ONE)
ROW(log,          1, check_real,      log,         log_grad,          A,    NONE, W, "[3,4]+")
ROW(sqrt,         1, check_real,      sqrt,        sqrt_grad,         NONE, A,    D, "[3,4]+")
ROW(rsqrt,        1, check_real,      rsqrt,       rsqrt_grad,        NONE, A,    W, "[3,4]+")
ROW(sin,          1, check_real,      sin,         sin_grad,          A,    NONE, D, ONE)
ROW(cos,          1, check_real,      cos,         cos_grad,          A,    NONE, D, ONE)
ROW(relu,         1, check_number,    relu,        relu_grad,         NONE, A,    D, ONE)
ROW(silu,         1, check_real,      silu,        silu_grad,         A,    NONE, D, ONE)
ROW(tanh,         1, check_real,      tanh,        tanh_grad,         NONE, A,    D, ONE)
ROW(sigmoid,      1, check_real,      sigmoid,     sigmoid_grad,      NONE, A,    D, ONE)
ROW(sign,         1, check_same,      sign,        zero_grad,         NONE, NONE, D, ONE)
ROW(reciprocal,   1, check_real,      reciprocal,  reciprocal_grad,   NONE, A,    W, "[3,4]+")
ROW(gelu,         1, check_real,      gelu,        gelu_grad,         A,    NONE, D, "[3,4];[3,4] i=1")
ROW(isfinite,     1, check_truth,     isfinite,    NULL,              NONE, NONE, 0, ONE)
ROW(isnan,        1, check_truth,     isnan,       NULL,              NONE, NONE, 0, ONE)
ROW(logical_not,  1, check_truth,     logical_not, NULL,              NONE, NONE, 0, "[3,4]b;[3,4]i2")

ROW(add,          2, check_add,       add,         add_backward,      NONE, NONE, D, TWO ";[3,4] [4] f=0.5")
ROW(sub,          2, check_sub,       sub,         add_backward,      NONE, NONE, D, TWO ";[3,4] [4] f=0.5")
ROW(mul,          2, check_binary,    mul,         mul_backward,      A|B,  NONE, D, TWO)
ROW(div,          2, check_div,       div,         div_backward,      A|B,  NONE, D, "[3,4] [3,4]+;[3,4] [4]+;[2,1,4] [3,1]+")
ROW(pow,          2, check_binary,    pow,         pow_backward,      A|B,  NONE, W, "[3,4]+ [3,4];[3,4]+ [4]")
ROW(maximum,      2, check_binary,    maximum,     maximum_backward,  A|B,  NONE, D, TWO)
ROW(minimum,      2, check_binary,    minimum,     minimum_backward,  A|B,  NONE, D, TWO)
ROW(add_,         2, check_add_,      add,         add_backward,      NONE, NONE, INPLACE, "[3,4] [3,4];[3,4] [4] f=0.5")
ROW(sub_,         2, check_sub_,      sub,         add_backward,      NONE, NONE, INPLACE, "[3,4] [3,4];[3,4] [4] f=0.5")
ROW(mul_,         2, check_mul_,      mul,         mul_backward,      A|B,  NONE, INPLACE, "[3,4] [3,4];[3,4] [4]")
ROW(div_,         2, check_div_,      div,         div_backward,      A|B,  NONE, INPLACE, "[3,4] [3,4]+;[3,4] [4]+")

ROW(add_scalar,   1, check_scalar,    add_scalar,  same_backward,         NONE, NONE, D, "[3,4] f=1.5")
ROW(mul_scalar,   1, check_scalar,    mul_scalar,  mul_scalar_backward,   NONE, NONE, D, "[3,4] f=-1.5")
ROW(rsub_scalar,  1, check_scalar,    rsub_scalar, neg_backward,          NONE, NONE, D, "[3,4] f=1.5")
ROW(div_scalar,   1, check_real_scalar,  div_scalar,  div_scalar_backward, NONE, NONE, D, "[3,4] f=1.5")
ROW(rdiv_scalar,  1, check_real_scalar,  rdiv_scalar, rdiv_scalar_grad,    A,    NONE, W, "[3,4]+ f=1.5")
ROW(pow_scalar,   1, check_pow_scalar,   pow_scalar,  pow_scalar_grad,     A,    NONE, W, "[3,4]+ f=1.5;[3,4] f=2;[3,4] f=3;[3,4]+ f=0.5;[3,4]+ f=-1;[3,4]+ f=-0.5;[3,4] f=0;[3,4] f=1")
ROW(rpow_scalar,  1, check_scalar,       rpow_scalar, rpow_scalar_grad,    NONE, A,    W, "[3,4] f=1.5")
ROW(add_scalar_,  1, check_scalar_,      add_scalar,  same_backward,       NONE, NONE, INPLACE, "[3,4] f=1.5")
ROW(mul_scalar_,  1, check_scalar_,      mul_scalar,  mul_scalar_backward, NONE, NONE, INPLACE, "[3,4] f=-1.5")
ROW(div_scalar_,  1, check_real_scalar_, div_scalar,  div_scalar_backward, NONE, NONE, INPLACE, "[3,4] f=1.5")
ROW(pow_scalar_,  1, check_pow_scalar_,  pow_scalar,  pow_scalar_grad,     A,    NONE, INPLACE, "[3,4] f=2")
// clang-format on
// Backward needs their results alone: the input's memory is all they take.
// clang-format off
ROW(relu_,        1, check_number_,      relu,        relu_grad,           NONE, A,    INPLACE, ONE)
ROW(tanh_,        1, check_real_,        tanh,        tanh_grad,           NONE, A,    INPLACE, ONE)
ROW(sigmoid_,     1, check_real_,        sigmoid,     sigmoid_grad,        NONE, A,    INPLACE, ONE)
// clang-format on

#define COMPARE(NAME)                                                            \
    ROW(NAME, 2, check_compare, NAME, NULL, NONE, NONE, 0, TWO ";[3,4]i3 [4]i3") \
    ROW(NAME##_scalar, 1, check_compare_scalar, NAME##_scalar, NULL, NONE, NONE, 0, "[3,4] f=0.25;[3,4]i4 f=1")
// clang-format off
COMPARE(eq)
COMPARE(ne)
COMPARE(lt)
COMPARE(le)
COMPARE(gt)
COMPARE(ge)
ROW(logical_and,  2, check_compare,   logical_and, NULL,              NONE, NONE, 0, "[3,4]b [4]b;[3,4] [3,4]i2")
ROW(logical_or,   2, check_compare,   logical_or,  NULL,              NONE, NONE, 0, "[3,4]b [4]b;[3,4] [3,4]i2")
// clang-format on

// One bool for all elements: other shapes are unequal.
// clang-format off
ROW(equal,        2, check_equal,     equal,       NULL,              NONE, NONE, 0, "[3,4] [3,4]")
ROW(allclose,     2, check_allclose,  allclose,    NULL,              NONE, NONE, 0, "[3,4] [3,4] f=1e-5,1e-8")
ROW(where,        3, check_where,     where,       where_grad,        A,    NONE, D, "[3,4]b [3,4] [3,4];[4]b [3,1] [];[2,3,4]b [4] [3,1]")
ROW(masked_fill,  2, check_masked_fill,  masked_fill, masked_fill_grad, B,  NONE, D, "[3,4] [3,4]b f=-2;[3,4] [4]b f=0")
ROW(masked_fill_, 2, check_masked_fill_, masked_fill, masked_fill_grad, B,  NONE, INPLACE, "[3,4] [4]b f=0.5")
ROW(clamp,        1, check_clamp,     clamp,       clamp_grad,        A,    NONE, D, "[3,4] f=-0.5,0.7;[3,4] f=0,inf")
ROW(clamp_,       1, check_clamp_,    clamp,       clamp_grad,        A,    NONE, INPLACE, "[3,4] f=-0.5,0.7")
// clang-format on

const ms_op *const ms__ops_elementwise[] = {
    &ms__op_neg,         &ms__op_abs,          &ms__op_exp,         &ms__op_log,         &ms__op_sqrt,
    &ms__op_rsqrt,       &ms__op_sin,          &ms__op_cos,         &ms__op_relu,        &ms__op_silu,
    &ms__op_tanh,        &ms__op_sigmoid,      &ms__op_sign,        &ms__op_reciprocal,  &ms__op_gelu,
    &ms__op_isfinite,    &ms__op_isnan,        &ms__op_logical_not, &ms__op_add,         &ms__op_sub,
    &ms__op_mul,         &ms__op_div,          &ms__op_pow,         &ms__op_maximum,     &ms__op_minimum,
    &ms__op_add_,        &ms__op_sub_,         &ms__op_mul_,        &ms__op_div_,        &ms__op_add_scalar,
    &ms__op_mul_scalar,  &ms__op_rsub_scalar,  &ms__op_div_scalar,  &ms__op_rdiv_scalar, &ms__op_pow_scalar,
    &ms__op_rpow_scalar, &ms__op_add_scalar_,  &ms__op_mul_scalar_, &ms__op_div_scalar_, &ms__op_pow_scalar_,
    &ms__op_relu_,       &ms__op_tanh_,        &ms__op_sigmoid_,    &ms__op_eq,          &ms__op_ne,
    &ms__op_lt,          &ms__op_le,           &ms__op_gt,          &ms__op_ge,          &ms__op_eq_scalar,
    &ms__op_ne_scalar,   &ms__op_lt_scalar,    &ms__op_le_scalar,   &ms__op_gt_scalar,   &ms__op_ge_scalar,
    &ms__op_logical_and, &ms__op_logical_or,   &ms__op_equal,       &ms__op_allclose,    &ms__op_where,
    &ms__op_masked_fill, &ms__op_masked_fill_, &ms__op_clamp,       &ms__op_clamp_,      NULL
};
