// SPDX-License-Identifier: MIT
// cuda/elementwise.cu -- the formulas of rows/elementwise.def on the GPU. There is one kernel per computing type and
// layout; a number that is the same for all threads selects the formula. This keeps the number of instantiations small,
// and the plugin builds in seconds. The formulas that training uses most have their own kernels.
#include "cuda/cuda.h"
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

#define CASE(name, expression) \
    case F_##name:             \
        return (T)(expression);
#define OMIT(...)
#define FOR_ALL CASE
#define FOR_FOUR CASE
#define FOR_BOOL CASE
template <class T> struct formula;
#define REAL float
#define R(name) name##_f32
#define FOR_FLOATS CASE
#define FOR_DOUBLE OMIT
#include "cuda/elementwise_body.h"
#define REAL double
#define R(name) name##_f64
#define FOR_FLOATS CASE
#define FOR_DOUBLE CASE
#include "cuda/elementwise_body.h"
#define MS_INTEGER
#define REAL int64_t
#define R(name) name##_i64
#define FOR_FLOATS OMIT
#define FOR_DOUBLE OMIT
#include "cuda/elementwise_body.h"

// ---- kernels ----

enum { LANES = 4, THREADS = 256 };

// Loads `LANES` adjacent elements, in one wide access where type and alignment allow it.
template <class T> static __device__ __forceinline__ void load_lanes(const strided &l, int k, int64_t i, int n, T *v)
{
    int64_t r = l.repeat[k];
    if (r == 1) {
        T one = value<T>::load(l.dtype[k], l.data[k]);
        for (int j = 0; j < LANES; j++) v[j] = one;
        return;
    }
    if (r) i = l.numel <= 0x7fffffff ? (int64_t)((uint32_t)i % (uint32_t)r) : i % r;
    const char *p = l.data[k] + i * l.size[k];
    if (n == LANES && sizeof(T) == 4 && l.dtype[k] == MS_F32) {
        float4 f = *(const float4 *)p;
        v[0] = (T)f.x;
        v[1] = (T)f.y;
        v[2] = (T)f.z;
        v[3] = (T)f.w;
        return;
    }
    if (n == LANES && sizeof(T) == 4 && ms__is_half(l.dtype[k])) {
        ushort4 h = *(const ushort4 *)p;
        uint16_t bits[4] = { h.x, h.y, h.z, h.w };
        for (int j = 0; j < LANES; j++) {
            ms_f16 x = { bits[j] };
            ms_bf16 y = { bits[j] };
            v[j] = (T)(l.dtype[k] == MS_F16 ? ms_f16_to_float(x) : ms_bf16_to_float(y));
        }
        return;
    }
    for (int j = 0; j < LANES; j++) v[j] = j < n ? value<T>::load(l.dtype[k], p + j * l.size[k]) : 0;
}
template <class T> static __device__ __forceinline__ void store_lanes(const strided &l, int64_t i, int n, const T *v)
{
    char *p = l.data[0] + i * l.size[0];
    if (n == LANES && sizeof(T) == 4 && l.dtype[0] == MS_F32) {
        *(float4 *)p = make_float4((float)v[0], (float)v[1], (float)v[2], (float)v[3]);
        return;
    }
    if (n == LANES && sizeof(T) == 4 && ms__is_half(l.dtype[0])) {
        uint16_t bits[4];
        for (int j = 0; j < LANES; j++)
            bits[j] = l.dtype[0] == MS_F16 ? ms_float_to_f16((float)v[j]).bits : ms_float_to_bf16((float)v[j]).bits;
        *(ushort4 *)p = make_ushort4(bits[0], bits[1], bits[2], bits[3]);
        return;
    }
    for (int j = 0; j < n; j++) value<T>::store(l.dtype[0], p + j * l.size[0], v[j]);
}

