// SPDX-License-Identifier: MIT
// ops/captured.h -- calls of operators, fills and copies as work of a captured step (device/capture.h), and the lasting
// tensors to which that work refers.
#ifndef MS_OPS_CAPTURED_H
#define MS_OPS_CAPTURED_H

#include "device/capture.h"
#include "ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

// A tensor with t's memory, shape and dtype that lives as long as the step; borrowed. Memory from outside of the
// recording is kept, and checked before each repetition. NULL if t is NULL, or if there is no memory (the step is then
// refused when its recording ends).
ms_tensor *ms__capture_tensor(ms_captured *c, ms_tensor *t);
ms_storage *ms__capture_storage(ms_captured *c, ms_storage *s);
// Whether t's memory is from outside of the recording, so that scripts may see what the step writes there.
bool ms__capture_outside(const ms_captured *c, const ms_tensor *t);

// Fails if memory or a parameter that the step uses has been replaced, moved or released.
ms_status ms__captured_check(const ms_captured *c);
void ms__captured_forget(ms_captured *c);  // releases the lasting tensors

#ifdef __cplusplus
}
#endif

#endif
