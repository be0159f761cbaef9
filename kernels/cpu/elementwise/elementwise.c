// SPDX-License-Identifier: MIT
// cpu/elementwise/elementwise.c -- CPU loops over the formulas in rows/elementwise.def, and the kernels that pass them
// to the elementwise engine (loops.h).
#include "cpu/cpu.h"
#include "cpu/elementwise/loops.h"
#include "rows/ops.h"

// ---- loops ----

// Converts a scalar argument to the computing type: integers saturate (clamp's bounds may be infinite), and NaN
// becomes 0; bools become 0 or 1.
static inline float from_f32(double v) { return (float)v; }
static inline double from_f64(double v) { return v; }
static inline int64_t from_i64(double v)
{
    return v >= 0x1p63 ? INT64_MAX : v > -0x1p63 ? (int64_t)v : v == v ? INT64_MIN : 0;
}
static inline uint8_t from_u8(double v) { return v != 0; }

// The loop needs omp simd: the output may be an input (in place), and the vectoriser cannot prove that this is safe. u
// and v are the first two inputs as masks.
#define LOOP(name, TO, expression)                                                   \
    static MS_KERNEL void R(loop_##name)(int64_t n, void *const *x, const double *p) \
    {                                                                                \
        TO *o = x[0];                                                                \
        const REAL *a = x[1], *b = x[2], *c = x[3];                                  \
        const uint8_t *u = x[1], *v = x[2];                                          \
        REAL s = p ? R(from)(p[0]) : 0, t = p ? R(from)(p[1]) : 0;                   \
        (void)a, (void)b, (void)c, (void)u, (void)v, (void)s, (void)t;               \
        _Pragma("omp simd") for (int64_t k = 0; k < n; k++) o[k] = (TO)(expression); \
    }

// The loop of a formula of an angle, the last input. Far angles are rare; without them the loop vectorises.
#define LOOP_ANGLE(name, TO, expression)                                                                      \
    static MS_KERNEL void R(loop_##name)(int64_t n, void *const *x, const double *p)                          \
    {                                                                                                         \
        TO *o = x[0];                                                                                         \
        const REAL *a = x[1], *b = x[2], *angle = b ? b : a;                                                  \
        int any = 0;                                                                                          \
        (void)p;                                                                                              \
        _Pragma("omp simd reduction(| : any)") for (int64_t k = 0; k < n; k++) any |= R(ms_is_far)(angle[k]); \
        if (any) {                                                                                            \
            enum { FAR = 1 };                                                                                 \
            for (int64_t k = 0; k < n; k++) o[k] = expression;                                                \
        } else {                                                                                              \
            enum { FAR = 0 };                                                                                 \
            _Pragma("omp simd") for (int64_t k = 0; k < n; k++) o[k] = expression;                            \
        }                                                                                                     \
    }

#define MS_FLOAT
#define REAL float
#define R(name) name##_f32
#include "cpu/elementwise/loops_body.h"
#undef MS_FLOAT
#define MS_DOUBLE
#define REAL double
#define R(name) name##_f64
#include "cpu/elementwise/loops_body.h"
#undef MS_DOUBLE
#define MS_INTEGER
#define REAL int64_t
#define R(name) name##_i64
#include "cpu/elementwise/loops_body.h"
#undef MS_INTEGER
#define MS_BYTE
#define REAL uint8_t
#define R(name) name##_u8
#include "cpu/elementwise/loops_body.h"
#undef MS_BYTE

// fns_NAME: the loops of a formula, indexed by computing type.
#define BOTH(name) [MS_C_F32] = loop_##name##_f32, [MS_C_F64] = loop_##name##_f64
#define TABLE_FLOATS(name) { BOTH(name) };
#define TABLE_ANGLE TABLE_FLOATS
#define TABLE_ALL(name) { BOTH(name), [MS_C_I64] = loop_##name##_i64 };
#define TABLE_FOUR(name) { BOTH(name), [MS_C_I64] = loop_##name##_i64, [MS_C_BOOL] = loop_##name##_u8 };
#define TABLE_DOUBLE(name) { [MS_C_F64] = loop_##name##_f64 };
#define TABLE_WHOLE(name) { [MS_C_I64] = loop_##name##_i64 };
#define TABLE_BOOL(name) { [MS_C_BOOL] = loop_##name##_u8 };
#define FORMULA(name, types, expression) static const ms_loop_fn fns_##name[MS_CLASSES] = TABLE_##types(name)
#define TRUTH FORMULA
#include "rows/elementwise.def"

// ---- kernels ----

// Arithmetic on bools is done in int64; results are stored as 0 or 1.
static int arithmetic_class(int dtype) { return dtype == MS_BOOL ? MS_C_I64 : ms__class_of(dtype); }

// Computes in arithmetic_class of the output's dtype; but in double if this class is float and an input with dimensions
// is float64: an in-place float32 += float64 adds in double.
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
    ms_status st = MS_OK;
    ms_tensor *apart[MS_LOOP_MAX] = { NULL };
    for (int k = 1; k < n && st == MS_OK; k++)
        if (MS_UNLIKELY(c->in[k]->storage == c->out[0]->storage)) {
            st = ms__cpu_apart(&apart[k], c->out[0], c->in[k]);
            x[k + 1] = apart[k];
        }
    if (st == MS_OK) ms__loop(n + 1, x, cls, fns[widest], c->n_f ? c->f : NULL);
    for (int k = 1; k < n; k++)
        if (MS_UNLIKELY(apart[k] != NULL)) ms__release(apart[k]);
    return st;
}

// Inputs: gradient, x, norm. Number: p, finite and not 0.
ms_status ms__cpu_norm_backward(ms_call *c)
{
    if (c->f[0] == 1) return run(c, 2, fns_bwd_norm_1);
    return run(c, 3, c->f[0] == 2 ? fns_bwd_norm_2 : fns_bwd_norm_p);
}

static bool is_tanh_form(const ms_call *c) { return c->n_i > 0 && c->i[0]; }
ms_status ms__cpu_gelu(ms_call *c) { return run(c, 1, is_tanh_form(c) ? fns_gelu_tanh : fns_gelu); }
ms_status ms__cpu_gelu_backward(ms_call *c) { return run(c, 2, is_tanh_form(c) ? fns_bwd_gelu_tanh : fns_bwd_gelu); }

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

// libm's pow takes 10 ns per element; common exponents have formulas of their own.
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

static ms_status compare(ms_call *c, int n, const ms_loop_fn *fns)
{
    int cls = ms__class_of(ms__result_dtype(c->in[0], c->in[1]));
    ms__loop(n + 1, (ms_tensor *[]) { c->out[0], c->in[0], c->in[1] },
             (uint8_t[]) { MS_C_BOOL, (uint8_t)cls, (uint8_t)cls }, fns[cls], NULL);
    return MS_OK;
}
// A scalar is first rounded to the dtype of a floating-point tensor (0.1 equals the float16 of 0.1). An integer tensor
// and a number that no int64 equals are compared in float64.
static ms_status compare_scalar(ms_call *c, int n, const ms_loop_fn *fns)
{
    int dtype = c->in[0]->dtype, cls = arithmetic_class(dtype);
    if (dtype == MS_F16) c->f[0] = ms_f16_to_float(ms_float_to_f16((float)c->f[0]));
    if (dtype == MS_BF16) c->f[0] = ms_bf16_to_float(ms_float_to_bf16((float)c->f[0]));
    if (cls == MS_C_I64 && !(c->f[0] >= -0x1p63 && c->f[0] < 0x1p63 && (double)(int64_t)c->f[0] == c->f[0]))
        cls = MS_C_F64;
    ms__loop(n + 1, (ms_tensor *[]) { c->out[0], c->in[0] }, (uint8_t[]) { MS_C_BOOL, (uint8_t)cls }, fns[cls], c->f);
    return MS_OK;
}
static ms_status test(ms_call *c, int n, const ms_loop_fn *fns)
{
    int cls = c->in[0]->dtype == MS_F32 || ms__is_half(c->in[0]->dtype) ? MS_C_F32 : MS_C_F64;
    ms__loop(n + 1, (ms_tensor *[]) { c->out[0], c->in[0] }, (uint8_t[]) { MS_C_BOOL, (uint8_t)cls }, fns[cls], NULL);
    return MS_OK;
}

static ms_status logic(ms_call *c, int n, const ms_loop_fn *fns)
{
    ms__loop(n + 1, (ms_tensor *[]) { c->out[0], c->in[0], c->in[1] }, (uint8_t[]) { MS_C_BOOL, MS_C_BOOL, MS_C_BOOL },
             fns[MS_C_BOOL], NULL);
    return MS_OK;
}

#define KERNEL(name, how, n, formula) \
    ms_status ms__cpu_##name(ms_call *c) { return how(c, n, fns_##formula); }
#include "rows/elementwise.def"

ms_status ms__cpu_where(ms_call *c)
{
    uint8_t cls = (uint8_t)ms__class_of(c->out[0]->dtype);
    ms__loop(4, (ms_tensor *[]) { c->out[0], c->in[0], c->in[1], c->in[2] }, (uint8_t[]) { cls, MS_C_BOOL, cls, cls },
             fns_where[cls], NULL);
    return MS_OK;
}
// Inputs: condition, gradient of the output. Integer: 0 for the gradient of the first branch (condition true), 1 for
// that of the second.
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

// ---- comparison of whole tensors: one bool ----

// Stores whether fn, a comparison in computing type cls, holds for all pairs of elements. tolerance: fn's p, or NULL.
static ms_status all_pairs_true(ms_call *c, int cls, ms_loop_fn fn, const double *tolerance, int ndim,
                                const int64_t *shape)
{
    ms_tensor *each = NULL;
    if (MS_UNLIKELY(ms__loop_asked != NULL)) return MS_OK;  // for ms__cpu_prepare_loop: the call is no single loop
    MS_TRY(ms__tensor_new(&each, MS_BOOL, MS_CPU, ndim, shape, c->op->name));
    if (each->numel)
        ms__loop(3, (ms_tensor *[]) { each, c->in[0], c->in[1] }, (uint8_t[]) { MS_C_BOOL, (uint8_t)cls, (uint8_t)cls },
                 fn, tolerance);
    *(uint8_t *)ms__data(c->out[0]) = each->numel == 0 || memchr(ms__data(each), 0, (size_t)each->numel) == NULL;
    ms__release(each);
    return MS_OK;
}
// Tensors of different shapes are unequal.
ms_status ms__cpu_equal(ms_call *c)
{
    if (!ms__same_shape(c->in[0], c->in[1])) {
        *(uint8_t *)ms__data(c->out[0]) = 0;
        return MS_OK;
    }
    int cls = ms__class_of(ms__promote(c->in[0]->dtype, c->in[1]->dtype));
    return all_pairs_true(c, cls, fns_eq[cls], NULL, c->in[0]->ndim, c->in[0]->shape);
}
// Numbers: rtol, atol, whether NaN equals NaN (1 or 0).
ms_status ms__cpu_allclose(ms_call *c)
{
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(ms__broadcast(c, c->in[0], c->in[1], &ndim, shape));
    return all_pairs_true(c, MS_C_F64, c->n_f > 2 && c->f[2] != 0 ? fns_is_close_nan[MS_C_F64] : fns_is_close[MS_C_F64],
                          c->f, ndim, shape);
}
