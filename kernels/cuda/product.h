// SPDX-License-Identifier: MIT
// cuda/product.h -- C = alpha A B (+ bias), batched, with any strides, and with GELU or its gradient; used by products,
// convolutions and attention.
#ifndef MS_CUDA_PRODUCT_H
#define MS_CUDA_PRODUCT_H

#include "cuda/cuda.h"
#include "rows/product.h"

// The epilogue: what is done with v = alpha A B + bias before it is stored in C. GELU (in tanh's form): aux gets v,
// rounded, and C its GELU. GELU_GRADIENT: C gets v, rounded, times the derivative of GELU at aux. These two take no
// batch, addition or row_sums, and need a contiguous floating-point C.
enum { PRODUCT_PLAIN, PRODUCT_GELU, PRODUCT_GELU_GRADIENT };

struct product {
    const char *what;
    int a_type, b_type, c_type;
    int64_t m, n, k;
    const void *a, *b, *bias;  // bias[n] has c's dtype; may be NULL
    void *c;
    void *row_sums;     // gets the m sums of A's rows over k, in c's dtype; may be NULL. Not with a bias or a batch
    void *column_sums;  // with GELU_GRADIENT: gets the n sums of C's columns, in c's dtype; may be NULL
    bool summed;  // set by ms__cuda_product if it has written row_sums or column_sums; if not, the caller must sum
    int epilogue;
    void *aux;                                   // [m, n] of c's dtype, contiguous
    int64_t a_rs, a_cs, b_rs, b_cs, c_rs, c_cs;  // in elements: from a row to the next, from a column to the next
    double alpha;
    bool add;  // C += alpha A B. Not with a batch or a bias
    int nb;    // number of batch dimensions, whose sizes and strides (in elements) follow
    int64_t batch[MS_MAX_DIMS], a_bs[MS_MAX_DIMS], b_bs[MS_MAX_DIMS], c_bs[MS_MAX_DIMS];
};
// One product with a contiguous C. The caller sets a, b, c and the strides of a and b, and optionally the rest.
static inline product product_of(const char *what, int dtype, int64_t m, int64_t n, int64_t k)
{
    product p = {};
    p.what = what;
    p.a_type = p.b_type = p.c_type = dtype;
    p.m = m, p.n = n, p.k = k;
    p.alpha = 1;
    p.c_rs = n, p.c_cs = 1;
    return p;
}
ms_status ms__cuda_product(int index, product *p);
// GELU, or its gradient, in a pass of its own: c = gelu(aux), or c times the derivative of GELU at aux; m x n elements.
ms_status ms__cuda_gelu(int index, const product *p);

// out[j] = the sum of g[i, j] over i. g is seen as `rows` rows with stride rs (in elements), whose columns are
// adjacent.
ms_status ms__cuda_column_sum(const ms_tensor *g, int64_t rows, int64_t rs, ms_tensor *out);

#endif
