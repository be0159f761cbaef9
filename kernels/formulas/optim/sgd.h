// SPDX-License-Identifier: MIT
// formulas/optim/sgd.h -- SGD (Sutskever et al. 2013, in PyTorch's form): g += wd*p; b = momentum*b + (1-dampening)*g,
// but b = g at the first step and without momentum; p -= lr*(g + momentum*b) with nesterov, else p -= lr*b. See list.h.
#ifndef MS_OPTIM_SGD
#define MS_OPTIM_SGD

// Indices into the factors: b = KEEP * b + TAKE * g; p -= LR * (OF_GRAD * g + OF_BUFFER * b).
enum { SGD_LR, SGD_DECAY, SGD_KEEP, SGD_TAKE, SGD_OF_GRAD, SGD_OF_BUFFER };
// The sets of states that a step accepts (list.h): none, or {the momentum buffer}.
enum { MS_KEEPS_sgd = 1 << 0 | 1 << 1 | MS_KEEPS_MASTERS };

#ifdef MS_OPTIM_ROWS
static ms_status sgd_check(const ms_optim_options *o)
{
    if (o->nesterov && (o->momentum <= 0 || o->dampening != 0))
        return ms__fail(MS_EINVAL, "SGD: Nesterov momentum requires a momentum and zero dampening");
    return MS_OK;
}

static unsigned sgd_keeps(const ms_optim_options *o) { return o->momentum != 0; }

static int sgd_is_plain(const ms_optim_options *o) { return o->momentum == 0 && o->weight_decay == 0; }

static void sgd_factors(const ms_optim_options *o, double step, double *f)
{
    f[SGD_LR] = o->lr;
    f[SGD_DECAY] = o->weight_decay;
    f[SGD_KEEP] = step == 1 ? 0 : o->momentum;
    f[SGD_TAKE] = step == 1 ? 1 : 1 - o->dampening;
    f[SGD_OF_GRAD] = o->nesterov ? 1 : 0;
    f[SGD_OF_BUFFER] = o->nesterov ? o->momentum : 1;
}

static const optimizer ms__optim_SGD = {
    .row = { .name = "SGD",
             .doc = "Stochastic gradient descent with momentum (Sutskever et al. 2013, in PyTorch's form): "
                    "v = momentum v + (1 - dampening) g, but v = g at the first step and without momentum; p = p - lr "
                    "v, or with nesterov p - lr (g + momentum v). "
                    "weight_decay adds weight_decay p to g. Errors: nesterov without momentum or with dampening.",
             .states = { "momentum_buffer" },
             .options = { MS_OPTION(lr, lr, 1e-3, 0, "learning rate"),
                          MS_OPTION(momentum, momentum, 0, 0, "share of the last step that is kept"),
                          MS_OPTION(dampening, dampening, 0, -INFINITY,
                                    "share of the gradient that is left out of the momentum"),
                          MS_OPTION_FLAG(nesterov, nesterov, "looks ahead by one step of momentum"),
                          MS_OPTION(weight_decay, weight_decay, 0, 0,
                                    "weight_decay times the parameter is added to the gradient"),
                          MS_OPTION_FLAG(maximize, maximize, "maximizes instead of minimizing: negates the gradient"),
                          MS_OPTION_MASTERS } },
    .range = "SGD.step",
    .check = sgd_check,
    .keeps = sgd_keeps,
    .factors = sgd_factors,
    .is_plain = sgd_is_plain,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_sgd)(REAL x, REAL g, REAL *b, REAL *unused_1, REAL *unused_2, const REAL *f)
{
    (void)unused_1, (void)unused_2;
    REAL d = g + f[SGD_DECAY] * x;
    if (!b) return x - f[SGD_LR] * d;
    REAL m = f[SGD_KEEP] * *b + f[SGD_TAKE] * d;
    *b = m;
    return x - f[SGD_LR] * (f[SGD_OF_GRAD] * d + f[SGD_OF_BUFFER] * m);
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(SGD, sgd)
#endif
