// SPDX-License-Identifier: MIT
// rows/random.c -- the random fills, all in place. First integer: the position of the first element in the
// whole tensor, so that a shard gets its part of the numbers. Each call uses one offset of the generator.
#include "cpu/cpu.h"
#include "rows/grad.h"

static ms_status check_distribution(const ms_call *c)
{
    if (c->n_i && c->i[0] < 0)
        return ms__call_fail(c, "the position of the first element must be 0 or more, got %lld", (long long)c->i[0]);
    return ms__check_writable(c);
}
static ms_status draw_seed(ms_call *c)
{
    ms__rng_next(&c->saved_rng[0], &c->saved_rng[1]);
    ms__call_inplace(c, 0, 0);
    return MS_OK;
}
static ms_status check_random_real(ms_call *c)
{
    MS_TRY(check_distribution(c));
    if (!ms__is_float(c->in[0]->dtype))
        return ms__call_fail(c, "needs a floating-point dtype, got %s", ms__tensor_text(c->in[0]));
    return MS_OK;
}
// The two numbers of the operator, 0 and 1 by default: bounds, or mean and standard deviation.
static ms_status check_pair(ms_call *c)
{
    for (; c->n_f < 2; c->n_f++) c->f[c->n_f] = c->n_f;
    return check_random_real(c);
}
static ms_status check_rand_(ms_call *c)
{
    MS_TRY(check_pair(c));
    if (!(c->f[0] <= c->f[1])) return ms__call_fail(c, "low must not be above high, got %g and %g", c->f[0], c->f[1]);
    return draw_seed(c);
}
static ms_status check_randn_(ms_call *c)
{
    MS_TRY(check_pair(c));
    if (!(c->f[1] >= 0)) return ms__call_fail(c, "std must be 0 or more, got %g", c->f[1]);
    return draw_seed(c);
}
static ms_status check_randint_(ms_call *c)
{
    MS_TRY(check_distribution(c));
    for (int k = 0; k < 2; k++)
        if (!(c->f[k] >= -0x1p63 && c->f[k] < 0x1p63) || c->f[k] != __builtin_floor(c->f[k]))
            return ms__call_fail(c, "a bound is %.15g, expected a whole number from -2^63 to below 2^63", c->f[k]);
    if (!(c->f[0] < c->f[1])) return ms__call_fail(c, "low must be below high, got %.15g and %.15g", c->f[0], c->f[1]);
    if (!ms__holds(c->in[0]->dtype, c->f[0]) || !ms__holds(c->in[0]->dtype, c->f[1] - 1))
        return ms__call_fail(c, "%.17g to %.17g is out of range for %s", c->f[0], c->f[1] - 1,
                             ms__tensor_text(c->in[0]));
    return draw_seed(c);
}
static ms_status check_trunc_normal_(ms_call *c)
{
    MS_TRY(check_random_real(c));
    if (!(c->f[1] > 0)) return ms__call_fail(c, "std must be positive, got %g", c->f[1]);
    if (!(c->f[2] < c->f[3])) return ms__call_fail(c, "a must be below b, got a = %g, b = %g", c->f[2], c->f[3]);
    return draw_seed(c);
}
#define ROW(NAME, KERNEL, TAKES, SAMPLES, DOC)                                                                       \
    static const ms_op NAME##row = MS_ROW(#NAME, 1, 1, .flags = MS_OP_INPLACE | MS_OP_RANDOM, .check = check_##NAME, \
                                          .run = { [MS_CPU] = ms__cpu_##KERNEL }, .backward = ms__zero_gradient,     \
                                          .takes = TAKES, .samples = SAMPLES, .doc = DOC);
// clang-format off
ROW(rand_,         rand,         "place=0; low=0, high=1", "[3,4] f=-1,2", "Uniform numbers in [low, high). place: where t's first element is in a larger tensor, so that a shard gets the same numbers as the whole.")
ROW(randn_,        randn,        "place=0; mean=0, std=1", "[3,4] f=1,2;[7] f=0,1 i=3", "Normal numbers; place: as for rand_.")
ROW(randint_,      randint,      "place=0; low, high", "[3,4] f=0,10;[3,4]i9 f=-5,5", "Whole numbers from low to below high; place: as for rand_.")
ROW(trunc_normal_, trunc_normal, "place=0; mean, std, low, high", "[3,4] f=0,1,-2,2", "Normal numbers within [low, high]; place: as for rand_.")
// clang-format on

MS_OPERATORS = { &rand_row, &randn_row, &randint_row, &trunc_normal_row };
