// SPDX-License-Identifier: MIT
// cuda/rows/norm.cu -- layer_norm, rms_norm and their gradients: h = (x - mean) rstd, y = h w + b; x may be a sum with
// a residual. A group of `width` threads (a warp or the whole block) computes a row, and reads it several times from
// the cache; where rows are few and long, blocks compute segments of them, in two launches. Sums are in float32
// (float64 for float64 tensors), in a fixed order. Forward keeps mean and rstd for backward.
#include "cuda/segments.h"
#include "rows/layout.h"

// Rows of n elements, to be normalised by rms or by mean and variance. NULL if absent: w; r, which is added to x, with
// the sum stored in `sum`; stats, the mean and rstd of each row.
struct norm_rows {
    int64_t rows, n;
    double eps;
    bool rms;
    const void *x, *w, *r;
    void *sum, *stats;
};

// The part of a row that a group of threads computes: elements [first, first + n) of it.
struct norm_part {
    int64_t row, first, n;
};
// Stores x + r of a part, rounded.
template <class S> static __device__ inline void add_residual(const norm_rows &q, const norm_part &my, int width)
{
    int64_t at = my.row * q.n + my.first;
    for (int64_t j = (int64_t)(threadIdx.x % width) * WIDE; j < my.n; j += width * WIDE) {
        real_of<S> v[WIDE], w[WIDE];
        read_two((const S *)q.x + at, (const S *)q.r + at, j, my.n, v, w);
        for (int e = 0; e < WIDE; e++) v[e] += w[e];
        write_pack((S *)q.sum + at, j, my.n, v);
    }
}
template <class S> static __device__ __forceinline__ const S *row_of(const norm_rows &q, const norm_part &my)
{
    return (const S *)(q.r ? q.sum : q.x) + my.row * q.n + my.first;
}
// The part's elements of a weight or bias, which may be absent.
template <class S> static __device__ __forceinline__ const S *part_of(const void *w, const norm_part &my)
{
    return w ? (const S *)w + my.first : NULL;
}
// Computes the mean of a part (0 for rms) and the sum of (x - mean)^2.
template <class S>
static __device__ inline void measure(const norm_rows &q, const norm_part &my, int width, real_of<S> *shared,
                                      real_of<S> *mean, real_of<S> *spread)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    int lane = threadIdx.x % width;
    T sum = 0, squares = 0, v[N];
    if (q.r) add_residual<S>(q, my, width);  // a thread reads only what it has stored itself
    const S *x = row_of<S>(q, my);
    if (!q.rms) {
        for (int64_t j = (int64_t)lane * N; j < my.n; j += width * N) {
            read_pack(x, j, my.n, (T)0, v);
            for (int e = 0; e < N; e++) sum += v[e];
        }
        sum = group_sum(sum, width, shared);
    }
    T m = q.rms ? (T)0 : sum / (T)my.n;
    for (int64_t j = (int64_t)lane * N; j < my.n; j += width * N) {
        read_pack(x, j, my.n, m, v);
        for (int e = 0; e < N; e++) squares += (v[e] - m) * (v[e] - m);
    }
    *mean = m;
    *spread = group_sum(squares, width, shared);
}
template <class T> static __device__ inline T rstd_of(const norm_rows &q, T spread)
{
    return 1 / sqrt_of(spread / (T)q.n + (T)q.eps);
}
template <class T> struct row_stats {
    T mean, rstd;
};
// Stores y of a part. Thread 0 of the group stores the row's statistics if the part begins the row.
template <class S>
static __device__ inline void normalise(const norm_rows &q, const norm_part &my, int width, row_stats<real_of<S>> r,
                                        const void *b, void *y)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    int lane = threadIdx.x % width;
    const S *x = row_of<S>(q, my), *w = part_of<S>(q.w, my), *c = part_of<S>(b, my);
    T v[N], f[N];
    for (int64_t j = (int64_t)lane * N; j < my.n; j += width * N) {
        read_pack(x, j, my.n, (T)0, v);
        for (int e = 0; e < N; e++) v[e] = (v[e] - r.mean) * r.rstd;
        if (q.w) {
            read_pack(w, j, my.n, (T)0, f);
            for (int e = 0; e < N; e++) v[e] *= f[e];
        }
        if (b) {
            read_pack(c, j, my.n, (T)0, f);
            for (int e = 0; e < N; e++) v[e] += f[e];
        }
        write_pack((S *)y + my.row * q.n + my.first, j, my.n, v);
    }
    if (q.stats && lane == 0 && my.first == 0) ((row_stats<T> *)q.stats)[my.row] = r;
}
template <class S> __global__ void norm_kernel(norm_rows q, int width, const void *b, void *y)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    norm_part my = { (int64_t)blockIdx.x * (BLOCK / width) + threadIdx.x / width, 0, q.n };
    if (my.row >= q.rows) return;
    T mean, spread;
    measure<S>(q, my, width, shared, &mean, &spread);
    normalise<S>(q, my, width, { mean, rstd_of(q, spread) }, b, y);
}

