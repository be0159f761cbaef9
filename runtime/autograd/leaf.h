// SPDX-License-Identifier: MIT
// autograd/leaf.h -- sums of gradients, and their landing in leaves.
#ifndef MS_LEAF_H
#define MS_LEAF_H

#include "autograd/graph.h"

bool ms__exclusive(const ms_tensor *t);  // whether nothing else needs t's elements, so that it may be overwritten
// *total += g, in place if *total is exclusive. Takes ownership of g.
ms_status ms__accumulate(ms_tensor **total, ms_tensor *g);

// To be called when the gradient of a unit's parameter t has landed on the shard. If t has leaf hooks, pushes a task
// that runs them.
ms_status ms__leaf_hooks(ms_run *run, ms_tensor *t);
// Converts *g to m's dtype. Fails if *g has another shape or device than m, is a sharded parameter, or has neither m's
// dtype nor a floating-point one; then releases *g.
ms_status ms__fit_gradient(ms_tensor **g, const ms_meta *m, const char *who, int k);
// Called after the leaf's last contribution: runs its hooks and lands its gradient.
ms_status ms__leaf_complete(ms_run *r, ms_leaf *l);

#endif
