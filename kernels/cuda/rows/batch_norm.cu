// SPDX-License-Identifier: MIT
// cuda/rows/batch_norm.cu -- batch_norm and its gradient. Sums are computed by one block per channel, or by several
// where channels are few and large (segments.h), in float64, in a fixed order; each thread computes WIDE elements of
// the output or of dx, in float32 or float64.
#include "formulas/batch_norm.h"
#include "cuda/segments.h"

// x is [n, c, s]: c is the second dimension of the tensor, s the product of all later ones. stats: dtype of mean and
// variance, which every `share` adjacent channels have together.
struct bn_sizes : channel_parts {
    int64_t share;
    int dtype, stats;
    bool training;
    double eps;
};
// operands: the number of tensors that are summed.
static bn_sizes bn_sizes_of(const ms_tensor *x, int64_t share, int operands, bool training, double eps)
{
    planes all = { x->shape[0], x->shape[1], 1 };
    for (int d = 2; d < x->ndim; d++) all.s *= x->shape[d];
    return { channel_parts_of(all, (int)ms__dtype_size(x->dtype), operands),
             share,
             x->dtype,
             x->dtype == MS_F64 ? MS_F64 : MS_F32,
             training,
             eps };
}
// The same memory as larger channels, each of those that share their statistics.
static bn_sizes groups_of(bn_sizes z, int operands)
{
    planes all = { z.n, z.c / z.share, z.s * z.share };
    static_cast<channel_parts &>(z) = channel_parts_of(all, (int)ms__dtype_size(z.dtype), operands);
    return z;
}

// A tensor with one number per channel, of any dtype; data is NULL if the call has none.
struct by_channel {
    int dtype;
    const void *data;
};
// t's value for channel c, or `absent` if the call has no such tensor.
static __device__ inline double at_channel(const by_channel &t, int64_t c, double absent)
{
    return t.data ? load<double>(t.dtype, t.data, c) : absent;
}

// Stores the mean of each segment of a channel in parts[2 * block], and the sum of the squared deviations from it in
// parts[2 * block + 1].
template <class S> __global__ void bn_stats_kernel(bn_sizes z, const S *x, double *parts)
{
    __shared__ double shared[BLOCK];
    alignas(16) __shared__ S tile[ROUND];
    channel_part my = channel_part_of(z);
    double m = 0, sum = 0;
    for (int pass = 0; pass < 2; pass++) {
        sum = 0;
        for (int64_t first = my.from; first < my.to; first += ROUND) {
            fill_tile(tile, z, x, my.c, first, my.to);
            __syncthreads();
            for (int j = threadIdx.x; j < ROUND && first + j < my.to; j += BLOCK) {
                double v = (double)one_of(tile + j), d = v - m;
                sum += pass ? d * d : v;
            }
            __syncthreads();
        }
        sum = block_sum(sum, shared);
        if (pass == 0) m = sum / (double)(my.to - my.from);
    }
    if (threadIdx.x != 0) return;
    parts[2 * (int64_t)blockIdx.x] = m;
    parts[2 * (int64_t)blockIdx.x + 1] = sum;
}
// Combines the segments of a channel: a warp computes its mean and (biased) variance (Chan, Golub and LeVeque 1979).
static __device__ inline void join_stats(const bn_sizes &z, const double *parts, double *mean, double *var)
{
    double sum = 0, spread = 0, count = (double)(z.n * z.s);
    auto elements = [&](int64_t s) { return (double)(s + 1 < z.segments ? z.segment : z.n * z.s - s * z.segment); };
    ROLLED
    for (int64_t s = threadIdx.x % 32; s < z.segments; s += 32) sum += parts[2 * s] * elements(s);
    double m = z.segments > 1 ? warp_sum(sum) / count : parts[0];
    ROLLED
    for (int64_t s = threadIdx.x % 32; s < z.segments; s += 32)
        spread += parts[2 * s + 1] + elements(s) * (parts[2 * s] - m) * (parts[2 * s] - m);
    *mean = m;
    *var = warp_sum(spread) / count;
}

// Stores a statistic of a channel, or its gradient.
static __device__ inline void store_stat(const bn_sizes &z, void *out, int64_t c, double v)
{
    if (z.stats == MS_F64) ((double *)out)[c] = v;
    else ((float *)out)[c] = (float)v;
}

