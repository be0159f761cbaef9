// SPDX-License-Identifier: MIT
// formulas/batch_norm.h -- the formulas of batch_norm for one channel, shared by the CPU and the GPU.
#ifndef MS_BATCH_NORM_H
#define MS_BATCH_NORM_H

#include "formulas/math32.h"

// y = (x - mean) scale + bias
MS_FN double ms_bn_scale(double var, double eps, double w) { return w / ms_sqrt_f64(var + eps); }

typedef struct ms_bn_channel {
    double dw, db, dmean, dvar;
    double of_g, of_x, alone;  // dx = of_g * g + of_x * (x - mean) + alone
} ms_bn_channel;

// The input of ms_bn_finish: a channel's variance, weight and number of elements, the gradients of its mean and
// variance outputs, and its sums of g and of g (x - mean). If several channels share their statistics, count and the
// sums wsg and wsgx of w sg and w sgx are over all of them.
typedef struct ms_bn_sums {
    double var, eps, w, count, gmean, gvar, sg, sgx, wsg, wsgx;
    int training;
} ms_bn_sums;

// With h = (x - mean) rstd: dw = sum g h, db = sum g. In training dx = w rstd (g - db / count - h dw / count), and
// gmean and gvar also contribute to it, by `alone` and of_x; otherwise dx = w rstd g.
MS_FN ms_bn_channel ms_bn_finish(const ms_bn_sums *s)
{
    double rstd = 1 / ms_sqrt_f64(s->var + s->eps), w = s->w;
    ms_bn_channel c;
    c.dw = s->sgx * rstd;
    c.db = s->sg;
    c.dmean = -w * rstd * s->sg;
    c.dvar = -0.5 * w * rstd * rstd * rstd * s->sgx;
    c.of_g = w * rstd;
    c.of_x = s->training ? (-rstd * rstd * rstd * s->wsgx + 2 * s->gvar) / s->count : 0;
    c.alone = s->training ? (-rstd * s->wsg + s->gmean) / s->count : 0;
    return c;
}

#endif
