// SPDX-License-Identifier: MIT
// cuda/rows/rows.cu -- softmax, log_softmax and their gradients; sums in float32 (float64 for float64 tensors) in a
// fixed order. Along the last dimension a warp or a block computes a row, 16 bytes at a time; along others the threads
// of a block have neighbouring rows. Where rows are few and long, blocks compute segments of them, in two launches.
#include "cuda/segments.h"
#include "rows/layout.h"

// ---- along the last dimension ----

// Rows of n adjacent elements; `width` threads process each row.
struct packed_rows {
    int64_t rows, n;
    int width;
    bool log;
};
// The row of this thread, the first element of the thread's first pack, and the distance from one of its packs to the
// next.
struct my_row {
    int64_t row, first, step;
};
static __device__ __forceinline__ my_row my_row_of(const packed_rows &r)
{
    int per_block = BLOCK / r.width;
    return { (int64_t)blockIdx.x * per_block + threadIdx.x / r.width, (int64_t)(threadIdx.x % r.width) * WIDE,
             (int64_t)r.width * WIDE };
}

template <class S> __global__ void softmax_rows_kernel(packed_rows r, const S *x, S *y)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    my_row my = my_row_of(r);
    if (my.row >= r.rows) return;
    x += my.row * r.n, y += my.row * r.n;
    my.first += first_pack(x);
    T most = -(T)INFINITY, sum = 0, v[WIDE];
    for (int64_t j = my.first; j < r.n; j += my.step) {
        read_pack(x, j, r.n, -(T)INFINITY, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) most = larger(most, v[e]);
    }
    most = group_max(most, r.width, shared);
    if (most == -(T)INFINITY) most = 0;  // a row in which all elements are -inf gives 0 / 0, as in PyTorch
    for (int64_t j = my.first; j < r.n; j += my.step) {
        read_pack(x, j, r.n, -(T)INFINITY, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) sum += exp_of(v[e] - most);
    }
    sum = group_sum(sum, r.width, shared);
    T shift = most + log_of(sum), scale = 1 / sum;
    for (int64_t j = my.first; j < r.n; j += my.step) {
        read_pack(x, j, r.n, (T)0, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) v[e] = r.log ? v[e] - shift : exp_of(v[e] - most) * scale;
        write_pack(y, j, r.n, v);
    }
}
// softmax: dx = y (g - sum g y); log_softmax: dx = g - exp(y) sum g
template <class S> __global__ void softmax_rows_backward_kernel(packed_rows r, const S *g, const S *y, S *dx)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    my_row my = my_row_of(r);
    if (my.row >= r.rows) return;
    g += my.row * r.n, y += my.row * r.n, dx += my.row * r.n;
    my.first += first_pack(g);
    T sum = 0, v[WIDE], w[WIDE];
    for (int64_t j = my.first; j < r.n; j += my.step) {
        read_two(g, y, j, r.n, v, w);
        UNROLL
        for (int e = 0; e < WIDE; e++) sum += r.log ? v[e] : v[e] * w[e];
    }
    sum = group_sum(sum, r.width, shared);
    for (int64_t j = my.first; j < r.n; j += my.step) {
        read_two(g, y, j, r.n, v, w);
        UNROLL
        for (int e = 0; e < WIDE; e++) v[e] = r.log ? v[e] - exp_of(w[e]) * sum : w[e] * (v[e] - sum);
        write_pack(dx, j, r.n, v);
    }
}

// The largest number that a thread or a segment has seen, and the sum of exp(number - largest).
template <class T> struct exp_sum {
    T most, sum;
};
template <class T> static __device__ __forceinline__ exp_sum<T> no_exps(void) { return { -(T)INFINITY, 0 }; }
// What is subtracted before exp: the largest number, or 0 where all are -inf, so that their exponentials are 0.
template <class T> static __device__ __forceinline__ T base_of(T most) { return most == -(T)INFINITY ? 0 : most; }
template <class T> static __device__ __forceinline__ exp_sum<T> join(exp_sum<T> a, exp_sum<T> b)
{
    T most = larger(a.most, b.most), base = base_of(most);
    return { most, a.sum * exp_of(a.most - base) + b.sum * exp_of(b.most - base) };
}
template <class T, int N> static __device__ __forceinline__ exp_sum<T> add_exps(exp_sum<T> a, const T *v)
{
    T most = a.most, sum = 0;
    UNROLL
    for (int e = 0; e < N; e++) most = larger(most, v[e]);
    T base = base_of(most);
    UNROLL
    for (int e = 0; e < N; e++) sum += exp_of(v[e] - base);
    return { most, a.sum * exp_of(a.most - base) + sum };
}

