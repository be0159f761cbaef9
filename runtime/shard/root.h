// SPDX-License-Identifier: MIT
// shard/root.h -- the state that all units of a root share: their order, the reduction in flight, the current
// iteration.
#ifndef MS_SHARD_ROOT_H
#define MS_SHARD_ROOT_H

#include "shard/reduce.h"

// One forward of a module.
typedef struct {
    unit *unit;
    int64_t use, pass;  // use: this forward's number; pass: equal for modules that share a gather and a reduction
    bool done;          // its backward has run
    bool regional;      // the module ran in an activation checkpoint that has not been recomputed yet
} order_entry;

typedef struct context {
    unit *root;
    unit **units;  // in module order
    int n;
    unit *opened;        // the unit whose forward began the current iteration
    order_entry *order;  // kept until the end of the backward
    int n_order, cap_order;
    // The units that the current forward has entered, and those of the latest complete forward; for prefetching.
    unit **entered, **last;
    int n_entered, cap_entered, n_last, cap_last;
    bool is_last_backward;
    int64_t backwards;     // number of backwards completed
    bool in_backward;      // a backward that uses these units has begun and not ended
    ms_failures failures;  // when the ranks last had equal state (ms__unit_after_errors)
    reduction reducing;    // the reduction in flight
    struct context *next;
} context;

context *ms__contexts(void);
void ms__context_leave(unit *u);  // removes u, which is being freed or gets a new root, from its context
// To be called before a use of u: after an error of any rank, makes the state of u's root equal on all ranks.
void ms__unit_after_errors(unit *u);
void ms__unit_drop_pending(context *c);

#endif
