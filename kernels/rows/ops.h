// SPDX-License-Identifier: MIT
// rows/ops.h -- rows that other families, the graph or the shard engine call from C.
#ifndef MS_OPS_H
#define MS_OPS_H

#include "ops/op.h"

// Anything else: ms__op_by_name.
extern const ms_op ms__op_add, ms__op_add_, ms__op_sub, ms__op_mul, ms__op_mul_, ms__op_div, ms__op_neg;
extern const ms_op ms__op_add_scalar, ms__op_mul_scalar, ms__op_mul_scalar_, ms__op_div_scalar;
extern const ms_op ms__op_relu, ms__op_relu_backward, ms__op_masked_fill;
extern const ms_op ms__op_norm_backward, ms__op_logsumexp_backward;
extern const ms_op ms__op_copy_, ms__op_cast, ms__op_clone, ms__op_fill_, ms__op_zero_;
extern const ms_op ms__op_sum, ms__op_mean, ms__op_cumsum, ms__op_cat;

// Bits of the n dimensions d (valid, maybe negative); none: all.
unsigned ms__reduced_dims(const ms_tensor *x, int n, const int64_t *d);
static inline bool ms__same_shape(const ms_tensor *a, const ms_tensor *b)
{
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

#endif
