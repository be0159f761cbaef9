// SPDX-License-Identifier: MIT
// autograd/custom.h -- nodes that are not operators, and the regions of checkpoints.
#ifndef MS_CUSTOM_H
#define MS_CUSTOM_H

#include "autograd/graph.h"

extern ms_region *ms__region;  // the innermost open region, or NULL

// Records an identity node over in[], whose backward calls post_backward(unit, use) of ms__run_owner; use: the number
// of this forward of the unit. out[] receives owned aliases; inputs that do not require grad are returned unchanged
// (retained). *recorded is false if no input requires grad.
ms_status ms__unit_boundary(void *unit, int64_t use, int n, ms_tensor *const *in, ms_tensor **out, bool *recorded);
// Makes backward call pre_backward(unit, use) of ms__run_owner before it uses the gradient of t.
ms_status ms__unit_hook(ms_tensor *t, void *unit, int64_t use);

#endif