template <class T, int FIXED> __global__ void dense_kernel(strided l, int chosen, T s, T t)
{
    int code = FIXED >= 0 ? FIXED : chosen;
    int64_t i = GLOBAL_INDEX * LANES;
    if (i >= l.numel) return;
    int n = l.numel - i < LANES ? (int)(l.numel - i) : LANES;
    T a[LANES] = {}, b[LANES] = {}, c[LANES] = {}, o[LANES];
    if (l.n > 1) load_lanes<T>(l, 1, i, n, a);
    if (l.n > 2) load_lanes<T>(l, 2, i, n, b);
    if (l.n > 3) load_lanes<T>(l, 3, i, n, c);
    for (int j = 0; j < LANES; j++) o[j] = formula<T>::apply(code, a[j], b[j], c[j], s, t);
    store_lanes<T>(l, i, n, o);
}

template <class T> __global__ void strided_kernel(strided l, int code, T s, T t)
{
    int64_t i = GLOBAL_INDEX, at[MAX_OPERANDS];
    if (i >= l.numel) return;
    place(l, i, at);
    T a = l.n > 1 ? value<T>::load(l.dtype[1], l.data[1] + at[1]) : 0,
      b = l.n > 2 ? value<T>::load(l.dtype[2], l.data[2] + at[2]) : 0;
    T c = l.n > 3 ? value<T>::load(l.dtype[3], l.data[3] + at[3]) : 0;
    value<T>::store(l.dtype[0], l.data[0] + at[0], formula<T>::apply(code, a, b, c, s, t));
}

// ---- launches ----

strided ms__strided(int n, const ms_tensor *const *x)
{
    strided l = {};
    const ms_tensor *o = x[0];
    l.n = n;
    l.numel = o->numel;
    int64_t shape[MS_MAX_DIMS], stride[MAX_OPERANDS][MS_MAX_DIMS];
    for (int k = 0; k < n; k++) {
        const ms_tensor *t = x[k];
        int lead = o->ndim - t->ndim;
        l.data[k] = (char *)ms__data(t);
        l.dtype[k] = t->dtype;
        l.size[k] = (uint8_t)ms__dtype_size(t->dtype);
        for (int d = 0; d < o->ndim; d++)
            stride[k][d] =
                d < lead || (t->shape[d - lead] == 1 && o->shape[d] != 1) ? 0 : t->stride[d - lead] * l.size[k];
    }
    for (int d = 0; d < o->ndim; d++) shape[d] = o->shape[d];
    // Drop dimensions of size 1; merge adjacent dimensions that every operand can traverse with one stride.
    int nd = 0;
    for (int d = 0; d < o->ndim; d++) {
        if (shape[d] == 1) continue;
        bool join = nd > 0;
        for (int k = 0; join && k < n; k++) join = l.stride[k][nd - 1] == stride[k][d] * shape[d];
        int at = join ? nd - 1 : nd++;
        l.shape[at] = join ? l.shape[at] * shape[d] : shape[d];
        for (int k = 0; k < n; k++) l.stride[k][at] = stride[k][d];
    }
    l.ndim = nd;
    // Dense operands: 4 elements at a time, aligned.
    l.dense = true;
    for (int k = 0; k < n && l.dense; k++) {
        int64_t run = 1;
        int d = nd - 1;
        for (; d >= 0 && l.stride[k][d] == run * l.size[k]; d--) run *= l.shape[d];
        bool whole = run == l.numel, rest = true;
        for (; d >= 0; d--) rest = rest && l.stride[k][d] == 0;
        l.repeat[k] = whole && run > 1 ? 0 : run;
        l.dense = (uintptr_t)l.data[k] % (4u * l.size[k]) == 0 || run == 1;
        l.dense = l.dense && (whole || (k > 0 && rest && (run == 1 || run % 4 == 0)));
    }
    return l;
}

// Converts a number to an element: integers saturate (clamp's bounds may be infinite).
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

template <class T> static ms_status run_typed(const char *what, int index, const strided &l, const chosen &f)
{
    int code = f.code;
    T u = number<T>(f.s), v = number<T>(f.t);
    int64_t wide = up(up(l.numel, LANES), THREADS);
    if (!l.dense) return launch(what, index, strided_kernel<T>, up(l.numel, THREADS), THREADS, l, code, u, v);
    if (sizeof(T) == 4) switch (code) {
#define HOT(name) \
    case F_##name: return launch(what, index, dense_kernel<T, F_##name>, wide, THREADS, l, code, u, v);
            HOT(add) HOT(mul) HOT(mul_scalar) HOT(add_scaled) HOT(copy) HOT(gelu_tanh) HOT(bwd_gelu_tanh)
#undef HOT
        }
    return launch(what, index, dense_kernel<T, -1>, wide, THREADS, l, code, u, v);
}