// ---- rows that are divided into segments, a block for each ----

struct norm_segments {
    int64_t count, length;  // length: elements of each but the last
};
static __device__ __forceinline__ norm_part norm_part_of(const norm_rows &q, const norm_segments &s)
{
    int64_t row = blockIdx.x / s.count, first = (blockIdx.x - row * s.count) * s.length, left = q.n - first;
    return { row, first, left < s.length ? left : s.length };
}
// Two results of a segment: in forward its mean and the sum of squared deviations from it, in backward its `dots`.
struct norm_sums {
    double a, b;
};
template <class S> __global__ void norm_measure_kernel(norm_rows q, norm_segments s, norm_sums *parts)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    T mean, spread;
    measure<S>(q, norm_part_of(q, s), BLOCK, shared, &mean, &spread);
    if (threadIdx.x == 0) parts[blockIdx.x] = { (double)mean, (double)spread };
}
// Combines the segments of a row: each warp computes the row's mean and variance from theirs (Chan, Golub and LeVeque
// 1979).
template <class S>
__global__ void norm_apply_kernel(norm_rows q, norm_segments s, const norm_sums *parts, const void *b, void *y)
{
    typedef real_of<S> T;
    norm_part my = norm_part_of(q, s);
    parts += my.row * s.count;
    double sum = 0, spread = 0;
    auto elements = [&](int64_t k) { return (double)(k + 1 < s.count ? s.length : q.n - k * s.length); };
    ROLLED
    for (int64_t k = threadIdx.x % 32; k < s.count; k += 32) sum += parts[k].a * elements(k);
    double mean = warp_sum(sum) / (double)q.n;
    ROLLED
    for (int64_t k = threadIdx.x % 32; k < s.count; k += 32)
        spread += parts[k].b + elements(k) * (parts[k].a - mean) * (parts[k].a - mean);
    normalise<S>(q, my, BLOCK, { (T)mean, rstd_of(q, (T)warp_sum(spread)) }, b, y);
}

// ---- gradients ----

