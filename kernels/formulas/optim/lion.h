// SPDX-License-Identifier: MIT
// formulas/optim/lion.h -- Lion (Chen et al. 2023, algorithm 2): p -= lr*wd*p; p -= lr * sign(b1*m + (1-b1)*g); m =
// b2*m + (1-b2)*g. See list.h.
#ifndef MS_OPTIM_LION
#define MS_OPTIM_LION

enum { LION_LR, LION_DECAY, LION_B1, LION_A1, LION_B2, LION_A2 };  // factors
// The set of states that a step accepts (list.h): {m}.
enum { MS_KEEPS_lion = 1 << 1 };

#ifdef MS_OPTIM_ROWS
static unsigned lion_keeps(const ms_optim_options *o)
{
    (void)o;
    return 1;
}

static void lion_factors(const ms_optim_options *o, double step, double *f)
{
    (void)step;
    f[LION_LR] = o->lr;
    f[LION_DECAY] = 1 - o->lr * o->weight_decay;
    f[LION_B1] = o->beta1;
    f[LION_A1] = 1 - o->beta1;
    f[LION_B2] = o->beta2;
    f[LION_A2] = 1 - o->beta2;
}

static const optimizer ms__optim_Lion = {
    .row = { .name = "Lion",
             .doc = "Lion (Chen et al. 2023, algorithm 2): steps by the sign of an average gradient, and subtracts "
                    "lr weight_decay p from parameter p.",
             .states = { "exp_avg" },
             .needed = 1,
             .options = { MS_OPTION(lr, lr, 1e-4, 0, "learning rate"),
                          MS_OPTION_PAIR(betas, beta1, 0.9, 0.99, 0, 1,
                                         "share of the average in the step, and its decay, from 0 to below 1"),
                          MS_OPTION(weight_decay, weight_decay, 0, 0,
                                    "the parameter is reduced by lr times weight_decay times itself"),
                          MS_OPTION_FLAG(maximize, maximize,
                                         "maximizes instead of minimizing: negates the gradient") } },
    .range = "Lion.step",
    .keeps = lion_keeps,
    .factors = lion_factors,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_lion)(REAL x, REAL g, REAL *m, REAL *unused_1, REAL *unused_2, const REAL *f)
{
    (void)unused_1, (void)unused_2;
    REAL u = f[LION_B1] * *m + f[LION_A1] * g;
    *m = f[LION_B2] * *m + f[LION_A2] * g;
    u = u > 0 ? 1 : u < 0 ? -1 : u;  // 0 and NaN stay what they are
    return x * f[LION_DECAY] - f[LION_LR] * u;
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(Lion, lion)
#endif
