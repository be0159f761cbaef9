// SPDX-License-Identifier: MIT
// cuda/strided.h -- operands of elementwise loops: broadcast to one shape, dimensions merged where possible, and read
// WIDE elements at a time where they are dense.
#ifndef MS_CUDA_STRIDED_H
#define MS_CUDA_STRIDED_H

#include "cuda/blocks.h"

// n operands, of which the first is the output. Strides are in bytes.
enum { MAX_OPERANDS = 4 };
// Elements of so few are numbered by 32 bits, which are divided faster.
#ifdef MS_EMULATED
enum { FEW = 1000 };  // so that specs reach both ways
#else
enum { FEW = 0x7fffffff };
#endif
struct strided {
    int n, ndim;
    int64_t numel, shape[MS_MAX_DIMS];
    char *data[MAX_OPERANDS];
    int64_t stride[MAX_OPERANDS][MS_MAX_DIMS];  // 0 for k >= n
    uint8_t dtype[MAX_OPERANDS], size[MAX_OPERANDS];
    bool dense;  // every operand is contiguous, a single element, or broadcast along the first dimensions
    bool few;
    int64_t repeat[MAX_OPERANDS];  // dense: element i of operand k is at i (repeat 0) or at i % repeat
};

// Describes x[0] .. x[n - 1], broadcast to the shape of x[0].
static strided strided_of(int n, const ms_tensor *const *x)
{
    strided l = {};
    const ms_tensor *o = x[0];
    l.n = n;
    l.numel = o->numel, l.few = o->numel <= FEW;
    int64_t shape[MS_MAX_DIMS], stride[MAX_OPERANDS][MS_MAX_DIMS];
    for (int k = 0; k < n; k++) {
        const ms_tensor *t = x[k];
        int lead = o->ndim - t->ndim;
        l.data[k] = (char *)ms__data(t);
        l.dtype[k] = t->dtype;
        l.size[k] = (uint8_t)ms__dtype_size(t->dtype);
        for (int d = 0; d < o->ndim; d++)
            stride[k][d] =
                d < lead || (t->shape[d - lead] == 1 && o->shape[d] != 1) ? 0 : t->stride[d - lead] * l.size[k];
    }
    for (int d = 0; d < o->ndim; d++) shape[d] = o->shape[d];
    // Drop dimensions of size 1; merge adjacent dimensions that every operand can traverse with one stride.
    int nd = 0;
    for (int d = 0; d < o->ndim; d++) {
        if (shape[d] == 1) continue;
        bool join = nd > 0;
        for (int k = 0; join && k < n; k++) join = l.stride[k][nd - 1] == stride[k][d] * shape[d];
        int at = join ? nd - 1 : nd++;
        l.shape[at] = join ? l.shape[at] * shape[d] : shape[d];
        for (int k = 0; k < n; k++) l.stride[k][at] = stride[k][d];
    }
    l.ndim = nd;
    // Dense operands are accessed WIDE elements at a time. Elements of 2 and 4 bytes must then be aligned to 16 bytes.
    l.dense = true;
    for (int k = 0; k < n && l.dense; k++) {
        int64_t run = 1;
        int d = nd - 1;
        for (; d >= 0 && l.stride[k][d] == run * l.size[k]; d--) run *= l.shape[d];
        bool whole = run == l.numel, rest = true;
        for (; d >= 0; d--) rest = rest && l.stride[k][d] == 0;
        l.repeat[k] = whole && run > 1 ? 0 : run;
        l.dense = l.size[k] == 1 || l.size[k] == 8 || (uintptr_t)l.data[k] % 16 == 0 || run == 1;
        l.dense = l.dense && (whole || (k > 0 && rest && (run == 1 || run % WIDE == 0)));
    }
    return l;
}

// Sets at[k], for k < N, to the offset of element i of operand k, in bytes.
template <int N> static __device__ __forceinline__ void place(const strided &l, int64_t i, int64_t *at)
{
    UNROLL
    for (int k = 0; k < N; k++) at[k] = 0;
    if (l.few) {
        uint32_t rest = (uint32_t)i;
        ROLLED
        for (int d = l.ndim - 1; d >= 0; d--) {
            uint32_t size = (uint32_t)l.shape[d], q = rest / size, r = rest - q * size;
            UNROLL
            for (int k = 0; k < N; k++) at[k] += r * l.stride[k][d];
            rest = q;
        }
    } else {
        ROLLED
        for (int d = l.ndim - 1; d >= 0; d--) {
            int64_t q = i / l.shape[d], r = i - q * l.shape[d];
            UNROLL
            for (int k = 0; k < N; k++) at[k] += r * l.stride[k][d];
            i = q;
        }
    }
}

// Loads elements i .. i + n - 1 of dense operand k (store_lanes: stores those of the output); i is a multiple of WIDE,
// n at most WIDE. NARROW: the operand is of float32 or a half type.
template <bool NARROW = false>
static __device__ __forceinline__ void load_lanes(const strided &l, int k, int64_t i, int n, float *v)
{
    typedef std::conditional_t<NARROW, own_value<float>, value<float>> element;
    int64_t r = l.repeat[k];
    if (r == 1) {
        float one = element::load(l.dtype[k], l.data[k]);
        UNROLL
        for (int j = 0; j < WIDE; j++) v[j] = one;
        return;
    }
    if (r) i = l.few ? (int64_t)((uint32_t)i % (uint32_t)r) : i % r;
    const char *p = l.data[k] + i * l.size[k];
    if (n == WIDE) switch (l.dtype[k]) {
        case MS_F32: return load_wide((const float *)p, v);
        case MS_F16: return load_wide((const ms_f16 *)p, v);
        case MS_BF16: return load_wide((const ms_bf16 *)p, v);
        }
    UNROLL
    for (int j = 0; j < WIDE; j++) v[j] = j < n ? element::load(l.dtype[k], p + j * l.size[k]) : 0;
}
static __device__ __forceinline__ void store_lanes(const strided &l, int64_t i, int n, const float *v)
{
    char *p = l.data[0] + i * l.size[0];
    if (n == WIDE) switch (l.dtype[0]) {
        case MS_F32: return store_wide((float *)p, v);
        case MS_F16: return store_wide((ms_f16 *)p, v);
        case MS_BF16: return store_wide((ms_bf16 *)p, v);
        }
    UNROLL
    for (int j = 0; j < WIDE; j++)
        if (j < n) own_value<float>::store_truth(l.dtype[0], p + j * l.size[0], v[j]);
}

#endif
