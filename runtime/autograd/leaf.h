// SPDX-License-Identifier: MIT
// autograd/leaf.h -- gradients come together.
#ifndef MS_LEAF_H
#define MS_LEAF_H

#include "autograd/graph.h"

bool ms__exclusive(const ms_tensor *t);  // its bytes are nobody else's and all there is in its storage
ms_status ms__accumulate(ms_tensor **total,
                         ms_tensor *g);  // *total += g, in place where the buffer is its own; takes over g

// Leaf hooks of a managed parameter, whose gradient has landed on the shard: pushes a task if there are any.
ms_status ms__leaf_hooks(ms_run *run, ms_tensor *t);
ms_status ms__fit_gradient(ms_tensor **g, const ms_meta *m, const char *who,
                           int k);                   // *g in m's shape and dtype, or an error
ms_status ms__leaf_complete(ms_run *r, ms_leaf *l);  // its last contribution has come: hooks, landing

#endif
