// SPDX-License-Identifier: MIT
// cpu/elementwise/random.c -- random fills on the CPU. Two elements share one Philox block of four words: the element
// at an even position uses words 0 and 1, the next element words 2 and 3; but normal numbers are made in pairs, from
// the words of both (Box-Muller). Uniform and normal numbers computed in float32 do not use words 1 and 3. A shard at
// an odd position begins in the middle of a block.
#include "cpu/cpu.h"
#include "cpu/elementwise/loops.h"
#include "formulas/draws.h"

enum { PAIRS = 256, BLOCK = 16384 };

typedef struct {
    uint32_t w[4][PAIRS];
} words;

static MS_KERNEL void draw_words_block(words *o, int64_t n, uint64_t seed, uint64_t offset, uint64_t first)
{
#pragma omp simd
    for (int64_t k = 0; k < n; k++)
        ms_philox(seed, offset, first + (uint64_t)k, &o->w[0][k], &o->w[1][k], &o->w[2][k], &o->w[3][k]);
}

typedef struct {
    uint64_t seed, offset, place;  // place: position of element 0 in the whole tensor
    double f[4], limit;            // f: the scalar arguments; limit: the largest uniform number to return
    int dtype;
    char *data;
    void (*fill)(const void *job, int64_t pairs, const words *w, void *out);
} random_job;

// Each of the following functions computes 2 * n numbers of its computing type from n blocks of words.
static MS_KERNEL void uniform_f32(const void *job, int64_t n, const words *w, void *out)
{
    const random_job *j = job;
    float *o = out, low = (float)j->f[0], width = (float)(j->f[1] - j->f[0]), limit = (float)j->limit;
#pragma omp simd
    for (int64_t k = 0; k < n; k++) {
        o[2 * k] = ms_draw_uniform_f32(w->w[0][k], low, width, limit);
        o[2 * k + 1] = ms_draw_uniform_f32(w->w[2][k], low, width, limit);
    }
}
static void uniform_f64(const void *job, int64_t n, const words *w, void *out)
{
    const random_job *j = job;
    double *o = out, low = j->f[0], width = j->f[1] - j->f[0];
    for (int64_t k = 0; k < n; k++)
        for (int h = 0; h < 2; h++)
            o[2 * k + h] = ms_draw_uniform_f64(w->w[2 * h][k], w->w[2 * h + 1][k], low, width, j->limit);
}
static MS_KERNEL void normal_f32(const void *job, int64_t n, const words *w, void *out)
{
    const random_job *j = job;
    float *o = out, mean = (float)j->f[0], std = (float)j->f[1];
#pragma omp simd
    for (int64_t k = 0; k < n; k++) ms_draw_normal_f32(w->w[0][k], w->w[2][k], mean, std, &o[2 * k], &o[2 * k + 1]);
}
static void normal_f64(const void *job, int64_t n, const words *w, void *out)
{
    const random_job *j = job;
    double *o = out;
    for (int64_t k = 0; k < n; k++)
        ms_draw_normal_f64((uint32_t[]) { w->w[0][k], w->w[1][k], w->w[2][k], w->w[3][k] }, j->f[0], j->f[1],
                           &o[2 * k]);
}
static void integers(const void *job, int64_t n, const words *w, void *out)
{
    const random_job *j = job;
    int64_t *o = out, low = (int64_t)j->f[0];
    uint64_t width = (uint64_t)(int64_t)j->f[1] - (uint64_t)low;
    for (int64_t k = 0; k < n; k++)
        for (int h = 0; h < 2; h++) o[2 * k + h] = ms_draw_integer(w->w[2 * h][k], w->w[2 * h + 1][k], low, width);
}

// Draws from a normal distribution truncated to [a, b]: the inverse CDF of a uniform number between CDF(a) and CDF(b).
static void truncated(const random_job *j, int64_t n, const words *w, void *out, bool wide)
{
    ms_truncated t = ms_truncated_of(j->f);
    for (int64_t k = 0; k < n; k++)
        for (int h = 0; h < 2; h++) {
            double v = ms_draw_truncated(w->w[2 * h][k], w->w[2 * h + 1][k], &t, wide);
            if (wide) ((double *)out)[2 * k + h] = v;
            else ((float *)out)[2 * k + h] = (float)v;
        }
}
static void truncated_f32(const void *job, int64_t n, const words *w, void *out) { truncated(job, n, w, out, false); }
static void truncated_f64(const void *job, int64_t n, const words *w, void *out) { truncated(job, n, w, out, true); }

static void random_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const random_job *j = arg;
    int size = ms__dtype_size(j->dtype), cls = ms__class_of(j->dtype);
    if (j->fill == integers) cls = MS_C_I64;
    int width = ms__class_size(cls);
    words w;
    double out[2 * PAIRS];
    uint64_t place = j->place + (uint64_t)first;
    while (first < last) {
        int64_t skip = (int64_t)(place & 1), n = last - first;
        if (n > 2 * PAIRS - skip) n = 2 * PAIRS - skip;
        int64_t pairs = (n + skip + 1) / 2;
        draw_words_block(&w, pairs, j->seed, j->offset, place >> 1);
        j->fill(j, pairs, &w, out);
        ms__store(cls, j->dtype, n, j->data + first * size, size, (char *)out + skip * width);
        first += n;
        place += (uint64_t)n;
    }
}

double ms__largest_below(int dtype, double x)
{
    char bits[8];
    double down = x;
    for (int step = 0; step < 60; step++) {
        ms__store(MS_C_F64, dtype, 1, bits, 8, &down);
        double back;
        ms__load(MS_C_F64, dtype, 1, &back, bits, 8);
        if (back < x) return back;
        double unit = (x < 0 ? -x : x) * 0x1p-53;
        down = x - (unit > 0x1p-149 ? unit : 0x1p-149) * (double)((uint64_t)1 << step);
    }
    return x;
}

static ms_status fill_random(ms_call *c, int n_f, void (*f32)(const void *, int64_t, const words *, void *),
                             void (*f64)(const void *, int64_t, const words *, void *))
{
    ms_tensor *t = c->out[0], *whole;
    random_job j = {
        .seed = c->saved_rng[0], .offset = c->saved_rng[1], .place = c->n_i ? (uint64_t)c->i[0] : 0, .dtype = t->dtype
    };
    for (int k = 0; k < n_f; k++) j.f[k] = c->f[k];
    j.fill = t->dtype == MS_F64 ? f64 : f32;
    if (f32 == uniform_f32) j.limit = j.f[1] > j.f[0] ? ms__largest_below(t->dtype, j.f[1]) : j.f[1];
    if (t->numel == 0) return MS_OK;
    if (ms__is_contiguous(t)) whole = ms__retain(t);
    else MS_TRY(ms__tensor_like(&whole, t, c->op->name));
    j.data = ms__data(whole);
    ms__parallel(t->numel, BLOCK, random_range, &j);
    if (whole != t) ms__cpu_copy_tensor(t, whole);
    ms__release(whole);
    return MS_OK;
}
ms_status ms__cpu_rand(ms_call *c) { return fill_random(c, 2, uniform_f32, uniform_f64); }
ms_status ms__cpu_randn(ms_call *c) { return fill_random(c, 2, normal_f32, normal_f64); }
ms_status ms__cpu_randint(ms_call *c) { return fill_random(c, 2, integers, integers); }
ms_status ms__cpu_trunc_normal(ms_call *c) { return fill_random(c, 4, truncated_f32, truncated_f64); }
