// SPDX-License-Identifier: MIT
// cuda/batch_norm.cu -- batch_norm and its gradient. Sums are computed by one block per channel, in float64, in a fixed
// order; outputs and dx by one thread per element, in float32 or float64.
#include "formulas/batch_norm.h"
#include "cuda/cuda.h"

// x is [n, c, s]: c is the second dimension of the tensor, s the product of all later ones. stats: dtype of mean and
// variance.
struct bn_sizes {
    int64_t n, c, s;
    int dtype, stats;
    bool training;
    double eps;
};
static bn_sizes bn_sizes_of(const ms_tensor *x, bool training, double eps)
{
    bn_sizes z = { x->shape[0], x->shape[1], 1, x->dtype, x->dtype == MS_F64 ? MS_F64 : MS_F32, training, eps };
    for (int d = 2; d < x->ndim; d++) z.s *= x->shape[d];
    return z;
}
// The index of element j of channel c.
static __device__ inline int64_t place_of(const bn_sizes &z, int64_t c, int64_t j)
{
    return (j / z.s * z.c + c) * z.s + j % z.s;
}

// A tensor with one number per channel, of any dtype; data is NULL if the call has none.
struct by_channel {
    int dtype;
    const void *data;
};
// The number of channel c, or `absent` if the call has no such tensor.
static __device__ inline double at_channel(const by_channel &t, int64_t c, double absent)
{
    return t.data ? load<double>(t.dtype, t.data, c) : absent;
}

// Mean and (biased) variance of every channel.
__global__ void bn_stats_kernel(bn_sizes z, const void *x, void *mean, void *var)
{
    __shared__ double shared[BLOCK];
    int64_t c = blockIdx.x, count = z.n * z.s;
    double sum = 0, spread = 0;
    for (int64_t j = threadIdx.x; j < count; j += BLOCK) sum += load<double>(z.dtype, x, place_of(z, c, j));
    double m = block_sum(sum, shared) / (double)count;
    for (int64_t j = threadIdx.x; j < count; j += BLOCK) {
        double d = load<double>(z.dtype, x, place_of(z, c, j)) - m;
        spread += d * d;
    }
    spread = block_sum(spread, shared);
    if (threadIdx.x != 0) return;
    store<double>(z.stats, mean, c, m);
    store<double>(z.stats, var, c, spread / (double)count);
}

// Computes the scale of every channel first, so that there is one square root per channel.
__global__ void bn_scale_kernel(bn_sizes z, by_channel var, by_channel w, double *scale)
{
    int64_t c = GLOBAL_INDEX;
    if (c < z.c) scale[c] = ms_bn_scale(at_channel(var, c, 1), z.eps, at_channel(w, c, 1));
}

template <class T>
__global__ void bn_kernel(bn_sizes z, const void *x, by_channel mean, const double *scale, by_channel b, void *y)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= z.n * z.c * z.s) return;
    int64_t c = i / z.s % z.c;
    store<T>(z.dtype, y, i,
             (load<T>(z.dtype, x, i) - (T)at_channel(mean, c, 0)) * (T)scale[c] + (T)at_channel(b, c, 0));
}

// What backward reads for every channel (gmean, gvar: the gradients of the statistics), and the gradients that it
// stores (NULL: not needed).
struct bn_channels {
    by_channel w, mean, var, gmean, gvar;
    void *dw, *db, *dmean, *dvar;
};
// One block per channel: stores its gradients, and in factors [3, c] the coefficients of dx: of g, of x - mean, and the
// constant.
template <class T>
__global__ void bn_sums_kernel(bn_sizes z, const void *g, const void *x, bn_channels t, double *factors)
{
    __shared__ double shared[BLOCK];
    int64_t c = blockIdx.x, count = z.n * z.s;
    T m = (T)at_channel(t.mean, c, 0);
    double sg = 0, sgx = 0;
    for (int64_t j = threadIdx.x; g && j < count; j += BLOCK) {
        int64_t k = place_of(z, c, j);
        double v = load<double>(z.dtype, g, k);
        sg += v;
        sgx += v * (double)(load<T>(z.dtype, x, k) - m);
    }
    sg = block_sum(sg, shared);
    sgx = block_sum(sgx, shared);
    if (threadIdx.x != 0) return;
    ms_bn_sums s = { at_channel(t.var, c, 1),
                     z.eps,
                     at_channel(t.w, c, 1),
                     (double)count,
                     at_channel(t.gmean, c, 0),
                     at_channel(t.gvar, c, 0),
                     sg,
                     sgx,
                     z.training };
    ms_bn_channel q = ms_bn_finish(&s);
    if (t.dw) store<double>(z.stats, t.dw, c, q.dw);
    if (t.db) store<double>(z.stats, t.db, c, q.db);
    if (t.dmean) store<double>(z.stats, t.dmean, c, q.dmean);
    if (t.dvar) store<double>(z.stats, t.dvar, c, q.dvar);
    factors[c] = q.of_g;
    factors[z.c + c] = q.of_x;
    factors[2 * z.c + c] = q.alone;
}

