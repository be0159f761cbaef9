// SPDX-License-Identifier: MIT
// cuda/special/draws.cu -- gamma and Poisson numbers, and the gradient of the former (formulas/gamma_draws.h): a thread
// for each element.
#include "cuda/blocks.h"
#include "formulas/gamma_draws.h"

struct draw_job {
    rng random;
    uint64_t place;
    const void *parameter;
    int64_t period, n;
    int wide, logarithm;
    double *out;
};

static __global__ void gamma_kernel(draw_job j)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= j.n) return;
    rng r = rng_now(j.random);
    double a = ms_draw_read(j.parameter, j.wide, k % j.period);
    uint64_t at = j.place + (uint64_t)k;
    uint32_t w[4] = { 0, 0, 0, 0 };
    double x = ms_gamma_number(ms_gamma_d(a), r.seed, r.offset, at, 0);
    if (a < 1) ms_philox(r.seed, r.offset, ms_gamma_boost_block(at), &w[0], &w[1], &w[2], &w[3]);
    j.out[k] = ms_gamma_draw(a, x, w[0], w[1], j.logarithm);
}
static __global__ void poisson_kernel(draw_job j)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= j.n) return;
    rng r = rng_now(j.random);
    double rate = ms_draw_read(j.parameter, j.wide, k % j.period);
    uint64_t at = j.place + (uint64_t)k;
    uint32_t w[4];
    if (ms_poisson_is_low(rate)) {
        ms_philox(r.seed, r.offset, at, &w[0], &w[1], &w[2], &w[3]);
        j.out[k] = ms_poisson_low(rate, ms_draw_exp(-rate), w[0], w[1]);
    } else {
        j.out[k] = ms_poisson_is_high(rate) ? ms_poisson_high(rate, r.seed, r.offset, at, 0) : ms_poisson_none(rate);
    }
}

template <class K> static ms_status draw(ms_call *c, const K &kernel)
{
    ms_tensor *t = c->out[0];
    if (t->numel == 0) return MS_OK;
    held_inputs held;
    MS_TRY(held.hold(c));
    draw_job j = {};
    j.random = rng_of(c);
    j.place = (uint64_t)c->i[0];
    j.parameter = ms__data(held.in[0]);
    j.period = held.in[0]->numel;
    j.n = t->numel;
    j.wide = held.in[0]->dtype == MS_F64;
    j.logarithm = c->i[1] != 0;
    j.out = (double *)ms__data(t);
    grid g = grid_of(t->numel);
    return launch(c->op->name, index_of(t), kernel, g.blocks, g.threads, j);
}
static ms_status run_gamma(ms_call *c) { return draw(c, gamma_kernel); }
static ms_status run_poisson(ms_call *c) { return draw(c, poisson_kernel); }

struct slope_job {
    const double *g, *x;
    const void *a;
    int64_t period, n;
    int wide, logarithm;
    double *out;
};
static __global__ void slope_kernel(slope_job j)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= j.n) return;
    double a = ms_draw_read(j.a, j.wide, k % j.period);
    j.out[k] = j.g[k] * ms_gamma_gradient(a, j.x[k], j.logarithm);
}
static ms_status run_slope(ms_call *c)
{
    ms_tensor *t = c->out[0];
    if (t->numel == 0) return MS_OK;
    held_inputs held;
    MS_TRY(held.hold(c));
    slope_job j = {};
    j.g = (const double *)ms__data(held.in[0]);
    j.a = ms__data(held.in[1]);
    j.x = (const double *)ms__data(held.in[2]);
    j.period = held.in[1]->numel;
    j.n = t->numel;
    j.wide = held.in[1]->dtype == MS_F64;
    j.logarithm = c->i[1] != 0;
    j.out = (double *)ms__data(t);
    grid g = grid_of(t->numel);
    return launch(c->op->name, index_of(t), slope_kernel, g.blocks, g.threads, j);
}

extern const ms_cuda_kernel ms__cuda_draws[];
const ms_cuda_kernel ms__cuda_draws[] = {
    { "gamma_draw", run_gamma }, { "gamma_draw_backward", run_slope }, { "poisson_draw", run_poisson }, { NULL, NULL }
};
