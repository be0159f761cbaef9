// SPDX-License-Identifier: MIT
// rows/elementwise.c -- the elementwise operators listed in elementwise.def: their checks, and the gradients
// that are not a single formula.
#include "cpu/cpu.h"
#include "rows/grad.h"

// ---- checks -----------------------------------------------------------------------------------

static ms_status no_bool(const ms_call *c, const ms_tensor *t)
{
    return ms__call_fail(c, "bool tensors are not supported, got %s; cast it first", ms__tensor_text(t));
}

// The output has the input's dtype: floating-point or integer, not bool.
static ms_status check_number(ms_call *c)
{
    if (MS_UNLIKELY(c->in[0]->dtype == MS_BOOL)) return no_bool(c, c->in[0]);
    return ms__call_out_like(c, 0, c->in[0]);
}
static ms_status check_same(ms_call *c) { return ms__call_out_like(c, 0, c->in[0]); }
// The output is floating-point: integer and bool inputs give the default dtype.
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
// Checks alpha, the factor of add and sub.
static ms_status check_alpha(const ms_call *c, int dtype)
{
    if (c->n_f && !ms__is_float(dtype) && c->f[0] != (double)(int64_t)c->f[0])
        return ms__call_fail(c, "alpha is %.15g, expected a whole number from -2^63 to below 2^63, as the result is %s",
                             c->f[0], ms__dtype_name(dtype));
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
// fmod, remainder and floor_divide: the output has the dtype to which both inputs promote, which must not be bool.
static ms_status check_modulo(ms_call *c)
{
    int dtype = ms__result_dtype(c->in[0], c->in[1]);
    if (dtype == MS_BOOL) return no_bool(c, c->in[0]);
    return binary_out(c, c->in[0], c->in[1], dtype);
}
static ms_status check_whole(const ms_call *c, const ms_tensor *t)
{
    if (!ms__is_float(t->dtype)) return MS_OK;
    return ms__call_fail(c, "integer or bool tensors are expected, got %s; cast it first", ms__tensor_text(t));
}
static ms_status check_bits(ms_call *c)
{
    for (int k = 0; k < 2; k++) MS_TRY(check_whole(c, c->in[k]));
    return check_binary(c);
}
// Sets the number that tells the kernel whether the tensor is bool.
static ms_status check_bits_of_one(ms_call *c)
{
    MS_TRY(check_whole(c, c->in[0]));
    c->f[0] = c->in[0]->dtype == MS_BOOL;
    c->n_f = 1;
    return ms__call_out_like(c, 0, c->in[0]);
}
static ms_status check_compare(ms_call *c) { return binary_out(c, c->in[0], c->in[1], MS_BOOL); }
// For operators that compute gradients: the output has the shape and dtype of g, which is the first or the second
// input.
static ms_status check_like_first(ms_call *c) { return ms__call_out_like(c, 0, c->in[0]); }
static ms_status check_like_second(ms_call *c) { return ms__call_out_like(c, 0, c->in[1]); }

// PyTorch's category of a dtype: 0 bool, 1 integer, 2 floating-point.
static int category(int dtype) { return ms__is_float(dtype) ? 2 : dtype == MS_BOOL ? 0 : 1; }
// Makes in[0] the output of an in-place call. b must broadcast to in[0], and the category of `dtype`, the result's,
// must not be above that of in[0].
static ms_status check_in_place(ms_call *c, const ms_tensor *b, int dtype)
{
    const ms_tensor *a = c->in[0];
    MS_TRY(ms__check_writable(c));
    if (MS_UNLIKELY(dtype != a->dtype && category(dtype) > category(a->dtype)))
        return ms__call_fail(c, "result type %s can't be cast to the %s tensor that is changed in place: %s",
                             ms__dtype_name(dtype), ms__dtype_name(a->dtype), ms__tensor_text(a));
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
    return check_in_place(c, NULL, c->in[0]->dtype);
}
static ms_status check_real_(ms_call *c)
{
    return check_in_place(c, NULL, ms__is_float(c->in[0]->dtype) ? c->in[0]->dtype : ms__state.default_dtype);
}
static ms_status check_add_(ms_call *c)
{
    int dtype = ms__result_dtype(c->in[0], c->in[1]);
    if (MS_UNLIKELY(c->n_f)) MS_TRY(check_alpha(c, dtype));
    return check_in_place(c, c->in[1], dtype);
}
static ms_status check_sub_(ms_call *c)
{
    if (MS_UNLIKELY(c->in[0]->dtype == MS_BOOL && c->in[1]->dtype == MS_BOOL)) return no_bool(c, c->in[0]);
    return check_add_(c);
}
static ms_status check_mul_(ms_call *c) { return check_in_place(c, c->in[1], ms__result_dtype(c->in[0], c->in[1])); }
static ms_status check_div_(ms_call *c)
{
    int dtype = ms__result_dtype(c->in[0], c->in[1]);
    return check_in_place(c, c->in[1], ms__is_float(dtype) ? dtype : ms__state.default_dtype);
}

// Checks that the tensor's dtype can hold the number: for an integer tensor it must be whole and in range. *dtype: that
// of the result, which is the tensor's, or int64 for a bool tensor.
static ms_status scalar_dtype(const ms_call *c, int *dtype)
{
    *dtype = c->in[0]->dtype;
    if (MS_LIKELY(ms__is_float(*dtype))) return MS_OK;
    double f = c->f[0];
    if (!(f >= -0x1p63 && f < 0x1p63) || f != (double)(int64_t)f)
        return ms__call_fail(c,
                             __builtin_isfinite(f) && f == __builtin_floor(f)
                                 ? "%g is out of range for %s; cast the tensor first"
                                 : "%.15g is not a whole number, but the tensor is %s; cast the tensor first",
                             f, ms__tensor_text(c->in[0]));
    if (*dtype == MS_BOOL) *dtype = MS_I64;
    if (!ms__holds(*dtype, f < 0 && *dtype == MS_U8 ? -f : f))  // a negative number with uint8 wraps, as in C
        return ms__call_fail(c, "%.17g is out of range for %s; cast the tensor first", f, ms__tensor_text(c->in[0]));
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
    return check_in_place(c, NULL, dtype);
}
static ms_status check_power(const ms_call *c)
{
    if (!ms__is_float(c->in[0]->dtype) && c->f[0] < 0)
        return ms__call_fail(c, "an integer tensor cannot be raised to the negative power %g; cast %s first", c->f[0],
                             ms__tensor_text(c->in[0]));
    return MS_OK;
}
static ms_status check_pow_scalar(ms_call *c)
{
    MS_TRY(check_power(c));
    return check_scalar(c);
}
static ms_status check_pow_scalar_(ms_call *c)
{
    MS_TRY(check_power(c));
    return check_scalar_(c);
}
static ms_status check_real_scalar(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int dtype = ms__is_float(x->dtype) ? x->dtype : ms__state.default_dtype;
    return ms__call_out(c, 0, dtype, ms__device(x), x->ndim, x->shape);
}
static ms_status check_real_scalar_(ms_call *c)
{
    return check_in_place(c, NULL, ms__is_float(c->in[0]->dtype) ? c->in[0]->dtype : ms__state.default_dtype);
}
static ms_status clamp_bounds(const ms_call *c)
{
    if (c->in[0]->dtype == MS_BOOL) return no_bool(c, c->in[0]);
    if (ms__is_float(c->in[0]->dtype)) return MS_OK;
    for (int k = 0; k < 2; k++)
        if (!__builtin_isinf(c->f[k]) && c->f[k] != __builtin_floor(c->f[k]))
            return ms__call_fail(c, "bound %.15g is not a whole number, but the tensor is %s", c->f[k],
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
    return check_in_place(c, NULL, c->in[0]->dtype);
}

static ms_status check_equal(ms_call *c) { return ms__call_out(c, 0, MS_BOOL, ms__device(c->in[0]), 0, NULL); }
static ms_status check_allclose(ms_call *c)
{
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(ms__broadcast(c, c->in[0], c->in[1], &ndim, shape));
    return check_equal(c);
}
static ms_status broadcast_three(const ms_call *c, int *ndim, int64_t *shape)
{
    MS_TRY(ms__broadcast(c, c->in[1], c->in[2], ndim, shape));
    ms_tensor both = { .ndim = (uint8_t)*ndim };
    memcpy(both.shape, shape, sizeof both.shape);
    return ms__broadcast(c, c->in[0], &both, ndim, shape);
}
static ms_status check_where(ms_call *c)
{
    const ms_tensor *m = c->in[0], *a = c->in[1], *b = c->in[2];
    if (m->dtype != MS_BOOL) return ms__call_fail(c, "the condition must be a bool tensor, got %s", ms__tensor_text(m));
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(broadcast_three(c, &ndim, shape));
    return ms__call_out(c, 0, ms__result_dtype(a, b), ms__device(a), ndim, shape);
}
// Checks, for lerp, addcmul and addcdiv, that all tensors have one supported dtype, and that the number fits it.
static ms_status one_dtype(const ms_call *c)
{
    bool wholes = strncmp(c->op->name, "addcmul", 7) == 0;  // defined for integers too
    for (int k = 0; k < c->n_in; k++)
        if (c->in[k]->dtype != c->in[0]->dtype || c->in[k]->dtype == MS_BOOL ||
            !(wholes || ms__is_float(c->in[k]->dtype)))
            return ms__call_fail(c, "%s tensors of one dtype are expected, got %s and %s",
                                 wholes ? "floating-point or integer" : "floating-point", ms__tensor_text(c->in[0]),
                                 ms__tensor_text(c->in[k]));
    if (!ms__is_float(c->in[0]->dtype) && c->n_f && c->f[0] != (double)(int64_t)c->f[0])
        return ms__call_fail(c,
                             "value is %.15g, expected a whole number from -2^63 to below 2^63, as the tensors are %s",
                             c->f[0], ms__tensor_text(c->in[0]));
    return MS_OK;
}
static ms_status check_lerp(ms_call *c)
{
    MS_TRY(one_dtype(c));
    return binary_out(c, c->in[0], c->in[1], c->in[0]->dtype);
}
static ms_status check_lerp_(ms_call *c)
{
    MS_TRY(one_dtype(c));
    return check_in_place(c, c->in[1], c->in[0]->dtype);
}
static ms_status check_three(ms_call *c)
{
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(one_dtype(c));
    MS_TRY(broadcast_three(c, &ndim, shape));
    return ms__call_out(c, 0, c->in[0]->dtype, ms__device(c->in[0]), ndim, shape);
}
static ms_status check_three_(ms_call *c)
{
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(one_dtype(c));
    MS_TRY(ms__broadcast(c, c->in[1], c->in[2], &ndim, shape));
    ms_tensor both = { .ndim = (uint8_t)ndim, .dtype = c->in[0]->dtype };
    memcpy(both.shape, shape, sizeof both.shape);
    return check_in_place(c, &both, c->in[0]->dtype);
}
static ms_status check_mask(const ms_call *c)
{
    if (c->in[1]->dtype != MS_BOOL)
        return ms__call_fail(c, "the mask must be a bool tensor, got %s", ms__tensor_text(c->in[1]));
    if (!ms__is_float(c->in[0]->dtype) && c->f[0] != __builtin_floor(c->f[0]))
        return ms__call_fail(c, "%.15g is not a whole number, but the tensor is %s", c->f[0],
                             ms__tensor_text(c->in[0]));
    if (!ms__holds(c->in[0]->dtype, c->f[0]))
        return ms__call_fail(c, "%.17g is out of range for %s", c->f[0], ms__tensor_text(c->in[0]));
    return MS_OK;
}
static ms_status check_masked_fill(ms_call *c)
{
    MS_TRY(check_mask(c));
    return binary_out(c, c->in[0], c->in[1], c->in[0]->dtype);
}
static ms_status check_masked_fill_(ms_call *c)
{
    MS_TRY(check_mask(c));
    return check_in_place(c, c->in[1], c->in[0]->dtype);
}

// ---- backwards --------------------------------------------------------------------------------

// Sets gin[k] to *g (owned), summed to the shape and converted to the dtype of input k. st: status of the call that
// made *g.
static ms_status give_gradient(ms_backward_call *b, int k, ms_status st, ms_tensor **g)
{
    MS_TRY(st);
    return ms__grad_to(&b->gin[k], *g, &b->in_meta[k]);
}

static ms_status same_backward(ms_backward_call *b)
{
    if (b->need[0]) MS_TRY(ms__grad_to(&b->gin[0], ms__retain(b->gout[0]), &b->in_meta[0]));
    return MS_OK;
}
static ms_status neg_grad(ms_backward_call *b)
{
    ms_tensor *g;
    return give_gradient(b, 0, ms__op1(&g, &ms__op_neg, b->gout[0]), &g);
}
static ms_status add_backward(ms_backward_call *b)
{
    MS_TRY(same_backward(b));
    if (b->need[1]) {
        double alpha = (b->n_f ? b->f[0] : 1) * (strncmp(b->op->name, "sub", 3) == 0 ? -1 : 1);
        ms_tensor *g = b->gout[0];
        if (alpha == 1) MS_TRY(ms__grad_to(&b->gin[1], ms__retain(g), &b->in_meta[1]));
        else {
            ms_tensor *sum, *scaled;  // sum first: fewer elements to scale
            MS_TRY(ms__sum_to(&sum, g, b->in_meta[1].ndim, b->in_meta[1].shape));
            ms_status st =
                alpha == -1 ? ms__op1(&scaled, &ms__op_neg, sum) : ms__op1f(&scaled, &ms__op_mul_scalar, sum, alpha);
            ms__release(sum);
            MS_TRY(give_gradient(b, 1, st, &scaled));
        }
    }
    return MS_OK;
}
static ms_status mul_backward(ms_backward_call *b)
{
    ms_tensor *g;
    if (b->need[0]) MS_TRY(give_gradient(b, 0, ms__op2(&g, &ms__op_mul, b->gout[0], b->in[1]), &g));
    if (b->need[1]) MS_TRY(give_gradient(b, 1, ms__op2(&g, &ms__op_mul, b->gout[0], b->in[0]), &g));
    return MS_OK;
}

// The gradient of an operator with one input: calls row(g, kept), where kept is the saved input or output.
static ms_status kept_backward(ms_backward_call *b, const ms_op *row, ms_tensor *kept)
{
    ms_tensor *in[2] = { b->gout[0], kept };
    return ms__run_op(row, &(ms_op_args) { 2, in, b->n_i, b->i, b->n_f, b->f }, 1, &b->gin[0]);
}
#define INTERNAL(NAME, N, CHECK) \
    const ms_op ms__op_##NAME =  \
        MS_ROW(#NAME, N, N, .check = CHECK, .run = { [MS_CPU] = ms__cpu_##NAME }, .prepare = ms__cpu_prepare_loop);
#define GRADIENT(NAME, KEPT)                                            \
    INTERNAL(NAME##_backward, 2, check_like_first)                      \
    static ms_status NAME##_grad(ms_backward_call *b)                   \
    {                                                                   \
        return kept_backward(b, &ms__op_##NAME##_backward, b->KEPT[0]); \
    }
// The gradients of an operator with two inputs: each row is called with g and both inputs.
static ms_status both_backward(ms_backward_call *b, const ms_op *first, const ms_op *second)
{
    ms_tensor *g;
    if (b->need[0]) MS_TRY(give_gradient(b, 0, ms__op3(&g, first, b->gout[0], b->in[0], b->in[1]), &g));
    if (b->need[1]) MS_TRY(give_gradient(b, 1, ms__op3(&g, second, b->gout[0], b->in[0], b->in[1]), &g));
    return MS_OK;
}
#define GRADIENTS(NAME)                                                                             \
    static ms_status NAME##_grad(ms_backward_call *b)                                               \
    {                                                                                               \
        return both_backward(b, &ms__op_##NAME##_first_backward, &ms__op_##NAME##_second_backward); \
    }
#include "rows/elementwise.def"

static ms_status div_backward(ms_backward_call *b)
{
    ms_tensor *g;
    if (b->need[0]) MS_TRY(give_gradient(b, 0, ms__op2(&g, &ms__op_div, b->gout[0], b->in[1]), &g));
    if (b->need[1])
        MS_TRY(give_gradient(b, 1, ms__op3(&g, &ms__op_div_other_backward, b->gout[0], b->in[0], b->in[1]), &g));
    return MS_OK;
}
static ms_status exp_grad(ms_backward_call *b) { return ms__op2(&b->gin[0], &ms__op_mul, b->gout[0], b->out[0]); }
static ms_status log_grad(ms_backward_call *b) { return ms__op2(&b->gin[0], &ms__op_div, b->gout[0], b->in[0]); }
static ms_status sign_grad(ms_backward_call *b) { return ms__zero_gradient(b); }
static ms_status floor_grad(ms_backward_call *b) { return ms__zero_gradient(b); }
static ms_status ceil_grad(ms_backward_call *b) { return ms__zero_gradient(b); }
static ms_status trunc_grad(ms_backward_call *b) { return ms__zero_gradient(b); }
static ms_status frac_grad(ms_backward_call *b) { return same_backward(b); }
static ms_status div_scalar_backward(ms_backward_call *b)
{
    return ms__op1f(&b->gin[0], &ms__op_div_scalar, b->gout[0], b->f[0]);
}
static ms_status mul_scalar_backward(ms_backward_call *b)
{
    return ms__op1f(&b->gin[0], &ms__op_mul_scalar, b->gout[0], b->f[0]);
}
static ms_status give_scaled(ms_backward_call *b, int k, double by)
{
    ms_tensor *g;
    return b->need[k] ? give_gradient(b, k, ms__op1f(&g, &ms__op_mul_scalar, b->gout[0], by), &g) : MS_OK;
}
static ms_status lerp_grad(ms_backward_call *b)
{
    MS_TRY(give_scaled(b, 0, 1 - b->f[0]));
    return give_scaled(b, 1, b->f[0]);
}
static ms_status lerp_tensor_grad(ms_backward_call *b)
{
    ms_tensor *g, *part;
    if (b->need[0]) {
        MS_TRY(ms__op2(&part, &ms__op_mul, b->gout[0], b->in[2]));
        ms_status st = ms__op2(&g, &ms__op_sub, b->gout[0], part);
        ms__release(part);
        MS_TRY(give_gradient(b, 0, st, &g));
    }
    if (b->need[1]) MS_TRY(give_gradient(b, 1, ms__op2(&g, &ms__op_mul, b->gout[0], b->in[2]), &g));
    if (!b->need[2]) return MS_OK;
    MS_TRY(ms__op2(&part, &ms__op_sub, b->in[1], b->in[0]));
    ms_status st = ms__op2(&g, &ms__op_mul, b->gout[0], part);
    ms__release(part);
    return give_gradient(b, 2, st, &g);
}
// addcmul, addcdiv: the first input gets the result's gradient, the others those of mul and div, times the number.
static ms_status addc_grad(ms_backward_call *b, const ms_op *first, const ms_op *second)
{
    MS_TRY(same_backward(b));
    if (!b->need[1] && !b->need[2]) return MS_OK;
    ms_tensor *scaled, *g;
    if (b->n_f && b->f[0] != 1) MS_TRY(ms__op1f(&scaled, &ms__op_mul_scalar, b->gout[0], b->f[0]));
    else scaled = ms__retain(b->gout[0]);
    ms_status st = MS_OK;
    if (b->need[1]) st = give_gradient(b, 1, ms__op2(&g, first, scaled, b->in[2]), &g);
    if (b->need[2] && st == MS_OK && second)
        st = give_gradient(b, 2, ms__op3(&g, second, scaled, b->in[1], b->in[2]), &g);
    else if (b->need[2] && st == MS_OK) st = give_gradient(b, 2, ms__op2(&g, first, scaled, b->in[1]), &g);
    ms__release(scaled);
    return st;
}
static ms_status addcmul_grad(ms_backward_call *b) { return addc_grad(b, &ms__op_mul, NULL); }
static ms_status addcdiv_grad(ms_backward_call *b) { return addc_grad(b, &ms__op_div, &ms__op_div_other_backward); }
static ms_status masked_fill_grad(ms_backward_call *b)
{
    ms_tensor *g;
    if (b->need[0])
        MS_TRY(give_gradient(b, 0,
                             ms__run_op(&ms__op_masked_fill,
                                        &(ms_op_args) { 2, (ms_tensor *[]) { b->gout[0], b->in[1] }, .n_f = 1,
                                                        .f = (double[]) { 0 } },
                                        1, &g),
                             &g));
    return MS_OK;
}
static ms_status where_grad(ms_backward_call *b)
{
    ms_tensor *g;
    for (int k = 1; k < 3; k++)
        if (b->need[k])
            MS_TRY(give_gradient(b, k,
                                 ms__run_op(&ms__op_where_backward,
                                            &(ms_op_args) { 2, (ms_tensor *[]) { b->in[0], b->gout[0] }, .n_i = 1,
                                                            .i = (int64_t[]) { k - 1 } },
                                            1, &g),
                                 &g));
    return MS_OK;
}

// ---- rows -------------------------------------------------------------------------------------

enum { A = 1, B = 2, C = 4, NONE = 0 };  // bits for save_in and save_out
enum {
    METHOD = MS_OP_METHOD,
    ACTIVATION = MS_OP_ACTIVATION,
    WIDE = MS_OP_WIDE,
    DIFFERENTIABLE = MS_OP_DIFFERENTIABLE,
    INPLACE = MS_OP_DIFFERENTIABLE | MS_OP_INPLACE
};

#define ROW(NAME, N, CHECK, KERNEL, BACKWARD, ...) ROW_OF(NAME, N, CHECK, KERNEL, BACKWARD, __VA_ARGS__)
#define ROW_OF(NAME, N, CHECK, KERNEL, BACKWARD, IN, OUT, FLAGS, TAKES, SAMPLES, DOC)                         \
    const ms_op ms__op_##NAME =                                                                               \
        MS_ROW(#NAME, N, N, .flags = (FLAGS) | MS_OP_EACH, .save_in = IN, .save_out = OUT, .check = CHECK,    \
               .run = { [MS_CPU] = ms__cpu_##KERNEL }, .backward = BACKWARD, .prepare = ms__cpu_prepare_loop, \
               .takes = TAKES, .samples = SAMPLES, .doc = DOC);
#include "rows/elementwise.def"

#define ROW(NAME, ...) &ms__op_##NAME,
MS_OPERATORS = {
#include "rows/elementwise.def"
};