// dx = rstd (q - mean(q) - h mean(q h)), where q = g w; rms_norm has no mean(q).
// dots: the sums over a part of a row, or the means over a row, of q (0 for rms) and of q h.
template <class T> struct dots {
    T q, h;
};
template <class S>
static __device__ inline dots<real_of<S>> dot(const norm_rows &r, const norm_part &my, int width, const void *g_,
                                              real_of<S> *shared)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    row_stats<T> t = ((const row_stats<T> *)r.stats)[my.row];
    const S *x = row_of<S>(r, my), *g = (const S *)g_ + my.row * r.n + my.first, *w = part_of<S>(r.w, my);
    T mq = 0, mh = 0, q[N], h[N], f[N];
    for (int e = 0; e < N; e++) f[e] = 1;
    for (int64_t j = (int64_t)(threadIdx.x % width) * N; j < my.n; j += width * N) {
        read_two(g, x, j, my.n, q, h);
        if (r.w) read_pack(w, j, my.n, (T)0, f);
        for (int e = 0; e < N; e++) {
            mq += q[e] * f[e];
            mh += q[e] * f[e] * ((h[e] - t.mean) * t.rstd);
        }
    }
    T sq = r.rms ? (T)0 : group_sum(mq, width, shared);
    return { sq, group_sum(mh, width, shared) };
}
// Where the gradient of x goes; add: it is added to what is there.
struct dx_target {
    void *dx;
    bool add;
};
template <class S>
static __device__ inline void store_dx(const norm_rows &r, const norm_part &my, int width, const void *g_,
                                       const dx_target &to, const dots<real_of<S>> &mean)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    row_stats<T> t = ((const row_stats<T> *)r.stats)[my.row];
    const S *x = row_of<S>(r, my), *g = (const S *)g_ + my.row * r.n + my.first, *w = part_of<S>(r.w, my);
    S *out = (S *)to.dx + my.row * r.n + my.first;
    T q[N], h[N], f[N];
    for (int e = 0; e < N; e++) f[e] = 1;
    for (int64_t j = (int64_t)(threadIdx.x % width) * N; j < my.n; j += width * N) {
        read_two(g, x, j, my.n, q, h);
        if (r.w) read_pack(w, j, my.n, (T)0, f);
        for (int e = 0; e < N; e++) q[e] = t.rstd * (q[e] * f[e] - mean.q - (h[e] - t.mean) * t.rstd * mean.h);
        if (to.add) {
            read_pack(out, j, my.n, (T)0, h);
            for (int e = 0; e < N; e++) q[e] += h[e];
        }
        write_pack(out, j, my.n, q);
    }
}
template <class S> __global__ void norm_backward_kernel(norm_rows r, int width, const void *g, dx_target to)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    norm_part my = { (int64_t)blockIdx.x * (BLOCK / width) + threadIdx.x / width, 0, r.n };
    if (my.row >= r.rows) return;
    dots<T> sum = dot<S>(r, my, width, g, shared);
    store_dx<S>(r, my, width, g, to, { sum.q / (T)r.n, sum.h / (T)r.n });
}
template <class S> __global__ void norm_dots_kernel(norm_rows r, norm_segments s, const void *g, norm_sums *parts)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    dots<T> sum = dot<S>(r, norm_part_of(r, s), BLOCK, g, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = { (double)sum.q, (double)sum.h };
}
template <class S>
__global__ void norm_dx_kernel(norm_rows r, norm_segments s, const norm_sums *parts, const void *g, dx_target to)
{
    typedef real_of<S> T;
    norm_part my = norm_part_of(r, s);
    parts += my.row * s.count;
    double sq = 0, sh = 0;
    ROLLED
    for (int64_t k = threadIdx.x % 32; k < s.count; k += 32) sq += parts[k].a, sh += parts[k].b;
    double n = (double)r.n;
    store_dx<S>(r, my, BLOCK, g, to, { (T)(warp_sum(sq) / n), (T)(warp_sum(sh) / n) });
}
// Column sums of g h and of g over a segment of rows. A group of 16 threads covers COLUMNS adjacent columns. The
// block's 16 groups take turns at the rows, four rows at a time, because the statistics of four rows are one pack.
enum { ACROSS = 16, COLUMNS = ACROSS * WIDE, GROUPS = BLOCK / ACROSS };
template <class S>
__global__ void __launch_bounds__(BLOCK, sizeof(S) == 8 ? 2 : 3)
    norm_parts_kernel(norm_rows q, int64_t segment, int64_t tiles, const void *g_, void *parts)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    __shared__ T shared[2][GROUPS][COLUMNS];
    const S *g = (const S *)g_, *x = (const S *)(q.r ? q.sum : q.x);
    int64_t n = q.n, tile = blockIdx.x % tiles, part = blockIdx.x / tiles, first = part * segment;
    int64_t last = first + segment < q.rows ? first + segment : q.rows;
    int group = threadIdx.x / ACROSS, at = threadIdx.x % ACROSS * N;
    int64_t j = tile * COLUMNS + at;
    T dw[N] = {}, db[N] = {};
    auto add = [&](int64_t r, T mean, T rstd) {
        T a[N], b[N];
        read_two(g + r * n, x + r * n, j, n, a, b);
        for (int e = 0; e < N; e++) {
            dw[e] += a[e] * ((b[e] - mean) * rstd);
            db[e] += a[e];
        }
    };
    for (int64_t r = first + 4 * group; r < last && j < n; r += 4 * GROUPS) {
        T s[WIDE];
        read_pack((const T *)q.stats, 2 * r, 2 * q.rows, (T)0, s);
        add(r, s[0], s[1]);
        if (r + 1 < last) add(r + 1, s[2], s[3]);
        if (r + 2 < last) add(r + 2, s[4], s[5]);
        if (r + 3 < last) add(r + 3, s[6], s[7]);
    }
    for (int e = 0; e < N; e++) {
        shared[0][group][at + e] = dw[e];
        shared[1][group][at + e] = db[e];
    }
    __syncthreads();
    int which = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;  // a thread for each of 2 * COLUMNS sums
    T sum = 0;
    for (int i = 0; i < GROUPS; i++) sum += shared[which][i][column];
    if (tile * COLUMNS + column < n) ((T *)parts)[(2 * part + which) * n + tile * COLUMNS + column] = sum;
}
// Reads the statistics of row `row`, which is even, and of row + 1 if it exists: both in one access of 16 bytes, if
// they are aligned.
static __device__ __forceinline__ void stats_of_two(const norm_rows &q, int64_t row, row_stats<float> *two)
{
    const row_stats<float> *at = (const row_stats<float> *)q.stats + row;
    if (row + 1 < q.rows && is_wide(at)) {
        float4 s = *(const float4 *)at;
        two[0] = { s.x, s.y }, two[1] = { s.z, s.w };
    } else {
        two[0] = at[0];
        two[1] = at[row + 1 < q.rows];
    }
}
// Computes dx, and parts of dw and db, in one pass, for rows of up to K * 32 * WIDE elements. A warp takes two adjacent
// rows, one after the other. Each lane holds K packs of a row and accumulates their columns' sums over its warp's rows;
// the block then adds the sums of its warps.
template <class S, int K>
__global__ void __launch_bounds__(BLOCK, K <= 2 ? 2 : 1)
    norm_rows_kernel(norm_rows r, const void *g_, void *dx, bool add, void *parts)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    __shared__ T shared[WARPS][BLOCK];
    static_assert(BLOCK == 32 * N, "the block has one thread for each element of each lane's pack");
    int64_t n = r.n, first = r.rows * blockIdx.x / gridDim.x, last = r.rows * (blockIdx.x + 1) / gridDim.x;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool wide = n % N == 0 && is_wide(g_) && is_wide(r.x);
    T dw[K][N] = {}, db[K][N] = {};
    int64_t row = warp ? first / 2 * 2 + 2 * warp : first;
    row_stats<float> next = {};  // of an odd row
    if (row % 2 && row < last) next = ((const row_stats<float> *)r.stats)[row];
    for (; row < last; row += row % 2 ? 2 * WARPS - 1 : 1) {
        row_stats<float> t = next, two[2];
        if (row % 2 == 0) stats_of_two(r, row, two), t = two[0], next = two[1];
        const S *x = (const S *)r.x + row * n, *g = (const S *)g_ + row * n;
        T q[K][N], h[K][N], f[N], mq = 0, mh = 0;
        if (wide) {  // all loads at once; lanes past the row's end load its start
            UNROLL
            for (int k = 0; k < K; k++) {
                int64_t j = (k * 32 + lane) * N < n ? (k * 32 + lane) * N : 0;
                load_wide(g + j, q[k]);
                load_wide(x + j, h[k]);
            }
        } else {
            UNROLL
            for (int k = 0; k < K; k++) read_two(g, x, (k * 32 + lane) * N, n, q[k], h[k]);
        }
        UNROLL
        for (int k = 0; k < K; k++) {
            for (int e = 0; e < N; e++)
                if ((k * 32 + lane) * N + e >= n) q[k][e] = h[k][e] = 0;
        }
        UNROLL
        for (int k = 0; k < K; k++) {
            for (int e = 0; e < N; e++) f[e] = 1;
            if (r.w) read_pack((const S *)r.w, (k * 32 + lane) * N, n, (T)0, f);
            for (int e = 0; e < N; e++) {
                h[k][e] = (k * 32 + lane) * N + e < n ? (h[k][e] - t.mean) * t.rstd : (T)0;
                dw[k][e] += q[k][e] * h[k][e];
                db[k][e] += q[k][e];
                q[k][e] *= f[e];
                mq += q[k][e];
                mh += q[k][e] * h[k][e];
            }
        }
        if (!dx) continue;
        mq = r.rms ? (T)0 : warp_sum(mq) / (T)n;
        mh = warp_sum(mh) / (T)n;
        UNROLL
        for (int k = 0; k < K; k++) {
            int64_t j = (k * 32 + lane) * N;
            for (int e = 0; e < N; e++) q[k][e] = t.rstd * (q[k][e] - mq - h[k][e] * mh);
            if (add) {
                read_pack((const S *)dx + row * n, j, n, (T)0, f);
                for (int e = 0; e < N; e++) q[k][e] += f[e];
            }
            write_pack((S *)dx + row * n, j, n, q[k]);
        }
    }
    if (!parts) return;
    UNROLL
    for (int i = 0; i < 2 * K; i++) {
        for (int e = 0; e < N; e++) shared[warp][lane * N + e] = i % 2 ? db[i / 2][e] : dw[i / 2][e];
        __syncthreads();
        int64_t column = i / 2 * BLOCK + threadIdx.x;
        T sum = 0;
        for (int k = 0; k < WARPS; k++) sum += shared[k][threadIdx.x];
        if (column < n) ((T *)parts)[(2 * (int64_t)blockIdx.x + i % 2) * n + column] = sum;
        __syncthreads();
    }
}
// Adds up the segments' sums of dw and of db. A block has JOIN_ACROSS columns of one of them: each of its threads adds
// up every JOIN_DOWN-th segment of a column, then the results are added in a tree.
enum { JOIN_ACROSS = 8, JOIN_DOWN = BLOCK / JOIN_ACROSS };
template <class S> __global__ void norm_join_kernel(int64_t segments, int64_t n, const void *parts, void *dw, void *db)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS][JOIN_ACROSS];
    int64_t tiles = gridDim.x / 2, which = blockIdx.x / tiles,
            j = blockIdx.x % tiles * JOIN_ACROSS + threadIdx.x % JOIN_ACROSS;
    const T *from = (const T *)parts + which * n + j;
    void *out = which ? db : dw;
    T sum = 0;
    for (int64_t s = threadIdx.x / JOIN_ACROSS; out && j < n && s < segments; s += 4 * JOIN_DOWN) {
        T v[4];  // the loads of four segments are in flight together
        UNROLL
        for (int a = 0; a < 4; a++) v[a] = s + a * JOIN_DOWN < segments ? from[(s + a * JOIN_DOWN) * 2 * n] : 0;
        UNROLL
        for (int a = 0; a < 4; a++) sum += v[a];
    }
    for (int step = JOIN_ACROSS; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 < JOIN_ACROSS) shared[threadIdx.x / 32][threadIdx.x % 32] = sum;
    __syncthreads();
    if (threadIdx.x >= JOIN_ACROSS || j >= n || !out) return;
    for (int w = 1; w < WARPS; w++) sum += shared[w][threadIdx.x];
    store_one((S *)out + j, sum);
}

