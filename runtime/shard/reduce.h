// SPDX-License-Identifier: MIT
// shard/reduce.h -- a reduction: gradients on their way over the ranks to their shards (docs/semantics.md#reduction).
#ifndef MS_SHARD_REDUCE_H
#define MS_SHARD_REDUCE_H

#include "shard/unit.h"

// A reduction in flight, or one that has not landed yet. owner NULL: none.
typedef struct reduction {
    unit *owner;
    int n;
    unit_param **present;
    int64_t *at;  // where each one's part begins in out
    ms_tensor *in, *out;
    ms_work *work;
    ms_work *scattered;  // of the reduce-scatter, where work is an all-reduce
    bool partial;        // sharded views: lands in owner->gradients.partial
    // views/classic.c only:
    double after;     // divides the result; 0: nothing
    int dtype;        // of the gradients that land
    bool replaces;    // its result contains the gradients that landed before
    uint32_t before;  // out's version before the script's hook fills it
} reduction;

// Lands the reduction in flight and lists the pending gradients of u in *r. r->n is 0 if there are none; then, and on
// failure, nothing needs freeing.
ms_status ms__reduction_new(ms_run *run, unit *u, reduction *reducing, reduction *r);
ms_status ms__reduction_wait(reduction *r);  // until out is complete; releases the input
void ms__reduction_free(reduction *r);
void ms__reduction_drop(reduction *r);  // waits and frees it; nothing lands

// Pushes a task on run that owns *r, with `step` for the script's events. On failure *r is still the caller's.
ms_status ms__reduction_push(ms_run *run, const reduction *r, ms_run_state (*step)(ms_task *, ms_run *, ms_event *));

// Waits for the reduction in flight and lands it.
ms_status ms__unit_land(ms_run *run, reduction *reducing);
// Adds a reduced gradient to the grad of p's local tensor. part is a view of the unit's reduced block.
ms_status ms__unit_land_part(unit_param *p, ms_tensor *part);
// Converts *t to a dtype on a device: *t becomes a copy, which its next reader waits for, unless it fits already. On
// failure *t is unchanged.
ms_status ms__unit_bring(int device, int dtype, ms_tensor **t);
ms_status ms__add_to(ms_tensor *sum, ms_tensor *t);  // in place
const char *ms__unit_reduced_name(const unit *u);    // of its reductions

#endif
