// SPDX-License-Identifier: MIT
// cpu/cpu.h -- declares the CPU kernels that the operators in kernels/rows use, and helpers for them.
#ifndef MS_CPU_KERNELS_H
#define MS_CPU_KERNELS_H

#include "ops/op.h"

// Kernels in elementwise/copy.c:
#define MS_CPU_COPY(X) X(copy) X(copy_) X(fill) X(arange) X(eye)
// Kernels in rows/reductions.c:
// clang-format off
#define MS_CPU_REDUCE(X)                                                                                    \
    X(sum) X(mean) X(prod) X(all) X(any) X(var) X(std) X(norm) X(max_all) X(min_all) X(amax) X(amin) X(max) X(min) X(argmax) X(argmin) \
    X(logsumexp) X(cumsum) X(prod_backward)
// clang-format on
// Kernels in index/index.c:
#define MS_CPU_INDEX(X) X(index_select) X(index_add) X(gather) X(scatter) X(scatter_add) X(scatter_reduce)
// Kernels in order/sort.c and order/search.c:
#define MS_CPU_ORDER(X) X(sort) X(topk) X(searchsorted) X(nonzero)
// Kernels in order/scan.c:
#define MS_CPU_SCAN(X) X(cumprod) X(cumprod_backward) X(cummax) X(cummin) X(logcumsumexp) X(logcumsumexp_backward)
// Kernels in elementwise/random.c:
#define MS_CPU_RANDOM(X) X(rand) X(randn) X(randint) X(trunc_normal)

#define MS_DECLARE(name) ms_status ms__cpu_##name(ms_call *c);
// clang-format off
MS_CPU_COPY(MS_DECLARE)
MS_CPU_REDUCE(MS_DECLARE)
MS_CPU_INDEX(MS_DECLARE)
MS_CPU_ORDER(MS_DECLARE)
MS_CPU_SCAN(MS_DECLARE)
MS_CPU_RANDOM(MS_DECLARE)
// clang-format on
#define ROW(name, n, check, kernel, ...) MS_DECLARE(kernel)
#define INTERNAL(name, ...) MS_DECLARE(name)
#define GRADIENT(name, kept) MS_DECLARE(name##_backward)
#include "rows/elementwise.def"

// Prepares a call whose kernel is one loop over contiguous tensors; returns false for others (ms_op.prepare of the
// elementwise operators).
bool ms__cpu_prepare_loop(ms_call *c, ms_prepared *p);
// Copies src to dst, with broadcasting and conversion; any strides.
void ms__cpu_copy_tensor(ms_tensor *dst, const ms_tensor *src);
// *use = x (retained); or a copy of x when x overlaps o but is not the same view: writing o would then change elements
// of x before they are read.
ms_status ms__cpu_apart(ms_tensor **use, const ms_tensor *o, ms_tensor *x);
// The largest number of this dtype that is less than x: the greatest value a uniform distribution may return.
double ms__largest_below(int dtype, double x);
void ms__cpu_fill_tensor(ms_tensor *dst, double value);

#endif