static ms_status run_loop(const char *what, int n, const ms_tensor *const *x, int cls, const chosen &f)
{
    if (x[0]->numel == 0) return MS_OK;
    strided l = ms__strided(n, x);
    int index = index_of(x[0]);
    switch (cls) {
    case MS_F32: return run_typed<float>(what, index, l, f);
    case MS_F64: return run_typed<double>(what, index, l, f);
    default: return run_typed<int64_t>(what, index, l, f);
    }
}

// The computing type of an operator on this dtype; bools are computed as integers.
static int class_of(int dtype) { return dtype == MS_F64 ? MS_F64 : dtype <= MS_BF16 ? MS_F32 : MS_I64; }

// As on the CPU: computes in a type that can represent the output and every input.
static ms_status run(ms_call *c, int n, const chosen &f)
{
    const ms_tensor *x[MAX_OPERANDS] = { c->out[0] };
    int cls = class_of(c->out[0]->dtype);
    for (int k = 0; k < n; k++) {
        x[k + 1] = c->in[k];
        if (c->in[k]->dtype == MS_F64 && cls == MS_F32 && c->in[k]->ndim) cls = MS_F64;
    }
    ms_tensor *apart = NULL;
    if (n == 2 && c->in[1]->storage == c->out[0]->storage) {
        MS_TRY(ms__apart(&apart, c->out[0], c->in[1]));
        x[2] = apart;
    }
    ms_status st = run_loop(c->op->name, n + 1, x, cls, f);
    if (apart) ms__release(apart);
    return st;
}
static double f_of(const ms_call *c, int k) { return c->n_f > k ? c->f[k] : 0; }
static ms_status run(ms_call *c, int n, int code) { return run(c, n, chosen { code, f_of(c, 0), f_of(c, 1) }); }

static ms_status run_norm_backward(ms_call *c)
{
    if (c->f[0] == 1) return run(c, 2, chosen { F_bwd_norm_1 });
    return run(c, 3, chosen { c->f[0] == 2 ? F_bwd_norm_2 : F_bwd_norm_p, c->f[0] });
}
static bool tanh_form(const ms_call *c) { return c->n_i > 0 && c->i[0]; }
static ms_status run_gelu(ms_call *c) { return run(c, 1, chosen { tanh_form(c) ? F_gelu_tanh : F_gelu }); }
static ms_status run_gelu_backward(ms_call *c)
{
    return run(c, 2, chosen { tanh_form(c) ? F_bwd_gelu_tanh : F_bwd_gelu });
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
// The scalar is first rounded to the tensor's dtype. An integer tensor and a fraction are compared in float64.
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

__global__ void all_kernel(strided l, int code, bool exact_integers, double s, double t, int *same)
{
    int64_t i = GLOBAL_INDEX, at[MAX_OPERANDS];
    if (i >= l.numel) return;
    place(l, i, at);
    bool yes;
    if (exact_integers)
        yes =
            value<int64_t>::load(l.dtype[1], l.data[1] + at[1]) == value<int64_t>::load(l.dtype[2], l.data[2] + at[2]);
    else {
        double a = value<double>::load(l.dtype[1], l.data[1] + at[1]),
               b = value<double>::load(l.dtype[2], l.data[2] + at[2]);
        yes = formula<double>::apply(code, a, b, 0, s, t) != 0;
    }
    if (!yes) atomicAnd(same, 0);
}
__global__ void truth_kernel(uint8_t *out, int *same, int begin)
{
    if (begin >= 0) *same = begin;
    else *out = (uint8_t)*same;
}
// a and b are broadcast to the shape of `over`, whose data is not read.
static ms_status all_true(ms_call *c, int code, bool same, const ms_tensor *over)
{
    const ms_tensor *a = c->in[0], *b = c->in[1], *x[] = { over, a, b };
    int index = index_of(a);
    uint8_t *out = (uint8_t *)ms__data(c->out[0]);
    ms_block *word;
    MS_TRY(ms__alloc(&word, ms__device(a), sizeof(int), c->op->name));
    ms_status st = launch(c->op->name, index, truth_kernel, 1, 1, out, (int *)word->data, same ? 1 : 0);
    if (st == MS_OK && same && over->numel) {
        strided l = ms__strided(3, x);
        bool whole = code == F_eq && a->dtype > MS_BF16 && b->dtype > MS_BF16;
        st = launch(c->op->name, index, all_kernel, up(over->numel, THREADS), THREADS, l, code, whole, f_of(c, 0),
                    f_of(c, 1), (int *)word->data);
    }
    if (st == MS_OK) st = launch(c->op->name, index, truth_kernel, 1, 1, out, (int *)word->data, -1);
    ms__free(word);
    return st;
}
static ms_status run_equal(ms_call *c)
{
    const ms_tensor *a = c->in[0], *b = c->in[1];
    return all_true(c, F_eq, a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0,
                    a);
}
// f2: whether NaN equals NaN.
static ms_status run_allclose(ms_call *c)
{
    ms_tensor over = *c->in[0];
    int ndim;
    MS_TRY(ms__broadcast(c, c->in[0], c->in[1], &ndim, over.shape));
    over.ndim = (uint8_t)ndim;
    over.numel = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        over.stride[d] = 0;
        over.numel *= over.shape[d];
    }
    return all_true(c, c->n_f > 2 && c->f[2] != 0 ? F_is_close_nan : F_is_close, true, &over);
}

