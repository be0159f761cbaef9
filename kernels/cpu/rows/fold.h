// SPDX-License-Identifier: MIT
// cpu/rows/fold.h -- folds over dimensions (reduce.c): the plan by which a tensor is traversed, and the kinds of fold.
#ifndef MS_FOLD_H
#define MS_FOLD_H

#include "cpu/elementwise/loops.h"

// Kinds up to MS_FOLD_COUNT exist for all computing types, the others for floating-point types.
typedef enum {
    MS_FOLD_SUM,
    MS_FOLD_PROD,
    MS_FOLD_MAX,
    MS_FOLD_MIN,
    MS_FOLD_COUNT,  // the number of non-zero elements
    MS_FOLD_ABS_SUM,
    MS_FOLD_SQUARE_SUM,
    MS_FOLD_ABS_MAX,
    MS_FOLD_ABS_MIN,
    MS_FOLD_POWER_SUM,  // the sum of |x|^p; p is the parameter
    MS_FOLD_DEVIATION,  // the sum of (x - m)^2; m is the parameter
    MS_FOLD_EXP_SUM,    // the sum of exp(x - m); m is the parameter
    MS_FOLDS
} ms_fold_kind;

typedef struct ms_fold_plan {
    const char *what;  // the operator's name
    const char *data;
    int dtype, cls;  // cls: the type computed in: float, double or int64_t; `wide` results are double or int64_t
    int nk, nr;      // numbers of kept and of reduced dimensions, after merging
    int64_t kshape[MS_MAX_DIMS], kstride[MS_MAX_DIMS], rshape[MS_MAX_DIMS], rstride[MS_MAX_DIMS];  // strides in bytes
    int64_t outputs, length;    // number of folds; elements per fold
    bool columns;               // how the tensor is traversed (reduce.c): by columns, otherwise by rows
    int64_t segments, segment;  // parts of a fold; elements per part
} ms_fold_plan;

// dims: bit d is set if dimension d is reduced.
void ms__fold_plan(ms_fold_plan *p, const char *what, const ms_tensor *x, unsigned dims);
// wide[m] = the fold of output m's elements (row-major over the kept dimensions). parameter: one per output (step 1),
// one for all (step 0), or NULL. An empty fold gives the neutral element.
ms_status ms__fold(const ms_fold_plan *p, ms_fold_kind kind, const double *parameter, int step, void *wide);
// index[m] = the position of the first element equal to wide[m] (NaN equals NaN), along the reduced dimension or, if
// all are reduced, in row-major order.
void ms__fold_find(const ms_fold_plan *p, const void *wide, int64_t *index);

#endif
