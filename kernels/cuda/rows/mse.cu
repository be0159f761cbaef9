// SPDX-License-Identifier: MIT
// cuda/rows/mse.cu -- mse_loss and its gradient: squares in float32 (float64 for float64 tensors), their sum in float64
// in a fixed order.
#include "cuda/segments.h"

enum { NONE, MEAN };  // reductions

// Stores the squares of the differences of a and b.
template <class S> __global__ void mse_kernel(int64_t n, const S *a, const S *b, S *out)
{
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= n) return;
    real_of<S> v[WIDE], w[WIDE];
    read_two(a, b, i, n, v, w);
    UNROLL
    for (int e = 0; e < WIDE; e++) v[e] = (v[e] - w[e]) * (v[e] - w[e]);
    write_pack(out, i, n, v);
}
// Each block adds up the squares of a piece in float64.
template <class S> __global__ void mse_parts_kernel(int64_t n, int64_t piece, const S *a, const S *b, double *parts)
{
    __shared__ double shared[BLOCK];
    alignas(16) __shared__ S tile[2][ROUND];
    planes all = { 1, 1, n };
    int64_t first = (int64_t)blockIdx.x * piece, last = first + piece < n ? first + piece : n;
    double sum = 0;
    for (; first < last; first += ROUND) {
        fill_tile(tile[0], all, a, 0, first, last);
        fill_tile(tile[1], all, b, 0, first, last);
        __syncthreads();
        for (int j = threadIdx.x; j < ROUND && first + j < last; j += BLOCK) {
            real_of<S> d = one_of(tile[0] + j) - one_of(tile[1] + j);
            sum += (double)(d * d);
        }
        __syncthreads();
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
// Adds up the parts and divides. Runs as one block.
__global__ void mse_join_kernel(int64_t parts, const double *part, double divisor, int dtype, void *out)
{
    __shared__ double shared[BLOCK];
    double sum = 0;
    ROLLED
    for (int64_t k = threadIdx.x; k < parts; k += BLOCK) sum += part[k];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) store<double>(dtype, out, 0, sum / divisor);
}
// mse_loss's inputs, and their gradients, which are NULL if they are not needed.
template <class S> struct mse_gradient {
    const S *a, *b;
    S *da, *db;
};
// da = 2 g (a - b), db = -da. each: g has one element per difference; otherwise it has one element, to be divided by
// the divisor.
template <class S>
__global__ void mse_backward_kernel(int64_t n, mse_gradient<S> q, bool each, double divisor, const S *g)
{
    typedef real_of<S> T;
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= n) return;
    T v[WIDE], w[WIDE], f[WIDE], scale = each ? 0 : (T)(2 * ((double)one_of(g) / divisor));
    read_two(q.a, q.b, i, n, v, w);
    if (each) read_pack(g, i, n, (T)0, f);
    UNROLL
    for (int e = 0; e < WIDE; e++) v[e] = (each ? (T)2 * f[e] : scale) * (v[e] - w[e]);
    if (q.da) write_pack(q.da, i, n, v);
    UNROLL
    for (int e = 0; e < WIDE; e++) v[e] = -v[e];
    if (q.db) write_pack(q.db, i, n, v);
}
template <class S> static ms_status mse(ms_call *c, const held_inputs &h)
{
    scratch sums;
    ms_tensor *o = c->out[0];
    // At most 4096 pieces, so that a thread adds up 16 at most; but enough blocks to fill the GPU, if n is large.
    int64_t n = c->in[0]->numel, size = sizeof(S), parts = up(n, 16384);
    if (parts > 4096) parts = 4096;
    if (parts < ENOUGH && 2 * n * size >= LARGE) parts = filling_segments(2 * n * size, 1, n, 2048 / size);
    int64_t piece = up(up(n, parts ? parts : 1), WIDE) * WIDE;
    parts = piece ? up(n, piece) : 0;
    const S *a = (const S *)ms__data(h.in[0]), *b = (const S *)ms__data(h.in[1]);
    int index = index_of(o);
    const char *what = c->op->name;
    grid threads = grid_of(up(n, WIDE));
    if (c->i[0] == NONE)
        return launch(what, index, mse_kernel<S>, threads.blocks, threads.threads, n, a, b, (S *)ms__data(o));
    MS_TRY(sums.alloc(c, ms__device(o), (parts + 1) * (int64_t)sizeof(double)));
    MS_TRY(launch_blocks(what, index, mse_parts_kernel<S>, parts, BLOCK, n, piece, a, b, (double *)sums.data));
    return launch_blocks(what, index, mse_join_kernel, 1, BLOCK, parts, (const double *)sums.data,
                         c->i[0] == MEAN ? (double)n : 1.0, (int)o->dtype, ms__data(o));
}
template <class S> static ms_status mse_backward(ms_call *c, const held_inputs &h)
{
    const ms_tensor *a = h.in[1];
    mse_gradient<S> q = { (const S *)ms__data(a), (const S *)ms__data(h.in[2]), (S *)data_of(ms__grad_out(c, 0)),
                          (S *)data_of(ms__grad_out(c, 1)) };
    grid threads = grid_of(up(a->numel, WIDE));
    return launch(c->op->name, index_of(a), mse_backward_kernel<S>, threads.blocks, threads.threads, a->numel, q,
                  c->i[0] == NONE, c->i[0] == MEAN ? (double)a->numel : 1.0, (const S *)ms__data(h.in[0]));
}
static ms_status run_mse_loss(ms_call *c)
{
    held_inputs h;
    MS_TRY(h.hold(c));
#define MSE(S, T) return mse<S>(c, h)
    WITH_FLOAT_TYPE(c->out[0]->dtype, MSE)
#undef MSE
}
static ms_status run_mse_loss_backward(ms_call *c)
{
    held_inputs h;
    MS_TRY(h.hold(c));
#define MSE(S, T) return mse_backward<S>(c, h)
    WITH_FLOAT_TYPE(h.in[1]->dtype, MSE)
#undef MSE
}

extern const ms_cuda_kernel ms__cuda_mse[];
const ms_cuda_kernel ms__cuda_mse[] = { { "mse_loss", run_mse_loss },
                                        { "mse_loss_backward", run_mse_loss_backward },
                                        { NULL, NULL } };
