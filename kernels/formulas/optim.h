// SPDX-License-Identifier: MIT
// formulas/optim.h -- one element's step of every optimizer, once: included by C (optim_body.h) and by
// nvcc with REAL (float, double), R(name) and R_SQRT.

#ifndef MS_OPTIM_ONCE
#define MS_OPTIM_ONCE
#include "tensor/dtype.h"
#endif

// SGD (Sutskever et al. 2013, as PyTorch has it): g += wd*p; b = momentum*b + (1-dampening)*g, at its first step b = g;
// p -= lr*(g + momentum*b) with nesterov, lr*b without.
MS_FN REAL R(ms_sgd)(REAL x, REAL g, REAL lr, REAL wd) { return x - lr * (g + wd * x); }
MS_FN REAL R(ms_sgd_momentum)(REAL x, REAL g, REAL *b, REAL lr, REAL wd, REAL keep, REAL take, REAL of_grad,
                              REAL of_buffer)
{
    REAL d = g + wd * x, m = keep * *b + take * d;
    *b = m;
    return x - lr * (of_grad * d + of_buffer * m);
}

// Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019, algorithm 2): (1) Adam: g += wd*p; AdamW: p -= lr*wd*p
// (2) m = b1*m + (1-b1)*g, v = b2*v + (1-b2)*g*g  (3) amsgrad: w = max(w, v), used for v  (4) p -= lr/c1 * m /
// (sqrt(v)/sqrt(c2) + eps), with the corrections c = 1 - b^step made by the caller. w NULL: no amsgrad.
MS_FN REAL R(ms_adam)(REAL x, REAL g, REAL *m, REAL *v, REAL *w, REAL l2, REAL decay, REAL b1, REAL b2, REAL a1,
                      REAL a2, REAL size, REAL root, REAL eps)
{
    REAL d = g + l2 * x;
    x *= decay;
    REAL mk = b1 * *m + a1 * d, vk = b2 * *v + a2 * (d * d);
    *m = mk;
    *v = vk;
    if (w) {
        vk = *w > vk ? *w : vk;
        *w = vk;
    }
    return x - size * (mk / (R_SQRT(vk) * root + eps));
}
