// SPDX-License-Identifier: MIT
// cuda/attention/attention.h -- the sizes and operands of a call of attention.
#ifndef MS_CUDA_ATTENTION_H
#define MS_CUDA_ATTENTION_H

#include "ops/philox.h"
#include "cuda/cuda.h"
#include "rows/attention.h"

// Sizes of q [shape..., tq, d] and of k and v [shape..., tk, d], whose last batch dimension is a `share` of q's. shape:
// the n batch dimensions; count: their product, the number of heads.
struct heads : ms_attention {
    int n;
    int64_t count, tq, tk, d, shape[MS_MAX_DIMS];
};

// A tensor whose last two dimensions are rows and columns; strides in elements.
struct strided_part {
    int dtype;
    const void *data;
    int64_t rs, cs, stride[MS_MAX_DIMS];
};

// n_i: the number of the forward's integers.
static inline heads heads_of(const ms_call *c, int n_i, const ms_tensor *q, const ms_tensor *k)
{
    heads h = {};
    (ms_attention &)h = ms__attention_of(c, n_i, q, k);
    h.n = q->ndim - 2;
    h.count = 1;
    for (int d = 0; d < h.n; d++) h.count *= h.shape[d] = q->shape[d];
    h.tq = q->shape[h.n];
    h.tk = k->shape[h.n];
    h.d = q->shape[h.n + 1];
    return h;
}
// Describes t. In a dimension that t lacks, or in which its size is 1, the stride is 0: t is broadcast along the
// dimension.
static inline strided_part strided_part_of(const ms_tensor *t, const heads &h)
{
    strided_part x = {};
    x.dtype = t->dtype;
    x.data = ms__data(t);
    x.rs = t->shape[t->ndim - 2] == 1 ? 0 : t->stride[t->ndim - 2];
    x.cs = t->shape[t->ndim - 1] == 1 ? 0 : t->stride[t->ndim - 1];
    for (int d = 0; d < h.n; d++) {
        int from = d + t->ndim - (h.n + 2);
        x.stride[d] = from >= 0 && t->shape[from] > 1 ? t->stride[from] : 0;
    }
    return x;
}

// Applies element `at` of a mask, bool or of a floating-point type, to a score. Does not call load(), whose cases for
// integers would need registers that the kernels do not have.
template <class T> static __device__ inline T masked(const strided_part &mask, int64_t at, T score)
{
    switch (mask.dtype) {
    case MS_BOOL: return ((const uint8_t *)mask.data)[at] ? score : -(T)INFINITY;
    case MS_F32: return score + (T)((const float *)mask.data)[at];
    case MS_F64: return score + (T)((const double *)mask.data)[at];
    case MS_F16: return score + (T)ms_f16_to_float(((const ms_f16 *)mask.data)[at]);
    default: return score + (T)ms_bf16_to_float(((const ms_bf16 *)mask.data)[at]);
    }
}

static __device__ inline float capped(float s, float cap) { return ms_capped_f32(s, cap); }
static __device__ inline double capped(double s, double cap) { return ms_capped_f64(s, cap); }
static __device__ inline float cap_slope(float c, float cap) { return ms_cap_slope_f32(c, cap); }
static __device__ inline double cap_slope(double c, double cap) { return ms_cap_slope_f64(c, cap); }

// Dropout of probabilities. Element `at` of [heads, queries, keys] uses word at % 4 of Philox's block at / 4.
struct dropped {
    double p;
    uint64_t limit;  // an element is kept where its word is not below it
    rng random;
};
static inline dropped dropped_with(double p, const rng &random) { return { p, (uint64_t)(p * 4294967296.0), random }; }
// The factor of the probabilities that dropout keeps.
static inline double keep_factor(double p) { return p < 1 ? 1 / (1 - p) : 0; }
// Whether element `at` is kept. r: rng_now of d.random.
static __device__ inline bool is_weight_kept(const dropped &d, const rng &r, uint64_t at)
{
    uint32_t w0, w1, w2, w3;
    ms_philox(r.seed, r.offset, at / 4, &w0, &w1, &w2, &w3);
    uint32_t low = at & 1 ? w1 : w0, high = at & 1 ? w3 : w2;
    return (at & 2 ? high : low) >= d.limit;
}

#endif
