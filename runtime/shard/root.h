// SPDX-License-Identifier: MIT
// shard/root.h -- what the units of one root share: their order, the reduction in flight, the state of the iteration.
#ifndef MS_SHARD_ROOT_H
#define MS_SHARD_ROOT_H

#include "shard/reduce.h"

// A forward of a module.
typedef struct {
    unit *unit;
    int64_t use, pass;  // pass: equal for modules that share one gather and one reduction
    bool done;          // its backward has run
    bool regional;      // in a checkpoint's region that has not run again yet
} order_entry;

typedef struct context {
    unit *root;
    unit **units;  // module order
    int n;
    unit *opened;        // the unit whose forward began the running iteration
    order_entry *order;  // until the end of the backward
    int n_order, cap_order;
    unit **entered, **last;  // units that this forward entered, and the latest complete one; for prefetching
    int n_entered, cap_entered, n_last, cap_last;
    bool is_last_backward;
    int64_t backwards;                // completed
    bool in_backward;                 // a backward has used these units and has not ended
    uint64_t epoch, failed_backward;  // of comm.h, when the ranks last had the same state (ms__unit_after_errors)
    reduction reducing;               // the one in flight
    struct context *next;
} context;

context *ms__contexts(void);
void ms__context_leave(unit *u);      // u's module dies: the context forgets it
void ms__unit_after_errors(unit *u);  // before a use: after an error of any rank, brings all ranks to the same state
void ms__unit_drop_pending(context *c);

#endif
