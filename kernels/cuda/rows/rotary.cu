// SPDX-License-Identifier: MIT
// cuda/rows/rotary.cu -- rotary and rms_norm_rotary: a group of `width` threads (a warp or the block) computes a row.
#include "cuda/blocks.h"
#include "rows/layers/rotary.h"

static __device__ inline float turn_first(float a, float b, float c, float s)
{
    return ms_turned_first_f32(a, b, c, s);
}
static __device__ inline float second_of(float a, float b, float c, float s)
{
    return ms_turned_second_f32(a, b, c, s);
}
static __device__ inline double turn_first(double a, double b, double c, double s)
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

// Angles j to j + WIDE of a row's `half`, which begin at `from`.
template <class T>
static __device__ __forceinline__ void read_angles(int dtype, const void *from, int64_t at, int64_t j, int64_t half,
                                                   T *v)
{
    if (dtype == MS_F64) {
        double wide[WIDE];
        read_pack((const double *)from + at, j, half, 0.0, wide);
        for (int e = 0; e < WIDE; e++) v[e] = (T)wide[e];
    } else {
        float narrow[WIDE];
        read_pack((const float *)from + at, j, half, 0.0f, narrow);
        for (int e = 0; e < WIDE; e++) v[e] = narrow[e];
    }
}
// Multiplies elements j to j + WIDE of n by rstd and their weights.
template <class S>
static __device__ __forceinline__ void scale_by(const S *w, real_of<S> rstd, int64_t j, int64_t n, real_of<S> *v)
{
    real_of<S> f[WIDE];
    read_pack(w, j, n, (real_of<S>)0, f);
    for (int e = 0; e < WIDE; e++) v[e] = v[e] * rstd * f[e];
}

template <class S> __global__ void rotary_kernel(rotary_call p, int width)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    int64_t row = (int64_t)blockIdx.x * (BLOCK / width) + threadIdx.x / width, n = p.q.n, half = p.q.half;
    int64_t first = (int64_t)(threadIdx.x % width) * WIDE, step = (int64_t)width * WIDE;
    if (row >= p.q.rows) return;
    const S *x = (const S *)p.x + ms_rotary_start(&p.q, row), *w = (const S *)p.w;
    S *y = (S *)p.y + row * n;
    T rstd = 1, a[WIDE], b[WIDE], c[WIDE], s[WIDE];
    if (w) {
        T sum = 0;
        ROLLED
        for (int64_t j = first; j < n; j += step) {
            read_pack(x, j, n, (T)0, a);
            for (int e = 0; e < WIDE; e++) sum += a[e] * a[e];
        }
        rstd = 1 / sqrt_of(group_sum(sum, width, shared) / (T)n + (T)p.eps);
        if (p.stats && first == 0) ((T *)p.stats)[2 * row] = 0, ((T *)p.stats)[2 * row + 1] = rstd;
    }
    int64_t at = ms_rotary_angles(&p.q, row), rest = n - 2 * half;
    ROLLED
    for (int64_t j = first; j < half; j += step) {
        read_two(x, x + half, j, half, a, b);
        read_angles(p.angles, p.cos, at, j, half, c);
        read_angles(p.angles, p.sin, at, j, half, s);
        if (w) {
            scale_by(w, rstd, j, half, a);
            scale_by(w + half, rstd, j, half, b);
        }
        for (int e = 0; e < WIDE; e++) {
            T one = a[e], two = b[e], turn = s[e] * (T)p.sign;
            a[e] = turn_first(one, two, c[e], turn);
            b[e] = second_of(one, two, c[e], turn);
        }
        write_pack(y, j, half, a);
        write_pack(y + half, j, half, b);
    }
    ROLLED
    for (int64_t j = first; j < rest; j += step) {
        read_pack(x + 2 * half, j, rest, (T)0, a);
        if (w) scale_by(w + 2 * half, rstd, j, rest, a);
        write_pack(y + 2 * half, j, rest, a);
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