// The factors of a channel: y or dx = of_g * g + of_x * (x - mean) + alone. CENTRE: the mean. Factor f of channel c is
// factors[f * C + c], where C is the number of channels.
enum { OF_G, OF_X, ALONE, CENTRE, FACTORS };
struct bn_inputs {
    by_channel mean, var, w, b;
};
// Where the statistics of training are stored.
struct bn_outputs {
    void *mean, *var;
};
// Computes the factors of y in a kernel of their own, so that there is one square root per channel. A warp for the
// channels of each mean; groups: them as channels. parts: in training the results of bn_stats_kernel; otherwise NULL,
// and the mean and variance are inputs.
__global__ void bn_scale_kernel(bn_sizes z, bn_sizes groups, const double *parts, bn_inputs t, bn_outputs o,
                                double *factors)
{
    int64_t k = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (k >= groups.c) return;
    double mean = at_channel(t.mean, k, 0), var = at_channel(t.var, k, 1);
    if (parts) join_stats(groups, parts + 2 * k * groups.segments, &mean, &var);
    if (threadIdx.x % 32 == 0 && parts) {
        store_stat(z, o.mean, k, mean);
        store_stat(z, o.var, k, var);
    }
    if (parts && z.stats == MS_F32) mean = (double)(float)mean, var = (double)(float)var;  // as backward will read them
    for (int64_t c = k * z.share + threadIdx.x % 32; c < (k + 1) * z.share; c += 32) {
        factors[OF_G * z.c + c] = 0;
        factors[OF_X * z.c + c] = ms_bn_scale(var, z.eps, at_channel(t.w, c, 1));
        factors[ALONE * z.c + c] = at_channel(t.b, c, 0);
        factors[CENTRE * z.c + c] = mean;
    }
}

// Stores in out the y or dx that the factors give. For dx, g is the gradient of y, NULL if there
// is none; for y, it is NULL.
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
// stores, which are NULL if they are not needed.
struct bn_channels {
    by_channel w, mean, var, gmean, gvar;
    void *dw, *db, *dmean, *dvar;
};
// Stores the sums of g and of g (x - mean) over a segment of a channel in parts[2 * block] and parts[2 * block + 1].
template <class S> __global__ void bn_sums_kernel(bn_sizes z, const S *g, const S *x, by_channel mean, double *parts)
{
    typedef real_of<S> T;
    __shared__ double shared[BLOCK];
    alignas(16) __shared__ S tile[2][ROUND];
    channel_part my = channel_part_of(z);
    T m = (T)at_channel(mean, my.c / z.share, 0);
    double sg = 0, sgx = 0;
    for (int64_t first = my.from; first < my.to; first += ROUND) {
        fill_tile(tile[0], z, g, my.c, first, my.to);
        fill_tile(tile[1], z, x, my.c, first, my.to);
        __syncthreads();
        for (int j = threadIdx.x; j < ROUND && first + j < my.to; j += BLOCK) {
            double v = (double)one_of(tile[0] + j);
            sg += v;
            sgx += v * (double)(one_of(tile[1] + j) - m);
        }
        __syncthreads();
    }
    sg = block_sum(sg, shared);
    sgx = block_sum(sgx, shared);
    if (threadIdx.x != 0) return;
    parts[2 * (int64_t)blockIdx.x] = sg;
    parts[2 * (int64_t)blockIdx.x + 1] = sgx;
}
// Adds the parts of a channel; every lane of the warp gets its sums of g and of g (x - mean).
static __device__ inline void join_sums(const bn_sizes &z, const double *parts, int64_t c, ms_bn_sums *s)
{
    s->sg = s->sgx = 0;
    if (!parts) return;
    parts += 2 * c * z.segments;
    ROLLED
    for (int64_t k = threadIdx.x % 32; k < z.segments; k += 32) s->sg += parts[2 * k], s->sgx += parts[2 * k + 1];
    s->sg = warp_sum(s->sg), s->sgx = warp_sum(s->sgx);
}
// Stores the gradients of each channel, and the factors of dx. A warp for the channels of each mean. parts: the results
// of bn_sums_kernel; NULL if there is no g, whose sums are then 0.
__global__ void bn_finish_kernel(bn_sizes z, const double *parts, bn_channels t, double *factors)
{
    int64_t k = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, first = k * z.share, end = first + z.share;
    if (end > z.c) return;
    ms_bn_sums s = {};
    s.var = at_channel(t.var, k, 1), s.eps = z.eps, s.count = (double)(z.n * z.s * z.share);
    s.gmean = at_channel(t.gmean, k, 0), s.gvar = at_channel(t.gvar, k, 0), s.training = z.training;
    for (int64_t c = first; c < end; c++) {
        double w = at_channel(t.w, c, 1);
        join_sums(z, parts, c, &s);
        s.wsg += w * s.sg, s.wsgx += w * s.sgx;
    }
    for (int64_t c = first; c < end; c++) {
        if (z.share > 1) join_sums(z, parts, c, &s);
        if (threadIdx.x % 32 != 0) continue;
        s.w = at_channel(t.w, c, 1);
        ms_bn_channel q = ms_bn_finish(&s);
        if (t.dw) store_stat(z, t.dw, c, q.dw);
        if (t.db) store_stat(z, t.db, c, q.db);
        if (t.dmean) store_stat(z, t.dmean, c, q.dmean);
        if (t.dvar) store_stat(z, t.dvar, c, q.dvar);
        factors[OF_G * z.c + c] = q.of_g;
        factors[OF_X * z.c + c] = q.of_x;
        factors[ALONE * z.c + c] = q.alone;
        factors[CENTRE * z.c + c] = at_channel(t.mean, k, 0);
    }
}

static by_channel channels_of(const ms_tensor *t) { return { t ? (int)t->dtype : MS_F32, t ? ms__data(t) : NULL }; }

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

