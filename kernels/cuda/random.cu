// SPDX-License-Identifier: MIT
// cuda/random.cu -- random fills and dropout, from the same 32-bit words of Philox and by the same formulas as on the
// CPU (formulas/draws.h). A thread computes WIDE elements.
#include "cuda/blocks.h"
#include "formulas/draws.h"

enum { UNIFORM, NORMAL, INTEGERS, TRUNCATED };

struct draw {
    rng random;
    uint64_t place;      // the position of out[0] in the whole tensor; 0 unless `out` is a shard
    double f[4], limit;  // the distribution's parameters; limit: the largest value that UNIFORM may return
    ms_truncated truncated;
    int dtype, kind;
    int64_t n;
    void *out;
};

// Gets the block of four words that two elements share: element k, at an even position of the whole tensor, and k + 1.
static __device__ __forceinline__ void draw_four_words(const draw &d, const rng &r, int64_t k, uint32_t *w)
{
    ms_philox(r.seed, r.offset, (d.place + (uint64_t)k) >> 1, &w[0], &w[1], &w[2], &w[3]);
}
static __device__ __forceinline__ void draw_floats(const draw &d, const rng &r, int64_t k, float *v)
{
    uint32_t w[4];
    draw_four_words(d, r, k, w);
    if (d.kind == NORMAL) return ms_draw_normal_f32(w[0], w[2], (float)d.f[0], (float)d.f[1], &v[0], &v[1]);
    UNROLL
    for (int h = 0; h < 2; h++)
        v[h] = d.kind == UNIFORM
                   ? ms_draw_uniform_f32(w[2 * h], (float)d.f[0], (float)(d.f[1] - d.f[0]), (float)d.limit)
                   : (float)ms_draw_truncated(w[2 * h], w[2 * h + 1], &d.truncated, 0);
}
static __device__ inline void draw_doubles(const draw &d, const rng &r, int64_t k, double *v)
{
    uint32_t w[4];
    draw_four_words(d, r, k, w);
    if (d.kind == NORMAL) return ms_draw_normal_f64(w, d.f[0], d.f[1], v);
    for (int h = 0; h < 2; h++)
        v[h] = d.kind == UNIFORM ? ms_draw_uniform_f64(w[2 * h], w[2 * h + 1], d.f[0], d.f[1] - d.f[0], d.limit)
                                 : ms_draw_truncated(w[2 * h], w[2 * h + 1], &d.truncated, 1);
}
static __device__ inline void draw_integers(const draw &d, const rng &r, int64_t k, int64_t *v)
{
    uint32_t w[4];
    draw_four_words(d, r, k, w);
    int64_t low = (int64_t)d.f[0];
    uint64_t width = (uint64_t)(int64_t)d.f[1] - (uint64_t)low;
    for (int h = 0; h < 2; h++) v[h] = ms_draw_integer(w[2 * h], w[2 * h + 1], low, width);
}

// The index of the first of a thread's WIDE elements. If out[0] is at an odd position of the whole tensor, the index is
// one lower, so the first thread begins at -1: out[0] uses the second half of its block of words, and the first
// half is unused.
static __device__ inline int64_t first_word_of(const draw &d) { return GLOBAL_INDEX * WIDE - (int64_t)(d.place & 1); }
// Stores element i: a double in a tensor of float64, an integer in one of any dtype.
static __device__ inline void put_drawn(const draw &d, int64_t i, double v) { ((double *)d.out)[i] = v; }
static __device__ inline void put_drawn(const draw &d, int64_t i, int64_t v)
{
    value<int64_t>::store(d.dtype, (char *)d.out + i * ms__dtype_size(d.dtype), v);
}
template <class T, class F> static __device__ __forceinline__ void draw_each(const draw &d, const F &make)
{
    int64_t k = first_word_of(d);
    rng r = rng_now(d.random);
    for (int j = 0; j < WIDE && k + j < d.n; j += 2) {
        T v[2];
        make(d, r, k + j, v);
        for (int h = 0; h < 2; h++)
            if (in_range(k + j + h, d.n)) put_drawn(d, k + j + h, v[h]);
    }
}
// S: float or a half type: the type of the elements; int64_t or double: the type of the computation, whose results are
// converted to the tensor's dtype.
template <class S> __global__ void draw_kernel(draw d)
{
    if constexpr (std::is_same_v<S, int64_t>) draw_each<S>(d, draw_integers);
    else if constexpr (std::is_same_v<S, double>) draw_each<S>(d, draw_doubles);
    else {
        int64_t k = first_word_of(d);
        S *to = (S *)d.out + k;
        float v[WIDE];
        if (k >= d.n) return;
        rng r = rng_now(d.random);
        UNROLL
        for (int j = 0; j < WIDE; j += 2) draw_floats(d, r, k + j, v + j);
        if (k >= 0 && k + WIDE <= d.n && is_wide(to)) store_wide(to, v);
        else UNROLL
        for (int j = 0; j < WIDE; j++)
            if (in_range(k + j, d.n)) store_one(to + j, v[j]);
    }
}

