// SPDX-License-Identifier: MIT
// formulas/optim/adagrad.h -- Adagrad (Duchi, Hazan & Singer 2011): g += wd*p; s += g*g; p -= lr / (1 +
// (step-1)*lr_decay) * g / (sqrt(s) + eps). s starts at initial_accumulator_value. See list.h.
#ifndef MS_OPTIM_ADAGRAD
#define MS_OPTIM_ADAGRAD

enum { ADAGRAD_LR, ADAGRAD_DECAY, ADAGRAD_START, ADAGRAD_EPS };  // factors; START: added to s at the first step
// The set of states that a step accepts (list.h): {s}.
enum { MS_KEEPS_adagrad = 1 << 1 };

#ifdef MS_OPTIM_ROWS
static unsigned adagrad_keeps(const ms_optim_options *o)
{
    (void)o;
    return 1;
}

static void adagrad_factors(const ms_optim_options *o, double step, double *f)
{
    f[ADAGRAD_LR] = o->lr / (1 + (step - 1) * o->more[0]);
    f[ADAGRAD_DECAY] = o->weight_decay;
    f[ADAGRAD_START] = step == 1 ? o->more[1] : 0;
    f[ADAGRAD_EPS] = o->eps;
}

static const optimizer ms__optim_Adagrad = {
    .row = { .name = "Adagrad",
             .doc = "Adagrad (Duchi, Hazan & Singer 2011): divides the gradient by the root of the sum of all its "
                    "squares so far.",
             .states = { "sum" },
             .needed = 1,
             .options = { MS_OPTION(lr, lr, 1e-2, 0, "learning rate"),
                          MS_OPTION(lr_decay, more[0], 0, 0, "step k uses lr / (1 + (k - 1) lr_decay)"),
                          MS_OPTION(weight_decay, weight_decay, 0, 0,
                                    "weight_decay times the parameter is added to the gradient"),
                          MS_OPTION(initial_accumulator_value, more[1], 0, 0, "the sum's value before the first step"),
                          MS_OPTION(eps, eps, 1e-10, 0, "added to the root"),
                          MS_OPTION_FLAG(maximize, maximize,
                                         "maximizes instead of minimizing: negates the gradient") } },
    .range = "Adagrad.step",
    .keeps = adagrad_keeps,
    .factors = adagrad_factors,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_adagrad)(REAL x, REAL g, REAL *s, REAL *unused_1, REAL *unused_2, const REAL *f)
{
    (void)unused_1, (void)unused_2;
    REAL d = g + f[ADAGRAD_DECAY] * x;
    REAL sk = *s + f[ADAGRAD_START] + d * d;
    *s = sk;
    return x - f[ADAGRAD_LR] * (d / (R_SQRT(sk) + f[ADAGRAD_EPS]));
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(Adagrad, adagrad)
#endif
