// SPDX-License-Identifier: MIT
// cpu/linalg/lapack.h -- LAPACK, a library that is loaded on first use, and the kernels that call it.
#ifndef MS_LAPACK_H
#define MS_LAPACK_H

#include "ops/op.h"

// The functions that the kernels call, by their name without the letter of the type. Integers have 32 bits, matrices
// are column-major, and Fortran's hidden lengths of text arguments, all 1, come last.
#define MS_LAPACK_IN const int *
#define MS_LAPACK_OUT int *
#define MS_LAPACK_TEXT const char *
// clang-format off
#define MS_LAPACK(X, REAL) \
    X(gemm,  (MS_LAPACK_TEXT, MS_LAPACK_TEXT, MS_LAPACK_IN, MS_LAPACK_IN, MS_LAPACK_IN, const REAL *, const REAL *, \
              MS_LAPACK_IN, const REAL *, MS_LAPACK_IN, const REAL *, REAL *, MS_LAPACK_IN, size_t, size_t)) \
    X(getrf, (MS_LAPACK_IN, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT, MS_LAPACK_OUT)) \
    X(getri, (MS_LAPACK_IN, REAL *, MS_LAPACK_IN, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT)) \
    X(gesv,  (MS_LAPACK_IN, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT)) \
    X(trtrs, (MS_LAPACK_TEXT, MS_LAPACK_TEXT, MS_LAPACK_TEXT, MS_LAPACK_IN, MS_LAPACK_IN, const REAL *, MS_LAPACK_IN, \
              REAL *, MS_LAPACK_IN, MS_LAPACK_OUT, size_t, size_t, size_t)) \
    X(potrf, (MS_LAPACK_TEXT, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT, size_t)) \
    X(geqrf, (MS_LAPACK_IN, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, REAL *, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT)) \
    X(orgqr, (MS_LAPACK_IN, MS_LAPACK_IN, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, const REAL *, REAL *, MS_LAPACK_IN, \
              MS_LAPACK_OUT)) \
    X(gesdd, (MS_LAPACK_TEXT, MS_LAPACK_IN, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, REAL *, REAL *, MS_LAPACK_IN, REAL *, \
              MS_LAPACK_IN, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT, MS_LAPACK_OUT, size_t)) \
    X(syevd, (MS_LAPACK_TEXT, MS_LAPACK_TEXT, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, REAL *, REAL *, MS_LAPACK_IN, \
              MS_LAPACK_OUT, MS_LAPACK_IN, MS_LAPACK_OUT, size_t, size_t)) \
    X(gelsy, (MS_LAPACK_IN, MS_LAPACK_IN, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT, \
              const REAL *, MS_LAPACK_OUT, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT)) \
    X(gelsd, (MS_LAPACK_IN, MS_LAPACK_IN, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, REAL *, MS_LAPACK_IN, REAL *, \
              const REAL *, MS_LAPACK_OUT, REAL *, MS_LAPACK_IN, MS_LAPACK_OUT, MS_LAPACK_OUT))
// clang-format on

#define MS_LAPACK_FIELD(NAME, ARGUMENTS) void(*NAME) ARGUMENTS;
typedef struct ms_lapack_f32 {
    MS_LAPACK(MS_LAPACK_FIELD, float)
} ms_lapack_f32;
typedef struct ms_lapack_f64 {
    MS_LAPACK(MS_LAPACK_FIELD, double)
} ms_lapack_f64;
typedef struct ms_lapack {
    ms_lapack_f32 f32;
    ms_lapack_f64 f64;
} ms_lapack;

// Loads LAPACK at the first call. Fails with MS_EUNSUPPORTED, and names Debian packages, if no library can be loaded
// that has all of these functions. who: the function that errors name.
ms_status ms__lapack(const ms_lapack **out, const char *who);

// The kernels, for the CPU and for GPUs, whose tensors they copy to the CPU and back. lstsq's drivers are 0 (gelsy) and
// 1 (gelsd).
#define MS_LINALG(X) \
    X(inv)           \
    X(solve) X(solve_triangular) X(det) X(slogdet) X(cholesky) X(qr) X(svd) X(eigh) X(pinv) X(lstsq) X(det_backward)
#define MS_LINALG_DECLARE(NAME) ms_status ms__linalg_##NAME(ms_call *c);
MS_LINALG(MS_LINALG_DECLARE)

#endif