// operands: the number of tensors that are read.
static norm_segments norm_segments_of(const norm_rows &q, int dtype, int operands)
{
    int64_t size = ms__dtype_size(dtype) * operands;
    norm_segments s = { filling_segments(q.rows * q.n * size, q.rows, q.n, 4096 / size), q.n };
    if (s.count > 1) s.length = up(up(q.n, s.count), WIDE) * WIDE;
    s.count = s.length ? up(q.n, s.length) : 1;
    return s;
}
// residual: the index of the residual among the inputs; 0 if there is none.
static ms_status norm(ms_call *c, bool rms, int residual)
{
    held_inputs h;
    scratch parts;
    ms_tensor *o = c->out[0];
    const char *what = c->op->name;
    int64_t n = ms__row_length(c->in[0], (int)c->i[0]);
    int index = index_of(o), dtype = o->dtype;
    MS_TRY(h.hold(c));
    if (o->numel == 0) return MS_OK;
    norm_rows q = { o->numel / n,
                    n,
                    c->f[0],
                    rms,
                    ms__data(h.in[0]),
                    data_of(h.in[residual + 1]),
                    NULL,
                    NULL,
                    data_of(c->out[residual + 1]) };
    if (residual) q.r = ms__data(h.in[residual]), q.sum = ms__data(c->out[1]);
    const void *b = data_of(h.in[residual + 2]);
    norm_segments s = norm_segments_of(q, dtype, residual ? 2 : 1);
    if (s.count == 1) {
        int width = row_width(q.rows, n);
        return launch_blocks(what, index, TYPED_KERNEL(dtype, norm_kernel), up(q.rows, BLOCK / width), BLOCK, q, width,
                             b, ms__data(o));
    }
    MS_TRY(parts.alloc(c, ms__device(o), q.rows * s.count * (int64_t)sizeof(norm_sums)));
    MS_TRY(launch_blocks(what, index, TYPED_KERNEL(dtype, norm_measure_kernel), q.rows * s.count, BLOCK, q, s,
                         (norm_sums *)parts.data));
    return launch_blocks(what, index, TYPED_KERNEL(dtype, norm_apply_kernel), q.rows * s.count, BLOCK, q, s,
                         (const norm_sums *)parts.data, b, ms__data(o));
}
static ms_status run_layer_norm(ms_call *c) { return norm(c, false, 0); }
static ms_status run_rms_norm(ms_call *c) { return norm(c, true, 0); }
static ms_status run_add_layer_norm(ms_call *c) { return norm(c, false, 1); }
static ms_status run_add_rms_norm(ms_call *c) { return norm(c, true, 1); }