// Rows of n adjacent elements, each divided into segments; a block for each segment.
struct split_rows {
    int64_t n, segments, segment;  // segment: elements of each but the last
    bool log;
};
struct row_part {
    int64_t row, first, n;  // elements [first, first + n) of the row
};
static __device__ __forceinline__ row_part split_row_part(const split_rows &r)
{
    int64_t row = blockIdx.x / r.segments, first = (blockIdx.x - row * r.segments) * r.segment, left = r.n - first;
    return { row, first, left < r.segment ? left : r.segment };
}
template <class S> __global__ void softmax_parts_kernel(split_rows r, const S *x, exp_sum<double> *parts)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    row_part my = split_row_part(r);
    exp_sum<T> a = no_exps<T>();
    T v[WIDE];
    x += my.row * r.n + my.first;
    for (int64_t j = first_pack(x) + threadIdx.x * WIDE; j < my.n; j += BLOCK * WIDE) {
        read_pack(x, j, my.n, -(T)INFINITY, v);
        a = add_exps<T, WIDE>(a, v);
    }
    T most = group_max(a.most, BLOCK, shared), sum = group_sum(a.sum * exp_of(a.most - base_of(most)), BLOCK, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = { (double)most, (double)sum };
}
template <class S> __global__ void softmax_apply_kernel(split_rows r, const S *x, const exp_sum<double> *parts, S *y)
{
    typedef real_of<S> T;
    row_part my = split_row_part(r);
    exp_sum<T> a = no_exps<T>();
    T v[WIDE];
    ROLLED
    for (int64_t s = threadIdx.x % 32; s < r.segments; s += 32) {
        exp_sum<double> part = parts[my.row * r.segments + s];
        a = join(a, { (T)part.most, (T)part.sum });
    }
    T most = base_of(warp_max(a.most)), sum = warp_sum(a.sum * exp_of(a.most - most));
    T shift = most + log_of(sum), scale = 1 / sum;
    x += my.row * r.n + my.first, y += my.row * r.n + my.first;
    for (int64_t j = first_pack(x) + threadIdx.x * WIDE; j < my.n; j += BLOCK * WIDE) {
        read_pack(x, j, my.n, (T)0, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) v[e] = r.log ? v[e] - shift : exp_of(v[e] - most) * scale;
        write_pack(y, j, my.n, v);
    }
}
template <class S> __global__ void softmax_backward_parts_kernel(split_rows r, const S *g, const S *y, double *parts)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    row_part my = split_row_part(r);
    T sum = 0, v[WIDE], w[WIDE];
    g += my.row * r.n + my.first, y += my.row * r.n + my.first;
    for (int64_t j = first_pack(g) + threadIdx.x * WIDE; j < my.n; j += BLOCK * WIDE) {
        read_two(g, y, j, my.n, v, w);
        UNROLL
        for (int e = 0; e < WIDE; e++) sum += r.log ? v[e] : v[e] * w[e];
    }
    sum = group_sum(sum, BLOCK, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = (double)sum;
}
template <class S>
__global__ void softmax_backward_apply_kernel(split_rows r, const S *g, const S *y, const double *parts, S *dx)
{
    typedef real_of<S> T;
    row_part my = split_row_part(r);
    T sum = 0, v[WIDE], w[WIDE];
    ROLLED
    for (int64_t s = threadIdx.x % 32; s < r.segments; s += 32) sum += (T)parts[my.row * r.segments + s];
    sum = warp_sum(sum);
    g += my.row * r.n + my.first, y += my.row * r.n + my.first, dx += my.row * r.n + my.first;
    for (int64_t j = first_pack(g) + threadIdx.x * WIDE; j < my.n; j += BLOCK * WIDE) {
        read_two(g, y, j, my.n, v, w);
        UNROLL
        for (int e = 0; e < WIDE; e++) v[e] = r.log ? v[e] - exp_of(w[e]) * sum : w[e] * (v[e] - sum);
        write_pack(dx, j, my.n, v);
    }
}

// ---- along other dimensions ----

