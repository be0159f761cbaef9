// SPDX-License-Identifier: MIT
// cuda/fold.h -- folds: sums, products, extremes and norms of a tensor's elements along any dimensions.
//
// A tensor is seen as outputs x length. Floating-point numbers are folded in float64, integers in int64. How the length
// is divided into segments, and how their results are combined, depends only on shape, strides, dtype and whether the
// data are aligned to 16 bytes. Dense operands are read 16 bytes at a time.
#ifndef MS_CUDA_FOLD_H
#define MS_CUDA_FOLD_H

#include "cuda/segments.h"
#include "rows/layout.h"

enum {
    SUM,
    PROD,
    PROD_NOT_0,  // the product of the elements that are not 0
    LARGEST,
    SMALLEST,
    COUNT,
    ABS_SUM,
    SQUARE_SUM,
    ABS_LARGEST,
    ABS_SMALLEST,
    POWER_SUM,
    DEVIATION,
    EXP_SUM
};
enum { SEGMENT = 16384, MOST_SEGMENTS = 1024 };

struct fold_plan {
    const char *data;
    int dtype, nk, nr;
    // Shapes, and strides in bytes, of the nk kept and of the nr reduced dimensions.
    int64_t kshape[MS_MAX_DIMS], kstride[MS_MAX_DIMS], rshape[MS_MAX_DIMS], rstride[MS_MAX_DIMS];
    int64_t outputs, length, segments, segment;  // segment: elements in each segment but the last
    bool columns;                                // neighbouring threads fold different outputs, not parts of one
    bool dense;                                  // floating-point elements that can be read 16 bytes at a time
};

// Divides the length into n segments, or somewhat fewer; at most MOST_SEGMENTS.
static void cut_segments(fold_plan *p, int64_t n)
{
    p->segments = n < 1 ? 1 : n > MOST_SEGMENTS ? (int64_t)MOST_SEGMENTS : n;
    p->segment = up(p->length, p->segments);
    if (p->segment > 0) p->segments = up(p->length, p->segment);
}

static bool is_real(const ms_tensor *t) { return t->dtype <= MS_BF16; }
static int64_t column_tiles(const fold_plan *p) { return up(p->kshape[p->nk - 1], BLOCK); }
// Sets p->dense, p->segments and p->segment.
static void finish_plan(fold_plan *p)
{
    int size = ms__dtype_size(p->dtype), last = p->nk - 1;
    int64_t bytes = p->outputs * p->length * size, n, more;
    p->dense = p->dtype <= MS_BF16 && p->length > 0 && p->outputs > 0;
    if (!p->columns) {
        p->dense = p->dense && p->nr == 1 && p->rstride[0] == size;
        n = up(p->length, SEGMENT);
        n = n > 512 ? 512 : n;
        more = p->outputs * n < ENOUGH ? filling_segments(bytes, p->outputs, p->length, 4096 / size) : 1;
        return cut_segments(p, more > n ? more : n);
    }
    p->dense = p->dense && p->kstride[last] == size && p->kshape[last] % WIDE == 0 && (uintptr_t)p->data % 16 == 0;
    for (int d = 0; d < last; d++) p->dense = p->dense && p->kstride[d] % 16 == 0;
    for (int d = 0; d < p->nr; d++) p->dense = p->dense && p->rstride[d] % 16 == 0;
    if (p->dense) {
        int64_t tiles = column_tiles(p) * (p->outputs / p->kshape[last]);
        n = column_segments(p->length, tiles);
        more = tiles * n < ENOUGH ? filling_segments(bytes, tiles, p->length, 4) : 1;
        return cut_segments(p, more > n ? more : n);
    }
    // One thread folds a segment of a column, in blocks of 64 threads where there are few threads.
    n = up(p->length, 256);
    n = n > 512 ? 512 : n;
    if (p->outputs > 0 && p->outputs * n < ENOUGH * 64 && bytes >= LARGE) {
        n = up(p->length, 8), more = up(2 * ENOUGH * 64, p->outputs);
        if (more < n) n = more;
    }
    cut_segments(p, n);
}