static ms_status fill_random_call(ms_call *c, int kind, int n_f)
{
    ms_tensor *t = c->out[0], *whole;
    if (t->numel == 0) return MS_OK;
    draw d = {};
    d.random = rng_of(c);
    d.place = c->n_i ? (uint64_t)c->i[0] : 0;
    for (int k = 0; k < n_f; k++) d.f[k] = c->f[k];
    d.dtype = t->dtype;
    d.kind = kind;
    d.n = t->numel;
    if (kind == UNIFORM) d.limit = d.f[1] > d.f[0] ? ms__largest_below(t->dtype, d.f[1]) : d.f[1];
    if (kind == TRUNCATED) d.truncated = ms_truncated_of(d.f);
    if (ms__is_contiguous(t)) whole = ms__retain(t);
    else MS_TRY(ms__tensor_like(&whole, t, c->op->name));
    d.out = ms__data(whole);
    grid g = grid_of(up(t->numel + 1, WIDE));
    int index = index_of(t);
    ms_status st;
    if (kind == INTEGERS) st = launch(c->op->name, index, draw_kernel<int64_t>, g.blocks, g.threads, d);
    else if (t->dtype == MS_F64) st = launch(c->op->name, index, draw_kernel<double>, g.blocks, g.threads, d);
    else if (t->dtype == MS_F32) st = launch(c->op->name, index, draw_kernel<float>, g.blocks, g.threads, d);
    else if (t->dtype == MS_F16) st = launch(c->op->name, index, draw_kernel<ms_f16>, g.blocks, g.threads, d);
    else st = launch(c->op->name, index, draw_kernel<ms_bf16>, g.blocks, g.threads, d);
    if (st == MS_OK && whole != t) st = ms__cuda_copy_tensor(t, whole);
    ms__release(whole);
    return st;
}
static ms_status run_rand(ms_call *c) { return fill_random_call(c, UNIFORM, 2); }
static ms_status run_randn(ms_call *c) { return fill_random_call(c, NORMAL, 2); }
static ms_status run_randint(ms_call *c) { return fill_random_call(c, INTEGERS, 2); }
static ms_status run_trunc_normal(ms_call *c) { return fill_random_call(c, TRUNCATED, 4); }

// ---- dropout: four elements per block of words; an element is kept where its word is not below the limit ----

struct dropout {
    rng random;
    uint64_t limit;
    double scale;
};
template <class S, class T> __global__ void dropout_kernel(int64_t n, const S *x, S *y, dropout d)
{
    int64_t k = GLOBAL_INDEX * WIDE;
    if (k >= n) return;
    x += k, y += k;
    bool whole = k + WIDE <= n && is_wide(x) && is_wide(y);
    T v[WIDE];
    uint32_t w[WIDE];
    if (whole) load_wide(x, v);
    else UNROLL
    for (int j = 0; j < WIDE; j++) v[j] = k + j < n ? load_one<T>(x + j) : 0;
    rng r = rng_now(d.random);
    UNROLL
    for (int j = 0; j < WIDE; j += 4)
        ms_philox(r.seed, r.offset, (uint64_t)(k + j) >> 2, &w[j], &w[j + 1], &w[j + 2], &w[j + 3]);
    UNROLL
    for (int j = 0; j < WIDE; j++) v[j] = d.limit <= 0xffffffffu && w[j] >= (uint32_t)d.limit ? v[j] * (T)d.scale : 0;
    if (whole) store_wide(y, v);
    else UNROLL
    for (int j = 0; j < WIDE; j++)
        if (k + j < n) store_one(y + j, v[j]);
}
static ms_status run_dropout(ms_call *c)
{
    ms_tensor *x, *y = c->out[0];
    double p = c->f[0];
    dropout d = { rng_of(c), (uint64_t)(p * 4294967296.0), p < 1 ? 1 / (1 - p) : 0.0 };
    MS_TRY(ms__contiguous(&x, c->in[0]));
    grid g = grid_of(up(y->numel, WIDE));
    ms_status st;
#define DROPOUT(S, T)                                                                                            \
    st = launch(c->op->name, index_of(y), dropout_kernel<S, T>, g.blocks, g.threads, y->numel, (S *)ms__data(x), \
                (S *)ms__data(y), d)
    WITH_FLOAT_TYPE(y->dtype, DROPOUT)
#undef DROPOUT
    ms__release(x);
    return st;
}

extern const ms_cuda_kernel ms__cuda_random[];
const ms_cuda_kernel ms__cuda_random[] = { { "rand_", run_rand },
                                           { "randn_", run_randn },
                                           { "randint_", run_randint },
                                           { "trunc_normal_", run_trunc_normal },
                                           { "dropout", run_dropout },
                                           { "dropout_backward", run_dropout },
                                           { NULL, NULL } };
