// SPDX-License-Identifier: MIT
// cuda/rows.cu -- softmax, log_softmax and their gradients; sums in float32 (float64 for float64 tensors) in a fixed
// order. A warp or a block computes a row along the last dimension, in accesses of 16 bytes; a block computes a row
// along another dimension.
#include "cuda/blocks.h"
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
    if (most == -(T)INFINITY) most = 0;  // a row whose elements are all -inf gives NaN (0 / 0), as in PyTorch
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

// ---- along other dimensions ----

template <class T> __global__ void softmax_kernel(ms_rows r, int dtype, const void *x, void *y, bool log)
{
    __shared__ T shared[BLOCK];
    int64_t at = ms__row_start(&r, blockIdx.x);
    T most = -(T)INFINITY, sum = 0;
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) {
        T v = load<T>(dtype, x, at + j * r.stride);
        most = ((v > most) | (v != v)) ? v : most;
    }
    most = block_max(most, shared);
    if (most == -(T)INFINITY) most = 0;  // a row whose elements are all -inf gives NaN (0 / 0), as in PyTorch
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) sum += exp_of(load<T>(dtype, x, at + j * r.stride) - most);
    sum = block_sum(sum, shared);
    T shift = most + log_of(sum), scale = 1 / sum;
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) {
        T v = load<T>(dtype, x, at + j * r.stride);
        store<T>(dtype, y, at + j * r.stride, log ? v - shift : exp_of(v - most) * scale);
    }
}
// softmax: dx = y (g - sum g y); log_softmax: dx = g - exp(y) sum g
template <class T>
__global__ void softmax_backward_kernel(ms_rows r, int dtype, const void *g, const void *y, void *dx, bool log)
{
    __shared__ T shared[BLOCK];
    int64_t at = ms__row_start(&r, blockIdx.x);
    T sum = 0;
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) {
        int64_t k = at + j * r.stride;
        sum += log ? load<T>(dtype, g, k) : load<T>(dtype, g, k) * load<T>(dtype, y, k);
    }
    sum = block_sum(sum, shared);
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) {
        int64_t k = at + j * r.stride;
        T a = load<T>(dtype, g, k), b = load<T>(dtype, y, k);
        store<T>(dtype, dx, k, log ? a - exp_of(b) * sum : b * (a - sum));
    }
}
static ms_status softmax(ms_call *c, bool log, bool backward)
{
    ms_tensor *x = NULL, *g = NULL, *o = c->out[0];
    int d = (int)(c->i[0] < 0 ? c->i[0] + (o->ndim ? o->ndim : 1) : c->i[0]), index = index_of(o), dtype = o->dtype;
    ms_rows r = ms__rows_along(o, d);
    ms_status st = ms__contiguous(&x, c->in[backward ? 1 : 0]);
    if (st == MS_OK && backward) st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK && r.stride == 1) {
        int width = row_width(r.rows, r.n);
        packed_rows p = { r.rows, r.n, width, log };
        int64_t blocks = up(r.rows, BLOCK / width);
#define SOFTMAX(S, T)                                                                                             \
    st = backward ? launch_blocks(c->op->name, index, softmax_rows_backward_kernel<S>, blocks, BLOCK, p,          \
                                  (S *)ms__data(g), (S *)ms__data(x), (S *)ms__data(o))                           \
                  : launch_blocks(c->op->name, index, softmax_rows_kernel<S>, blocks, BLOCK, p, (S *)ms__data(x), \
                                  (S *)ms__data(o))
        WITH_FLOAT_TYPE(dtype, SOFTMAX)
#undef SOFTMAX
    } else if (st == MS_OK && !backward)
        st = launch_blocks(c->op->name, index, REAL_KERNEL(dtype, softmax_kernel), r.rows, BLOCK, r, dtype, ms__data(x),
                           ms__data(o), log);
    else if (st == MS_OK)
        st = launch_blocks(c->op->name, index, REAL_KERNEL(dtype, softmax_backward_kernel), r.rows, BLOCK, r, dtype,
                           ms__data(g), ms__data(x), ms__data(o), log);
    if (g) ms__release(g);
    if (x) ms__release(x);
    return st;
}
static ms_status run_softmax(ms_call *c) { return softmax(c, false, false); }
static ms_status run_log_softmax(ms_call *c) { return softmax(c, true, false); }
static ms_status run_softmax_backward(ms_call *c) { return softmax(c, false, true); }
static ms_status run_log_softmax_backward(ms_call *c) { return softmax(c, true, true); }

extern const ms_cuda_kernel ms__cuda_rows[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_rows[] = { ROW(softmax) ROW(softmax_backward) ROW(log_softmax)
                                             ROW(log_softmax_backward) { NULL, NULL } };
