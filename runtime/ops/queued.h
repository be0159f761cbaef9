// SPDX-License-Identifier: MIT
// ops/queued.h -- the work that was queued on each GPU last. An error of a kernel is reported by some later call;
// the message lists the operators that may have caused it. Used by the engine thread; other threads may read.
// And what each operator on a GPU has computed, written to a file (MOONSHARD_CUDA_RESULTS), so that the results of two
// devices can be compared bit by bit (scripts/support/gpu_check/results.lua).
#ifndef MS_OPS_QUEUED_H
#define MS_OPS_QUEUED_H

#include "ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

void ms__note_call(int device, const ms_call *c);       // before a call of an operator is queued
void ms__note_queued(int device, const char *what);     // before other work is queued; `what` must stay valid
void ms__queued_text(int index, char *text, size_t n);  // the latest work not waited for by the host, newest first
// Both add the operator and its tensors to the text of the current error, st, and return st. ms__call_failed: only
// if st is an error of CUDA.
ms_status ms__call_named(const ms_call *c, ms_status st);
ms_status ms__call_failed(const ms_call *c, ms_status st);

// Whether results are written: not during a capture, and not for the copies that the functions below make.
bool ms__results_wanted(void);
ms_status ms__results_before(const ms_call *c);  // before the kernel changes an input
ms_status ms__results_after(const ms_call *c);   // after the kernel

#ifdef __cplusplus
}
#endif

#endif
