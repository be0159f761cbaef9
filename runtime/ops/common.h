// SPDX-License-Identifier: MIT
// ops/common.h -- helpers for checks and backwards.
#ifndef MS_COMMON_H
#define MS_COMMON_H

#include "ops/data.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sums t over broadcast dimensions to `shape`. Returns t itself (retained) if it has that shape.
ms_status ms__sum_to(ms_tensor **out, ms_tensor *t, int ndim, const int64_t *shape);
// PyTorch's result dtype: a 0-dim tensor only counts if its category is higher than the other tensor's (bool < integer
// < floating-point).
int ms__result_dtype(const ms_tensor *a, const ms_tensor *b);

// Sums and converts gradient g to an input's shape, dtype and device. Takes ownership of g.
ms_status ms__grad_to(ms_tensor **out, ms_tensor *g, const ms_meta *input);
// A view of t with another shape of the same number of elements; NULL if t's strides do not allow it.
ms_tensor *ms__view_as(const ms_tensor *t, int ndim, const int64_t *shape);
// As ms__view_as, but a view of a contiguous copy of t if its strides do not allow a view.
ms_status ms__reshape(ms_tensor **out, ms_tensor *t, int ndim, const int64_t *shape);
// A bit mask of the n dimensions d of x, which are valid and may be negative; of all dimensions if n is 0.
unsigned ms__reduced_dims(const ms_tensor *x, int n, const int64_t *d);

#ifdef __cplusplus
}
#endif

#endif