static fold_plan make_plan(const ms_tensor *x, unsigned dims)
{
    fold_plan p = {};
    int size = ms__dtype_size(x->dtype);
    p.data = (const char *)ms__data(x);
    p.dtype = x->dtype;
    p.outputs = p.length = 1;
    for (int d = 0; d < x->ndim; d++) {
        if (dims >> d & 1) {
            p.rshape[p.nr] = x->shape[d];
            p.rstride[p.nr++] = x->stride[d] * size;
            p.length *= x->shape[d];
        } else {
            p.kshape[p.nk] = x->shape[d];
            p.kstride[p.nk++] = x->stride[d] * size;
            p.outputs *= x->shape[d];
        }
    }
    p.nk = ms__join_dims(p.nk, p.kshape, p.kstride);
    p.nr = ms__join_dims(p.nr, p.rshape, p.rstride);
    p.columns = p.nk > 0 &&
                (p.nr == 0 || (p.kstride[p.nk - 1] < p.rstride[p.nr - 1] && p.kshape[p.nk - 1] >= 16) || p.length < 32);
    finish_plan(&p);
    return p;
}

// W: double or int64_t. begin: the fold of no elements. join: combines two results. term: what element v contributes,
// given the fold's parameter m; narrow: computed in float32.
template <class W> struct fold;
template <> struct fold<double> {
    static __device__ inline double begin(int kind)
    {
        switch (kind) {
        case PROD:
        case PROD_NOT_0: return 1;
        case LARGEST: return -INFINITY;
        case SMALLEST:
        case ABS_SMALLEST: return INFINITY;
        default: return 0;
        }
    }
    static __device__ inline double join(int kind, double a, double b)
    {
        switch (kind) {
        case PROD:
        case PROD_NOT_0: return a * b;
        case LARGEST:
        case ABS_LARGEST: return ((b > a) | (b != b)) ? b : a;  // NaN propagates
        case SMALLEST:
        case ABS_SMALLEST: return ((b < a) | (b != b)) ? b : a;
        default: return a + b;
        }
    }
    static __device__ inline double term(int kind, double v, double m, bool narrow)
    {
        switch (kind) {
        case PROD_NOT_0: return v == 0 ? 1 : v;
        case COUNT: return v != 0;
        case ABS_SUM:
        case ABS_LARGEST:
        case ABS_SMALLEST: return fabs(v);
        case SQUARE_SUM: return v * v;
        case POWER_SUM: return narrow ? (double)ms_pow_f32((float)fabs(v), (float)m) : ms_pow_f64(fabs(v), m);
        case DEVIATION: return (v - m) * (v - m);
        case EXP_SUM: return narrow ? (double)ms_exp_f32((float)v - (float)m) : ms_exp_f64(v - m);
        default: return v;
        }
    }
};
template <> struct fold<int64_t> {
    static __device__ inline int64_t begin(int kind)
    {
        return kind == PROD ? 1 : kind == LARGEST ? INT64_MIN : kind == SMALLEST ? INT64_MAX : 0;
    }
    static __device__ inline int64_t join(int kind, int64_t a, int64_t b)
    {
        switch (kind) {
        case PROD: return (int64_t)((uint64_t)a * (uint64_t)b);
        case LARGEST: return b > a ? b : a;
        case SMALLEST: return b < a ? b : a;
        default: return (int64_t)((uint64_t)a + (uint64_t)b);
        }
    }
    static __device__ inline int64_t term(int kind, int64_t v, double, bool) { return kind == COUNT ? v != 0 : v; }
};

// A fold's kind, and its parameter: one per output, on the device, or one number.
struct fold_of {
    int kind;
    const double *parameters = NULL;
    double number = 0;
};
static __device__ inline double parameter_of(const fold_of &f, int64_t m)
{
    return f.parameters ? f.parameters[m] : f.number;
}
template <class W> static __device__ inline W fold_in(const fold_of &f, W a, W v, double parameter, bool narrow)
{
    return fold<W>::join(f.kind, a, fold<W>::term(f.kind, v, parameter, narrow));
}
// ---- results ----