// Memory for the factors of all channels, and for two parts per segment of each channel of z.
struct bn_room : scratch {
    double *factors, *parts;
    ms_status make(const ms_call *c, int device, int64_t channels, const bn_sizes &z)
    {
        int64_t n = FACTORS * channels;
        MS_TRY(alloc(c, device, (n + 2 * z.segments * z.c) * (int64_t)sizeof(double)));
        factors = (double *)data;
        parts = factors + n;
        return MS_OK;
    }
};

static ms_status stats(const char *what, int index, const bn_sizes &z, const ms_tensor *x, double *parts)
{
#define STATS(S, T) \
    return launch_blocks(what, index, bn_stats_kernel<S>, z.c * z.segments, BLOCK, z, (const S *)ms__data(x), parts)
    WITH_FLOAT_TYPE(z.dtype, STATS)
#undef STATS
}

static ms_status run_batch_norm(ms_call *c)
{
    ms_tensor *y = c->out[0];
    if (y->numel == 0) return nothing(c);
    bn_sizes z = bn_sizes_of(c->in[0], c->n_i > 1 ? c->i[1] : 1, 1, c->i[0] != 0, c->f[0]), groups = groups_of(z, 1);
    const char *what = c->op->name;
    int index = index_of(y);
    held_inputs h;
    bn_room room;
    MS_TRY(h.hold(c));
    MS_TRY(room.make(c, ms__device(y), z.c, groups));
    if (z.training) MS_TRY(stats(what, index, groups, h.in[0], room.parts));
    bn_inputs t = { {}, {}, channels_of(h.in[1]), channels_of(h.in[2]) };
    bn_outputs o = {};
    if (z.training) o = { ms__data(c->out[1]), ms__data(c->out[2]) };
    else t.mean = channels_of(h.in[3]), t.var = channels_of(h.in[4]);
    MS_TRY(launch_blocks(what, index, bn_scale_kernel, up(groups.c, WARPS), BLOCK, z, groups,
                         (const double *)(z.training ? room.parts : NULL), t, o, room.factors));
    return apply(c, z, NULL, h.in[0], room.factors, y);
}

static ms_status run_batch_norm_stats(ms_call *c)
{
    if (c->in[0]->numel == 0) return nothing(c);
    bn_sizes z = bn_sizes_of(c->in[0], 1, 1, true, 1);
    int index = index_of(c->in[0]);
    held_inputs h;
    bn_room room;
    MS_TRY(h.hold(c));
    MS_TRY(room.make(c, ms__device(c->in[0]), z.c, z));
    MS_TRY(stats(c->op->name, index, z, h.in[0], room.parts));
    bn_outputs o = { ms__data(c->out[0]), ms__data(c->out[1]) };
    return launch_blocks(c->op->name, index, bn_scale_kernel, up(z.c, WARPS), BLOCK, z, z, (const double *)room.parts,
                         bn_inputs {}, o, room.factors);
}

// Inputs: gradient (optional), x, weight (optional), mean, var, and optionally the gradients of mean and of var.
// Integers: training, channels that share statistics, mask (rows/grad.h). Number: eps. Outputs: those of dx, dw, db,
// dmean, dvar that the mask selects.
static ms_status run_batch_norm_backward(ms_call *c)
{
    if (c->in[1]->numel == 0) return nothing(c);
    bn_sizes z = bn_sizes_of(c->in[1], c->i[1], 2, c->i[0] != 0, c->f[0]);
    const char *what = c->op->name;
    int index = index_of(c->in[1]);
    held_inputs h;
    bn_room room;
    MS_TRY(h.hold(c));
    MS_TRY(room.make(c, ms__device(c->in[1]), z.c, z));
    bn_channels t = { channels_of(h.in[2]),        channels_of(h.in[3]),        channels_of(h.in[4]),
                      channels_of(h.in[5]),        channels_of(h.in[6]),        data_of(ms__grad_out(c, 1)),
                      data_of(ms__grad_out(c, 2)), data_of(ms__grad_out(c, 3)), data_of(ms__grad_out(c, 4)) };
    ms_tensor *dx = ms__grad_out(c, 0);
    if (h.in[0]) {
#define SUMS(S, T)                                                                                                \
    MS_TRY(launch_blocks(what, index, bn_sums_kernel<S>, z.c *z.segments, BLOCK, z, (const S *)ms__data(h.in[0]), \
                         (const S *)ms__data(h.in[1]), t.mean, room.parts))
        WITH_FLOAT_TYPE(z.dtype, SUMS)
#undef SUMS
    }
    MS_TRY(launch_blocks(what, index, bn_finish_kernel, up(z.c / z.share, WARPS), BLOCK, z,
                         (const double *)(h.in[0] ? room.parts : NULL), t, room.factors));
    return dx ? apply(c, z, h.in[0], h.in[1], room.factors, dx) : MS_OK;
}

extern const ms_cuda_kernel ms__cuda_batch_norm[];
const ms_cuda_kernel ms__cuda_batch_norm[] = { { "batch_norm", run_batch_norm },
                                               { "batch_norm_backward", run_batch_norm_backward },
                                               { "batch_norm_stats", run_batch_norm_stats },
                                               { NULL, NULL } };
