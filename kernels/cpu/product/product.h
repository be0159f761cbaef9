// SPDX-License-Identifier: MIT
// cpu/product/product.h -- matrix products: C[m,n] = A[m,k] B[k,n] (+ bias[n]), any strides for A and B. ms__gemm picks
// our own loops (cpu/product/gemm.c) or oneDNN (cpu/product/onednn.c).
//
// float32 and float64 accumulate in their own type, half types in float32, rounded once. The path and every order of
// summation depend on shapes, strides and the CPU, never on the number of threads.
#ifndef MS_PRODUCT_H
#define MS_PRODUCT_H

#include "ops/op.h"

typedef struct ms_gemm {
    int dtype;  // of a, b, bias and c
    int64_t m, n, k;
    const void *a, *b, *bias;  // bias may be NULL
    void *c;
    int64_t a_rs, a_cs;  // strides in elements: of a row, of a column
    int64_t b_rs, b_cs;
    int64_t c_rs;      // columns of c are adjacent
    const char *what;  // operator's name, for errors
} ms_gemm;

// The product with a contiguous C. The caller sets a, b, c and their strides, and optionally bias.
static inline ms_gemm ms__gemm_of(const char *what, int dtype, int64_t m, int64_t n, int64_t k)
{
    return (ms_gemm) { .what = what, .dtype = dtype, .m = m, .n = n, .k = k, .c_rs = n };
}
ms_status ms__gemm(const ms_gemm *g);

// The implementations. own: every dtype. onednn: float32, bfloat16.
ms_status ms__gemm_own(const ms_gemm *g);
ms_status ms__gemm_onednn(const ms_gemm *g);
bool ms__onednn_takes(const ms_gemm *g);
ms_status ms__gemm_integer(const ms_gemm *g);  // int64, int32, uint8: exact, overflow wraps around; no bias

// For kernels made of small products (attention): C[m,n] = A B, or C[m,n] += A B. n is a multiple of 16; the columns of
// B and C are adjacent and readable up to n. pack: out[p * out_rs + j] = b[p * rs + j * cs]; pads rows with zeros to a
// multiple of 16.
void ms__block_f32(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_rs, int64_t a_cs, const float *b,
                   int64_t b_rs, float *c, int64_t c_rs, bool add);
void ms__block_f64(int64_t m, int64_t n, int64_t k, const double *a, int64_t a_rs, int64_t a_cs, const double *b,
                   int64_t b_rs, double *c, int64_t c_rs, bool add);
void ms__pack_f32(float *out, int64_t out_rs, const float *b, int64_t rs, int64_t cs, int64_t k, int64_t n);
void ms__pack_f64(double *out, int64_t out_rs, const double *b, int64_t rs, int64_t cs, int64_t k, int64_t n);

// out[n] = sum over m of x[m,n] (row stride rs, adjacent columns): the gradient of a bias. Half types accumulate in
// float32. The blocks of rows are fixed, so results do not depend on the number of threads.
void ms__column_sum(int dtype, void *out, const void *x, int64_t m, int64_t n, int64_t rs);

#endif