// A call of the backward. Inputs: gradient, x, w (optional), statistics, and optionally the gradient that x already
// has: it is then in dx, and `add` is set. Outputs: those of dx, dw, db that the mask (rows/grad.h) selects; the others
// are NULL.
struct norm_gradients {
    const ms_call *c;
    norm_rows q;
    ms_tensor *g, *x, *dx, *dw, *db;
    bool add;  // whether to add to dx
};

static ms_status join_norm_parts(const norm_gradients &d, int64_t segments, const void *parts)
{
    return launch_blocks(d.c->op->name, index_of(d.x), TYPED_KERNEL(d.x->dtype, norm_join_kernel),
                         2 * up(d.q.n, JOIN_ACROSS), BLOCK, segments, d.q.n, parts, data_of(d.dw), data_of(d.db));
}

enum { LONGEST_ROW = 4 * 32 * WIDE };
#ifdef MS_EMULATED
enum { FILLING_ROWS = 24, MOST_BLOCKS = 4 };  // few, so that specs reach all paths
#else
enum { FILLING_ROWS = (int)ENOUGH * (int)WARPS, MOST_BLOCKS = 480 };
#endif
#define ROWS_KERNEL(dtype, K)                            \
    ((dtype) == MS_F16    ? norm_rows_kernel<ms_f16, K>  \
     : (dtype) == MS_BF16 ? norm_rows_kernel<ms_bf16, K> \
                          : norm_rows_kernel<float, K>)
