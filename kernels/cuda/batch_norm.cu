// SPDX-License-Identifier: MIT
// cuda/batch_norm.cu -- batch_norm and its gradient. Sums are computed by one block per channel, in float64, in a fixed
// order; each thread computes WIDE elements of the output or of dx, in float32 or float64.
#include "formulas/batch_norm.h"
#include "cuda/blocks.h"

// x is [n, c, s]: c is the second dimension of the tensor, s the product of all later ones. stats: dtype of mean and
// variance.
struct bn_sizes : planes {
    int dtype, stats;
    bool training;
    double eps;
};
static bn_sizes bn_sizes_of(const ms_tensor *x, bool training, double eps)
{
    bn_sizes z = { { x->shape[0], x->shape[1], 1 }, x->dtype, x->dtype == MS_F64 ? MS_F64 : MS_F32, training, eps };
    for (int d = 2; d < x->ndim; d++) z.s *= x->shape[d];
    return z;
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
template <class S> __global__ void bn_stats_kernel(bn_sizes z, const S *x, void *mean, void *var)
{
    __shared__ double shared[BLOCK];
    alignas(16) __shared__ S tile[ROUND];
    int64_t c = blockIdx.x, count = z.n * z.s;
    double m = 0, sum = 0;
    for (int pass = 0; pass < 2; pass++) {
        sum = 0;
        for (int64_t first = 0; first < count; first += ROUND) {
            fill_tile(tile, z, x, c, first, count);
            __syncthreads();
            for (int j = threadIdx.x; j < ROUND && first + j < count; j += BLOCK) {
                double v = (double)one_of(tile + j), d = v - m;
                sum += pass ? d * d : v;
            }
            __syncthreads();
        }
        sum = block_sum(sum, shared);
        if (pass == 0) m = sum / (double)count;
    }
    if (threadIdx.x != 0) return;
    store<double>(z.stats, mean, c, m);
    store<double>(z.stats, var, c, sum / (double)count);
}

// The factors of a channel: y or dx = of_g * g + of_x * (x - mean) + alone. CENTRE: the mean. Factor f of channel c is
// factors[f * C + c], where C is the number of channels.
enum { OF_G, OF_X, ALONE, CENTRE, FACTORS };
// Computes the factors of y in a kernel of their own, so that there is one square root per channel.
__global__ void bn_scale_kernel(bn_sizes z, by_channel mean, by_channel var, by_channel w, by_channel b,
                                double *factors)
{
    int64_t c = GLOBAL_INDEX;
    if (c >= z.c) return;
    factors[OF_G * z.c + c] = 0;
    factors[OF_X * z.c + c] = ms_bn_scale(at_channel(var, c, 1), z.eps, at_channel(w, c, 1));
    factors[ALONE * z.c + c] = at_channel(b, c, 0);
    factors[CENTRE * z.c + c] = at_channel(mean, c, 0);
}

// Stores y (g is NULL) or dx (g is the gradient of y) in out.
template <class S> __global__ void bn_kernel(planes z, const S *g, const S *x, const double *factors, S *out)
{
    typedef real_of<S> T;
    int64_t i = GLOBAL_INDEX * WIDE, n = z.n * z.c * z.s;
    if (i >= n) return;
    T v[WIDE], w[WIDE], of_g = 0, of_x = 0, alone = 0, mean = 0;
    if (g) read_two(x, g, i, n, v, w);
    else read_pack(x, i, n, (T)0, v);
    int64_t c = i / z.s, r = i - c * z.s;
    c %= z.c;
    UNROLL
    for (int e = 0; e < WIDE; e++) {
        if (e == 0 || r == 0) {
            of_g = (T)factors[OF_G * z.c + c], of_x = (T)factors[OF_X * z.c + c];
            alone = (T)factors[ALONE * z.c + c], mean = (T)factors[CENTRE * z.c + c];
        }
        v[e] = of_x * (v[e] - mean) + alone;
        if (g) v[e] += of_g * w[e];
        if (++r == z.s) r = 0, c = c + 1 < z.c ? c + 1 : 0;
    }
    write_pack(out, i, n, v);
}

// What backward reads for every channel (gmean, gvar: the gradients of the statistics), and the gradients that it
// stores (NULL: not needed).
struct bn_channels {
    by_channel w, mean, var, gmean, gvar;
    void *dw, *db, *dmean, *dvar;
};
// One block per channel: stores its gradients, and the factors of dx.
template <class S> __global__ void bn_sums_kernel(bn_sizes z, const S *g, const S *x, bn_channels t, double *factors)
{
    typedef real_of<S> T;
    __shared__ double shared[BLOCK];
    alignas(16) __shared__ S tile[2][ROUND];
    int64_t c = blockIdx.x, count = z.n * z.s;
    T m = (T)at_channel(t.mean, c, 0);
    double sg = 0, sgx = 0;
    for (int64_t first = 0; g && first < count; first += ROUND) {
        fill_tile(tile[0], z, g, c, first, count);
        fill_tile(tile[1], z, x, c, first, count);
        __syncthreads();
        for (int j = threadIdx.x; j < ROUND && first + j < count; j += BLOCK) {
            double v = (double)one_of(tile[0] + j);
            sg += v;
            sgx += v * (double)(one_of(tile[1] + j) - m);
        }
        __syncthreads();
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
    factors[OF_G * z.c + c] = q.of_g;
    factors[OF_X * z.c + c] = q.of_x;
    factors[ALONE * z.c + c] = q.alone;
    factors[CENTRE * z.c + c] = at_channel(t.mean, c, 0);
}

static by_channel channels(const ms_tensor *t) { return { t ? (int)t->dtype : MS_F32, t ? ms__data(t) : NULL }; }

static ms_status nothing(ms_call *c)  // an empty batch: statistics and gradients are 0
{
    for (int k = 0; k < c->n_out; k++) MS_TRY(ms__cuda_fill_tensor(c->out[k], 0));
    return MS_OK;
}

static ms_status apply(ms_call *c, const planes &z, const ms_tensor *g, const ms_tensor *x, const double *factors,
                       ms_tensor *out)
{
    grid n = grid_of(up(out->numel, WIDE));
#define APPLY(S, T)                                                                                                    \
    return launch(c->op->name, index_of(out), bn_kernel<S>, n.blocks, n.threads, z, (S *)data_of(g), (S *)ms__data(x), \
                  factors, (S *)ms__data(out))
    WITH_FLOAT_TYPE(out->dtype, APPLY)
#undef APPLY
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
    MS_TRY(room.alloc(c, ms__device(y), FACTORS * z.c * (int64_t)sizeof(double)));
    if (z.training) {
#define STATS(S, T)                                                                                                   \
    MS_TRY(launch_blocks(what, index, bn_stats_kernel<S>, z.c, BLOCK, z, (S *)ms__data(h.in[0]), ms__data(c->out[1]), \
                         ms__data(c->out[2])))
        WITH_FLOAT_TYPE(z.dtype, STATS)
#undef STATS
    }
    by_channel mean = channels(z.training ? c->out[1] : h.in[3]), var = channels(z.training ? c->out[2] : h.in[4]);
    double *factors = (double *)room.data;
    MS_TRY(launch(what, index, bn_scale_kernel, up(z.c, BLOCK), BLOCK, z, mean, var, channels(h.in[1]),
                  channels(h.in[2]), factors));
    return apply(c, z, NULL, h.in[0], factors, y);
}

// Inputs: gradient?, x, weight?, mean, var, gradient of mean?, gradient of var?. Integers: training, mask
// (rows/grad.h). Number: eps. Outputs: those of dx, dw, db, dmean, dvar that the mask selects.
static ms_status run_batch_norm_backward(ms_call *c)
{
    if (c->in[1]->numel == 0) return nothing(c);
    bn_sizes z = bn_sizes_of(c->in[1], c->i[0] != 0, c->f[0]);
    held_inputs h;
    scratch room;
    MS_TRY(h.hold(c));
    MS_TRY(room.alloc(c, ms__device(c->in[1]), FACTORS * z.c * (int64_t)sizeof(double)));
    bn_channels t = { channels(h.in[2]),           channels(h.in[3]),           channels(h.in[4]),
                      channels(h.in[5]),           channels(h.in[6]),           data_of(ms__grad_out(c, 1)),
                      data_of(ms__grad_out(c, 2)), data_of(ms__grad_out(c, 3)), data_of(ms__grad_out(c, 4)) };
    ms_tensor *dx = ms__grad_out(c, 0);
    double *factors = (double *)room.data;
#define SUMS(S, T)                                                                                                \
    MS_TRY(launch_blocks(c->op->name, index_of(h.in[1]), bn_sums_kernel<S>, z.c, BLOCK, z, (S *)data_of(h.in[0]), \
                         (S *)ms__data(h.in[1]), t, factors))
    WITH_FLOAT_TYPE(z.dtype, SUMS)
#undef SUMS
    return dx ? apply(c, z, h.in[0], h.in[1], factors, dx) : MS_OK;
}

extern const ms_cuda_kernel ms__cuda_batch_norm[];
const ms_cuda_kernel ms__cuda_batch_norm[] = { { "batch_norm", run_batch_norm },
                                               { "batch_norm_backward", run_batch_norm_backward },
                                               { NULL, NULL } };
