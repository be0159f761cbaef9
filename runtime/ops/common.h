// SPDX-License-Identifier: MIT
// ops/common.h -- helpers for checks and backwards; filling and copying from C code.
#ifndef MS_COMMON_H
#define MS_COMMON_H

#include "ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sums t over broadcast dimensions to `shape`. Returns t itself (retained) if it has that shape.
ms_status ms__sum_to(ms_tensor **out, ms_tensor *t, int ndim, const int64_t *shape);
ms_status ms__zeros(ms_tensor **out, int dtype, int device, int ndim, const int64_t *shape);
ms_status ms__zero(ms_tensor *t);  // fills t with 0; any strides
// Copies src to dst with broadcasting and conversion, for any strides, also between devices. Records no graph.
ms_status ms__copy(ms_tensor *dst, ms_tensor *src);
// As ms__copy, for use in kernels: does not wait for the storages' events.
ms_status ms__copy_data(ms_tensor *dst, const ms_tensor *src);
ms_status ms__fill_data(ms_tensor *t, double value);
ms_status ms__contiguous(ms_tensor **out, ms_tensor *t);  // t itself (retained) or a contiguous copy; no graph
// As ms__contiguous, but the result is in host memory.
ms_status ms__on_cpu(ms_tensor **out, ms_tensor *t, const char *what);

// PyTorch's result dtype: a 0-dim tensor only counts if its category is higher than the other tensor's (bool < integer
// < floating-point).
int ms__result_dtype(const ms_tensor *a, const ms_tensor *b);

// Sums and converts gradient g to an input's shape, dtype and device. Takes ownership of g.
ms_status ms__grad_to(ms_tensor **out, ms_tensor *g, const ms_meta *input);
// A view of t with another shape of the same number of elements; NULL if t's strides do not allow it.
ms_tensor *ms__view_as(const ms_tensor *t, int ndim, const int64_t *shape);
// As ms__view_as, but a view of a contiguous copy of t if its strides do not allow a view.
ms_status ms__reshape(ms_tensor **out, ms_tensor *t, int ndim, const int64_t *shape);

#ifdef __cplusplus
}
#endif

#endif
