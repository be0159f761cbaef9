// SPDX-License-Identifier: MIT
// shard/root.h -- what the units of one root share: their order, the reduction under way, the state of the iteration.
#ifndef MS_SHARD_ROOT_H
#define MS_SHARD_ROOT_H

#include "shard/reduce.h"

typedef struct context {
    unit *root;
    unit **units;  // module order
    int n;
    unit *opened;  // whose forward opened the running iteration
    struct {
        unit *unit;
        int64_t use, pass;
        bool done, regional;
    } * order;  // forwards of modules in order, until the backward's end;
                // pass: the same for modules that one gather and one reduction serve; regional: in a
                // checkpoint's region, which has not run again yet
    int n_order, cap_order;
    unit **entered, **last;  // what this forward entered, and the latest complete one, for prefetching
    int n_entered, cap_entered, n_last, cap_last;
    bool is_last_backward;
    int64_t backwards;  // completed
    bool in_backward;   // a backward has touched these units and is not through
    uint64_t epoch,
        failed_backward;  // of comm.h, when the ranks last agreed on who is whole and what waits to be reduced
    reduction reducing;   // owner NULL: none
    struct context *next;
} context;

context *ms__contexts(void);
void ms__context_leave(unit *u);      // u's module dies: its root's units neither wait for it nor prefetch it
void ms__unit_after_errors(unit *u);  // before a use: an error of any rank leaves all ranks in the same state
void ms__unit_drop_pending(context *c);

#endif
