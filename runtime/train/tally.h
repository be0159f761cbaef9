// SPDX-License-Identifier: MIT
// train/tally.h -- counts that a GPU keeps for a captured step with a gradient scaler.
#ifndef MS_TRAIN_TALLY_H
#define MS_TRAIN_TALLY_H

#include "device/device.h"

// A new tally on a GPU (ms_tally_free drops one reference): of steps, which are added to numbers of the script
// (ms__tally_adds), or of the steps with finite gradients that `rule` counts. NULL on failure.
ms_tally *ms__tally_new(int device, ms_scale_rule *rule);
ms_tally *ms__tally_hold(ms_tally *t);

// Makes the tally add steps to n numbers, *to[0] and so on, which must stay valid as long as ms_tally_read and
// ms__tally_begin are called.
ms_status ms__tally_adds(ms_tally *t, int n, double *const *to);
// Whether the tally updates a number in [counts, counts + bytes).
bool ms__tally_updates(const ms_tally *t, const void *counts, size_t bytes);
ms_tally_place ms__tally_place(const ms_tally *t);
// Registers one more decision in each repetition. depth: how many of its earlier results the host may not know yet.
void ms__tally_use(ms_tally *t, uint32_t depth);
// Before a repetition: waits until there is room for its decisions. Its work then need not wait: if a wait inside it
// failed, as when a script is interrupted, only a part of the repetition's steps would have been counted.
ms_status ms__tally_ready(ms_tally *t);
// Called before a decision is queued that the kernel `choose` counts. Adds the steps made so far to the script's
// numbers. *pending: the number of earlier decisions that the host does not know yet; waits until it is below depth.
// *base: the GPU's count without the pending decisions.
ms_status ms__tally_begin(ms_tally *t, uint32_t depth, uint32_t *pending, uint32_t *base);

double *ms__tally_tracker(const ms_tally *t);  // the count of steps with finite gradients, on the GPU
// Returns the count with which the next change of the scale begins. NaN: the count on the GPU. Any other count is the
// rule's, which the script may have changed; it replaces the count on the GPU.
double ms__tally_next(ms_tally *t);

#endif
