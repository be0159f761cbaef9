// SPDX-License-Identifier: MIT
// ops/copy.h -- copies on the copy stream, copies from pinned memory, and lists of copies that run together.
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

// A list of copies, each like a call of ms__copy. Copies of contiguous tensors within one GPU are launched together at
// the end where possible, and their tensors must live until then; all others run when they are added.
typedef struct ms_copies {
    int n, cap, index;
    struct ms_cuda_copy *list;
} ms_copies;
ms_status ms__copies_add(ms_copies *c, ms_tensor *dst, ms_tensor *src /* NULL: zeros */);
// Launches the list unless `sofar` is a failure, and frees it.
ms_status ms__copies_end(ms_copies *c, ms_status sofar);

#ifdef __cplusplus
}
#endif

#endif
