// SPDX-License-Identifier: MIT
// cuda/rows.cu -- softmax, log_softmax and their gradients: one block per row; sums in float32 (float64 for doubles) in
// a fixed tree.
#include "cuda/blocks.h"
#include "rows/layout.h"

// ---- softmax along any dimension ----

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
    if (most == -(T)INFINITY) most = 0;  // a row of -inf only gives 0 / 0, as in PyTorch
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
    if (st == MS_OK && !backward)
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
