// SPDX-License-Identifier: MIT
// train/optim_body.h -- the optimizers' passes over [first, last); included by optim.c once per element type with
//   T (stored parameter and gradient), REAL (arithmetic and state), LOAD(x), STORE(x), N(name), R(name).
// Every array is read and written once. The formulas are in formulas/optim.h.

static MS_KERNEL void N(sgd)(T *restrict p, const T *restrict g, const ms_optim_options *o, int64_t n)
{
    const REAL lr = (REAL)o->lr, wd = (REAL)o->weight_decay;
    for (int64_t k = 0; k < n; k++) p[k] = STORE(R(ms_sgd)(LOAD(p[k]), LOAD(g[k]), lr, wd));
}

static MS_KERNEL void N(sgd_momentum)(T *restrict p, const T *restrict g, REAL *restrict b, const ms_optim_options *o,
                                      bool first, int64_t n)
{
    const REAL lr = (REAL)o->lr, wd = (REAL)o->weight_decay;
    const REAL keep = first ? 0 : (REAL)o->momentum, take = first ? 1 : (REAL)(1 - o->dampening);
    const REAL of_grad = o->nesterov ? 1 : 0, of_buffer = o->nesterov ? (REAL)o->momentum : 1;
    for (int64_t k = 0; k < n; k++)
        p[k] = STORE(R(ms_sgd_momentum)(LOAD(p[k]), LOAD(g[k]), &b[k], lr, wd, keep, take, of_grad, of_buffer));
}

#define FACTORS                                                                                    \
    const REAL l2 = (REAL)f->l2, decay = (REAL)f->decay, b1 = (REAL)f->beta1, b2 = (REAL)f->beta2; \
    const REAL a1 = (REAL)f->one_minus_beta1, a2 = (REAL)f->one_minus_beta2;                       \
    const REAL size = (REAL)f->step_size, root = (REAL)f->rsqrt_c2, eps = (REAL)f->eps;
static MS_KERNEL void N(adam)(T *restrict p, const T *restrict g, REAL *restrict m, REAL *restrict v,
                              const adam_factors *f, int64_t n)
{
    FACTORS
    for (int64_t k = 0; k < n; k++)
        p[k] =
            STORE(R(ms_adam)(LOAD(p[k]), LOAD(g[k]), &m[k], &v[k], NULL, l2, decay, b1, b2, a1, a2, size, root, eps));
}

static MS_KERNEL void N(adam_amsgrad)(T *restrict p, const T *restrict g, REAL *restrict m, REAL *restrict v,
                                      REAL *restrict w, const adam_factors *f, int64_t n)
{
    FACTORS
    for (int64_t k = 0; k < n; k++)
        p[k] =
            STORE(R(ms_adam)(LOAD(p[k]), LOAD(g[k]), &m[k], &v[k], &w[k], l2, decay, b1, b2, a1, a2, size, root, eps));
}

static void N(run)(const job *j, int64_t at, int64_t n)
{
    T *p = (T *)j->p + at;
    const T *g = (const T *)j->g + at;
    REAL *a = j->state[0] ? (REAL *)j->state[0] + at : NULL;
    if (j->o->kind == MS_SGD) {
        if (a) N(sgd_momentum)(p, g, a, j->o, j->first, n);
        else N(sgd)(p, g, j->o, n);
        return;
    }
    REAL *v = (REAL *)j->state[1] + at;
    if (j->o->amsgrad) N(adam_amsgrad)(p, g, a, v, (REAL *)j->state[2] + at, &j->adam, n);
    else N(adam)(p, g, a, v, &j->adam, n);
}

#undef FACTORS
#undef T
#undef REAL
#undef R
#undef LOAD
#undef STORE
#undef N