// ---- copies and fills of tensors, for the engine ----

// A copy without conversion moves bytes, which keeps the payload of NaN.
__global__ void move_kernel(strided l)
{
    int64_t i = GLOBAL_INDEX, at[MAX_OPERANDS];
    if (i >= l.numel) return;
    place(l, i, at);
    const char *from = l.data[1] + at[1];
    char *to = l.data[0] + at[0];
    switch (l.size[0]) {
    case 1: *(uint8_t *)to = *(const uint8_t *)from; break;
    case 2: *(uint16_t *)to = *(const uint16_t *)from; break;
    case 4: *(uint32_t *)to = *(const uint32_t *)from; break;
    default: *(uint64_t *)to = *(const uint64_t *)from; break;
    }
}

// A transposed source is read in 32 x 32 tiles through shared memory, so that reads and writes are both coalesced.
enum { TILE = 32 };
__global__ void turn_kernel(strided l, int64_t tiles_r, int64_t tiles_c)
{
    __shared__ uint32_t tile[TILE][TILE + 1];
    int64_t b = blockIdx.x, tc = b % tiles_c, tr = b / tiles_c % tiles_r, rest = b / tiles_c / tiles_r;
    int nd = l.ndim, tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    const char *from = l.data[1];
    char *to = l.data[0];
    for (int d = nd - 3; d >= 0; d--) {
        int64_t k = rest % l.shape[d];
        rest /= l.shape[d];
        from += k * l.stride[1][d];
        to += k * l.stride[0][d];
    }
    int64_t rows = l.shape[nd - 2], cols = l.shape[nd - 1];
    for (int j = ty; j < TILE; j += 8) {  // the source is contiguous along the rows
        int64_t r = tr * TILE + tx, q = tc * TILE + j;
        if (r < rows && q < cols) {
            const char *p = from + r * l.stride[1][nd - 2] + q * l.stride[1][nd - 1];
            tile[j][tx] = l.size[0] == 2 ? *(const uint16_t *)p : *(const uint32_t *)p;
        }
    }
    __syncthreads();
    for (int j = ty; j < TILE; j += 8) {
        int64_t r = tr * TILE + j, q = tc * TILE + tx;
        if (r < rows && q < cols) {
            char *p = to + r * l.stride[0][nd - 2] + q * l.stride[0][nd - 1];
            if (l.size[0] == 2) *(uint16_t *)p = (uint16_t)tile[tx][j];
            else *(uint32_t *)p = tile[tx][j];
        }
    }
}

