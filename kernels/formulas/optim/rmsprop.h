// SPDX-License-Identifier: MIT
// formulas/optim/rmsprop.h -- RMSprop (Tieleman & Hinton 2012): g += wd*p; v = alpha*v + (1-alpha)*g*g; d = g /
// (sqrt(v) + eps). centered (Graves 2013): a = alpha*a + (1-alpha)*g, and v - a*a in place of v. With momentum: b =
// momentum*b + d, and b in place of d. p -= lr*d. See list.h.
#ifndef MS_OPTIM_RMSPROP
#define MS_OPTIM_RMSPROP

enum { RMSPROP_LR, RMSPROP_DECAY, RMSPROP_ALPHA, RMSPROP_REST, RMSPROP_EPS, RMSPROP_MOMENTUM };  // factors
// The sets of states that a step accepts (list.h): {v}, {v, b}, {v, a} and {v, b, a}.
enum { MS_KEEPS_rmsprop = 1 << 1 | 1 << 3 | 1 << 5 | 1 << 7 };

#ifdef MS_OPTIM_ROWS
static unsigned rmsprop_keeps(const ms_optim_options *o)
{
    return 1u | (o->momentum != 0 ? 2u : 0) | (o->more[1] != 0 ? 4u : 0);
}

static void rmsprop_factors(const ms_optim_options *o, double step, double *f)
{
    (void)step;
    f[RMSPROP_LR] = o->lr;
    f[RMSPROP_DECAY] = o->weight_decay;
    f[RMSPROP_ALPHA] = o->more[0];
    f[RMSPROP_REST] = 1 - o->more[0];
    f[RMSPROP_EPS] = o->eps;
    f[RMSPROP_MOMENTUM] = o->momentum;
}

static const optimizer ms__optim_RMSprop = {
    .row = { .name = "RMSprop",
             .doc = "RMSprop (Tieleman & Hinton 2012): divides the gradient by the root of a moving average of its "
                    "squares; centered (Graves 2013) subtracts the square of the average gradient from it.",
             .states = { "square_avg", "momentum_buffer", "grad_avg" },
             .needed = 1,
             .options = { MS_OPTION(lr, lr, 1e-2, 0, "learning rate"),
                          MS_OPTION(alpha, more[0], 0.99, 0, "share of the averages that is kept"),
                          MS_OPTION(eps, eps, 1e-8, 0, "added to the root"),
                          MS_OPTION(weight_decay, weight_decay, 0, 0,
                                    "weight_decay times the parameter is added to the gradient"),
                          MS_OPTION(momentum, momentum, 0, 0, "share of the last step that is kept"),
                          MS_OPTION_FLAG(centered, more[1], "divides by an estimate of the variance"),
                          MS_OPTION_FLAG(maximize, maximize,
                                         "maximizes instead of minimizing: negates the gradient") } },
    .range = "RMSprop.step",
    .keeps = rmsprop_keeps,
    .factors = rmsprop_factors,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_rmsprop)(REAL x, REAL g, REAL *v, REAL *b, REAL *a, const REAL *f)
{
    REAL d = g + f[RMSPROP_DECAY] * x;
    REAL vk = f[RMSPROP_ALPHA] * *v + f[RMSPROP_REST] * (d * d);
    *v = vk;
    if (a) {
        REAL ak = *a + f[RMSPROP_REST] * (d - *a);
        *a = ak;
        vk -= ak * ak;
    }
    d /= R_SQRT(vk) + f[RMSPROP_EPS];
    if (b) *b = d = f[RMSPROP_MOMENTUM] * *b + d;
    return x - f[RMSPROP_LR] * d;
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(RMSprop, rmsprop)
#endif
