// SPDX-License-Identifier: MIT
// formulas/optim/adam.h -- Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019, algorithm 2). See list.h.
// (1) Adam: g += wd*p; AdamW: p -= lr*wd*p  (2) m = b1*m + (1-b1)*g, v = b2*v + (1-b2)*g*g  (3) amsgrad: w = max(w, v),
// used for v  (4) p -= lr/c1 * m / (sqrt(v)/sqrt(c2) + eps), with the corrections c = 1 - b^step.
#ifndef MS_OPTIM_ADAM
#define MS_OPTIM_ADAM

// Indices into the factors. A1, A2: 1 - b1, 1 - b2; SIZE: lr / c1; ROOT: 1 / sqrt(c2).
enum { ADAM_L2, ADAM_DECAY, ADAM_B1, ADAM_B2, ADAM_A1, ADAM_A2, ADAM_SIZE, ADAM_ROOT, ADAM_EPS };
// The sets of states that a step accepts (list.h): {m, v} and {m, v, w}.
enum { MS_KEEPS_adam = 1 << 3 | 1 << 7 | MS_KEEPS_MASTERS };

#ifdef MS_OPTIM_ROWS
static unsigned adam_keeps(const ms_optim_options *o) { return o->amsgrad ? 7 : 3; }

static void adam_factors(const ms_optim_options *o, double step, double *f)
{
    f[ADAM_L2] = o->weight_decay;
    f[ADAM_DECAY] = 1;
    f[ADAM_B1] = o->beta1;
    f[ADAM_B2] = o->beta2;
    f[ADAM_A1] = 1 - o->beta1;
    f[ADAM_A2] = 1 - o->beta2;
    f[ADAM_SIZE] = o->lr / (1 - pow(o->beta1, step));
    f[ADAM_ROOT] = 1 / sqrt(1 - pow(o->beta2, step));
    f[ADAM_EPS] = o->eps;
}

static void adamw_factors(const ms_optim_options *o, double step, double *f)
{
    adam_factors(o, step, f);
    f[ADAM_L2] = 0;
    f[ADAM_DECAY] = 1 - o->lr * o->weight_decay;
}

#define ADAM_ROW(NAME, FACTORS, DOC, WEIGHT_DECAY, DECAY_DOC)                                                  \
    static const optimizer ms__optim_##NAME = {                                                                \
        .row = { .name = #NAME,                                                                                \
                 .doc = DOC,                                                                                   \
                 .states = { "exp_avg", "exp_avg_sq", "max_exp_avg_sq" },                                      \
                 .needed = 3,                                                                                  \
                 .options = { MS_OPTION(lr, lr, 1e-3, 0, "learning rate"),                                     \
                              MS_OPTION_PAIR(betas, beta1, 0.9, 0.999, 0, 1,                                   \
                                             "decay of the first and second moment, from 0 to below 1"),       \
                              MS_OPTION(eps, eps, 1e-8, 0, "added to the root of the second moment"),          \
                              MS_OPTION(weight_decay, weight_decay, WEIGHT_DECAY, 0, DECAY_DOC),               \
                              MS_OPTION_FLAG(amsgrad, amsgrad, "divides by the largest second moment so far"), \
                              MS_OPTION_FLAG(maximize, maximize,                                               \
                                             "maximizes instead of minimizing: negates the gradient"),         \
                              MS_OPTION_MASTERS } },                                                           \
        .range = #NAME ".step",                                                                                \
        .keeps = adam_keeps,                                                                                   \
        .factors = FACTORS,                                                                                    \
    };
ADAM_ROW(Adam, adam_factors,
         "Adam (Kingma & Ba 2015, algorithm 1); amsgrad keeps the largest second moment (Reddi et al. 2018). "
         "weight_decay adds weight_decay p to the gradient of parameter p.",
         0, "weight_decay times the parameter is added to the gradient")
ADAM_ROW(AdamW, adamw_factors,
         "Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2): each step also subtracts lr "
         "weight_decay p from parameter p.",
         0.01, "the parameter is reduced by lr times weight_decay times itself")
#undef ADAM_ROW
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_adam)(REAL x, REAL g, REAL *m, REAL *v, REAL *w, const REAL *f)
{
    REAL d = g + f[ADAM_L2] * x;
    x *= f[ADAM_DECAY];
    REAL mk = f[ADAM_B1] * *m + f[ADAM_A1] * d, vk = f[ADAM_B2] * *v + f[ADAM_A2] * (d * d);
    *m = mk;
    *v = vk;
    if (w) {
        vk = *w > vk ? *w : vk;
        *w = vk;
    }
    return x - f[ADAM_SIZE] * (mk / (R_SQRT(vk) * f[ADAM_ROOT] + f[ADAM_EPS]));
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(Adam, adam)
OPTIMIZER(AdamW, adam)
#endif
