// SPDX-License-Identifier: MIT
// cuda/rows/rotary.cu -- rotary and rms_norm_rotary: a group of `width` threads (a warp or the block) computes a row.
#include "cuda/blocks.h"
#include "rows/layers/rotary.h"

static __device__ inline float first_of(float a, float b, float c, float s) { return ms_turned_first_f32(a, b, c, s); }
static __device__ inline float second_of(float a, float b, float c, float s)
{
    return ms_turned_second_f32(a, b, c, s);
}
static __device__ inline double first_of(double a, double b, double c, double s)
{
    return ms_turned_first_f64(a, b, c, s);
}
static __device__ inline double second_of(double a, double b, double c, double s)
{
    return ms_turned_second_f64(a, b, c, s);
}

struct rotary_call {
    ms_rotary_rows q;
    int angles;  // the dtype of cos and sin
    double eps, sign;
    const void *x, *cos, *sin, *w;
    void *y, *stats;
};

template <class S> __global__ void rotary_kernel(rotary_call p, int width)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    int64_t row = (int64_t)blockIdx.x * (BLOCK / width) + threadIdx.x / width, n = p.q.n, half = p.q.half;
    int lane = threadIdx.x % width;
    if (row >= p.q.rows) return;
    const S *x = (const S *)p.x + ms_rotary_start(&p.q, row), *w = (const S *)p.w;
    S *y = (S *)p.y + row * n;
    T rstd = 1;
    if (w) {
        T sum = 0;
        for (int64_t j = lane; j < n; j += width) sum += one_of(x + j) * one_of(x + j);
        rstd = 1 / sqrt_of(group_sum(sum, width, shared) / (T)n + (T)p.eps);
        if (p.stats && lane == 0) ((T *)p.stats)[2 * row] = 0, ((T *)p.stats)[2 * row + 1] = rstd;
    }
    int64_t at = ms_rotary_angles(&p.q, row);
    for (int64_t j = lane; j < n - half; j += width) {
        bool pair = j < half;
        int64_t k = pair ? j : j + half;  // the rest begins behind the pairs
        T a = one_of(x + k), b = pair ? one_of(x + j + half) : a;
        if (w) a = a * rstd * one_of(w + k), b = pair ? b * rstd * one_of(w + j + half) : a;
        if (!pair) {
            store_one(y + k, a);
            continue;
        }
        T c = load<T>(p.angles, p.cos, at + j), s = load<T>(p.angles, p.sin, at + j) * (T)p.sign;
        store_one(y + j, first_of(a, b, c, s));
        store_one(y + j + half, second_of(a, b, c, s));
    }
}

static ms_status run_rotary(ms_call *c)
{
    held_inputs h;
    rotary_call p = {};
    ms_tensor *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    MS_TRY(ms__rotary_rows(&p.q, &h.in[0], c));
    for (int k = 1; k < c->n_in; k++) MS_TRY(ms__contiguous(&h.in[k], c->in[k]));
    p.angles = h.in[MS_ROTARY_COS]->dtype;
    p.sign = c->i[0] ? -1 : 1;
    p.x = ms__data(h.in[MS_ROTARY_X]), p.cos = ms__data(h.in[MS_ROTARY_COS]), p.sin = ms__data(h.in[MS_ROTARY_SIN]);
    p.y = ms__data(o);
    if (c->n_in > MS_ROTARY_WEIGHT) {
        p.w = ms__data(h.in[MS_ROTARY_WEIGHT]), p.eps = c->f[0];
        p.stats = c->out[1] ? ms__data(c->out[1]) : NULL;
    }
    int width = row_width(p.q.rows, p.q.n);
    return launch_blocks(c->op->name, index_of(o), TYPED_KERNEL(o->dtype, rotary_kernel), up(p.q.rows, BLOCK / width),
                         BLOCK, p, width);
}

extern const ms_cuda_kernel ms__cuda_rotary[];
const ms_cuda_kernel ms__cuda_rotary[] = { { "rotary", run_rotary },
                                           { "rms_norm_rotary", run_rotary },
                                           { NULL, NULL } };
