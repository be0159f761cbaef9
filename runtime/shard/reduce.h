// SPDX-License-Identifier: MIT
// shard/reduce.h -- a reduction: gradients on their way over the ranks to their shards (docs/semantics.md#reduction).
#ifndef MS_SHARD_REDUCE_H
#define MS_SHARD_REDUCE_H

#include "shard/unit.h"

// A reduction that is under way, or waits to land. owner NULL: none.
typedef struct reduction {
    unit *owner;
    int n;
    unit_param **present;
    int64_t *at;  // where each one's part begins in out
    ms_tensor *in, *out;
    ms_work *work;
    ms_work *scattered;  // of the reduce-scatter, where work is an all-reduce
    bool partial;        // sharded views: lands in owner->gradients.partial
    double after;        // from here on classic.c: divides the result; 0: nothing
    int dtype;           // of the gradients that land
    bool replaces;       // what landed before is in it
    uint32_t before;     // out's version when a hook of the script's was given it to fill
} reduction;

// Lists the gradients of u that wait in *r, once the reduction under way has landed. r->n is 0 when there are none;
// then, and on failure, nothing needs freeing.
ms_status ms__reduction_new(ms_run *run, unit *u, reduction *reducing, reduction *r);
ms_status ms__reduction_wait(reduction *r);  // until out is there; what was reduced is let go
void ms__reduction_free(reduction *r);
void ms__reduction_drop(reduction *r);  // waits, and frees it; nothing lands

// Waits for the reduction under way and lands it.
ms_status ms__unit_land(ms_run *run, reduction *reducing);
// A reduced gradient joins what p's local tensor has. part is a view of the unit's reduced block.
ms_status ms__unit_land_part(unit_param *p, ms_tensor *part);
// *t in another dtype, on another device: itself, or a copy that its next reader waits for. Takes *t, unless it fails.
ms_status ms__unit_bring(int device, int dtype, ms_tensor **t);
ms_status ms__add_to(ms_tensor *sum, ms_tensor *t);  // in place
const char *ms__unit_reduced_name(const unit *u);    // of its reductions

#endif