static ms_status short_norm_backward(const norm_gradients &d)
{
    // Few enough blocks that their parts take about 1 MB at most, because only a few blocks add them up.
    int64_t packs = up(d.q.n, 32 * WIDE), blocks = packs <= 2 ? MOST_BLOCKS / packs : MOST_BLOCKS * 11 / 40;
    if (blocks > up(d.q.rows, WARPS)) blocks = up(d.q.rows, WARPS);
    int dtype = d.x->dtype, index = index_of(d.x);
    scratch parts;
    if (d.dw || d.db) MS_TRY(parts.alloc(d.c, ms__device(d.x), 2 * blocks * d.q.n * (int64_t)sizeof(float)));
    auto kernel = packs == 1   ? ROWS_KERNEL(dtype, 1)
                  : packs == 2 ? ROWS_KERNEL(dtype, 2)
                  : packs == 3 ? ROWS_KERNEL(dtype, 3)
                               : ROWS_KERNEL(dtype, 4);
    MS_TRY(launch_blocks(d.c->op->name, index, kernel, blocks, BLOCK, d.q, ms__data(d.g), data_of(d.dx), d.add,
                         (void *)parts.data));
    return parts.data ? join_norm_parts(d, blocks, parts.data) : MS_OK;
}

static ms_status long_norm_dx(const norm_gradients &d)
{
    int dtype = d.x->dtype, index = index_of(d.x);
    const char *what = d.c->op->name;
    norm_segments s = norm_segments_of(d.q, dtype, 2);
    scratch parts;
    if (s.count == 1) {
        int width = row_width(d.q.rows, d.q.n);
        return launch_blocks(what, index, TYPED_KERNEL(dtype, norm_backward_kernel), up(d.q.rows, BLOCK / width), BLOCK,
                             d.q, width, ms__data(d.g), dx_target { ms__data(d.dx), d.add });
    }
    MS_TRY(parts.alloc(d.c, ms__device(d.x), d.q.rows * s.count * (int64_t)sizeof(norm_sums)));
    MS_TRY(launch_blocks(what, index, TYPED_KERNEL(dtype, norm_dots_kernel), d.q.rows * s.count, BLOCK, d.q, s,
                         ms__data(d.g), (norm_sums *)parts.data));
    return launch_blocks(what, index, TYPED_KERNEL(dtype, norm_dx_kernel), d.q.rows * s.count, BLOCK, d.q, s,
                         (const norm_sums *)parts.data, ms__data(d.g), dx_target { ms__data(d.dx), d.add });
}
static ms_status long_norm_backward(const norm_gradients &d)
{
    int dtype = d.x->dtype;
    int64_t rows = d.q.rows, n = d.q.n, tiles = up(n, COLUMNS);
    scratch room;
    int64_t cut = column_segments(rows, tiles), more = up(2 * ENOUGH, tiles);
    if (cut * tiles < ENOUGH && rows * n * 4 >= LARGE) cut = more < MOST_JOINED ? more : int64_t { MOST_JOINED };
    // A segment has a multiple of four rows, because statistics are read for four rows at a time.
    int64_t segment = up(up(rows, cut), 4) * 4, segments = up(rows, segment);
    static_assert(2 * COLUMNS == BLOCK, "norm_parts_kernel has a thread for each sum");
    if (d.dx) MS_TRY(long_norm_dx(d));
    if (!d.dw && !d.db) return MS_OK;
    MS_TRY(room.alloc(d.c, ms__device(d.x), 2 * segments * n * (dtype == MS_F64 ? 8 : 4)));
    MS_TRY(launch_blocks(d.c->op->name, index_of(d.x), TYPED_KERNEL(dtype, norm_parts_kernel), tiles * segments, BLOCK,
                         d.q, segment, tiles, ms__data(d.g), (void *)room.data));
    return join_norm_parts(d, segments, room.data);
}