// What is done with the result of a fold. number: the divisor of MEAN and STD; the number that ALL compares with; the p
// of INVERSE_POWER, which raises to 1 / p. more: per output, the number that PLUS_LOG adds to the logarithm. keep: gets
// the fold's result itself, as W; may be NULL.
enum { AS_IS, MEAN, ALL, ANY, ROOT, INVERSE_POWER, STD, FINITE_OR_0, PLUS_LOG };
struct ending {
    int how = AS_IS;
    double number = 0;
    const double *more = NULL;
    void *keep = NULL;
};
// Where results are stored: elements of a dtype on a device. out: NULL if they are stored only in the ending's `keep`.
struct target {
    int dtype;
    void *out;
};
static target tensor_of(const ms_tensor *t) { return { t->dtype, ms__data(t) }; }
static target doubles_of(double *wide) { return { MS_F64, wide }; }
// parts: gets the results of the segments [segments, outputs]; NULL if there is one segment, whose result is finished
// as `e` says and stored in t.
template <class W> struct fold_result {
    W *parts;
    ending e;
    target t;
};
template <class W> static __device__ inline void finish_one(const fold_result<W> &r, int64_t m, W v)
{
    const ending &e = r.e;
    if (e.keep) ((W *)e.keep)[m] = v;
    if (!r.t.out) return;
    if (e.how == ALL) v = (double)v == e.number;
    else if (e.how == ANY) v = v != 0;
    else if constexpr (std::is_same_v<W, double>) {
        switch (e.how) {
        case MEAN: v /= e.number; break;
        case ROOT: v = ms_sqrt_f64(v); break;
        case INVERSE_POWER: v = ms_pow_f64(v, 1 / e.number); break;
        case STD: v = ms_sqrt_f64(v / e.number); break;
        case FINITE_OR_0: v = v - v == 0 ? v : 0; break;
        case PLUS_LOG: v = e.more[m] + ms_log_f64(v); break;
        }
    }
    own_value<W>::store_truth(r.t.dtype, (char *)r.t.out + m * ms__dtype_size(r.t.dtype), v);
}
template <class W>
static __device__ inline void put_result(const fold_result<W> &r, const fold_plan &p, int64_t s, int64_t m, W v)
{
    if (r.parts) r.parts[s * p.outputs + m] = v;
    else finish_one(r, m, v);
}

// The part of the length that belongs to segment s.
struct span {
    int64_t from, to;
};
static __device__ inline span segment_span(const fold_plan &p, int64_t s)
{
    int64_t from = s * p.segment;
    return { from, from + p.segment < p.length ? from + p.segment : p.length };
}

// ---- adjacent elements of one output: `width` threads per output and segment, a warp or a block ----

template <class S> __global__ void dense_rows_kernel(fold_plan p, fold_of f, int width, fold_result<double> r)
{
    __shared__ double shared[WARPS];
    int64_t i = (int64_t)blockIdx.x * (BLOCK / width) + threadIdx.x / width, m = i / p.segments, s = i % p.segments;
    if (m >= p.outputs) return;
    span k = segment_span(p, s);
    const S *row = (const S *)(p.data + offset_of(m, p.nk, p.kshape, p.kstride)) + k.from;
    int64_t n = k.to - k.from;
    double parameter = parameter_of(f, m), a = fold<double>::begin(f.kind);
    for (int64_t j = first_pack(row) + (int64_t)(threadIdx.x % width) * WIDE; j < n; j += (int64_t)width * WIDE) {
        real_of<S> v[WIDE];
        read_pack(row, j, n, (real_of<S>)0, v);
        UNROLL
        for (int e = 0; e < WIDE; e++)
            if (in_range(j + e, n)) a = fold_in<double>(f, a, (double)v[e], parameter, sizeof(S) < 8);
    }
    for (int step = 16; step > 0; step /= 2) a = fold<double>::join(f.kind, a, __shfl_xor_sync(0xffffffffu, a, step));
    if (width > 32) {
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = a;
        __syncthreads();
        if (threadIdx.x == 0)
            for (int w = 1; w < WARPS; w++) a = fold<double>::join(f.kind, a, shared[w]);
    }
    if (threadIdx.x % width == 0) put_result(r, p, s, m, a);
}
template <class W> __global__ void rows_kernel(fold_plan p, fold_of f, fold_result<W> r)
{
    __shared__ W shared[BLOCK];
    int64_t m = blockIdx.x / p.segments, s = blockIdx.x % p.segments;
    span part = segment_span(p, s);
    const char *base = p.data + offset_of(m, p.nk, p.kshape, p.kstride);
    double parameter = parameter_of(f, m);
    W a = fold<W>::begin(f.kind);
    for (int64_t k = part.from + threadIdx.x; k < part.to; k += BLOCK)
        a = fold_in<W>(f, a, own_value<W>::load(p.dtype, base + offset_of(k, p.nr, p.rshape, p.rstride)), parameter,
                       p.dtype != MS_F64);
    shared[threadIdx.x] = a;
    __syncthreads();
    for (int h = BLOCK / 2; h > 0; h /= 2) {
        if ((int)threadIdx.x < h)
            shared[threadIdx.x] = fold<W>::join(f.kind, shared[threadIdx.x], shared[threadIdx.x + h]);
        __syncthreads();
    }
    if (threadIdx.x == 0) put_result(r, p, s, m, shared[0]);
}

