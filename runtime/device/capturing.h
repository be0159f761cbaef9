// SPDX-License-Identifier: MIT
// device/capturing.h -- which captured step (capture.h) is being recorded.
#ifndef MS_CAPTURING_H
#define MS_CAPTURING_H

#include "device/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

extern ms_captured *ms__capturing;  // the step to which work that begins now belongs; NULL: none
// The step that is being recorded, also while a piece of its work runs (ms__capturing is then NULL)
extern ms_captured *ms__recording;

// Suspends the recording while a piece of work runs: the calls inside it are not recorded, and what they allocate is
// not pinned. Returns the step to resume.
ms_captured *ms__capture_suspend(void);
void ms__capture_resume(ms_captured *c);
extern ms_pins *ms__pinning;  // what is allocated now is pinned for this step (pool.h); NULL: it is not

void ms__capture_no_memory(ms_captured *c);  // refuses the step: there is no memory for the list of its work
// Refuses the step that is being recorded: fails with MS_ESTATE and the text, which names what cannot be captured.
ms_status ms__capture_refuse(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#ifdef __cplusplus
}
#endif

#endif
