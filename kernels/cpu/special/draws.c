// SPDX-License-Identifier: MIT
// cpu/special/draws.c -- gamma and Poisson numbers on the CPU (formulas/gamma_draws.h). A chunk's first tries are
// computed in loops that vectorise; elements whose try is not accepted at once begin again, one by one.
#include "cpu/cpu.h"
#include "cpu/special/special.h"
#include "formulas/gamma_draws.h"

enum { CHUNK = 256, BLOCK = 8192 };

typedef struct draw_job {
    uint64_t seed, offset, place;  // place: position of element 0 in the whole tensor
    const void *parameter;         // `period` numbers, which repeat over the elements
    int64_t period;
    int wide, logarithm;  // wide: parameters are float64
    double *out;
    void (*chunk)(const struct draw_job *j, int64_t n, const double *parameter, uint64_t first, double *out);
} draw_job;

typedef struct {
    uint32_t w[4][CHUNK];
} words;

static MS_KERNEL void draw_job_words(words *o, int64_t n, const draw_job *j, uint64_t first)
{
    uint64_t seed = j->seed, offset = j->offset;
#pragma omp simd
    for (int64_t k = 0; k < n; k++)
        ms_philox(seed, offset, first + (uint64_t)k, &o->w[0][k], &o->w[1][k], &o->w[2][k], &o->w[3][k]);
}

static MS_KERNEL void gamma_tries(int64_t n, const double *a, const words *w, double *x, double *quick)
{
#pragma omp simd
    for (int64_t k = 0; k < n; k++) {
        double d = ms_gamma_d(a[k]);
        ms_gamma_try t = ms_gamma_try_of(d, w->w[0][k], w->w[1][k], w->w[2][k], w->w[3][k]);
        x[k] = d * t.v;
        quick[k] = t.quick ? 1 : 0;
    }
}
static MS_KERNEL void gamma_results(int64_t n, const double *a, const words *w, double *x, int logarithm)
{
#pragma omp simd
    for (int64_t k = 0; k < n; k++) x[k] = ms_gamma_draw(a[k], x[k], w->w[0][k], w->w[1][k], logarithm);
}
static void gamma_chunk(const draw_job *j, int64_t n, const double *a, uint64_t first, double *out)
{
    words w;
    double quick[CHUNK];
    bool small = false, usable = true;
    draw_job_words(&w, n, j, first);
    gamma_tries(n, a, &w, out, quick);
    for (int64_t k = 0; k < n; k++) {
        small |= a[k] < 1;
        usable &= a[k] >= 0 && a[k] <= 1.7976931348623157e308;
        if (quick[k] == 0) out[k] = ms_gamma_number(ms_gamma_d(a[k]), j->seed, j->offset, first + (uint64_t)k, 0);
    }
    if (!j->logarithm && !small && usable) return;
    if (small) draw_job_words(&w, n, j, ms_gamma_boost_block(first));
    gamma_results(n, a, &w, out, j->logarithm);
}

static MS_KERNEL void poisson_tries(int64_t n, const double *rate, const words *w, double *out)
{
#pragma omp simd
    for (int64_t k = 0; k < n; k++) out[k] = ms_poisson_try(rate[k], w->w[0][k], w->w[1][k], w->w[2][k], w->w[3][k]);
}
static void poisson_chunk(const draw_job *j, int64_t n, const double *rate, uint64_t first, double *out)
{
    words w;
    bool any = false;
    double before = -1, none = 0;  // the last low rate, and the probability that it draws 0
    for (int64_t k = 0; k < n; k++) any |= ms_poisson_is_high(rate[k]);
    draw_job_words(&w, n, j, first);
    if (any) poisson_tries(n, rate, &w, out);
    for (int64_t k = 0; k < n; k++) {
        if (ms_poisson_is_low(rate[k])) {
            if (rate[k] != before) before = rate[k], none = ms_draw_exp(-before);
            out[k] = ms_poisson_low(before, none, w.w[0][k], w.w[1][k]);
        } else if (!ms_poisson_is_high(rate[k])) {
            out[k] = ms_poisson_none(rate[k]);
        } else if (out[k] < 0) {
            out[k] = ms_poisson_high(rate[k], j->seed, j->offset, first + (uint64_t)k, 1);
        }
    }
}

static void draw_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const draw_job *j = arg;
    double parameter[CHUNK];
    int64_t at = first % j->period;
    while (first < last) {
        int64_t n = last - first < CHUNK ? last - first : CHUNK;
        for (int64_t k = 0; k < n; k++) {
            parameter[k] = ms_draw_read(j->parameter, j->wide, at);
            if (++at == j->period) at = 0;
        }
        j->chunk(j, n, parameter, j->place + (uint64_t)first, j->out + first);
        first += n;
    }
}

static ms_status draw_samples(ms_call *c, draw_job j)
{
    ms_tensor *parameter;
    if (c->out[0]->numel == 0) return MS_OK;
    MS_TRY(ms__contiguous(&parameter, c->in[0]));
    j.seed = c->saved_rng[0], j.offset = c->saved_rng[1], j.place = (uint64_t)c->i[0];
    j.parameter = ms__data(parameter), j.period = parameter->numel, j.wide = parameter->dtype == MS_F64,
    j.out = ms__data(c->out[0]);
    ms__parallel(c->out[0]->numel, BLOCK, draw_range, &j);
    ms__release(parameter);
    return MS_OK;
}
ms_status ms__cpu_gamma_draw(ms_call *c)
{
    return draw_samples(c, (draw_job) { .chunk = gamma_chunk, .logarithm = c->i[1] != 0 });
}
ms_status ms__cpu_poisson_draw(ms_call *c) { return draw_samples(c, (draw_job) { .chunk = poisson_chunk }); }

// ---- the gradient of gamma numbers --------------------------------------------------------------------------

typedef struct {
    const double *g, *x;
    const void *a;
    int64_t period;
    int wide, logarithm;
    double *out;
} slope_job;
static void slope_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const slope_job *j = arg;
    for (int64_t k = first; k < last; k++) {
        double a = ms_draw_read(j->a, j->wide, k % j->period);
        j->out[k] = j->g[k] * ms_gamma_gradient(a, j->x[k], j->logarithm);
    }
}
ms_status ms__cpu_gamma_draw_backward(ms_call *c)
{
    ms_tensor *in[3] = { NULL };
    ms_status st = MS_OK;
    for (int k = 0; k < 3 && st == MS_OK; k++) st = ms__contiguous(&in[k], c->in[k]);
    if (st == MS_OK && c->out[0]->numel > 0) {
        slope_job j = { .g = ms__data(in[0]), .a = ms__data(in[1]), .x = ms__data(in[2]), .out = ms__data(c->out[0]) };
        j.period = in[1]->numel, j.wide = in[1]->dtype == MS_F64, j.logarithm = c->i[1] != 0;
        ms__parallel(c->out[0]->numel, 256, slope_range, &j);
    }
    for (int k = 0; k < 3; k++)
        if (in[k]) ms__release(in[k]);
    return st;
}