// ---- adjacent elements of different outputs ----

template <size_t N> static __device__ __forceinline__ void copy_raw(uint4 (&to)[N], const char *from)
{
    for (size_t k = 0; k < N; k++) to[k] = ((const uint4 *)from)[k];
}

// A block folds a segment of BLOCK columns. Each lane has WIDE adjacent columns; each warp folds every WARPS-th element
// of the segment.
template <class S> __global__ void dense_columns_kernel(fold_plan p, fold_of f, int64_t tiles, fold_result<double> r)
{
    __shared__ double shared[WARPS][BLOCK + 1];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t inner = p.kshape[p.nk - 1], tile = blockIdx.x % tiles, outer = blockIdx.x / tiles % (p.outputs / inner),
            s = blockIdx.x / tiles / (p.outputs / inner), column = tile * BLOCK + lane * WIDE,
            m = outer * inner + column;
    span part = segment_span(p, s);
    double a[WIDE];
    UNROLL
    for (int e = 0; e < WIDE; e++) a[e] = fold<double>::begin(f.kind);
    if (column < inner) {
        const char *base = p.data + offset_of(m, p.nk, p.kshape, p.kstride);
        for (int64_t k = part.from + warp; k < part.to; k += 2 * WARPS) {
            bool both = k + WARPS < part.to;
            real_of<S> v[WIDE], w[WIDE];
            uint4 raw[2][sizeof(S) * WIDE / 16];  // both are read before one is converted
            UNROLL
            for (int q = 0; q < 2; q++)
                copy_raw(raw[q], base + offset_of(q && both ? k + WARPS : k, p.nr, p.rshape, p.rstride));
            load_wide((const S *)raw[0], v);
            load_wide((const S *)raw[1], w);
            UNROLL
            for (int e = 0; e < WIDE; e++) {
                double parameter = parameter_of(f, m + e);
                a[e] = fold_in<double>(f, a[e], (double)v[e], parameter, sizeof(S) < 8);
                if (both) a[e] = fold_in<double>(f, a[e], (double)w[e], parameter, sizeof(S) < 8);
            }
        }
    }
    UNROLL
    for (int e = 0; e < WIDE; e++) shared[warp][lane * WIDE + e] = a[e];
    __syncthreads();
    column = tile * BLOCK + threadIdx.x;
    if (column >= inner) return;
    double all = shared[0][threadIdx.x];
    for (int w = 1; w < WARPS; w++) all = fold<double>::join(f.kind, all, shared[w][threadIdx.x]);
    put_result(r, p, s, outer * inner + column, all);
}
// One thread per output and segment: neighbouring threads read neighbouring elements.
template <class W> __global__ void columns_kernel(fold_plan p, fold_of f, fold_result<W> r)
{
    int64_t i = GLOBAL_INDEX, m = i % p.outputs, s = i / p.outputs;
    if (s >= p.segments) return;
    span part = segment_span(p, s);
    const char *base = p.data + offset_of(m, p.nk, p.kshape, p.kstride);
    double parameter = parameter_of(f, m);
    W a = fold<W>::begin(f.kind);
    for (int64_t k = part.from; k < part.to; k++)
        a = fold_in<W>(f, a, own_value<W>::load(p.dtype, base + offset_of(k, p.nr, p.rshape, p.rstride)), parameter,
                       p.dtype != MS_F64);
    put_result(r, p, s, m, a);
}

// ---- segments ----

