// SPDX-License-Identifier: MIT
// cpu/elementwise/elementwise.c -- CPU loops over the formulas of formulas/elementwise.h, and the kernels that hand
// them to the elementwise engine (loops.h).
#include "cpu/cpu.h"
#include "cpu/elementwise/loops.h"
#include "rows/ops.h"

#define REAL float
#define R(name) name##_f32
#include "formulas/elementwise.h"
#undef REAL
#undef R
#define REAL double
#define R(name) name##_f64
#include "formulas/elementwise.h"
#undef REAL
#undef R
#define MS_INTEGER
#define REAL int64_t
#define R(name) name##_i64
#include "formulas/elementwise.h"
#undef REAL
#undef R

// ---- loops ----
// A number as an element: integers saturate (clamp's bounds may be infinite), bools are truth.
static int64_t saturated(double v)
{
    return v >= 0x1p63 ? INT64_MAX : v > -0x1p63 ? (int64_t)v : v == v ? INT64_MIN : 0;
}
#define FROM_f32(v) (float)(v)
#define FROM_f64(v) (v)
#define FROM_i64(v) saturated(v)
#define FROM_u8(v) (uint8_t)((v) != 0)

// In place is ordinary (out is an input), which the vectoriser can't prove harmless: hence omp simd.
#define BODY(name, T, S, TO, expr)                                                      \
    static MS_KERNEL void loop_##name##_##S(int64_t n, void *const *x, const double *p) \
    {                                                                                   \
        TO *o = x[0];                                                                   \
        const T *a = x[1], *b = x[2], *c = x[3];                                        \
        T s = p ? FROM_##S(p[0]) : 0, t = p ? FROM_##S(p[1]) : 0;                       \
        (void)a;                                                                        \
        (void)b;                                                                        \
        (void)c;                                                                        \
        (void)s;                                                                        \
        (void)t;                                                                        \
        _Pragma("omp simd") for (int64_t k = 0; k < n; k++) o[k] = (TO)(expr);          \
    }
#define F(name, S) ms_##name##_##S
#define REAL_TYPES(M, name) M(name, float, f32) M(name, double, f64) TABLE_REAL(name)
#define ALL_TYPES(M, name) M(name, float, f32) M(name, double, f64) M(name, int64_t, i64) TABLE_ALL(name)
#define FOUR_TYPES(M, name) \
    M(name, float, f32) M(name, double, f64) M(name, int64_t, i64) M(name, uint8_t, u8) TABLE_FOUR(name)
#define TABLE_REAL(name) static const ms_loop_fn fns_##name[MS_CLASSES] = { loop_##name##_f32, loop_##name##_f64 };
#define TABLE_ALL(name) \
    static const ms_loop_fn fns_##name[MS_CLASSES] = { loop_##name##_f32, loop_##name##_f64, loop_##name##_i64 };
#define TABLE_FOUR(name)                                                                                        \
    static const ms_loop_fn fns_##name[MS_CLASSES] = { loop_##name##_f32, loop_##name##_f64, loop_##name##_i64, \
                                                       loop_##name##_u8 };

#define UNARY(name, T, S) BODY(name, T, S, T, ms_fwd_##name##_##S(a[k]))
#define BINARY(name, T, S) BODY(name, T, S, T, ms_fwd_##name##_##S(a[k], b[k]))
#define BWD2(name, T, S) BODY(bwd_##name, T, S, T, ms_bwd_##name##_##S(a[k], b[k]))
#define BWD3(name, T, S) BODY(bwd_##name, T, S, T, ms_bwd_##name##_##S(a[k], b[k], c[k]))

// clang-format off
ALL_TYPES(UNARY, neg)
ALL_TYPES(UNARY, abs)
ALL_TYPES(UNARY, relu)
ALL_TYPES(UNARY, sign)
ALL_TYPES(UNARY, square)
ALL_TYPES(UNARY, cube)
ALL_TYPES(UNARY, copy)
REAL_TYPES(UNARY, exp)
REAL_TYPES(UNARY, log)
REAL_TYPES(UNARY, sqrt)
REAL_TYPES(UNARY, rsqrt)
REAL_TYPES(UNARY, sin)
REAL_TYPES(UNARY, cos)
REAL_TYPES(UNARY, tanh)
REAL_TYPES(UNARY, sigmoid)
REAL_TYPES(UNARY, silu)
REAL_TYPES(UNARY, reciprocal)
REAL_TYPES(UNARY, gelu)
REAL_TYPES(UNARY, gelu_tanh)

