// SPDX-License-Identifier: MIT
// rows/ops.h -- helpers shared by the files in rows, and the operators that C code outside of them calls.
#ifndef MS_OPS_H
#define MS_OPS_H

#include "ops/op.h"

// A row of the operator table: its name, the fewest and most inputs, and the other fields by name.
#define MS_ROW(NAME, MIN, MAX, ...)                                 \
    {                                                               \
        .name = NAME, .n_in_min = MIN, .n_in_max = MAX, __VA_ARGS__ \
    }

// Ends a file of rows: MS_OPERATORS = { &relu_row, &gelu_row }; registers them. The linker puts these lists side by
// side (ops/op.c).
#define MS_OPERATORS static const ms_op *const operators[] __attribute__((section("ms_operators"), used))

// The rows that C code calls directly. ms__op_by_name finds all others.
extern const ms_op ms__op_add, ms__op_add_, ms__op_sub, ms__op_mul, ms__op_mul_, ms__op_div, ms__op_neg;
extern const ms_op ms__op_add_scalar, ms__op_mul_scalar, ms__op_mul_scalar_, ms__op_div_scalar;
extern const ms_op ms__op_relu, ms__op_relu_backward, ms__op_masked_fill;
extern const ms_op ms__op_gelu, ms__op_gelu_backward, ms__op_linear, ms__op_linear_backward;
extern const ms_op ms__op_norm_backward, ms__op_logsumexp_backward;
extern const ms_op ms__op_copy_, ms__op_cast, ms__op_clone, ms__op_fill_, ms__op_zero_;
extern const ms_op ms__op_sum, ms__op_mean, ms__op_cumsum, ms__op_cat;

// Fails unless in[0]'s dtype holds f[0].
ms_status ms__check_value(ms_call *c);

static inline bool ms__same_shape(const ms_tensor *a, const ms_tensor *b)
{
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

// Fails when in[0] is an expanded view, which an in-place operator must not write.
static inline ms_status ms__check_writable(const ms_call *c)
{
    const ms_tensor *t = c->in[0];
    for (int d = 0; d < t->ndim; d++)
        if (MS_UNLIKELY(t->stride[d] == 0 && t->shape[d] > 1))
            return ms__call_fail(c,
                                 "%s is an expanded view: several of its elements share one memory address; clone() "
                                 "it before writing in place",
                                 ms__tensor_text(t));
    return MS_OK;
}

// Makes in[0] the output. Fails if in[0] is an expanded view.
static inline ms_status ms__write_in_place(ms_call *c)
{
    MS_TRY(ms__check_writable(c));
    ms__call_inplace(c, 0, 0);
    return MS_OK;
}

#endif
