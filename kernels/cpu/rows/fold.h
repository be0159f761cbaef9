// SPDX-License-Identifier: MIT
// cpu/rows/fold.h -- folds over dimensions (reduce.c): the plan by which a tensor is walked, and the folds.
#ifndef MS_FOLD_H
#define MS_FOLD_H

#include "cpu/elementwise/loops.h"

typedef enum {
    MS_FOLD_SUM,
    MS_FOLD_PROD,
    MS_FOLD_MAX,
    MS_FOLD_MIN,
    MS_FOLD_COUNT,  // all computing types; count: of non-zeros
    MS_FOLD_ABS_SUM,
    MS_FOLD_SQUARE_SUM,
    MS_FOLD_ABS_MAX,
    MS_FOLD_ABS_MIN,
    MS_FOLD_POWER_SUM,  // real; p is the parameter
    MS_FOLD_DEVIATION,
    MS_FOLD_EXP_SUM,  // sum of (x - m)^2, of exp(x - m): m is the parameter
    MS_FOLDS
} ms_fold_kind;

typedef struct ms_fold_plan {
    const char *what;  // the operator's name
    const char *data;
    int dtype, cls;  // cls: float, double or int64_t; the wide type is double or int64_t
    int nk, nr;      // kept and reduced dimensions, collapsed
    int64_t kshape[MS_MAX_DIMS], kstride[MS_MAX_DIMS], rshape[MS_MAX_DIMS], rstride[MS_MAX_DIMS];  // strides in bytes
    int64_t outputs, length;  // number of folds; elements of each
    bool columns;
    int64_t segments, segment;  // parts of a fold; elements of a part
} ms_fold_plan;

// dims: bits of the reduced dimensions.
void ms__fold_plan(ms_fold_plan *p, const char *what, const ms_tensor *x, unsigned dims);
// wide[m] = fold of output m's elements (row-major over the kept dimensions). parameter: one per output
// (step 1), one for all (step 0), or NULL. An empty fold gives the fold's neutral element.
ms_status ms__fold(const ms_fold_plan *p, ms_fold_kind kind, const double *parameter, int step, void *wide);
// index[m] = position of the first element equal to wide[m] (NaN equals NaN) along the one reduced dimension or the
// flat order.
void ms__fold_find(const ms_fold_plan *p, const void *wide, int64_t *index);

#endif
