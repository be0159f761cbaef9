// SPDX-License-Identifier: MIT
// autograd/saved.h -- checks of what nodes have saved, and inputs that backward computes again.
#ifndef MS_SAVED_H
#define MS_SAVED_H

#include "autograd/graph.h"

ms_status ms__used_up(const ms_node *n);      // fails: an earlier backward freed what n had saved
ms_status ms__check_saved(const ms_node *n);  // fails if a saved tensor was changed in place after it was saved
// Sets the inputs that n's backward reads and that n has not kept (ms_recompute). The nodes that made them are older
// than n, so the run has not freed what these nodes saved.
ms_status ms__compute_again(ms_node *n);
void ms__drop_again(ms_node *n);
// Makes the units' parameters whole that n's backward reads; if it has begun to gather some, sets *started. Mostly they
// are whole, since a gradient of their module's output has arrived; but a hook of the script may have kept features
// from inside of the module.
ms_status ms__read_parameters(ms_run *r, const ms_node *n, bool *started);

#endif