ALL_TYPES(BINARY, add)
ALL_TYPES(BINARY, sub)
ALL_TYPES(BINARY, mul)
ALL_TYPES(BINARY, pow)
ALL_TYPES(BINARY, maximum)
ALL_TYPES(BINARY, minimum)
REAL_TYPES(BINARY, div)
// clang-format on

#define ADD_SCALED(name, T, S) BODY(name, T, S, T, ms_fwd_add_scaled_##S(a[k], b[k], s))
#define ADD_SCALAR(name, T, S) BODY(name, T, S, T, ms_fwd_add_##S(a[k], s))
#define MUL_SCALAR(name, T, S) BODY(name, T, S, T, ms_fwd_mul_##S(a[k], s))
#define POW_SCALAR(name, T, S) BODY(name, T, S, T, ms_fwd_pow_##S(a[k], s))
#define RSUB_SCALAR(name, T, S) BODY(name, T, S, T, ms_fwd_sub_##S(s, a[k]))
#define RPOW_SCALAR(name, T, S) BODY(name, T, S, T, ms_fwd_pow_##S(s, a[k]))
#define DIV_SCALAR(name, T, S) BODY(name, T, S, T, ms_fwd_div_##S(a[k], s))
#define RDIV_SCALAR(name, T, S) BODY(name, T, S, T, ms_fwd_div_##S(s, a[k]))
#define CLAMP(name, T, S) BODY(name, T, S, T, ms_fwd_clamp_##S(a[k], s, t))
// clang-format off
ALL_TYPES(ADD_SCALED, add_scaled)
ALL_TYPES(ADD_SCALAR, add_scalar)
ALL_TYPES(MUL_SCALAR, mul_scalar)
ALL_TYPES(POW_SCALAR, pow_scalar)
ALL_TYPES(RSUB_SCALAR, rsub_scalar)
ALL_TYPES(RPOW_SCALAR, rpow_scalar)
ALL_TYPES(CLAMP, clamp)
REAL_TYPES(DIV_SCALAR, div_scalar)
REAL_TYPES(RDIV_SCALAR, rdiv_scalar)
// clang-format on

#define BWD_REAL(M, name) M(name, float, f32) M(name, double, f64) TABLE_REAL(bwd_##name)
#define BWD_POW_SCALAR(name, T, S) BODY(bwd_##name, T, S, T, ms_bwd_pow_scalar_##S(a[k], b[k], s))
#define BWD_POW_BASE(name, T, S) BODY(bwd_##name, T, S, T, ms_bwd_pow_scalar_##S(a[k], b[k], c[k]))
#define BWD_NORM_P(name, T, S) BODY(bwd_##name, T, S, T, ms_bwd_norm_p_##S(a[k], b[k], c[k], s))
// clang-format off
BWD_REAL(BWD3, logsumexp)
BWD_REAL(BWD2, norm_1)
BWD_REAL(BWD3, norm_2)
BWD_REAL(BWD_NORM_P, norm_p)
// clang-format on
#define BWD_CLAMP(name, T, S) BODY(bwd_##name, T, S, T, ms_bwd_clamp_##S(a[k], b[k], s, t))
// clang-format off
BWD_REAL(BWD2, relu)
BWD_REAL(BWD2, abs)
BWD_REAL(BWD2, sqrt)
BWD_REAL(BWD2, rsqrt)
BWD_REAL(BWD2, sin)
BWD_REAL(BWD2, cos)
BWD_REAL(BWD2, tanh)
BWD_REAL(BWD2, sigmoid)
BWD_REAL(BWD2, silu)
BWD_REAL(BWD2, reciprocal)
BWD_REAL(BWD2, gelu)
BWD_REAL(BWD2, gelu_tanh)
BWD_REAL(BWD_POW_SCALAR, pow_scalar)
// clang-format on
#define BWD_RDIV(name, T, S) BODY(bwd_##name, T, S, T, ms_bwd_rdiv_scalar_##S(a[k], b[k], s))
#define BWD_RPOW(name, T, S) BODY(bwd_##name, T, S, T, ms_bwd_rpow_scalar_##S(a[k], b[k], s))
// clang-format off
BWD_REAL(BWD_RDIV, rdiv_scalar)
BWD_REAL(BWD_RPOW, rpow_scalar)
BWD_REAL(BWD_POW_BASE, pow_base)
BWD_REAL(BWD3, pow_exponent)
BWD_REAL(BWD3, div_other)
BWD_REAL(BWD3, maximum)
BWD_REAL(BWD3, minimum)
BWD_REAL(BWD_CLAMP, clamp)

