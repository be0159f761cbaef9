// SPDX-License-Identifier: MIT
// cuda/norm.cu -- layer_norm, rms_norm and their gradients: h = (x - mean) rstd, y = h w + b. A group of `width`
// threads (a warp or the whole block) computes a row, and reads it several times from the cache. Sums are in float32
// (float64 for float64 tensors), in a fixed order.
#include "cuda/blocks.h"
#include "rows/layout.h"

// Rows of n elements, to be normalised by rms or by mean and variance. w is NULL if absent.
struct norm_rows {
    int64_t rows, n;
    double eps;
    bool rms;
    const void *x, *w;
};

// Computes a row's mean (0 for rms) and rstd = 1 / sqrt(mean of (x - mean)^2 + eps).
template <class S>
__device__ inline void measure(const norm_rows &q, const S *x, int width, real_of<S> *shared, real_of<S> *mean,
                               real_of<S> *rstd)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    int64_t n = q.n;
    int lane = threadIdx.x % width;
    T sum = 0, spread = 0, v[N];
    if (!q.rms) {
        for (int64_t j = (int64_t)lane * N; j < n; j += width * N) {
            read_pack(x, j, n, (T)0, v);
            for (int e = 0; e < N; e++) sum += v[e];
        }
        sum = group_sum(sum, width, shared);
    }
    T m = q.rms ? (T)0 : sum / (T)n;
    for (int64_t j = (int64_t)lane * N; j < n; j += width * N) {
        read_pack(x, j, n, m, v);
        for (int e = 0; e < N; e++) spread += (v[e] - m) * (v[e] - m);
    }
    spread = group_sum(spread, width, shared);
    *mean = m;
    *rstd = 1 / sqrt_of(spread / (T)n + (T)q.eps);
}
template <class S> __global__ void norm_kernel(norm_rows q, int width, const void *b, void *y)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    __shared__ T shared[WARPS];
    int64_t n = q.n, row = (int64_t)blockIdx.x * (BLOCK / width) + threadIdx.x / width;
    int lane = threadIdx.x % width;
    if (row >= q.rows) return;
    const S *x = (const S *)q.x + row * n;
    T mean, rstd, v[N], f[N];
    measure<S>(q, x, width, shared, &mean, &rstd);
    for (int64_t j = (int64_t)lane * N; j < n; j += width * N) {
        read_pack(x, j, n, (T)0, v);
        for (int e = 0; e < N; e++) v[e] = (v[e] - mean) * rstd;
        if (q.w) {
            read_pack((const S *)q.w, j, n, (T)0, f);
            for (int e = 0; e < N; e++) v[e] *= f[e];
        }
        if (b) {
            read_pack((const S *)b, j, n, (T)0, f);
            for (int e = 0; e < N; e++) v[e] += f[e];
        }
        write_pack((S *)y + row * n, j, n, v);
    }
}
// dx = rstd (q - mean(q) - h mean(q h)), q = g w, without mean(q) for rms; `add`: added to dx. Stores mean and rstd of
// every row in stats. dx and stats may be NULL.
template <class S>
__global__ void norm_backward_kernel(norm_rows r, int width, const void *g_, void *dx, bool add, void *stats)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    __shared__ T shared[WARPS];
    int64_t n = r.n, row = (int64_t)blockIdx.x * (BLOCK / width) + threadIdx.x / width;
    int lane = threadIdx.x % width;
    if (row >= r.rows) return;
    const S *x = (const S *)r.x + row * n, *g = (const S *)g_ + row * n;
    T mean, rstd, mq = 0, mh = 0, q[N], h[N], f[N];
    measure<S>(r, x, width, shared, &mean, &rstd);
    if (stats && lane == 0) {
        ((T *)stats)[2 * row] = mean;
        ((T *)stats)[2 * row + 1] = rstd;
    }
    if (!dx) return;
    for (int e = 0; e < N; e++) f[e] = 1;
    for (int64_t j = (int64_t)lane * N; j < n; j += width * N) {
        read_two(g, x, j, n, q, h);
        if (r.w) read_pack((const S *)r.w, j, n, (T)0, f);
        for (int e = 0; e < N; e++) {
            mq += q[e] * f[e];
            mh += q[e] * f[e] * ((h[e] - mean) * rstd);
        }
    }
    mq = r.rms ? (T)0 : group_sum(mq, width, shared) / (T)n;
    mh = group_sum(mh, width, shared) / (T)n;
    for (int64_t j = (int64_t)lane * N; j < n; j += width * N) {
        read_two(g, x, j, n, q, h);
        if (r.w) read_pack((const S *)r.w, j, n, (T)0, f);
        for (int e = 0; e < N; e++) q[e] = rstd * (q[e] * f[e] - mq - (h[e] - mean) * rstd * mh);
        if (add) {
            read_pack((const S *)dx + row * n, j, n, (T)0, h);
            for (int e = 0; e < N; e++) q[e] += h[e];
        }
        write_pack((S *)dx + row * n, j, n, q);
    }
}
// Column sums of g h and of g over a segment of rows. A group of 16 threads covers COLUMNS adjacent columns. The
// block's 16 groups take turns at the rows, four rows at a time: their statistics are read in one access.
enum { ACROSS = 16, COLUMNS = ACROSS * WIDE, GROUPS = BLOCK / ACROSS };
template <class S>
__global__ void __launch_bounds__(BLOCK, sizeof(S) == 8 ? 2 : 3)
    norm_parts_kernel(norm_rows q, int64_t segment, int64_t tiles, const void *g_, const void *stats, void *parts)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    __shared__ T shared[2][GROUPS][COLUMNS];
    const S *g = (const S *)g_, *x = (const S *)q.x;
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
        load_wide((const T *)stats + 2 * r, s);
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
// All three gradients in one pass, for rows of up to K * 32 * WIDE elements. A warp processes one row at a time. Each
// lane holds K packs of the row and accumulates their columns' sums over its warp's rows; the block then adds the sums
// of its warps.
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
    for (int64_t row = first + warp; row < last; row += WARPS) {
        const S *x = (const S *)r.x + row * n, *g = (const S *)g_ + row * n;
        T q[K][N], h[K][N], f[N], sum = 0, spread = 0, mq = 0, mh = 0;
        if (wide) {  // all loads are in flight together; lanes past the row's end load its start
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
        for (int k = 0; k < K; k++)
            for (int e = 0; e < N; e++) sum += h[k][e];
        T mean = r.rms ? (T)0 : warp_sum(sum) / (T)n;
        UNROLL
        for (int k = 0; k < K; k++)
            for (int e = 0; e < N; e++) {
                h[k][e] = (k * 32 + lane) * N + e < n ? h[k][e] - mean : (T)0;
                spread += h[k][e] * h[k][e];
            }
        T rstd = 1 / sqrt_of(warp_sum(spread) / (T)n + (T)r.eps);
        UNROLL
        for (int k = 0; k < K; k++) {
            for (int e = 0; e < N; e++) f[e] = 1;
            if (r.w) read_pack((const S *)r.w, (k * 32 + lane) * N, n, (T)0, f);
            for (int e = 0; e < N; e++) {
                h[k][e] *= rstd;
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
            for (int e = 0; e < N; e++) q[k][e] = rstd * (q[k][e] - mq - h[k][e] * mh);
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
template <class S> __global__ void norm_join_kernel(int64_t segments, int64_t n, const void *parts, void *dw, void *db)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS][33];
    int64_t tiles = gridDim.x / 2, which = blockIdx.x / tiles, j = blockIdx.x % tiles * 32 + threadIdx.x % 32;
    void *out = which ? db : dw;
    T sum = join_column((const T *)parts + which * n, segments, 2 * n, j, j < n && out, shared);
    if (threadIdx.x < 32 && j < n && out) store_one((S *)out + j, sum);
}

static ms_status norm(ms_call *c, bool rms)
{
    held_inputs h;
    ms_tensor *o = c->out[0];
    int64_t n = ms__row_length(c->in[0], rms ? 1 : (int)c->i[0]);
    MS_TRY(h.hold(c));
    norm_rows q = { n ? o->numel / n : 0, n, c->f[0], rms, data_of(h.in[0]), data_of(h.in[1]) };
    int width = row_width(q.rows, n);
    return launch_blocks(c->op->name, index_of(o), TYPED_KERNEL(o->dtype, norm_kernel), up(q.rows, BLOCK / width),
                         BLOCK, q, width, data_of(h.in[2]), ms__data(o));
}
static ms_status run_layer_norm(ms_call *c) { return norm(c, false); }
static ms_status run_rms_norm(ms_call *c) { return norm(c, true); }

// A call of the backward. Inputs: gradient, x, w (optional), and optionally the gradient that x already has (dx then
// holds it, and is added to). Outputs: those of dx, dw, db that the mask (rows/grad.h) selects; the others are NULL.
struct norm_gradients {
    const ms_call *c;
    norm_rows q;
    ms_tensor *g, *x, *dx, *dw, *db;
    bool add;  // whether to add to dx
};

static ms_status join_norm_parts(const norm_gradients &d, int64_t segments, const void *parts)
{
    return launch_blocks(d.c->op->name, index_of(d.x), TYPED_KERNEL(d.x->dtype, norm_join_kernel), 2 * up(d.q.n, 32),
                         BLOCK, segments, d.q.n, parts, data_of(d.dw), data_of(d.db));
}

enum { LONGEST_ROW = 4 * 32 * WIDE };
#define ROWS_KERNEL(dtype, K)                            \
    ((dtype) == MS_F16    ? norm_rows_kernel<ms_f16, K>  \
     : (dtype) == MS_BF16 ? norm_rows_kernel<ms_bf16, K> \
                          : norm_rows_kernel<float, K>)
static ms_status short_norm_backward(const norm_gradients &d)
{
    int64_t packs = up(d.q.n, 32 * WIDE), blocks = packs == 1 ? 512 : packs == 2 ? 264 : 132;
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

static ms_status long_norm_backward(const norm_gradients &d)
{
    int dtype = d.x->dtype, index = index_of(d.x), size = dtype == MS_F64 ? 8 : 4;
    int64_t rows = d.q.rows, n = d.q.n, tiles = up(n, COLUMNS);
    bool sums = d.dw || d.db;
    scratch room;
    // A segment has a multiple of four rows, because statistics are read for four rows at a time.
    int64_t segment = up(up(rows, column_segments(rows, tiles)), 4) * 4, segments = up(rows, segment);
    int64_t stats_n = up(2 * rows, WIDE) * WIDE;
    int width = row_width(rows, n);
    static_assert(2 * COLUMNS == BLOCK, "norm_parts_kernel has a thread for each sum");
    if (sums) MS_TRY(room.alloc(d.c, ms__device(d.x), (stats_n + 2 * segments * n) * size));
    void *stats = room.data, *parts = room.data + stats_n * size;
    MS_TRY(launch_blocks(d.c->op->name, index, TYPED_KERNEL(dtype, norm_backward_kernel), up(rows, BLOCK / width),
                         BLOCK, d.q, width, ms__data(d.g), data_of(d.dx), d.add, stats));
    if (!sums) return MS_OK;
    MS_TRY(launch_blocks(d.c->op->name, index, TYPED_KERNEL(dtype, norm_parts_kernel), tiles * segments, BLOCK, d.q,
                         segment, tiles, ms__data(d.g), stats, parts));
    return join_norm_parts(d, segments, parts);
}

static ms_status norm_backward(ms_call *c, bool rms)
{
    held_inputs h;
    int64_t n = ms__row_length(c->in[1], rms ? 1 : (int)c->i[0]);
    MS_TRY(h.hold(c, 3));
    norm_rows q = { n ? h.in[1]->numel / n : 0, n, c->f[0], rms, ms__data(h.in[1]), data_of(h.in[2]) };
    norm_gradients d = { c,           q, h.in[0], h.in[1], ms__grad_out(c, 0), ms__grad_out(c, 1), ms__grad_out(c, 2),
                         c->n_in == 4 };
    if (q.rows > 0) return n <= LONGEST_ROW && d.x->dtype != MS_F64 ? short_norm_backward(d) : long_norm_backward(d);
    if (d.dw) MS_TRY(ms__cuda_fill_tensor(d.dw, 0));
    return d.db ? ms__cuda_fill_tensor(d.db, 0) : MS_OK;
}
static ms_status run_layer_norm_backward(ms_call *c) { return norm_backward(c, false); }
static ms_status run_rms_norm_backward(ms_call *c) { return norm_backward(c, true); }

extern const ms_cuda_kernel ms__cuda_norm[];
const ms_cuda_kernel ms__cuda_norm[] = { { "layer_norm", run_layer_norm },
                                         { "layer_norm_backward", run_layer_norm_backward },
                                         { "rms_norm", run_rms_norm },
                                         { "rms_norm_backward", run_rms_norm_backward },
                                         { NULL, NULL } };
