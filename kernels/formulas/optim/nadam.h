// SPDX-License-Identifier: MIT
// formulas/optim/nadam.h -- NAdam (Dozat 2016), with PyTorch's schedule of the momentum: mu_k = b1 * (1 - 0.96^(k *
// momentum_decay) / 2), P = mu_1 * ... * mu_step. g += wd*p, or decoupled: p -= lr*wd*p; m = b1*m + (1-b1)*g, v = b2*v
// + (1-b2)*g*g; p -= lr * ((1 - mu_step) / (1 - P) * g + mu_next / (1 - P * mu_next) * m) / (sqrt(v / (1 - b2^step)) +
// eps). See list.h.
#ifndef MS_OPTIM_NADAM
#define MS_OPTIM_NADAM

// Factors. OF_GRAD, OF_MOMENT: what g and m are multiplied by; ROOT: 1 / sqrt(1 - b2^step).
enum {
    NADAM_L2,
    NADAM_DECAY,
    NADAM_B1,
    NADAM_A1,
    NADAM_B2,
    NADAM_A2,
    NADAM_OF_GRAD,
    NADAM_OF_MOMENT,
    NADAM_ROOT,
    NADAM_EPS
};
// The set of states that a step accepts (list.h): {m, v}.
enum { MS_KEEPS_nadam = 1 << 3 };

#ifdef MS_OPTIM_ROWS
static unsigned nadam_keeps(const ms_optim_options *o)
{
    (void)o;
    return 3;
}

static double nadam_mu(const ms_optim_options *o, double step)
{
    return o->beta1 * (1 - 0.5 * pow(0.96, step * o->more[0]));
}

// mu_1 * ... * mu_step. The latest products are kept: parameters usually ask for the same step, and then for the next
// one; where a GPU skips steps (train/pass.c), also for a few later steps, and then again for earlier ones.
static double nadam_product(const ms_optim_options *o, double step)
{
    enum { KEPT = 64 };  // a power of two
    static _Thread_local struct {
        double beta1, decay, first, last, product[KEPT];  // the products of steps first to last
    } kept = { .beta1 = -1, .decay = -1 };
    if (kept.beta1 != o->beta1 || kept.decay != o->more[0] || step < kept.first) {
        kept.beta1 = o->beta1;
        kept.decay = o->more[0];
        kept.first = kept.last = 0;
        kept.product[0] = 1;
    }
    while (kept.last < step) {
        double before = kept.product[(int64_t)kept.last & (KEPT - 1)];
        if (before == 0) return 0;
        kept.last++;
        kept.product[(int64_t)kept.last & (KEPT - 1)] = before * nadam_mu(o, kept.last);
        if (kept.last - kept.first >= KEPT) kept.first = kept.last - KEPT + 1;
    }
    return kept.product[(int64_t)step & (KEPT - 1)];
}

static void nadam_factors(const ms_optim_options *o, double step, double *f)
{
    double product = nadam_product(o, step), next = nadam_mu(o, step + 1);
    f[NADAM_L2] = o->more[1] != 0 ? 0 : o->weight_decay;
    f[NADAM_DECAY] = o->more[1] != 0 ? 1 - o->lr * o->weight_decay : 1;
    f[NADAM_B1] = o->beta1;
    f[NADAM_A1] = 1 - o->beta1;
    f[NADAM_B2] = o->beta2;
    f[NADAM_A2] = 1 - o->beta2;
    f[NADAM_OF_GRAD] = o->lr * (1 - nadam_mu(o, step)) / (1 - product);
    f[NADAM_OF_MOMENT] = o->lr * next / (1 - product * next);
    f[NADAM_ROOT] = 1 / sqrt(1 - pow(o->beta2, step));
    f[NADAM_EPS] = o->eps;
}

static const optimizer ms__optim_NAdam = {
    .row = { .name = "NAdam",
             .doc = "NAdam (Dozat 2016, with PyTorch's schedule of the momentum): Adam with Nesterov momentum.",
             .states = { "exp_avg", "exp_avg_sq" },
             .needed = 3,
             .options = { MS_OPTION(lr, lr, 2e-3, 0, "learning rate"),
                          MS_OPTION_PAIR(betas, beta1, 0.9, 0.999, 0, 1,
                                         "decay of the first and second moment, from 0 to below 1"),
                          MS_OPTION(eps, eps, 1e-8, 0, "added to the root of the second moment"),
                          MS_OPTION(weight_decay, weight_decay, 0, 0,
                                    "weight_decay times the parameter is added to the gradient"),
                          MS_OPTION(momentum_decay, more[0], 4e-3, 0, "speed at which the momentum grows to betas[1]"),
                          MS_OPTION_FLAG(decoupled_weight_decay, more[1],
                                         "reduces the parameter by lr times weight_decay times itself instead"),
                          MS_OPTION_FLAG(maximize, maximize,
                                         "maximizes instead of minimizing: negates the gradient") } },
    .range = "NAdam.step",
    .keeps = nadam_keeps,
    .factors = nadam_factors,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_nadam)(REAL x, REAL g, REAL *m, REAL *v, REAL *unused, const REAL *f)
{
    (void)unused;
    REAL d = g + f[NADAM_L2] * x;
    x *= f[NADAM_DECAY];
    REAL mk = f[NADAM_B1] * *m + f[NADAM_A1] * d, vk = f[NADAM_B2] * *v + f[NADAM_A2] * (d * d);
    *m = mk;
    *v = vk;
    return x - (f[NADAM_OF_GRAD] * d + f[NADAM_OF_MOMENT] * mk) / (R_SQRT(vk) * f[NADAM_ROOT] + f[NADAM_EPS]);
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(NAdam, nadam)
#endif
