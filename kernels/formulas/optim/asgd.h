// SPDX-License-Identifier: MIT
// formulas/optim/asgd.h -- averaged SGD (Polyak & Juditsky 1992, in PyTorch's form): g += wd*p; p -= lambd*eta*p; p -=
// eta*g; a += (p - a) * mu, with eta = lr / (1 + lambd*lr*(step-1))^alpha and mu = 1 / max(1, step - 1 - t0). See
// list.h.
#ifndef MS_OPTIM_ASGD
#define MS_OPTIM_ASGD

enum { ASGD_DECAY, ASGD_SHRINK, ASGD_ETA, ASGD_MU };  // factors; SHRINK: 1 - lambd * eta
// The set of states that a step accepts (list.h): {a}.
enum { MS_KEEPS_asgd = 1 << 1 };

#ifdef MS_OPTIM_ROWS
static unsigned asgd_keeps(const ms_optim_options *o)
{
    (void)o;
    return 1;
}

static void asgd_factors(const ms_optim_options *o, double step, double *f)
{
    double lambd = o->more[0], alpha = o->more[1], t0 = o->more[2];
    double eta = o->lr / pow(1 + lambd * o->lr * (step - 1), alpha);
    f[ASGD_DECAY] = o->weight_decay;
    f[ASGD_SHRINK] = 1 - lambd * eta;
    f[ASGD_ETA] = eta;
    f[ASGD_MU] = 1 / fmax(1, step - 1 - t0);
}

static const optimizer ms__optim_ASGD = {
    .row = { .name = "ASGD",
             .doc = "Averaged stochastic gradient descent (Polyak & Juditsky 1992, in PyTorch's form): state ax is the "
                    "average of the parameter from step t0 on.",
             .states = { "ax" },
             .needed = 1,
             .options = { MS_OPTION(lr, lr, 1e-2, 0, "learning rate"),
                          MS_OPTION(lambd, more[0], 1e-4, 0, "decay of the parameter, and of the learning rate"),
                          MS_OPTION(alpha, more[1], 0.75, 0, "power of the learning rate's decay"),
                          MS_OPTION(t0, more[2], 1e6, 0, "the step at which averaging begins"),
                          MS_OPTION(weight_decay, weight_decay, 0, 0,
                                    "weight_decay times the parameter is added to the gradient"),
                          MS_OPTION_FLAG(maximize, maximize,
                                         "maximizes instead of minimizing: negates the gradient") } },
    .range = "ASGD.step",
    .keeps = asgd_keeps,
    .factors = asgd_factors,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_asgd)(REAL x, REAL g, REAL *a, REAL *unused_1, REAL *unused_2, const REAL *f)
{
    (void)unused_1, (void)unused_2;
    REAL d = g + f[ASGD_DECAY] * x;
    x = x * f[ASGD_SHRINK] - f[ASGD_ETA] * d;
    *a = f[ASGD_MU] == 1 ? x : *a + (x - *a) * f[ASGD_MU];
    return x;
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(ASGD, asgd)
#endif