// A block combines the segments of JOIN_ACROSS outputs: each of JOIN_DOWN threads per output folds every JOIN_DOWN-th
// segment, then their results are combined in a tree.
enum { JOIN_ACROSS = 8, JOIN_DOWN = BLOCK / JOIN_ACROSS };
template <class W>
__global__ void join_kernel(int64_t outputs, int64_t segments, int kind, const W *parts, fold_result<W> r)
{
    __shared__ W shared[WARPS][JOIN_ACROSS];
    int64_t m = (int64_t)blockIdx.x * JOIN_ACROSS + threadIdx.x % JOIN_ACROSS;
    W a = fold<W>::begin(kind);
    for (int64_t s = threadIdx.x / JOIN_ACROSS; s < segments && m < outputs; s += 2 * JOIN_DOWN) {
        bool both = s + JOIN_DOWN < segments;  // both loads are in flight together
        W v = parts[s * outputs + m], w = parts[(both ? s + JOIN_DOWN : s) * outputs + m];
        a = fold<W>::join(kind, a, v);
        if (both) a = fold<W>::join(kind, a, w);
    }
    for (int step = JOIN_ACROSS; step < 32; step *= 2)
        a = fold<W>::join(kind, a, __shfl_xor_sync(0xffffffffu, a, step));
    if (threadIdx.x % 32 < JOIN_ACROSS) shared[threadIdx.x / 32][threadIdx.x % 32] = a;
    __syncthreads();
    if (threadIdx.x >= JOIN_ACROSS || m >= outputs) return;
    for (int w = 1; w < WARPS; w++) a = fold<W>::join(kind, a, shared[w][threadIdx.x]);
    finish_one(r, m, a);
}
template <class W> __global__ void begin_kernel(int64_t outputs, int kind, fold_result<W> r)
{
    int64_t m = GLOBAL_INDEX;
    if (m < outputs) finish_one(r, m, fold<W>::begin(kind));
}

// Combines the parts [segments, outputs] of a fold.
template <class W>
static ms_status join_segments(const char *what, int index, const fold_plan &p, int kind, const W *parts,
                               const fold_result<W> &r)
{
    return launch_blocks(what, index, join_kernel<W>, up(p.outputs, JOIN_ACROSS), BLOCK, p.outputs, p.segments, kind,
                         parts, r);
}

template <class W>
static ms_status fold_segments(const char *what, int index, const fold_plan &p, const fold_of &f,
                               const fold_result<W> &r)
{
    int64_t n = p.outputs * p.segments;
    if constexpr (std::is_same_v<W, double>) {
        if (p.dense && p.columns) {
            int64_t tiles = column_tiles(&p), blocks = tiles * (n / p.kshape[p.nk - 1]);
            return launch_blocks(what, index, TYPED_KERNEL(p.dtype, dense_columns_kernel), blocks, BLOCK, p, f, tiles,
                                 r);
        } else if (p.dense) {
            int width = row_width(n, p.segment);
            return launch_blocks(what, index, TYPED_KERNEL(p.dtype, dense_rows_kernel), up(n, BLOCK / width), BLOCK, p,
                                 f, width, r);
        }
    }
    grid threads = grid_of(n);
    if (p.columns) return launch(what, index, columns_kernel<W>, threads.blocks, threads.threads, p, f, r);
    return launch_blocks(what, index, rows_kernel<W>, n, BLOCK, p, f, r);
}
// Folds t as the plan says, and finishes the results.
template <class W>
static ms_status run_fold(const char *what, const ms_tensor *t, const fold_plan &p, const fold_of &f, const ending &e,
                          const target &to)
{
    int device = ms__device(t), index = ms__index(device);
    fold_result<W> r = { NULL, e, to };
    if (p.outputs == 0) return MS_OK;
    if (p.length == 0) return launch(what, index, begin_kernel<W>, up(p.outputs, BLOCK), BLOCK, p.outputs, f.kind, r);
    if (p.segments == 1) return fold_segments<W>(what, index, p, f, r);
    ms_block *room = NULL;
    MS_TRY(ms__alloc(&room, device, (size_t)(p.segments * p.outputs) * sizeof(W), what));
    W *parts = (W *)room->data;
    ms_status st = fold_segments<W>(what, index, p, f, { parts, e, to });
    if (st == MS_OK) st = join_segments<W>(what, index, p, f.kind, parts, r);
    ms__free(room);
    return st;
}

#endif
