// SPDX-License-Identifier: MIT
// formulas/optim/adamax.h -- Adamax (Kingma & Ba 2015, section 7.1): g += wd*p; m = b1*m + (1-b1)*g; u = max(b2*u, |g|
// + eps); p -= lr / (1 - b1^step) * m / u. See list.h.
#ifndef MS_OPTIM_ADAMAX
#define MS_OPTIM_ADAMAX

enum { ADAMAX_SIZE, ADAMAX_DECAY, ADAMAX_B1, ADAMAX_A1, ADAMAX_B2, ADAMAX_EPS };  // factors; SIZE: lr / (1 - b1^step)
// The set of states that a step accepts (list.h): {m, u}.
enum { MS_KEEPS_adamax = 1 << 3 };

#ifdef MS_OPTIM_ROWS
static unsigned adamax_keeps(const ms_optim_options *o)
{
    (void)o;
    return 3;
}

static void adamax_factors(const ms_optim_options *o, double step, double *f)
{
    f[ADAMAX_SIZE] = o->lr / (1 - pow(o->beta1, step));
    f[ADAMAX_DECAY] = o->weight_decay;
    f[ADAMAX_B1] = o->beta1;
    f[ADAMAX_A1] = 1 - o->beta1;
    f[ADAMAX_B2] = o->beta2;
    f[ADAMAX_EPS] = o->eps;
}

static const optimizer ms__optim_Adamax = {
    .row = { .name = "Adamax",
             .doc =
                 "Adamax (Kingma & Ba 2015, section 7.1): Adam with a decaying maximum of |g| in place of the second "
                 "moment.",
             .states = { "exp_avg", "exp_inf" },
             .needed = 3,
             .options = { MS_OPTION(lr, lr, 2e-3, 0, "learning rate"),
                          MS_OPTION_PAIR(betas, beta1, 0.9, 0.999, 0, 1,
                                         "decay of the first moment and of the maximum, from 0 to below 1"),
                          MS_OPTION(eps, eps, 1e-8, 0, "added to |g|"),
                          MS_OPTION(weight_decay, weight_decay, 0, 0,
                                    "weight_decay times the parameter is added to the gradient"),
                          MS_OPTION_FLAG(maximize, maximize,
                                         "maximizes instead of minimizing: negates the gradient") } },
    .range = "Adamax.step",
    .keeps = adamax_keeps,
    .factors = adamax_factors,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_adamax)(REAL x, REAL g, REAL *m, REAL *u, REAL *unused, const REAL *f)
{
    (void)unused;
    REAL d = g + f[ADAMAX_DECAY] * x;
    REAL mk = f[ADAMAX_B1] * *m + f[ADAMAX_A1] * d;
    *m = mk;
    REAL old = f[ADAMAX_B2] * *u, size = (d < 0 ? -d : d) + f[ADAMAX_EPS];
    REAL uk = old > size ? old : size;  // NaN if the gradient is NaN
    *u = uk;
    return x - f[ADAMAX_SIZE] * (mk / uk);
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(Adamax, adamax)
#endif
