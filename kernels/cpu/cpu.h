// SPDX-License-Identifier: MIT
// cpu/cpu.h -- the CPU kernels: what the rows in kernels/ name.
#ifndef MS_CPU_KERNELS_H
#define MS_CPU_KERNELS_H

#include "ops/op.h"

// elementwise.c
// clang-format off
#define MS_CPU_ELEMENTWISE(X)                                                                               \
    X(neg) X(abs) X(exp) X(log) X(sqrt) X(rsqrt) X(sin) X(cos) X(relu) X(silu) X(tanh) X(sigmoid) X(sign)   \
    X(reciprocal) X(gelu)                                                                                   \
    X(abs_backward) X(sqrt_backward) X(rsqrt_backward) X(sin_backward) X(cos_backward) X(relu_backward)     \
    X(silu_backward) X(tanh_backward) X(sigmoid_backward) X(reciprocal_backward) X(gelu_backward)           \
    X(add) X(sub) X(mul) X(div) X(pow) X(maximum) X(minimum)                                                \
    X(add_scalar) X(mul_scalar) X(div_scalar) X(pow_scalar) X(rsub_scalar) X(rdiv_scalar) X(rpow_scalar)    \
    X(pow_scalar_backward) X(pow_base_backward) X(pow_exponent_backward) X(div_other_backward)              \
    X(rdiv_scalar_backward) X(rpow_scalar_backward) X(maximum_backward) X(minimum_backward) X(clamp) X(clamp_backward) X(logsumexp_backward) X(norm_backward)                                      \
    X(eq) X(ne) X(lt) X(le) X(gt) X(ge) X(eq_scalar) X(ne_scalar) X(lt_scalar) X(le_scalar) X(gt_scalar) X(ge_scalar) \
    X(isfinite) X(isnan) X(logical_not) X(logical_and) X(logical_or) X(where) X(masked_fill) X(where_backward)
// clang-format on
// copy.c
#define MS_CPU_COPY(X) X(copy) X(copy_) X(fill) X(arange) X(eye)
// reductions.c
// clang-format off
#define MS_CPU_REDUCE(X)                                                                                    \
    X(sum) X(mean) X(prod) X(all) X(any) X(var) X(std) X(norm) X(max_all) X(min_all) X(max) X(min) X(argmax) X(argmin) \
    X(logsumexp) X(cumsum) X(prod_backward) X(equal) X(allclose)
// clang-format on
// index.c
#define MS_CPU_INDEX(X) X(index_select) X(index_add) X(gather) X(scatter) X(scatter_add)
// random.c
#define MS_CPU_RANDOM(X) X(rand) X(randn) X(randint) X(trunc_normal)

#define MS_DECLARE(name) ms_status ms__cpu_##name(ms_call *c);
// clang-format off
MS_CPU_ELEMENTWISE(MS_DECLARE)
MS_CPU_COPY(MS_DECLARE)
MS_CPU_REDUCE(MS_DECLARE)
MS_CPU_INDEX(MS_DECLARE)
MS_CPU_RANDOM(MS_DECLARE)
// clang-format on

// dst = src, broadcast and cast; any strides.
void ms__cpu_copy_tensor(ms_tensor *dst, const ms_tensor *src);
// x (retained), or a copy of it where it lies in o's memory as another view: o is about to be written. Such a
// call would read some of its own results.
ms_status ms__cpu_apart(ms_tensor **use, const ms_tensor *o, ms_tensor *x);
// The largest number of this dtype below x: where uniform numbers end.
double ms__largest_below(int dtype, double x);
void ms__cpu_fill_tensor(ms_tensor *dst, double value);

#endif