static ms_status norm_backward_call(ms_call *c, bool rms)
{
    held_inputs h;
    int64_t n = ms__row_length(c->in[1], (int)c->i[0]);
    MS_TRY(h.hold(c, 4));
    norm_rows q = { n ? h.in[1]->numel / n : 0, n, c->f[0], rms, ms__data(h.in[1]), data_of(h.in[2]), NULL, NULL,
                    ms__data(h.in[3]) };
    norm_gradients d = { c,           q, h.in[0], h.in[1], ms__grad_out(c, 0), ms__grad_out(c, 1), ms__grad_out(c, 2),
                         c->n_in == 5 };
    // norm_rows_kernel computes rows of up to LONGEST_ROW elements, except those of float64 and of large data with too
    // few rows to fill the GPU.
    bool fills = q.rows >= FILLING_ROWS || q.rows * n * 2 * ms__dtype_size(d.x->dtype) < LARGE;
    if (q.rows > 0)
        return n <= LONGEST_ROW && d.x->dtype != MS_F64 && fills ? short_norm_backward(d) : long_norm_backward(d);
    if (d.dw) MS_TRY(ms__cuda_fill_tensor(d.dw, 0));
    return d.db ? ms__cuda_fill_tensor(d.db, 0) : MS_OK;
}
static ms_status run_layer_norm_backward(ms_call *c) { return norm_backward_call(c, false); }
static ms_status run_rms_norm_backward(ms_call *c) { return norm_backward_call(c, true); }

extern const ms_cuda_kernel ms__cuda_norm[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_norm[] = { ROW(layer_norm) ROW(layer_norm_backward) ROW(rms_norm) ROW(rms_norm_backward)
                                             ROW(add_layer_norm) ROW(add_rms_norm) { NULL, NULL } };
