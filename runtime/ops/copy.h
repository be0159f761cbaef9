// SPDX-License-Identifier: MIT
// ops/copy.h -- copies on the copy stream, and copies from pinned memory.
#ifndef MS_COPY_H
#define MS_COPY_H

#include "ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

// Copies src to dst (contiguous, of one dtype) on the copy stream and returns at once; the next operator on dst waits
// for the copy, and so does the next change of src. The caller releases *event; event may be NULL.
ms_status ms__copy_async(ms_tensor *dst, ms_tensor *src, ms_pending **event);

// Copies src, contiguous and in pinned memory of the CPU, to dst, on a GPU, on the compute stream. The host does not
// wait: whatever changes or reuses the source waits for the copy.
ms_status ms__copy_pinned(ms_tensor *dst, ms_tensor *src);

#ifdef __cplusplus
}
#endif

#endif
