// optim_body.h -- the optimizers' formulas; included by optim.c once per element type with
//   T (stored parameter and gradient), REAL (arithmetic and state), LOAD(x), STORE(x), N(name).
// One pass over [first, last): every array is read and written once.

// SGD (Sutskever et al. 2013, as PyTorch has it): g += wd*p; b = momentum*b + (1-dampening)*g, at its first step b = g;
// p -= lr*(g + momentum*b) with nesterov, lr*b without.
static MS_KERNEL void N(sgd)(T *restrict p, const T *restrict g, const ms_optim_options *o, int64_t n)
{
    const REAL lr = (REAL)o->lr, wd = (REAL)o->weight_decay;
    for (int64_t k = 0; k < n; k++) {
        REAL x = LOAD(p[k]);
        p[k] = STORE(x - lr * (LOAD(g[k]) + wd * x));
    }
}

static MS_KERNEL void N(sgd_momentum)(T *restrict p, const T *restrict g, REAL *restrict b, const ms_optim_options *o, bool first, int64_t n)
{
    const REAL lr = (REAL)o->lr, wd = (REAL)o->weight_decay;
    const REAL keep = first ? 0 : (REAL)o->momentum, take = first ? 1 : (REAL)(1 - o->dampening);
    const REAL of_grad = o->nesterov ? 1 : 0, of_buffer = o->nesterov ? (REAL)o->momentum : 1;
    for (int64_t k = 0; k < n; k++) {
        REAL x = LOAD(p[k]), d = LOAD(g[k]) + wd * x;
        REAL m = keep * b[k] + take * d;
        b[k] = m;
        p[k] = STORE(x - lr * (of_grad * d + of_buffer * m));
    }
}

// Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019, algorithm 2): (1) Adam: g += wd*p; AdamW: p -= lr*wd*p
// (2) m = b1*m + (1-b1)*g, v = b2*v + (1-b2)*g*g  (3) amsgrad: w = max(w, v), used for v  (4) p -= lr/c1 * m / (sqrt(v)/sqrt(c2) + eps),
// with the corrections c = 1 - b^step made by the caller.
static MS_KERNEL void N(adam)(T *restrict p, const T *restrict g, REAL *restrict m, REAL *restrict v, const adam_factors *f, int64_t n)
{
    const REAL l2 = (REAL)f->l2, decay = (REAL)f->decay, b1 = (REAL)f->beta1, b2 = (REAL)f->beta2;
    const REAL a1 = (REAL)f->one_minus_beta1, a2 = (REAL)f->one_minus_beta2;
    const REAL size = (REAL)f->step_size, root = (REAL)f->rsqrt_c2, eps = (REAL)f->eps;
    for (int64_t k = 0; k < n; k++) {
        REAL x = LOAD(p[k]), d = LOAD(g[k]) + l2 * x;
        x *= decay;
        REAL mk = b1 * m[k] + a1 * d, vk = b2 * v[k] + a2 * (d * d);
        m[k] = mk;
        v[k] = vk;
        p[k] = STORE(x - size * (mk / (SQRT(vk) * root + eps)));
    }
}

static MS_KERNEL void N(adam_amsgrad)(T *restrict p, const T *restrict g, REAL *restrict m, REAL *restrict v, REAL *restrict w,
                                      const adam_factors *f, int64_t n)
{
    const REAL l2 = (REAL)f->l2, decay = (REAL)f->decay, b1 = (REAL)f->beta1, b2 = (REAL)f->beta2;
    const REAL a1 = (REAL)f->one_minus_beta1, a2 = (REAL)f->one_minus_beta2;
    const REAL size = (REAL)f->step_size, root = (REAL)f->rsqrt_c2, eps = (REAL)f->eps;
    for (int64_t k = 0; k < n; k++) {
        REAL x = LOAD(p[k]), d = LOAD(g[k]) + l2 * x;
        x *= decay;
        REAL mk = b1 * m[k] + a1 * d, vk = b2 * v[k] + a2 * (d * d);
        REAL wk = w[k] > vk ? w[k] : vk;
        m[k] = mk;
        v[k] = vk;
        w[k] = wk;
        p[k] = STORE(x - size * (mk / (SQRT(wk) * root + eps)));
    }
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

#undef T
#undef REAL
#undef LOAD
#undef STORE
#undef SQRT
#undef N
