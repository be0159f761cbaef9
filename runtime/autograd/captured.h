// SPDX-License-Identifier: MIT
// autograd/captured.h -- what a captured step (device/capture.h) does to the grads of leaves.
//
// A repetition runs no backward: it computes the bytes of the grads that the leaves had when the recorded step ended,
// and makes these tensors the grads again. It is only correct if the grads that the step reads or adds to are the same
// tensors as when the step was recorded.
#ifndef MS_AUTOGRAD_CAPTURED_H
#define MS_AUTOGRAD_CAPTURED_H

#include "autograd/graph.h"
#include "device/capture.h"

// While a step is recorded: to be called before a leaf's grad is read or added to.
void ms__note_grad_read(ms_captured *c, ms_leaf *l);
// To be called before a leaf's grad is set, or cleared (NULL).
void ms__note_grad_set(ms_captured *c, ms_leaf *l, const ms_tensor *g);
static inline void ms__grad_is_read(ms_leaf *l)
{
    if (MS_UNLIKELY(ms__capturing != NULL)) ms__note_grad_read(ms__capturing, l);
}

// To be called at the end of the recording. *pinned: the number of pinned blocks (ms_pins) that the grads use.
ms_status ms__captured_grads_end(ms_captured *c, int *pinned);
// To be called before a repetition. Fails unless each grad that the step reads is the same tensor as when the step was
// recorded, or is unset if it was unset then.
ms_status ms__captured_grads_check(const ms_captured *c);
// To be called after a repetition. Sets the leaves' grads to those at the end of the recorded step. set:
// ms__leaf_set_grad, of a higher file.
void ms__captured_grads_set(const ms_captured *c, void (*set)(ms_leaf *l, ms_tensor *grad));
void ms__captured_grads_forget(ms_captured *c);

#endif
