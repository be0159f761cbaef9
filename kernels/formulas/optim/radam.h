// SPDX-License-Identifier: MIT
// formulas/optim/radam.h -- RAdam (Liu et al. 2020, algorithm 2): g += wd*p, or decoupled: p -= lr*wd*p; m = b1*m +
// (1-b1)*g, v = b2*v + (1-b2)*g*g; with n = 2/(1-b2) - 1 and n_t = n - 2*step*b2^step / (1 - b2^step), p -= lr / (1 -
// b1^step) * m * r, where r = sqrt((n_t-4)(n_t-2)n / ((n-4)(n-2)n_t)) * sqrt(1 - b2^step) / (sqrt(v) + eps) if n_t > 5,
// else 1. See list.h.
#ifndef MS_OPTIM_RADAM
#define MS_OPTIM_RADAM

// Factors. SIZE: lr / (1 - b1^step); RECT: the numerator of r; 0 while n_t is at most 5.
enum { RADAM_L2, RADAM_DECAY, RADAM_B1, RADAM_A1, RADAM_B2, RADAM_A2, RADAM_SIZE, RADAM_RECT, RADAM_EPS };
// The set of states that a step accepts (list.h): {m, v}.
enum { MS_KEEPS_radam = 1 << 3 };

#ifdef MS_OPTIM_ROWS
static unsigned radam_keeps(const ms_optim_options *o)
{
    (void)o;
    return 3;
}

static void radam_factors(const ms_optim_options *o, double step, double *f)
{
    double power = pow(o->beta2, step), n = 2 / (1 - o->beta2) - 1, nt = n - 2 * step * power / (1 - power);
    f[RADAM_L2] = o->more[0] != 0 ? 0 : o->weight_decay;
    f[RADAM_DECAY] = o->more[0] != 0 ? 1 - o->lr * o->weight_decay : 1;
    f[RADAM_B1] = o->beta1;
    f[RADAM_A1] = 1 - o->beta1;
    f[RADAM_B2] = o->beta2;
    f[RADAM_A2] = 1 - o->beta2;
    f[RADAM_SIZE] = o->lr / (1 - pow(o->beta1, step));
    f[RADAM_RECT] = nt > 5 ? sqrt((nt - 4) * (nt - 2) * n / ((n - 4) * (n - 2) * nt)) * sqrt(1 - power) : 0;
    f[RADAM_EPS] = o->eps;
}

static const optimizer ms__optim_RAdam = {
    .row = { .name = "RAdam",
             .doc = "RAdam (Liu et al. 2020, algorithm 2): Adam whose first steps do without the second moment, until "
                    "its variance is small enough.",
             .states = { "exp_avg", "exp_avg_sq" },
             .needed = 3,
             .options = { MS_OPTION(lr, lr, 1e-3, 0, "learning rate"),
                          MS_OPTION_PAIR(betas, beta1, 0.9, 0.999, 0, 1,
                                         "decay of the first and second moment, from 0 to below 1"),
                          MS_OPTION(eps, eps, 1e-8, 0, "added to the root of the second moment"),
                          MS_OPTION(weight_decay, weight_decay, 0, 0,
                                    "weight_decay times the parameter is added to the gradient"),
                          MS_OPTION_FLAG(decoupled_weight_decay, more[0],
                                         "reduces the parameter by lr times weight_decay times itself instead"),
                          MS_OPTION_FLAG(maximize, maximize,
                                         "maximizes instead of minimizing: negates the gradient") } },
    .range = "RAdam.step",
    .keeps = radam_keeps,
    .factors = radam_factors,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_radam)(REAL x, REAL g, REAL *m, REAL *v, REAL *unused, const REAL *f)
{
    (void)unused;
    REAL d = g + f[RADAM_L2] * x;
    x *= f[RADAM_DECAY];
    REAL mk = f[RADAM_B1] * *m + f[RADAM_A1] * d, vk = f[RADAM_B2] * *v + f[RADAM_A2] * (d * d);
    *m = mk;
    *v = vk;
    REAL by = f[RADAM_RECT] == 0 ? 1 : f[RADAM_RECT] / (R_SQRT(vk) + f[RADAM_EPS]);
    return x - f[RADAM_SIZE] * mk * by;
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(RAdam, radam)
#endif