ms_status ms__cuda_copy_tensor(ms_tensor *dst, const ms_tensor *src)
{
    if (dst->numel == 0) return MS_OK;
    int index = index_of(dst);
    const ms_tensor *x[] = { dst, src };
    if (dst->dtype != src->dtype) {
        // Converts through the destination's computing type; conversion to bool uses the source's.
        return run_loop("copy", 2, x, class_of(dst->dtype == MS_BOOL ? src->dtype : dst->dtype), { F_copy });
    }
    strided l = ms__strided(2, x);
    if (l.ndim <= 1 && (l.ndim == 0 || (l.stride[0][0] == l.size[0] && l.stride[1][0] == l.size[0]))) {
        MS_TRY(ms__cuda_use(index));
        size_t bytes = (size_t)l.numel * l.size[0];
        CUDA_TRY(index,
                 cudaMemcpyAsync(l.data[0], l.data[1], bytes, cudaMemcpyDeviceToDevice,
                                 ms__cuda_stream(index, MS_STREAM_COMPUTE)),
                 "%zu bytes on the device", bytes);
        return MS_OK;
    }
    int n = l.ndim;
    if (n >= 2 && (l.size[0] == 2 || l.size[0] == 4) && l.stride[0][n - 1] == l.size[0] &&
        l.stride[1][n - 1] != l.size[0] && l.shape[n - 1] >= 16) {
        int other = -1;
        for (int d = 0; d < n - 1; d++)
            if (l.stride[1][d] == l.size[0] && l.shape[d] >= 16) other = d;
        if (other >= 0) {
            for (int d = other; d < n - 2; d++) {  // move the source's contiguous dimension next to the last
                int64_t shape = l.shape[d], a = l.stride[0][d], b = l.stride[1][d];
                l.shape[d] = l.shape[d + 1], l.stride[0][d] = l.stride[0][d + 1], l.stride[1][d] = l.stride[1][d + 1];
                l.shape[d + 1] = shape, l.stride[0][d + 1] = a, l.stride[1][d + 1] = b;
            }
            int64_t tr = up(l.shape[n - 2], TILE), tc = up(l.shape[n - 1], TILE),
                    batch = l.numel / (l.shape[n - 1] * l.shape[n - 2]);
            return launch_blocks("copy", index, turn_kernel, tr * tc * batch, 256, l, tr, tc);
        }
    }
    return launch("copy", index, move_kernel, up(l.numel, THREADS), THREADS, l);
}

template <class T> __global__ void fill_kernel(strided l, T v)
{
    int64_t i = GLOBAL_INDEX, at[MAX_OPERANDS];
    if (i >= l.numel) return;
    place(l, i, at);
    value<T>::store(l.dtype[0], l.data[0] + at[0], v);
}
ms_status ms__cuda_fill_tensor(ms_tensor *t, double v)
{
    if (t->numel == 0) return MS_OK;
    int index = index_of(t);
    if (v == 0 && !std::signbit(v) && ms__is_contiguous(t)) {
        MS_TRY(ms__cuda_use(index));
        CUDA_TRY(index, cudaMemsetAsync(ms__data(t), 0, ms__nbytes(t), ms__cuda_stream(index, MS_STREAM_COMPUTE)),
                 "%zu bytes", ms__nbytes(t));
        return MS_OK;
    }
    const ms_tensor *x[] = { t };
    strided l = ms__strided(1, x);
    int64_t blocks = up(l.numel, THREADS);
    if (t->dtype == MS_BOOL) v = v != 0;
    switch (class_of(t->dtype)) {
    case MS_F32: return launch("fill", index, fill_kernel<float>, blocks, THREADS, l, (float)v);
    case MS_F64: return launch("fill", index, fill_kernel<double>, blocks, THREADS, l, v);
    default: return launch("fill", index, fill_kernel<int64_t>, blocks, THREADS, l, (int64_t)v);
    }
}

#define ROW(name, n, check, kernel, ...) { #name, run_##kernel },
#define INTERNAL(name, ...) { #name, run_##name },
#define GRADIENT(name, kept) { #name "_backward", run_##name##_backward },
extern const ms_cuda_kernel ms__cuda_elementwise[];
const ms_cuda_kernel ms__cuda_elementwise[] = {
#include "rows/elementwise.def"
    { NULL, NULL }
};
