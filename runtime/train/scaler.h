// SPDX-License-Identifier: MIT
// train/scaler.h -- what gradient scalers decide in a captured step.
#ifndef MS_TRAIN_SCALER_H
#define MS_TRAIN_SCALER_H

#include "train/pass.h"

// Adds an optimizer's step that has just been recorded to c's list of them. p is NULL if there was no memory for it.
void ms__choices_pass(ms_captured *c, ms_pass *p);
// At the end of the recording: makes GPUs decide what they can.
ms_status ms__choices_end(ms_captured *c);
// Before a repetition: if the host does not know yet the decisions of too many earlier repetitions, waits for them.
ms_status ms__choices_ready(const ms_captured *c);
// Frees the lists of decisions; called after the step's work has been freed.
void ms__choices_forget(ms_captured *c);

#endif
