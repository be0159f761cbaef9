// SPDX-License-Identifier: MIT
// formulas/batch_norm.h -- the formulas of a channel, shared by the CPU and the GPU.
#ifndef MS_BATCH_NORM_H
#define MS_BATCH_NORM_H

#include "formulas/math32.h"

// y = (x - mean) scale + bias
MS_FN double ms_bn_scale(double var, double eps, double w) { return w / ms_sqrt_f64(var + eps); }

typedef struct ms_bn_channel {
    double dw, db, dmean, dvar;
    double of_g, of_x, alone;  // dx = of_g g + of_x (x - mean) + alone
} ms_bn_channel;

// sg and sgx: the sums of g and of g (x - mean) over the channel's `count` elements. With h = (x - mean) rstd:
// dw = sum g h, db = sum g. dx = w rstd (g - db / count - h dw / count) when training, else w rstd g. The gradients of
// the mean and variance outputs (gmean, gvar) are added to `alone` and of_x.
MS_FN ms_bn_channel ms_bn_finish(double var, double eps, double w, double count, int training, double gmean,
                                 double gvar, double sg, double sgx)
{
    double rstd = 1 / ms_sqrt_f64(var + eps);
    ms_bn_channel c;
    c.dw = sgx * rstd;
    c.db = sg;
    c.dmean = -w * rstd * sg;
    c.dvar = -0.5 * w * rstd * rstd * rstd * sgx;
    c.of_g = w * rstd;
    c.of_x = training ? (-w * rstd * rstd * rstd * sgx + 2 * gvar) / count : 0;
    c.alone = training ? (-w * rstd * sg + gmean) / count : 0;
    return c;
}

#endif
