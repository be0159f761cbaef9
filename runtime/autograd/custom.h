// SPDX-License-Identifier: MIT
// autograd/custom.h -- nodes that are no operator, and regions of checkpoints.
#ifndef MS_CUSTOM_H
#define MS_CUSTOM_H

#include "autograd/graph.h"

// What the two identity nodes around a module with a full backward hook share.
typedef struct ms_module_call {
    int refs, n_in, n_out;
    double key, token;
    ms_tensor **grad_out;
} ms_module_call;

void ms__module_call_release(ms_module_call *m);

// The leaves that a checkpointed region met when it ran forward: until it has run again, its contributions to them are
// still to come.
typedef struct ms_region {
    double token;
    int n, cap;
    ms_leaf **leaves;          // retained
    struct ms_region *around;  // of the regions that are open
} ms_region;
extern ms_region *ms__region;  // the innermost open one, or NULL
void ms__region_release(ms_region *g);

// Identity over inputs: outs are aliases (owned) with a node whose backward, when it runs, calls
// the owner's post_backward(unit). Inputs without grad pass through unchanged (retained); *recorded tells.
ms_status ms__unit_boundary(void *unit, int64_t use, int n, ms_tensor *const *in, ms_tensor **out, bool *recorded);
// Before the gradient of t's node output is used, run the owner's pre_backward(unit, use).
ms_status ms__unit_hook(ms_tensor *t, void *unit, int64_t use);

#endif
