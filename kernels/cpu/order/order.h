// SPDX-License-Identifier: MIT
// cpu/order/order.h -- lines of a tensor along one dimension, for kernels that read a line and write lines.
#ifndef MS_CPU_ORDER_H
#define MS_CPU_ORDER_H

#include "ops/op.h"
#include "cpu/elementwise/loops.h"

// One line: element k is `step` bytes after element k - 1.
typedef struct ms_line {
    char *data;
    int64_t n, step;
    int dtype;
} ms_line;

static inline int64_t ms__lines_of(const ms_tensor *t, int d)
{
    int64_t n = t->ndim ? t->shape[d] : 1;
    return n ? t->numel / n : 0;
}
// Line `number` of t along d. Lines are numbered in row-major order of the other dimensions.
static inline ms_line ms__line_of(const ms_tensor *t, int d, int64_t number)
{
    int size = ms__dtype_size(t->dtype);
    int64_t at = 0;
    for (int k = t->ndim - 1; k >= 0; k--) {
        if (k == d) continue;
        at += number % t->shape[k] * t->stride[k];
        number /= t->shape[k];
    }
    return (ms_line) { (char *)ms__data(t) + at * size, t->ndim ? t->shape[d] : 1, t->ndim ? t->stride[d] * size : size,
                       t->dtype };
}

#endif
