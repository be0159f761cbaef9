// SPDX-License-Identifier: MIT
// cuda/product/int8.cu -- int8_linear (rows/int8.c). Up to 16 rows are dot products, which read the weight as it is.
// More rows are a product with a copy of the weight in the input's dtype, which represents it exactly; a second pass
// multiplies the sums by the scale. In the copy for the gradient, the weight is multiplied by its scale.
#include "cuda/blocks.h"
#include "cuda/product.h"

enum { FEW_ROWS = 16, ROWS = 4, SCALE = 3 };  // ROWS: rows that a warp computes

// The scale: its dtype, and the elements from a number to the next. data is NULL: every number is 1.
struct scales {
    int dtype;
    const void *data;
    int64_t step;
};
template <class T> static __device__ inline T scale_of(const scales &s, int64_t j)
{
    return s.data ? (T)load<double>(s.dtype, s.data, j * s.step) : 1;
}

// WIDE elements from q on of a row of n elements; elements outside are 0.
template <class T> static __device__ __forceinline__ void read_int8(const int8_t *row, int64_t q, int64_t n, T *v)
{
    uint64_t bytes = 0;
    if (q + WIDE <= n && ((uintptr_t)(row + q) & 7) == 0) bytes = *(const uint64_t *)(row + q);
    else
        for (int e = 0; e < WIDE; e++) bytes |= q + e < n ? (uint64_t)(uint8_t)row[q + e] << 8 * e : 0;
    UNROLL
    for (int e = 0; e < WIDE; e++) v[e] = (T)(int8_t)(bytes >> 8 * e);
}

// Each warp computes one column of up to ROWS rows.
template <class S> __global__ void int8_dots(product p, const int8_t *w, scales scale)
{
    typedef real_of<S> T;
    int64_t groups = (p.m + ROWS - 1) / ROWS, warp = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int64_t j = warp / groups, i = warp % groups * ROWS;
    if (j >= p.n) return;
    const int8_t *row = w + j * p.k;
    T sum[ROWS] = {};
    for (int64_t q = threadIdx.x % 32 * WIDE; q < p.k; q += 32 * WIDE) {
        T v[WIDE], x[WIDE];
        read_int8(row, q, p.k, v);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            if (i + r >= p.m) continue;
            read_pack((const S *)p.a + (i + r) * p.a_rs, q, p.k, (T)0, x);
            UNROLL
            for (int e = 0; e < WIDE; e++) sum[r] += v[e] * x[e];
        }
    }
    T by = scale_of<T>(scale, j), bias = p.bias ? one_of((const S *)p.bias + j) : 0;
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        T v = warp_sum(sum[r]) * by;
        if (p.bias) v += bias;
        if (threadIdx.x % 32 == 0 && i + r < p.m) store_one((S *)p.c + (i + r) * p.c_rs + j, v);
    }
}

// out = w, whose n rows have k numbers, times the scales of its rows; WIDE adjacent elements a thread.
template <class S> __global__ void int8_widen(S *out, const int8_t *w, int64_t n, int64_t k, scales scale)
{
    typedef real_of<S> T;
    int64_t packs = (k + WIDE - 1) / WIDE, j = GLOBAL_INDEX / packs, q = GLOBAL_INDEX % packs * WIDE;
    T v[WIDE];
    if (j >= n) return;
    read_int8(w + j * k, q, k, v);
    T by = scale_of<T>(scale, j);
    UNROLL
    for (int e = 0; e < WIDE; e++) v[e] *= by;
    write_pack(out + j * k, q, k, v);
}

// C = sums, times the scales of its columns, plus the bias; one element a thread. sums, contiguous, may be C itself.
template <class S> __global__ void int8_finish(product p, const real_of<S> *sums, scales scale)
{
    int64_t i = GLOBAL_INDEX / p.n, j = GLOBAL_INDEX % p.n;
    if (i >= p.m) return;
    real_of<S> v = sums[i * p.n + j] * scale_of<real_of<S>>(scale, j);
    if (p.bias) v += one_of((const S *)p.bias + j);
    store_one((S *)p.c + i * p.n + j, v);
}

// Computes the product p of a call of int8_linear, or of its backward, whose last integer is a mask.
static ms_status multiply_int8(const ms_call *c, int index, product *p)
{
    held_inputs h;
    scratch copy, sums;
    bool backward = c->n_i > 0;
    const ms_tensor *t = c->in[SCALE];
    const scales scale = { (int)t->dtype, ms__data(t), t->stride[0] }, none = {};
    MS_TRY(ms__contiguous(&h.in[0], c->in[backward ? 2 : 1]));
    const ms_tensor *w = h.in[0];
    int64_t n = w->shape[0], k = w->shape[1];
    const int8_t *from = (const int8_t *)ms__data(w);
    if (!backward && p->m <= FEW_ROWS && (p->a_cs == 1 || k == 1)) {
        int64_t blocks = up(n * up(p->m, ROWS), WARPS);
#define DOTS(S, T) return launch_blocks(c->op->name, index, int8_dots<S>, blocks, BLOCK, *p, from, scale)
        WITH_FLOAT_TYPE(p->c_type, DOTS)
#undef DOTS
    }
    MS_TRY(copy.alloc(c, ms__device(w), n * k * ms__dtype_size(p->c_type)));
    p->b = copy.data;
    p->b_rs = backward ? k : 1;
    p->b_cs = backward ? 1 : k;
    grid g = grid_of(n * up(k, WIDE)), all = grid_of(p->m * p->n);
#define WIDEN(S, T)                                                                                   \
    MS_TRY(launch(c->op->name, index, int8_widen<S>, g.blocks, g.threads, (S *)copy.data, from, n, k, \
                  backward ? scale : none))
    WITH_FLOAT_TYPE(p->c_type, WIDEN)
#undef WIDEN
    if (backward) return ms__cuda_product(index, p);

    product exact = *p;
    exact.bias = NULL;
    if (p->c_type == MS_F16 || p->c_type == MS_BF16) {
        MS_TRY(sums.alloc(c, ms__device(w), p->m * p->n * 4));
        exact.c = sums.data;
        exact.c_type = MS_F32;
    }
    MS_TRY(ms__cuda_product(index, &exact));
#define FINISH(S, T) \
    return launch(c->op->name, index, int8_finish<S>, all.blocks, all.threads, *p, (const T *)exact.c, scale)
    WITH_FLOAT_TYPE(p->c_type, FINISH)
#undef FINISH
}

#define PRODUCT product
#define PRODUCT_OF product_of
#define MULTIPLY(y, p) multiply_int8(c, index_of(y), p)
#define MULTIPLY_AND_ADD_ROWS(y, p, out, summed) multiply_int8(c, index_of(y), p)  // the weight gets no gradient
#define ADD_ROWS(g, rows, rs, out) ms__cuda_column_sum(g, (g)->numel ? rows : 0, rs, out)
#define ACCUMULATE(p, on) ((void)0)
#include "rows/linear_body.h"

extern const ms_cuda_kernel ms__cuda_int8_rows[];
const ms_cuda_kernel ms__cuda_int8_rows[] = { { "int8_linear", run_linear },
                                              { "int8_linear_backward", run_linear_backward },
                                              { NULL, NULL } };
