// SPDX-License-Identifier: MIT
// cuda/elementwise.cu -- the formulas of rows/elementwise.def on the GPU. There is one kernel per computing type and
// layout; a number that is the same for all threads selects the formula. This keeps the number of instantiations small,
// and so the time that nvcc takes. The formulas that training uses most have their own kernels.
#include "cuda/strided.h"
#ifdef __CUDACC__
#pragma nv_diag_suppress 177  // unused functions: formulas that this type does not use
#endif

// ---- which formula: a, b, c are the inputs, s and t the operator's scalar arguments ----

#define FORMULA(name, types, expression) F_##name,
#define TRUTH FORMULA
enum {
#include "rows/elementwise.def"
    F_COUNT
};

// The gamma functions have a kernel of their own: with calls of them, the kernel of all other formulas would need more
// registers.
static __host__ __device__ constexpr bool is_gamma(int code)
{
    return code == F_lgamma || code == F_digamma || code == F_polygamma || code == F_bwd_lgamma ||
           code == F_bwd_digamma || code == F_bwd_polygamma;
}
#define CASE(name, expression)                                             \
    case F_##name:                                                         \
        if constexpr (GAMMA == is_gamma(F_##name)) return (T)(expression); \
        else return a;
#define OMIT(...)
#define FOR_ALL CASE
#define FOR_FOUR CASE
#define FOR_BOOL CASE
template <class T> struct formula;
#define REAL float
#define R(name) name##_f32
#define FOR_FLOATS CASE
#define FOR_DOUBLE OMIT
#define FOR_WHOLE OMIT
#include "cuda/elementwise_body.h"
#define REAL double
#define R(name) name##_f64
#define FOR_FLOATS CASE
#define FOR_DOUBLE CASE
#define FOR_WHOLE OMIT
#include "cuda/elementwise_body.h"
#define MS_INTEGER
#define REAL int64_t
#define R(name) name##_i64
#define FOR_FLOATS OMIT
#define FOR_DOUBLE OMIT
#define FOR_WHOLE CASE
#include "cuda/elementwise_body.h"

// ---- kernels ----

static __device__ __forceinline__ void dense(const strided &l, int code, float s, float t)
{
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= l.numel) return;
    int n = l.numel - i < WIDE ? (int)(l.numel - i) : WIDE;
    float a[WIDE] = {}, b[WIDE] = {}, c[WIDE] = {}, o[WIDE];
    if (l.n > 1) load_lanes(l, 1, i, n, a);
    if (l.n > 2) load_lanes(l, 2, i, n, b);
    if (l.n > 3) load_lanes(l, 3, i, n, c);
    UNROLL
    for (int j = 0; j < WIDE; j++) o[j] = formula<float>::apply(code, a[j], b[j], c[j], s, t);
    store_lanes(l, i, n, o);
}
// Kernels for formula CODE, and for any formula.
template <int CODE> __global__ void dense_kernel(strided l, float s, float t) { dense(l, CODE, s, t); }
__global__ void dense_any_kernel(strided l, int code, float s, float t) { dense(l, code, s, t); }

// A thread computes EACH elements; neighbouring threads compute neighbouring elements. A thread loads all its elements
// of 2 and 4 bytes before it converts the first, so that it waits for memory once.
enum { EACH = 4 };
template <class T> struct gathered {
    uint16_t two[EACH];
    uint32_t four[EACH];
    T v[EACH];
    __device__ __forceinline__ void load(const strided &l, int k, int64_t at, int j)
    {
        const char *p = l.data[k] + at;
        if (l.size[k] == 2) two[j] = *(const uint16_t *)p;
        else if (l.size[k] == 4) four[j] = *(const uint32_t *)p;
        else switch (l.dtype[k]) {
            case MS_F64: v[j] = convert<T>(*(const double *)p); break;
            case MS_I64: v[j] = convert<T>(*(const int64_t *)p); break;
            case MS_I8: v[j] = *(const int8_t *)p; break;
            default: v[j] = *(const uint8_t *)p;
            }
    }
    __device__ __forceinline__ T get(const strided &l, int k, int j) const
    {
        switch (l.dtype[k]) {
        case MS_F32: return convert<T>(ms__bits_float(four[j]));
        case MS_F16: return convert<T>(ms_f16_to_float({ two[j] }));
        case MS_BF16: return convert<T>(ms_bf16_to_float({ two[j] }));
        case MS_I32: return convert<T>((int32_t)four[j]);
        case MS_I16: return convert<T>((int16_t)two[j]);
        default: return v[j];
        }
    }
};
template <class T>
__global__ void __launch_bounds__(256, sizeof(T) == 4 ? 3 : 2) strided_kernel(strided l, int code, T s, T t)
{
    int64_t first = (int64_t)blockIdx.x * blockDim.x * EACH + threadIdx.x;
    gathered<T> a = {}, b = {}, c = {};
    int64_t to[EACH];
    UNROLL
    for (int j = 0; j < EACH; j++) {
        int64_t i = first + j * blockDim.x, at[MAX_OPERANDS];
        if (i >= l.numel) break;
        place<MAX_OPERANDS>(l, i, at);
        to[j] = at[0];
        if (l.n > 1) a.load(l, 1, at[1], j);
        if (l.n > 2) b.load(l, 2, at[2], j);
        if (l.n > 3) c.load(l, 3, at[3], j);
    }
    UNROLL
    for (int j = 0; j < EACH; j++)
        if (first + j * blockDim.x < l.numel) {
            T o = formula<T>::apply(code, l.n > 1 ? a.get(l, 1, j) : 0, l.n > 2 ? b.get(l, 2, j) : 0,
                                    l.n > 3 ? c.get(l, 3, j) : 0, s, t);
            own_value<T>::store_truth(l.dtype[0], l.data[0] + to[j], o);
        }
}
// A thread computes one element.
template <class T> __global__ void gamma_kernel(strided l, int code, T s)
{
    int64_t i = GLOBAL_INDEX, at[MAX_OPERANDS];
    if (i >= l.numel) return;
    place<MAX_OPERANDS>(l, i, at);
    T a = value<T>::load(l.dtype[1], l.data[1] + at[1]), b = 0;
    if (l.n > 2) b = own_value<T>::load(l.dtype[2], l.data[2] + at[2]);
    own_value<T>::store(l.dtype[0], l.data[0] + at[0], formula<T>::template apply<true>(code, a, b, 0, s, 0));
}

// ---- launches ----

// Converts a scalar argument to the computing type: integers saturate (clamp's bounds may be infinite), NaN becomes 0.
template <class T> static T number(double v) { return (T)v; }
template <> int64_t number<int64_t>(double v)
{
    return v >= 0x1p63 ? INT64_MAX : v > -0x1p63 ? (int64_t)v : v == v ? INT64_MIN : 0;
}

// The code that selects a formula, and the operator's scalar arguments.
struct chosen {
    int code;
    double s = 0, t = 0;
};

// Double and int64 have no kernels for dense operands: eight copies of all formulas would be too large.
static ms_status run_dense(const char *what, int index, const strided &l, int code, float s, float t)
{
    grid g = grid_of(up(l.numel, WIDE));
    switch (code) {
#define HOT(name) \
    case F_##name: return launch(what, index, dense_kernel<F_##name>, g.blocks, g.threads, l, s, t);
        HOT(add) HOT(mul) HOT(mul_scalar) HOT(add_scaled) HOT(gelu_tanh) HOT(bwd_gelu_tanh)
#undef HOT
    }
    return launch(what, index, dense_any_kernel, g.blocks, g.threads, l, code, s, t);
}

template <class T> static ms_status run_typed(const char *what, int index, const strided &l, const chosen &f)
{
    int code = f.code;
    T u = number<T>(f.s), v = number<T>(f.t);
    if constexpr (!std::is_same_v<T, int64_t>)
        if (is_gamma(code)) {
            grid g = grid_of(l.numel);
            return launch(what, index, gamma_kernel<T>, g.blocks, g.threads, l, code, u);
        }
    if constexpr (std::is_same_v<T, float>)
        if (l.dense) return run_dense(what, index, l, code, u, v);
    grid g = grid_of(up(l.numel, EACH));
    return launch(what, index, strided_kernel<T>, g.blocks, g.threads, l, code, u, v);
}

static ms_status run_loop(const char *what, int n, const ms_tensor *const *x, int cls, const chosen &f)
{
    if (x[0]->numel == 0) return MS_OK;
    strided l = strided_of(n, x);
    int index = index_of(x[0]);
    switch (cls) {
    case MS_F32: return run_typed<float>(what, index, l, f);
    case MS_F64: return run_typed<double>(what, index, l, f);
    default: return run_typed<int64_t>(what, index, l, f);
    }
}

// The computing type of an operator on this dtype; bools are computed as integers.
static int class_of(int dtype) { return dtype == MS_F64 ? MS_F64 : dtype <= MS_BF16 ? MS_F32 : MS_I64; }

// As on the CPU: computes in class_of the output's dtype; but in double if this class is float32 and an input with
// dimensions is float64.
static ms_status run(ms_call *c, int n, const chosen &f)
{
    const ms_tensor *x[MAX_OPERANDS] = { c->out[0] };
    int cls = class_of(c->out[0]->dtype);
    for (int k = 0; k < n; k++) {
        x[k + 1] = c->in[k];
        if (c->in[k]->dtype == MS_F64 && cls == MS_F32 && c->in[k]->ndim) cls = MS_F64;
    }
    ms_status st = MS_OK;
    ms_tensor *apart[MAX_OPERANDS] = {};
    for (int k = 1; k < n && st == MS_OK; k++)
        if (c->in[k]->storage == c->out[0]->storage) {
            st = ms__apart(&apart[k], c->out[0], c->in[k]);
            x[k + 1] = apart[k];
        }
    if (st == MS_OK) st = run_loop(c->op->name, n + 1, x, cls, f);
    for (int k = 1; k < n; k++)
        if (apart[k]) ms__release(apart[k]);
    return st;
}
static double f_of(const ms_call *c, int k) { return c->n_f > k ? c->f[k] : 0; }
static ms_status run(ms_call *c, int n, int code) { return run(c, n, chosen { code, f_of(c, 0), f_of(c, 1) }); }

static ms_status run_norm_backward(ms_call *c)
{
    if (c->f[0] == 1) return run(c, 2, chosen { F_bwd_norm_1 });
    return run(c, 3, chosen { c->f[0] == 2 ? F_bwd_norm_2 : F_bwd_norm_p, c->f[0] });
}
static bool wants_tanh(const ms_call *c) { return c->n_i > 0 && c->i[0]; }
static ms_status run_gelu(ms_call *c) { return run(c, 1, chosen { wants_tanh(c) ? F_gelu_tanh : F_gelu }); }
static ms_status run_gelu_backward(ms_call *c)
{
    return run(c, 2, chosen { wants_tanh(c) ? F_bwd_gelu_tanh : F_bwd_gelu });
}
static ms_status run_add(ms_call *c)
{
    return run(c, 2, chosen { c->n_f == 0 || c->f[0] == 1 ? F_add : F_add_scaled, f_of(c, 0) });
}
static ms_status run_sub(ms_call *c)
{
    if (c->n_f == 0 || c->f[0] == 1) return run(c, 2, chosen { F_sub });
    return run(c, 2, chosen { F_add_scaled, -c->f[0] });
}
static ms_status run_pow_scalar(ms_call *c)
{
    double p = c->f[0];
    bool real = c->out[0]->dtype <= MS_BF16;
    int code = p == 1              ? F_copy
               : p == 2            ? F_square
               : p == 3            ? F_cube
               : real && p == 0.5  ? F_sqrt
               : real && p == -0.5 ? F_rsqrt
               : real && p == -1   ? F_reciprocal
                                   : F_pow_scalar;
    return run(c, 1, chosen { code, p });
}

static ms_status compare(ms_call *c, int n, int code)
{
    const ms_tensor *x[] = { c->out[0], c->in[0], c->in[1] };
    return run_loop(c->op->name, n + 1, x, class_of(ms__result_dtype(c->in[0], c->in[1])), { code });
}
// A scalar is first rounded to the dtype of a floating-point tensor. An integer tensor and a number that no int64
// equals are compared in float64.
static ms_status compare_scalar(ms_call *c, int n, int code)
{
    const ms_tensor *x[] = { c->out[0], c->in[0] };
    int dtype = c->in[0]->dtype, cls = class_of(dtype);
    double f = c->f[0];
    if (dtype == MS_F16) f = ms_f16_to_float(ms_float_to_f16((float)f));
    if (dtype == MS_BF16) f = ms_bf16_to_float(ms_float_to_bf16((float)f));
    if (cls == MS_I64 && !(f >= -0x1p63 && f < 0x1p63 && (double)(int64_t)f == f)) cls = MS_F64;
    return run_loop(c->op->name, n + 1, x, cls, { code, f });
}
static ms_status test(ms_call *c, int n, int code)
{
    const ms_tensor *x[] = { c->out[0], c->in[0] };
    int dtype = c->in[0]->dtype;
    return run_loop(c->op->name, n + 1, x, dtype == MS_F32 || ms__is_half(dtype) ? MS_F32 : MS_F64, { code });
}
// Computes in the wider of the inputs' types, so that no nonzero value becomes 0.
static ms_status logic(ms_call *c, int n, int code)
{
    const ms_tensor *x[] = { c->out[0], c->in[0], c->in[1] };
    int a = class_of(c->in[0]->dtype), b = n > 1 ? class_of(c->in[1]->dtype) : a;
    return run_loop(c->op->name, n + 1, x,
                    a == MS_F64 || b == MS_F64   ? MS_F64
                    : a == MS_F32 || b == MS_F32 ? MS_F32
                                                 : MS_I64,
                    { code });
}

#define KERNEL(name, how, n, formula) \
    static ms_status run_##name(ms_call *c) { return how(c, n, F_##formula); }
#include "rows/elementwise.def"

static ms_status run_where(ms_call *c)
{
    const ms_tensor *x[] = { c->out[0], c->in[0], c->in[1], c->in[2] };
    return run_loop(c->op->name, 4, x, class_of(c->out[0]->dtype), { F_where });
}
static ms_status run_where_backward(ms_call *c)
{
    const ms_tensor *x[] = { c->out[0], c->in[0], c->in[1] };
    return run_loop(c->op->name, 3, x, class_of(c->out[0]->dtype), { c->i[0] ? F_where_b : F_where_a });
}
static ms_status run_masked_fill(ms_call *c)
{
    const ms_tensor *x[] = { c->out[0], c->in[0], c->in[1] };
    return run_loop(c->op->name, 3, x, class_of(c->out[0]->dtype), { F_masked_fill, c->f[0] });
}

// ---- whole tensors compared: one bool ----

// How two elements are compared: exactly, as integers, or by a formula and its numbers.
struct comparison {
    bool exact_integers;
    double s, t;
};
template <int CODE> static __device__ __forceinline__ bool is_same_element(const comparison &by, double a, double b)
{
    return formula<double>::apply(CODE, a, b, 0, by.s, by.t) != 0;
}
// Sets *same to 0 unless formula CODE holds for all pairs of elements; for dense operands of float32 and half types.
template <int CODE> __global__ void dense_all_kernel(strided l, comparison by, int *same)
{
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= l.numel) return;
    int n = l.numel - i < WIDE ? (int)(l.numel - i) : WIDE;
    float a[WIDE], b[WIDE];
    bool yes = true;
    load_lanes<true>(l, 1, i, n, a);
    load_lanes<true>(l, 2, i, n, b);
    UNROLL
    for (int j = 0; j < WIDE; j++) yes = yes && (j >= n || is_same_element<CODE>(by, a[j], b[j]));
    if (!yes) atomicAnd(same, 0);
}
template <int CODE> __global__ void all_kernel(strided l, comparison by, int *same)
{
    int64_t i = GLOBAL_INDEX, at[3];
    if (i >= l.numel) return;
    place<3>(l, i, at);
    const char *p = l.data[1] + at[1], *q = l.data[2] + at[2];
    bool yes = CODE == F_eq && by.exact_integers
                   ? own_value<int64_t>::load(l.dtype[1], p) == own_value<int64_t>::load(l.dtype[2], q)
                   : is_same_element<CODE>(by, value<double>::load(l.dtype[1], p), value<double>::load(l.dtype[2], q));
    if (!yes) atomicAnd(same, 0);
}
// Sets *same to `begin` or, if that is negative, stores *same, the result, in *out.
__global__ void truth_kernel(uint8_t *out, int *same, int begin)
{
    if (begin >= 0) *same = begin;
    else *out = (uint8_t)*same;
}
static bool is_narrow(int dtype) { return dtype == MS_F32 || ms__is_half(dtype); }
// Stores whether formula `code` holds for all pairs of elements of the two inputs, which are broadcast to the shape of
// `over` (whose data is not read). same: false if the result is false already.
static ms_status all_elements_true(ms_call *c, int code, bool same, const ms_tensor *over)
{
    const ms_tensor *a = c->in[0], *b = c->in[1], *x[] = { over, a, b };
    int index = index_of(a);
    uint8_t *out = (uint8_t *)ms__data(c->out[0]);
    ms_block *word;
    MS_TRY(ms__alloc(&word, ms__device(a), sizeof(int), c->op->name));
    ms_status st = launch(c->op->name, index, truth_kernel, 1, 1, out, (int *)word->data, same ? 1 : 0);
    if (st == MS_OK && same && over->numel) {
        strided l = strided_of(3, x);
        comparison by = { code == F_eq && a->dtype > MS_BF16 && b->dtype > MS_BF16, f_of(c, 0), f_of(c, 1) };
        bool dense = l.dense && is_narrow(a->dtype) && is_narrow(b->dtype);
        grid g = grid_of(dense ? up(over->numel, WIDE) : over->numel);
#define OF(code) (dense ? dense_all_kernel<code> : all_kernel<code>)
        st = launch(c->op->name, index,
                    code == F_eq         ? OF(F_eq)
                    : code == F_is_close ? OF(F_is_close)
                                         : OF(F_is_close_nan),
                    g.blocks, g.threads, l, by, (int *)word->data);
#undef OF
    }
    if (st == MS_OK) st = launch(c->op->name, index, truth_kernel, 1, 1, out, (int *)word->data, -1);
    ms__free(word);
    return st;
}
static ms_status run_equal(ms_call *c)
{
    const ms_tensor *a = c->in[0], *b = c->in[1];
    return all_elements_true(c, F_eq,
                             a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0,
                             a);
}
// Numbers: rtol, atol, whether NaN equals NaN (1 or 0).
static ms_status run_allclose(ms_call *c)
{
    ms_tensor over = *c->in[0];
    int ndim;
    MS_TRY(ms__broadcast(c, c->in[0], c->in[1], &ndim, over.shape));
    over.ndim = (uint8_t)ndim;
    over.numel = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        over.stride[d] = over.numel;
        over.numel *= over.shape[d];
    }
    return all_elements_true(c, c->n_f > 2 && c->f[2] != 0 ? F_is_close_nan : F_is_close, true, &over);
}

// Converts through the destination's computing type; to bool, through the source's.
ms_status ms__cuda_convert(ms_tensor *dst, const ms_tensor *src)
{
    const ms_tensor *x[] = { dst, src };
    return run_loop("copy", 2, x, class_of(dst->dtype == MS_BOOL ? src->dtype : dst->dtype), { F_copy });
}

#define ROW(name, n, check, kernel, ...) { #name, run_##kernel },
#define INTERNAL(name, ...) { #name, run_##name },
#define GRADIENT(name, kept) { #name "_backward", run_##name##_backward },
extern const ms_cuda_kernel ms__cuda_elementwise[];
const ms_cuda_kernel ms__cuda_elementwise[] = {
#include "rows/elementwise.def"
    { NULL, NULL }
};
