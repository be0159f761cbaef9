// SPDX-License-Identifier: MIT
// formulas/batch_norm.h -- what becomes of a channel's sums, once for the CPU and the GPU.
#ifndef MS_BATCH_NORM_H
#define MS_BATCH_NORM_H

#include "formulas/math32.h"

// y = (x - mean) scale + bias
MS_FN double ms_bn_scale(double var, double eps, double w) { return w / ms_sqrt_f64(var + eps); }

typedef struct ms_bn_channel {
    double dw, db, dmean, dvar;
    double of_g, of_x, alone;  // dx = of_g g + of_x (x - mean) + alone
} ms_bn_channel;

// From the sums of g and of g (x - mean) over the channel's `count` numbers. With h = (x - mean) rstd: dw = sum g h, db
// = sum g, dx = w rstd (g - db / count - h dw / count) in training and w rstd g outside of it; what arrives at the mean
// and the variance themselves (gmean, gvar) joins alone and of_x.
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