template <class T>
__global__ void bn_backward_kernel(bn_sizes z, const void *g, const void *x, by_channel mean, const double *factors,
                                   void *dx)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= z.n * z.c * z.s) return;
    int64_t c = i / z.s % z.c;
    T v = (T)factors[z.c + c] * (load<T>(z.dtype, x, i) - (T)at_channel(mean, c, 0)) + (T)factors[2 * z.c + c];
    if (g) v += (T)factors[c] * load<T>(z.dtype, g, i);
    store<T>(z.dtype, dx, i, v);
}

static by_channel channels(const ms_tensor *t) { return { t ? (int)t->dtype : MS_F32, t ? ms__data(t) : NULL }; }

static ms_status nothing(ms_call *c)  // an empty batch: statistics and gradients are 0
{
    for (int k = 0; k < c->n_out; k++) MS_TRY(ms__cuda_fill_tensor(c->out[k], 0));
    return MS_OK;
}

static ms_status run_batch_norm(ms_call *c)
{
    ms_tensor *y = c->out[0];
    if (y->numel == 0) return nothing(c);
    bn_sizes z = bn_sizes_of(c->in[0], c->i[0] != 0, c->f[0]);
    const char *what = c->op->name;
    int index = index_of(y);
    held_inputs h;
    scratch room;
    MS_TRY(h.hold(c));
    MS_TRY(room.alloc(c, ms__device(y), z.c * (int64_t)sizeof(double)));
    if (z.training)
        MS_TRY(launch_blocks(what, index, bn_stats_kernel, z.c, BLOCK, z, ms__data(h.in[0]), ms__data(c->out[1]),
                             ms__data(c->out[2])));
    by_channel mean = channels(z.training ? c->out[1] : h.in[3]), var = channels(z.training ? c->out[2] : h.in[4]);
    double *scale = (double *)room.data;
    MS_TRY(launch(what, index, bn_scale_kernel, up(z.c, BLOCK), BLOCK, z, var, channels(h.in[1]), scale));
    return launch(what, index, REAL_KERNEL(z.dtype, bn_kernel), up(y->numel, BLOCK), BLOCK, z, ms__data(h.in[0]), mean,
                  scale, channels(h.in[2]), ms__data(y));
}

template <class T> static ms_status backward(ms_call *c, const bn_sizes &z, const held_inputs &h, double *factors)
{
    const char *what = c->op->name;
    const void *g = data_of(h.in[0]), *x = ms__data(h.in[1]);
    bn_channels t = { channels(h.in[2]),           channels(h.in[3]),           channels(h.in[4]),
                      channels(h.in[5]),           channels(h.in[6]),           data_of(ms__grad_out(c, 1)),
                      data_of(ms__grad_out(c, 2)), data_of(ms__grad_out(c, 3)), data_of(ms__grad_out(c, 4)) };
    ms_tensor *dx = ms__grad_out(c, 0);
    int index = index_of(h.in[1]);
    MS_TRY(launch_blocks(what, index, bn_sums_kernel<T>, z.c, BLOCK, z, g, x, t, factors));
    return dx ? launch(what, index, bn_backward_kernel<T>, up(dx->numel, BLOCK), BLOCK, z, g, x, t.mean,
                       (const double *)factors, ms__data(dx))
              : MS_OK;
}

// Inputs: gradient?, x, weight?, mean, var, gradient of mean?, gradient of var?. Integers: training, mask
// (rows/grad.h). Number: eps. Outputs: those of dx, dw, db, dmean, dvar that the mask names.
static ms_status run_batch_norm_backward(ms_call *c)
{
    if (c->in[1]->numel == 0) return nothing(c);
    bn_sizes z = bn_sizes_of(c->in[1], c->i[0] != 0, c->f[0]);
    held_inputs h;
    scratch room;
    MS_TRY(h.hold(c));
    MS_TRY(room.alloc(c, ms__device(c->in[1]), 3 * z.c * (int64_t)sizeof(double)));
    return z.dtype == MS_F64 ? backward<double>(c, z, h, (double *)room.data)
                             : backward<float>(c, z, h, (double *)room.data);
}

extern const ms_cuda_kernel ms__cuda_batch_norm[];
const ms_cuda_kernel ms__cuda_batch_norm[] = { { "batch_norm", run_batch_norm },
                                               { "batch_norm_backward", run_batch_norm_backward },
                                               { NULL, NULL } };
