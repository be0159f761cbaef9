// SPDX-License-Identifier: MIT
// autograd/leaf.h -- sums of gradients, and their landing in leaves.
#ifndef MS_LEAF_H
#define MS_LEAF_H

#include "autograd/graph.h"

bool ms__exclusive(const ms_tensor *t);  // no other tensor shares its storage, and it covers all of it
// *total += g, in place if *total is exclusive. Takes over g.
ms_status ms__accumulate(ms_tensor **total, ms_tensor *g);

// Runs the leaf hooks of a managed parameter whose gradient has landed on the shard: pushes a task if there are any.
ms_status ms__leaf_hooks(ms_run *run, ms_tensor *t);
// Casts *g to m's dtype. Fails, and drops *g, unless it has m's shape and device.
ms_status ms__fit_gradient(ms_tensor **g, const ms_meta *m, const char *who, int k);
ms_status ms__leaf_complete(ms_run *r, ms_leaf *l);  // after its last contribution: runs hooks, lands

#endif
