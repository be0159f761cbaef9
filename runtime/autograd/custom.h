// SPDX-License-Identifier: MIT
// autograd/custom.h -- nodes that are not operators, and the regions of checkpoints.
#ifndef MS_CUSTOM_H
#define MS_CUSTOM_H

#include "autograd/graph.h"

// One call of a module with a full backward hook; the two identity nodes around the call share it.
typedef struct ms_module_call {
    int refs, n_in, n_out;
    double key, token;
    ms_tensor **grad_out;
} ms_module_call;

void ms__module_call_release(ms_module_call *m);

// The leaves that a checkpointed region used in its forward. A backward expects a contribution to each of them until
// the region has been recomputed.
typedef struct ms_region {
    double token;
    int n, cap;
    ms_leaf **leaves;          // retained
    struct ms_region *around;  // the enclosing open region
} ms_region;
extern ms_region *ms__region;  // the innermost open region, or NULL
void ms__region_release(ms_region *g);

// Records an identity node over in[], whose backward calls post_backward(unit, use) of ms__run_owner; use: the number
// of this forward of the unit. out[] receives owned aliases; inputs that do not require grad are returned unchanged
// (retained). *recorded is false if no input requires grad.
ms_status ms__unit_boundary(void *unit, int64_t use, int n, ms_tensor *const *in, ms_tensor **out, bool *recorded);
// Makes backward call pre_backward(unit, use) of ms__run_owner before it uses the gradient of t.
ms_status ms__unit_hook(ms_tensor *t, void *unit, int64_t use);

#endif
