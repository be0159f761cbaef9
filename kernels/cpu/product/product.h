// SPDX-License-Identifier: MIT
// cpu/product/product.h -- matrix products: C[m,n] = A[m,k] B[k,n] (+ bias[n]), any strides for A and B. ms__gemm picks
// our own loops (cpu/product/gemm.c) or oneDNN (cpu/product/onednn.c); integers have loops of their own
// (cpu/product/gemm_integer.c).
//
// float32, float64 and integers accumulate in their own type, half types in float32, rounded once. The path and every
// order of summation depend on shapes, strides and the CPU, never on the number of threads.
#ifndef MS_PRODUCT_H
#define MS_PRODUCT_H

#include "ops/op.h"

typedef struct ms_gemm {
    int dtype;  // of a, b (but for int8), bias and c
    int64_t m, n, k;
    const void *a, *b, *bias;  // bias may be NULL
    void *c;
    int64_t a_rs, a_cs;  // in elements: from a row to the next, from a column to the next
    int64_t b_rs, b_cs;
    int64_t c_rs;  // columns of c are adjacent
    // NULL, or B is int8 (A and C are not float64): a factor for each of its columns, which are contiguous, or, if
    // scales_rows is set, for each of its rows, which then are.
    const float *scale;
    bool scales_rows;
    const char *what;  // operator's name, for errors
} ms_gemm;

// The product with a contiguous C. The caller sets a, b, c and their strides, and optionally bias.
static inline ms_gemm ms__gemm_of(const char *what, int dtype, int64_t m, int64_t n, int64_t k)
{
    return (ms_gemm) { .what = what, .dtype = dtype, .m = m, .n = n, .k = k, .c_rs = n };
}
ms_status ms__gemm(const ms_gemm *g);
// Up to MS_GEMM_PARTS products with the same A and k, of one dtype. Few rows are divided among the threads once.
enum { MS_GEMM_PARTS = 4 };
ms_status ms__gemm_parts(const ms_gemm *g, int n);

// The function that computes g: ms__gemm, or for small products in float32 and float64 what ms__gemm would call.
typedef ms_status (*ms_gemm_fn)(const ms_gemm *g);
ms_gemm_fn ms__gemm_fn(const ms_gemm *g);

// The implementations. own: every floating-point dtype. onednn: what ms__onednn_takes accepts.
ms_status ms__gemm_own(const ms_gemm *g);
ms_status ms__gemm_onednn(const ms_gemm *g);
ms_status ms__gemm_few(const ms_gemm *g);   // what ms__gemm_takes_few accepts
bool ms__gemm_takes_few(const ms_gemm *g);  // up to 16 rows times a weight with contiguous rows
// Computes ms__gemm_parts(g, n) as one product of few rows, if that is possible.
bool ms__gemm_few_parts(const ms_gemm *g, int n, ms_status *st);
bool ms__onednn_takes(const ms_gemm *g);       // float32 and, with AVX-512, bfloat16; contiguous rows or columns
bool ms__onednn_tiles(void);                   // whether it has tiles (AMX) for bfloat16
ms_status ms__gemm_integer(const ms_gemm *g);  // all integer dtypes: exact, overflow wraps around; no bias

// The operands of a small product: C = A B + bias, or C += A B + bias if `add` is set. bias may be NULL; the columns of
// B and C are adjacent. Strides in elements.
#define MS_OPERANDS(T)      \
    struct {                \
        const T *a;         \
        int64_t a_rs, a_cs; \
        const T *b;         \
        int64_t b_rs;       \
        T *c;               \
        int64_t c_rs;       \
        const T *bias;      \
        bool add;           \
    }
typedef MS_OPERANDS(float) ms_operands_f32;
typedef MS_OPERANDS(double) ms_operands_f64;
// A matrix to pack: element (p, j) is at p * rs + j * cs. dtype: which half type; functions for float and double do not
// read it.
typedef struct {
    const void *data;
    int64_t rs, cs;
    int dtype;
} ms_matrix;

// For attention and recurrent layers, which are made of small products. ms__block (block.c) computes the m x n product
// *o of depth k; n is a multiple of 16, and B and C have memory for n columns. scale: NULL, or a number for each row,
// by which C is multiplied before the product is added. ms__pack sets out[p * out_rs + j] to b(p, j) for p < k, j < n,
// and pads rows with zeros to a multiple of 16.
void ms__block_f32(int64_t m, int64_t n, int64_t k, const ms_operands_f32 *o, const float *scale);
void ms__block_f64(int64_t m, int64_t n, int64_t k, const ms_operands_f64 *o, const double *scale);
void ms__pack_f32(float *out, int64_t out_rs, const ms_matrix *b, int64_t k, int64_t n);
void ms__pack_f64(double *out, int64_t out_rs, const ms_matrix *b, int64_t k, int64_t n);

// out[n] = sum over m of x[m,n] (row stride rs, adjacent columns): the gradient of a bias. Half types accumulate in
// float32. The blocks of rows are fixed, so results do not depend on the number of threads.
void ms__column_sum(int dtype, void *out, const void *x, int64_t m, int64_t n, int64_t rs);

// out = the sums of g's rows, rs elements apart.
static inline ms_status ms__sum_rows(const ms_tensor *g, int64_t rows, int64_t rs, ms_tensor *out)
{
    ms__column_sum(g->dtype, ms__data(out), ms__data(g), rows, out->numel, rs);
    return MS_OK;
}

#endif
