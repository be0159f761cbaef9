// SPDX-License-Identifier: MIT
// ops/copy.h -- copies on the copy stream.
#ifndef MS_COPY_H
#define MS_COPY_H

#include "ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

// Copies src to dst (contiguous, of one dtype) on the copy stream and returns at once; the next operator on either
// tensor waits. The caller releases *event; event may be NULL.
ms_status ms__copy_async(ms_tensor *dst, ms_tensor *src, ms_pending **event);

#ifdef __cplusplus
}
#endif

#endif
