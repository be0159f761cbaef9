// SPDX-License-Identifier: MIT
// rows/linalg/algebra.h -- gradients written as expressions of matrices. A formula calls these functions, which record
// no graph, and ends with ms__algebra_end: it releases all intermediate results. After a failure every function returns
// NULL and does nothing, so that a formula needs no checks.
#ifndef MS_ALGEBRA_H
#define MS_ALGEBRA_H

#include "rows/ops.h"

typedef struct ms_algebra {
    ms_status st;
    int n;
    ms_tensor *held[64];
} ms_algebra;

// The result of an operator, found by its name, on one tensor or two, with n_i integers.
ms_tensor *ms__a1(ms_algebra *e, const char *op, ms_tensor *a, int n_i, const int64_t *i);
ms_tensor *ms__a2(ms_algebra *e, const char *op, ms_tensor *a, ms_tensor *b, int n_i, const int64_t *i);
ms_tensor *ms__hold(ms_algebra *e, ms_tensor *t);                               // t is owned by the formula from now on
ms_tensor *ms__transposed(ms_algebra *e, ms_tensor *a);                         // a view
ms_tensor *ms__columns(ms_algebra *e, ms_tensor *a, int64_t first, int64_t n);  // a view of n columns
ms_tensor *ms__scaled(ms_algebra *e, ms_tensor *a, double f);
ms_tensor *ms__identity(ms_algebra *e, const ms_tensor *like);  // n x n for like's last size n; like's dtype, device
ms_tensor *ms__diagonal(ms_algebra *e, ms_tensor *d);           // matrices with the vectors d on the diagonal
// Moves the result (which may be NULL: no gradient) to *out, unless a step failed, and releases all other tensors that
// the formula holds.
ms_status ms__algebra_end(ms_algebra *e, ms_tensor *result, ms_tensor **out);

static inline ms_tensor *ms__times(ms_algebra *e, ms_tensor *a, ms_tensor *b)
{
    return ms__a2(e, "matmul", a, b, 0, NULL);
}
static inline ms_tensor *ms__plus(ms_algebra *e, ms_tensor *a, ms_tensor *b) { return ms__a2(e, "add", a, b, 0, NULL); }
static inline ms_tensor *ms__minus(ms_algebra *e, ms_tensor *a, ms_tensor *b)
{
    return ms__a2(e, "sub", a, b, 0, NULL);
}
static inline ms_tensor *ms__each(ms_algebra *e, ms_tensor *a, ms_tensor *b) { return ms__a2(e, "mul", a, b, 0, NULL); }
static inline ms_tensor *ms__over(ms_algebra *e, ms_tensor *a, ms_tensor *b) { return ms__a2(e, "div", a, b, 0, NULL); }
// The elements on and below (ms__lower), on and above (ms__upper) diagonal d (0: the main one, -1: the one below it).
static inline ms_tensor *ms__lower(ms_algebra *e, ms_tensor *a, int64_t d) { return ms__a1(e, "tril", a, 1, &d); }
static inline ms_tensor *ms__upper(ms_algebra *e, ms_tensor *a, int64_t d) { return ms__a1(e, "triu", a, 1, &d); }
static inline ms_tensor *ms__unsqueezed(ms_algebra *e, ms_tensor *a, int64_t d)
{
    return ms__a1(e, "unsqueeze", a, 1, &d);
}

#endif
