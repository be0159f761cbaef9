// SPDX-License-Identifier: MIT
// cuda/random.cu -- random fills and dropout, with the same words and formulas as the CPU (draws.h): one thread per
// Philox block.
#include "cuda/cuda.h"
#include "formulas/draws.h"

enum { THREADS = 256 };
enum { UNIFORM, NORMAL, INTEGERS, TRUNCATED };

struct draw {
    uint64_t seed, offset, place;  // place: position of element 0 in the whole tensor
    double f[4], limit;
    ms_truncated truncated;
    int dtype, kind;
    int64_t n;
    void *out;
};

// An element at an even position and the next one share a block of four words.
__global__ void draw_kernel(draw d)
{
    int64_t pair = GLOBAL_INDEX, k = 2 * pair - (int64_t)(d.place & 1);
    if (k >= d.n) return;
    uint32_t w[4];
    ms_philox(d.seed, d.offset, (d.place >> 1) + (uint64_t)pair, &w[0], &w[1], &w[2], &w[3]);
    if (d.kind == INTEGERS) {
        int64_t low = (int64_t)d.f[0];
        uint64_t width = (uint64_t)(int64_t)d.f[1] - (uint64_t)low;
        for (int h = 0; h < 2; h++)
            if (k + h >= 0 && k + h < d.n)
                store<int64_t>(d.dtype, d.out, k + h, ms_draw_integer(w[2 * h], w[2 * h + 1], low, width));
        return;
    }
    if (d.dtype == MS_F64) {
        double v[2];
        if (d.kind == NORMAL) ms_draw_normal_f64(w, d.f[0], d.f[1], v);
        else
            for (int h = 0; h < 2; h++)
                v[h] = d.kind == UNIFORM ? ms_draw_uniform_f64(w[2 * h], w[2 * h + 1], d.f[0], d.f[1] - d.f[0], d.limit)
                                         : ms_draw_truncated(w[2 * h], w[2 * h + 1], &d.truncated, 1);
        for (int h = 0; h < 2; h++)
            if (k + h >= 0 && k + h < d.n) store<double>(d.dtype, d.out, k + h, v[h]);
        return;
    }
    float v[2];
    if (d.kind == NORMAL) ms_draw_normal_f32(w[0], w[2], (float)d.f[0], (float)d.f[1], &v[0], &v[1]);
    else
        for (int h = 0; h < 2; h++)
            v[h] = d.kind == UNIFORM
                       ? ms_draw_uniform_f32(w[2 * h], (float)d.f[0], (float)(d.f[1] - d.f[0]), (float)d.limit)
                       : (float)ms_draw_truncated(w[2 * h], w[2 * h + 1], &d.truncated, 0);
    for (int h = 0; h < 2; h++)
        if (k + h >= 0 && k + h < d.n) store<float>(d.dtype, d.out, k + h, v[h]);
}

ms_status ms__cuda_copy_tensor(ms_tensor *dst, const ms_tensor *src);

static ms_status fill(ms_call *c, int kind, int n_f)
{
    ms_tensor *t = c->out[0], *whole;
    if (t->numel == 0) return MS_OK;
    draw d = {};
    d.seed = c->saved_rng[0];
    d.offset = c->saved_rng[1];
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
    ms_status st = launch(c->op->name, index_of(t), draw_kernel, up(up(t->numel + 1, 2), THREADS), THREADS, d);
    if (st == MS_OK && whole != t) st = ms__cuda_copy_tensor(t, whole);
    ms__release(whole);
    return st;
}
static ms_status run_rand(ms_call *c) { return fill(c, UNIFORM, 2); }
static ms_status run_randn(ms_call *c) { return fill(c, NORMAL, 2); }
static ms_status run_randint(ms_call *c) { return fill(c, INTEGERS, 2); }
static ms_status run_trunc_normal(ms_call *c) { return fill(c, TRUNCATED, 4); }

// ---- dropout: four elements per block of words; an element is kept where its word is not below the limit ----

struct dropout {
    uint64_t seed, offset, limit;
    double scale;
};
__global__ void dropout_kernel(int64_t n, int dtype, const void *x, void *y, dropout d)
{
    int64_t b = GLOBAL_INDEX;
    if (4 * b >= n) return;
    uint32_t w[4];
    ms_philox(d.seed, d.offset, (uint64_t)b, &w[0], &w[1], &w[2], &w[3]);
    for (int j = 0; j < 4 && 4 * b + j < n; j++) {
        int64_t k = 4 * b + j;
        bool keep = d.limit <= 0xffffffffu && w[j] >= (uint32_t)d.limit;
        if (dtype == MS_F64) store<double>(dtype, y, k, keep ? load<double>(dtype, x, k) * d.scale : 0);
        else store<float>(dtype, y, k, keep ? load<float>(dtype, x, k) * (float)d.scale : 0);
    }
}
static ms_status run_dropout(ms_call *c)
{
    ms_tensor *x, *y = c->out[0];
    double p = c->f[0];
    dropout d = { c->saved_rng[0], c->saved_rng[1], (uint64_t)(p * 4294967296.0), p < 1 ? 1 / (1 - p) : 0.0 };
    MS_TRY(ms__contiguous(&x, c->in[0]));
    ms_status st = launch(c->op->name, index_of(y), dropout_kernel, up(up(y->numel, 4), THREADS), THREADS, y->numel,
                          (int)y->dtype, (const void *)ms__data(x), ms__data(y), d);
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
