// SPDX-License-Identifier: MIT
// shard/reduce.h -- a reduction: sums gradients over the ranks and puts the results on the shards
// (docs/semantics.md#reduction).
#ifndef MS_SHARD_REDUCE_H
#define MS_SHARD_REDUCE_H

#include "shard/unit.h"

// A reduction that is in flight or has not landed yet. owner NULL: there is none.
typedef struct reduction {
    unit *owner;
    int n;
    unit_param **present;  // the n parameters whose gradients are reduced
    int64_t *at;           // the offset of each parameter's part in out
    ms_tensor *in, *out;   // in: packed gradients, NULL if sent in place; out: this rank's part of the result
    ms_work *work;
    ms_work *scattered;  // the reduce-scatter, if `work` is an all-reduce; in views/classic.c also without all-reduce
    bool partial;        // sharded views: the result is added to owner->gradients.partial
    // used by views/classic.c only:
    double after;     // divisor of the result; 0: do not divide
    int dtype;        // dtype of the gradients that land
    bool replaces;    // the result includes the gradients that landed before
    uint32_t before;  // version of out before the script's hook fills it
} reduction;

// Lands the reduction in flight and lists the pending gradients of u in *r. r->n is 0 if there are none. In that case,
// and on failure, nothing needs freeing.
ms_status ms__reduction_new(ms_run *run, unit *u, reduction *reducing, reduction *r);
ms_status ms__reduction_wait(reduction *r);  // waits until out is complete; releases the input
void ms__reduction_free(reduction *r);
void ms__reduction_drop(reduction *r);  // waits for the reduction and frees it without landing

// Pushes a task that owns *r on run; `step` exchanges events with the script. On failure the caller still owns *r.
ms_status ms__reduction_push(ms_run *run, const reduction *r, ms_run_state (*step)(ms_task *, ms_run *, ms_event *));

// Waits for the reduction in flight and lands it.
ms_status ms__unit_land(ms_run *run, reduction *reducing);
// Adds a reduced gradient to the grad of p's local tensor. part is a view of the unit's reduced gradients.
ms_status ms__unit_land_part(unit_param *p, ms_tensor *part);
// Replaces *t by a copy in a dtype on a device, unless it has them already; the copy's next reader waits for it. On
// failure *t is the old tensor or a copy that has the dtype, but is not on the device.
ms_status ms__unit_bring(int device, int dtype, ms_tensor **t);
// As ms__unit_bring, to the unit's home device; pins the copy if the unit's options say so.
ms_status ms__unit_bring_home(const unit *u, int dtype, ms_tensor **t);
ms_status ms__add_to(ms_tensor *sum, ms_tensor *t);  // adds t to sum in place
const char *ms__unit_reduced_name(const unit *u);

#endif
