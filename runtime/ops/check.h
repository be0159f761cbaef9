// SPDX-License-Identifier: MIT
// ops/check.h -- what an operator's check() does: it makes the outputs, or refuses the call.
#ifndef MS_CHECK_H
#define MS_CHECK_H

#include "ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

ms_status ms__call_out(ms_call *c, int k, int dtype, int device, int ndim, const int64_t *shape);  // allocates out[k]
ms_status ms__call_out_like(ms_call *c, int k, const ms_tensor *t);
ms_status ms__call_view(ms_call *c, int k, ms_tensor *view);  // out[k] becomes `view`; takes ownership of it
void ms__call_inplace(ms_call *c, int k, int in);             // out[k] becomes in[in], whose version is incremented
// Fails with MS_EINVAL and the text "OPERATOR: ...".
ms_status ms__call_fail(const ms_call *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
// Converts d, which may be negative, to a 0-based dimension; MS_EINVAL if it is out of range.
ms_status ms__call_dim(const ms_call *c, int64_t d, int ndim, int *out);
// The dimension of in[0] that i[0] says; the last one, which is then written to i[0], if the call has no integers.
ms_status ms__call_last_dim(ms_call *c, int *out);
// Computes the shape to which two inputs broadcast.
ms_status ms__broadcast(const ms_call *c, const ms_tensor *a, const ms_tensor *b, int *ndim, int64_t *shape);

#ifdef __cplusplus
}
#endif

#endif
