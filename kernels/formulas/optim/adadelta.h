// SPDX-License-Identifier: MIT
// formulas/optim/adadelta.h -- Adadelta (Zeiler 2012): g += wd*p; v = rho*v + (1-rho)*g*g; d = sqrt(u + eps) / sqrt(v +
// eps) * g; u = rho*u + (1-rho)*d*d; p -= lr*d. See list.h.
#ifndef MS_OPTIM_ADADELTA
#define MS_OPTIM_ADADELTA

enum { ADADELTA_LR, ADADELTA_DECAY, ADADELTA_RHO, ADADELTA_REST, ADADELTA_EPS };  // factors
// The set of states that a step accepts (list.h): {v, u}.
enum { MS_KEEPS_adadelta = 1 << 3 };

#ifdef MS_OPTIM_ROWS
static ms_status adadelta_check(const ms_optim_options *o)
{
    if (o->more[0] > 1) return ms__fail(MS_EINVAL, "Adadelta: rho is %g, expected at most 1", o->more[0]);
    return MS_OK;
}

static unsigned adadelta_keeps(const ms_optim_options *o)
{
    (void)o;
    return 3;
}

static void adadelta_factors(const ms_optim_options *o, double step, double *f)
{
    (void)step;
    f[ADADELTA_LR] = o->lr;
    f[ADADELTA_DECAY] = o->weight_decay;
    f[ADADELTA_RHO] = o->more[0];
    f[ADADELTA_REST] = 1 - o->more[0];
    f[ADADELTA_EPS] = o->eps;
}

static const optimizer ms__optim_Adadelta = {
    .row = { .name = "Adadelta",
             .doc = "Adadelta (Zeiler 2012): scales the gradient by the root of average squared steps over average "
                    "squared gradients.",
             .states = { "square_avg", "acc_delta" },
             .needed = 3,
             .options = { MS_OPTION(lr, lr, 1, 0, "learning rate"),
                          MS_OPTION(rho, more[0], 0.9, 0, "share of the averages that is kept"),
                          MS_OPTION(eps, eps, 1e-6, 0, "added to both averages"),
                          MS_OPTION(weight_decay, weight_decay, 0, 0,
                                    "weight_decay times the parameter is added to the gradient"),
                          MS_OPTION_FLAG(maximize, maximize,
                                         "maximizes instead of minimizing: negates the gradient") } },
    .range = "Adadelta.step",
    .check = adadelta_check,
    .keeps = adadelta_keeps,
    .factors = adadelta_factors,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_adadelta)(REAL x, REAL g, REAL *v, REAL *u, REAL *unused, const REAL *f)
{
    (void)unused;
    REAL d = g + f[ADADELTA_DECAY] * x;
    REAL vk = f[ADADELTA_RHO] * *v + f[ADADELTA_REST] * (d * d);
    *v = vk;
    d *= R_SQRT(*u + f[ADADELTA_EPS]) / R_SQRT(vk + f[ADADELTA_EPS]);
    *u = f[ADADELTA_RHO] * *u + f[ADADELTA_REST] * (d * d);
    return x - f[ADADELTA_LR] * d;
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(Adadelta, adadelta)
#endif