// Rows whose elements are `inner` apart: element j of row i of a group is at j * inner + i of the group's n * inner
// elements. A block has `across` neighbouring rows, each computed by BLOCK / across threads, which take turns at its
// elements; `tiles` blocks cover a group.
enum { AT_ONCE = 4 };  // elements whose loads are in flight together
struct columns {
    int64_t groups, inner, n, tiles, segments, segment;
    int across;
    bool log;
};
enum { ALL, MEASURE, APPLY };  // what a launch does; with one segment ALL does the work of MEASURE and APPLY
struct column_part {
    int64_t row, at;         // the row, and the place of its element 0 in the tensor
    int64_t step, from, to;  // the thread's elements of the row: from, from + step, ... below `to`
    bool valid;              // whether the row exists
};
static __device__ __forceinline__ column_part column_part_of(const columns &c)
{
    int64_t s = blockIdx.x % c.segments, rest = blockIdx.x / c.segments, group = rest / c.tiles;
    int64_t i = (rest - group * c.tiles) * c.across + threadIdx.x % c.across, first = s * c.segment;
    int64_t last = first + c.segment < c.n ? first + c.segment : c.n;
    return { group * c.inner + i, group * c.n * c.inner + i, BLOCK / c.across, first + threadIdx.x / c.across, last,
             i < c.inner };
}
// Combines the results of the threads of each row by both(a, b); every thread gets its row's result.
template <class T, class F> static __device__ inline T column_join(const columns &c, T a, T *shared, const F &both)
{
    shared[threadIdx.x] = a;
    __syncthreads();
    for (int step = BLOCK / 2; step >= c.across; step /= 2) {
        if ((int)threadIdx.x < step) shared[threadIdx.x] = both(shared[threadIdx.x], shared[threadIdx.x + step]);
        __syncthreads();
    }
    a = shared[threadIdx.x % c.across];
    __syncthreads();
    return a;
}
// parts: the results of the segments, [segments, rows], which MEASURE stores and APPLY reads.
template <class S> __global__ void softmax_kernel(columns c, int how, const S *x, exp_sum<real_of<S>> *parts, S *y)
{
    typedef real_of<S> T;
    __shared__ exp_sum<T> shared[BLOCK];
    column_part my = column_part_of(c);
    int64_t rows = c.groups * c.inner;
    auto both = [](exp_sum<T> a, exp_sum<T> b) { return join(a, b); };
    exp_sum<T> a = no_exps<T>();
    if (how == APPLY) {
        for (int64_t s = threadIdx.x / c.across; s < c.segments && my.valid; s += my.step)
            a = join(a, parts[s * rows + my.row]);
    } else {
        for (int64_t j = my.from; j < my.to && my.valid; j += AT_ONCE * my.step) {
            T v[AT_ONCE];
            UNROLL
            for (int e = 0; e < AT_ONCE; e++) {
                int64_t k = j + e * my.step;
                v[e] = e == 0 || k < my.to ? one_of(x + my.at + k * c.inner) : -(T)INFINITY;
            }
            a = add_exps<T, AT_ONCE>(a, v);
        }
    }
    a = column_join(c, a, shared, both);
    if (how == MEASURE) {
        if ((int)threadIdx.x < c.across && my.valid) parts[blockIdx.x % c.segments * rows + my.row] = a;
        return;
    }
    T most = base_of(a.most), shift = most + log_of(a.sum), scale = 1 / a.sum;
    for (int64_t j = my.from; j < my.to && my.valid; j += my.step) {
        T v = one_of(x + my.at + j * c.inner);
        store_one(y + my.at + j * c.inner, c.log ? v - shift : exp_of(v - most) * scale);
    }
}
template <class S>
__global__ void softmax_backward_kernel(columns c, int how, const S *g, const S *y, real_of<S> *parts, S *dx)
{
    typedef real_of<S> T;
    __shared__ T shared[BLOCK];
    column_part my = column_part_of(c);
    int64_t rows = c.groups * c.inner;
    T sum = 0;
    if (how == APPLY) {
        for (int64_t s = threadIdx.x / c.across; s < c.segments && my.valid; s += my.step)
            sum += parts[s * rows + my.row];
    } else {
        for (int64_t j = my.from; j < my.to && my.valid; j += AT_ONCE * my.step) {
            T v[AT_ONCE], w[AT_ONCE];
            UNROLL
            for (int e = 0; e < AT_ONCE; e++) {
                int64_t k = j + e * my.step, at = my.at + k * c.inner;
                bool inside = e == 0 || k < my.to;
                v[e] = inside ? one_of(g + at) : 0;
                w[e] = inside && !c.log ? one_of(y + at) : 1;
            }
            UNROLL
            for (int e = 0; e < AT_ONCE; e++) sum += v[e] * w[e];
        }
    }
    sum = column_join(c, sum, shared, [](T a, T b) { return a + b; });
    if (how == MEASURE) {
        if ((int)threadIdx.x < c.across && my.valid) parts[blockIdx.x % c.segments * rows + my.row] = sum;
        return;
    }
    for (int64_t j = my.from; j < my.to && my.valid; j += my.step) {
        int64_t k = my.at + j * c.inner;
        T a = one_of(g + k), b = one_of(y + k);
        store_one(dx + k, c.log ? a - exp_of(b) * sum : b * (a - sum));
    }
}