#define COMPARE(name, op)                                                                                   \
    BODY(name, float, f32, uint8_t, a[k] op b[k])   BODY(name, double, f64, uint8_t, a[k] op b[k])          \
    BODY(name, int64_t, i64, uint8_t, a[k] op b[k]) BODY(name, uint8_t, u8, uint8_t, a[k] op b[k])          \
    TABLE_FOUR(name)                                                                                        \
    BODY(name##_scalar, float, f32, uint8_t, a[k] op s) BODY(name##_scalar, double, f64, uint8_t, a[k] op s)\
    BODY(name##_scalar, int64_t, i64, uint8_t, a[k] op s)                                                   \
    TABLE_ALL(name##_scalar)
COMPARE(eq, ==)
COMPARE(ne, !=)
COMPARE(lt, <)
COMPARE(le, <=)
COMPARE(gt, >)
COMPARE(ge, >=)

BODY(isfinite, float, f32, uint8_t, a[k] - a[k] == 0)
BODY(isfinite, double, f64, uint8_t, a[k] - a[k] == 0)
TABLE_REAL(isfinite)
BODY(isnan, float, f32, uint8_t, a[k] != a[k])
BODY(isnan, double, f64, uint8_t, a[k] != a[k])
TABLE_REAL(isnan)
BODY(logical_not, uint8_t, u8, uint8_t, !a[k])
BODY(logical_and, uint8_t, u8, uint8_t, a[k] & b[k])
BODY(logical_or, uint8_t, u8, uint8_t, a[k] | b[k])
// clang-format on

// Equal infinities are close; NaN is to NaN in the second. p: rtol, atol
BODY(is_close_nan, double, f64, uint8_t,
     (a[k] == b[k]) | ((a[k] != a[k]) & (b[k] != b[k])) |
         ((b[k] - b[k] == 0) & (ms_abs_f64(a[k] - b[k]) <= t + s * ms_abs_f64(b[k]))))
BODY(is_close, double, f64, uint8_t,
     (a[k] == b[k]) | ((b[k] - b[k] == 0) & (ms_abs_f64(a[k] - b[k]) <= t + s * ms_abs_f64(b[k]))))

// A condition among the operands: bytes.
#define CHOOSE(name, T, S, cond, yes, no)                                               \
    static MS_KERNEL void loop_##name##_##S(int64_t n, void *const *x, const double *p) \
    {                                                                                   \
        T *o = x[0];                                                                    \
        const uint8_t *m = x[cond];                                                     \
        const T *a = x[2], *b = x[3], *v = x[1], s = p ? FROM_##S(p[0]) : 0;            \
        (void)a;                                                                        \
        (void)b;                                                                        \
        (void)v;                                                                        \
        (void)s;                                                                        \
        _Pragma("omp simd") for (int64_t k = 0; k < n; k++) o[k] = m[k] ? (yes) : (no); \
    }
#define WHERE(name, T, S) CHOOSE(name, T, S, 1, a[k], b[k])
#define MASKED_FILL(name, T, S) CHOOSE(name, T, S, 2, s, v[k])
#define WHERE_A(name, T, S) CHOOSE(name, T, S, 1, a[k], 0)
#define WHERE_B(name, T, S) CHOOSE(name, T, S, 1, 0, a[k])
// clang-format off
FOUR_TYPES(WHERE, where)
FOUR_TYPES(MASKED_FILL, masked_fill)
REAL_TYPES(WHERE_A, where_a)
REAL_TYPES(WHERE_B, where_b)
// clang-format on

// ---- kernels ----

// Arithmetic on bools is done in integers and stored back as truth.
static int arithmetic_class(int dtype) { return dtype == MS_BOOL ? MS_C_I64 : ms__class_of(dtype); }

// In the type that holds both the output and every input: an in-place f16 += f32 adds in float.
static ms_status run(ms_call *c, int n, const ms_loop_fn *fns)
{
    int dtype = c->out[0]->dtype;
    uint8_t cls[MS_LOOP_MAX];
    ms_tensor *x[MS_LOOP_MAX] = { c->out[0] };
    int widest = arithmetic_class(dtype);
    for (int k = 0; k < n; k++) {
        x[k + 1] = c->in[k];
        if (MS_UNLIKELY(c->in[k]->dtype == MS_F64 && widest == MS_C_F32 && c->in[k]->ndim)) widest = MS_C_F64;
    }
    for (int k = 0; k <= n; k++) cls[k] = (uint8_t)widest;
    if (MS_UNLIKELY(n == 2 && c->in[1]->storage == c->out[0]->storage)) {
        MS_TRY(ms__cpu_apart(&x[2], c->out[0], c->in[1]));
        ms__loop(3, x, cls, fns[widest], c->n_f ? c->f : NULL);
        ms__release(x[2]);
        return MS_OK;
    }
    ms__loop(n + 1, x, cls, fns[widest], c->n_f ? c->f : NULL);
    return MS_OK;
}

#define KERNEL(name, n) \
    ms_status ms__cpu_##name(ms_call *c) { return run(c, n, fns_##name); }
#define BACKWARD(name, n) \
    ms_status ms__cpu_##name##_backward(ms_call *c) { return run(c, n, fns_bwd_##name); }
// clang-format off
KERNEL(neg, 1)
KERNEL(abs, 1)
KERNEL(relu, 1)
KERNEL(sign, 1)
KERNEL(exp, 1)
KERNEL(log, 1)
KERNEL(sqrt, 1)
KERNEL(rsqrt, 1)
KERNEL(sin, 1)
KERNEL(cos, 1)
KERNEL(tanh, 1)
KERNEL(sigmoid, 1)
KERNEL(silu, 1)
KERNEL(reciprocal, 1)
KERNEL(mul, 2)
KERNEL(div, 2)
KERNEL(pow, 2)
KERNEL(maximum, 2)
KERNEL(minimum, 2)
KERNEL(add_scalar, 1)
KERNEL(mul_scalar, 1)
KERNEL(div_scalar, 1)
KERNEL(rsub_scalar, 1)
KERNEL(rdiv_scalar, 1)
KERNEL(rpow_scalar, 1)
KERNEL(clamp, 1)
BACKWARD(relu, 2)
BACKWARD(abs, 2)
BACKWARD(sqrt, 2)
BACKWARD(rsqrt, 2)
BACKWARD(sin, 2)
BACKWARD(cos, 2)
BACKWARD(tanh, 2)
BACKWARD(sigmoid, 2)
BACKWARD(silu, 2)
BACKWARD(reciprocal, 2)
BACKWARD(pow_scalar, 2)
BACKWARD(rdiv_scalar, 2)
BACKWARD(rpow_scalar, 2)
BACKWARD(pow_base, 3)
BACKWARD(pow_exponent, 3)
BACKWARD(div_other, 3)
BACKWARD(maximum, 3)
BACKWARD(minimum, 3)
BACKWARD(clamp, 2)
BACKWARD(logsumexp, 3)
// clang-format on
// in: g, x, norm; f0 = p, finite and not 0
ms_status ms__cpu_norm_backward(ms_call *c)
{
    if (c->f[0] == 1) return run(c, 2, fns_bwd_norm_1);
    return run(c, 3, c->f[0] == 2 ? fns_bwd_norm_2 : fns_bwd_norm_p);
}

static bool tanh_form(const ms_call *c) { return c->n_i > 0 && c->i[0]; }
ms_status ms__cpu_gelu(ms_call *c) { return run(c, 1, tanh_form(c) ? fns_gelu_tanh : fns_gelu); }
ms_status ms__cpu_gelu_backward(ms_call *c) { return run(c, 2, tanh_form(c) ? fns_bwd_gelu_tanh : fns_bwd_gelu); }

ms_status ms__cpu_add(ms_call *c) { return run(c, 2, c->n_f == 0 || c->f[0] == 1 ? fns_add : fns_add_scaled); }
ms_status ms__cpu_sub(ms_call *c)
{
    if (c->n_f == 0 || c->f[0] == 1) return run(c, 2, fns_sub);
    double alpha = c->f[0];
    c->f[0] = -alpha;
    ms_status st = run(c, 2, fns_add_scaled);
    c->f[0] = alpha;
    return st;
}

// libm's pow costs 10 ns; these exponents are what models use, and exact besides.
ms_status ms__cpu_pow_scalar(ms_call *c)
{
    double p = c->f[0];
    bool real = ms__is_float(c->out[0]->dtype);
    if (p == 1) return run(c, 1, fns_copy);
    if (p == 2) return run(c, 1, fns_square);
    if (p == 3) return run(c, 1, fns_cube);
    if (real && p == 0.5) return run(c, 1, fns_sqrt);
    if (real && p == -0.5) return run(c, 1, fns_rsqrt);
    if (real && p == -1) return run(c, 1, fns_reciprocal);
    return run(c, 1, fns_pow_scalar);
}

static ms_status compare(ms_call *c, const ms_loop_fn *fns)
{
    int cls = ms__class_of(ms__result_dtype(c->in[0], c->in[1]));
    ms__loop(3, (ms_tensor *[]) { c->out[0], c->in[0], c->in[1] },
             (uint8_t[]) { MS_C_BOOL, (uint8_t)cls, (uint8_t)cls }, fns[cls], NULL);
    return MS_OK;
}
// The number takes the tensor's dtype (0.1 equals a float16 made of it); against a fraction integers are compared as
// real numbers.
static ms_status compare_scalar(ms_call *c, const ms_loop_fn *fns)
{
    int dtype = c->in[0]->dtype, cls = arithmetic_class(dtype);
    if (dtype == MS_F16) c->f[0] = ms_f16_to_float(ms_float_to_f16((float)c->f[0]));
    if (dtype == MS_BF16) c->f[0] = ms_bf16_to_float(ms_float_to_bf16((float)c->f[0]));
    if (cls == MS_C_I64 && !(c->f[0] >= -0x1p63 && c->f[0] < 0x1p63 && (double)(int64_t)c->f[0] == c->f[0]))
        cls = MS_C_F64;
    ms__loop(2, (ms_tensor *[]) { c->out[0], c->in[0] }, (uint8_t[]) { MS_C_BOOL, (uint8_t)cls }, fns[cls], c->f);
    return MS_OK;
}
#define COMPARE_KERNEL(name)                                                \
    ms_status ms__cpu_##name(ms_call *c) { return compare(c, fns_##name); } \
    ms_status ms__cpu_##name##_scalar(ms_call *c) { return compare_scalar(c, fns_##name##_scalar); }
// clang-format off
COMPARE_KERNEL(eq)
COMPARE_KERNEL(ne)
COMPARE_KERNEL(lt)
COMPARE_KERNEL(le)
COMPARE_KERNEL(gt)
COMPARE_KERNEL(ge)
// clang-format on

static ms_status test(ms_call *c, const ms_loop_fn *fns)
{
    int cls = c->in[0]->dtype == MS_F32 || ms__is_half(c->in[0]->dtype) ? MS_C_F32 : MS_C_F64;
    ms__loop(2, (ms_tensor *[]) { c->out[0], c->in[0] }, (uint8_t[]) { MS_C_BOOL, (uint8_t)cls }, fns[cls], NULL);
    return MS_OK;
}
ms_status ms__cpu_isfinite(ms_call *c) { return test(c, fns_isfinite); }
ms_status ms__cpu_isnan(ms_call *c) { return test(c, fns_isnan); }

static ms_status logic(ms_call *c, int n, ms_loop_fn fn)
{
    ms__loop(n + 1, (ms_tensor *[]) { c->out[0], c->in[0], c->in[1] }, (uint8_t[]) { MS_C_BOOL, MS_C_BOOL, MS_C_BOOL },
             fn, NULL);
    return MS_OK;
}
ms_status ms__cpu_logical_not(ms_call *c) { return logic(c, 1, loop_logical_not_u8); }
ms_status ms__cpu_logical_and(ms_call *c) { return logic(c, 2, loop_logical_and_u8); }
ms_status ms__cpu_logical_or(ms_call *c) { return logic(c, 2, loop_logical_or_u8); }

ms_status ms__cpu_where(ms_call *c)
{
    uint8_t cls = (uint8_t)ms__class_of(c->out[0]->dtype);
    ms__loop(4, (ms_tensor *[]) { c->out[0], c->in[0], c->in[1], c->in[2] }, (uint8_t[]) { cls, MS_C_BOOL, cls, cls },
             fns_where[cls], NULL);
    return MS_OK;
}
// in: condition, gradient of the output; i0: which branch's gradient
ms_status ms__cpu_where_backward(ms_call *c)
{
    uint8_t cls = (uint8_t)ms__class_of(c->out[0]->dtype);
    ms__loop(3, (ms_tensor *[]) { c->out[0], c->in[0], c->in[1] }, (uint8_t[]) { cls, MS_C_BOOL, cls },
             (c->i[0] ? fns_where_b : fns_where_a)[cls], NULL);
    return MS_OK;
}
ms_status ms__cpu_masked_fill(ms_call *c)
{
    uint8_t cls = (uint8_t)ms__class_of(c->out[0]->dtype);
    ms__loop(3, (ms_tensor *[]) { c->out[0], c->in[0], c->in[1] }, (uint8_t[]) { cls, cls, MS_C_BOOL },
             fns_masked_fill[cls], c->f);
    return MS_OK;
}

// ---- whole tensors compared: one bool ----

// fn: of two elements of class cls. tolerance: its parameters, or NULL
static ms_status all_true(ms_call *c, int cls, ms_loop_fn fn, const double *tolerance, int ndim, const int64_t *shape)
{
    ms_tensor *each = NULL;
    MS_TRY(ms__tensor_new(&each, MS_BOOL, MS_CPU, ndim, shape, c->op->name));
    if (each->numel)
        ms__loop(3, (ms_tensor *[]) { each, c->in[0], c->in[1] }, (uint8_t[]) { MS_C_BOOL, (uint8_t)cls, (uint8_t)cls },
                 fn, tolerance);
    *(uint8_t *)ms__data(c->out[0]) = each->numel == 0 || memchr(ms__data(each), 0, (size_t)each->numel) == NULL;
    ms__release(each);
    return MS_OK;
}
// Other shapes are unequal.
ms_status ms__cpu_equal(ms_call *c)
{
    if (!ms__same_shape(c->in[0], c->in[1])) {
        *(uint8_t *)ms__data(c->out[0]) = 0;
        return MS_OK;
    }
    int cls = ms__class_of(ms__promote(c->in[0]->dtype, c->in[1]->dtype));
    return all_true(c, cls, fns_eq[cls], NULL, c->in[0]->ndim, c->in[0]->shape);
}
// f2: is NaN close to NaN?
ms_status ms__cpu_allclose(ms_call *c)
{
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(ms__broadcast(c, c->in[0], c->in[1], &ndim, shape));
    return all_true(c, MS_C_F64, c->n_f > 2 && c->f[2] != 0 ? loop_is_close_nan_f64 : loop_is_close_f64, c->f, ndim,
                    shape);
}