// A call: g, the gradient of the output, is NULL in a forward; x is the output in a backward.
struct softmax_call {
    const ms_call *c;
    const ms_tensor *g, *x;
    ms_tensor *o;
    bool log;
};
template <class S> static ms_status along_last(const softmax_call &k, const ms_rows &r)
{
    const char *what = k.c->op->name;
    const S *g = (const S *)data_of(k.g), *x = (const S *)ms__data(k.x);
    S *o = (S *)ms__data(k.o);
    int index = index_of(k.o);
    int64_t bytes = k.o->numel * (int64_t)sizeof(S) * (g ? 2 : 1);
    int64_t segments = filling_segments(bytes, r.rows, r.n, 4096 / sizeof(S)),
            segment = up(up(r.n, segments), WIDE) * WIDE;
    if (r.n == 0 || segments == 1) {
        int width = row_width(r.rows, r.n);
        packed_rows p = { r.rows, r.n, width, k.log };
        int64_t blocks = up(r.rows, BLOCK / width);
        if (g) return launch_blocks(what, index, softmax_rows_backward_kernel<S>, blocks, BLOCK, p, g, x, o);
        return launch_blocks(what, index, softmax_rows_kernel<S>, blocks, BLOCK, p, x, o);
    }
    split_rows p = { r.n, up(r.n, segment), segment, k.log };
    int64_t blocks = r.rows * p.segments;
    scratch parts;
    MS_TRY(parts.alloc(k.c, ms__device(k.o), blocks * (int64_t)sizeof(exp_sum<double>)));
    if (g) {
        MS_TRY(
            launch_blocks(what, index, softmax_backward_parts_kernel<S>, blocks, BLOCK, p, g, x, (double *)parts.data));
        return launch_blocks(what, index, softmax_backward_apply_kernel<S>, blocks, BLOCK, p, g, x,
                             (const double *)parts.data, o);
    }
    MS_TRY(launch_blocks(what, index, softmax_parts_kernel<S>, blocks, BLOCK, p, x, (exp_sum<double> *)parts.data));
    return launch_blocks(what, index, softmax_apply_kernel<S>, blocks, BLOCK, p, x, (const exp_sum<double> *)parts.data,
                         o);
}
template <class S> static ms_status along_other(const softmax_call &k, const ms_rows &r)
{
    typedef real_of<S> T;
    const char *what = k.c->op->name;
    const S *g = (const S *)data_of(k.g), *x = (const S *)ms__data(k.x);
    S *o = (S *)ms__data(k.o);
    int index = index_of(k.o), across = 32;
    while (across / 2 >= r.stride) across /= 2;
    columns c = { r.rows / r.stride, r.stride, r.n, up(r.stride, across), 1, 0, across, k.log };
    int64_t bytes = k.o->numel * (int64_t)sizeof(S) * (g ? 2 : 1), tiles = c.groups * c.tiles;
    c.segments = filling_segments(bytes, tiles, r.n, up(4096 / sizeof(S), across));
    c.segment = up(r.n, c.segments), c.segments = up(r.n, c.segment);
    scratch parts;
    if (c.segments > 1) MS_TRY(parts.alloc(k.c, ms__device(k.o), r.rows * c.segments * (int64_t)sizeof(exp_sum<T>)));
    for (int how = c.segments > 1 ? MEASURE : ALL; how <= APPLY; how++) {
        if (g)
            MS_TRY(launch_blocks(what, index, softmax_backward_kernel<S>, tiles * c.segments, BLOCK, c, how, g, x,
                                 (T *)parts.data, o));
        else
            MS_TRY(launch_blocks(what, index, softmax_kernel<S>, tiles * c.segments, BLOCK, c, how, x,
                                 (exp_sum<T> *)parts.data, o));
        if (how == ALL) break;
    }
    return MS_OK;
}
static ms_status softmax(ms_call *c, bool log, bool backward)
{
    held_inputs h;
    ms_tensor *o = c->out[0];
    int d = (int)(c->i[0] < 0 ? c->i[0] + (o->ndim ? o->ndim : 1) : c->i[0]);
    ms_rows r = ms__rows_along(o, d);
    if (r.rows == 0) return MS_OK;
    MS_TRY(h.hold(c, backward ? 2 : 1));
    softmax_call k = { c, backward ? h.in[0] : NULL, h.in[backward], o, log };
#define SOFTMAX(S, T) return r.stride == 1 ? along_last<S>(k, r) : along_other<S>(k, r)
    WITH_FLOAT_TYPE(o->dtype, SOFTMAX)
#undef SOFTMAX
}
static ms_status run_softmax(ms_call *c) { return softmax(c, false, false); }
static ms_status run_log_softmax(ms_call *c) { return softmax(c, true, false); }
static ms_status run_softmax_backward(ms_call *c) { return softmax(c, false, true); }
static ms_status run_log_softmax_backward(ms_call *c) { return softmax(c, true, true); }

extern const ms_cuda_kernel ms__cuda_rows[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_rows[] = { ROW(softmax) ROW(softmax_backward) ROW(log_softmax)
                                             ROW(log_softmax_backward) { NULL, NULL } };
