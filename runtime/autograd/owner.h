// SPDX-License-Identifier: MIT
// autograd/owner.h -- functions of the owner of managed parameters, called by runs (runtime/shard registers them).
//
// A managed parameter is a tensor with unit_param set; its gradients are passed to the owner instead of its leaf. Only
// the owner records unit nodes and unit hooks (ms__unit_boundary, ms__unit_hook), so only functions that every run
// calls need to test ms__run_owner for NULL.
#ifndef MS_OWNER_H
#define MS_OWNER_H

#include "ops/op.h"

typedef struct ms_run_owner {
    // Called before the gradient of a module's output is used.
    ms_status (*pre_backward)(ms_run *run, void *unit, int64_t use);
    // Called before a backward reads gathered parameters, whose storage is s. *started: it has begun to gather them;
    // the run then calls again, after the tasks that were pushed.
    ms_status (*read)(ms_run *run, const ms_storage *s, bool *started);
    // Called after the backward of a unit node, when the gradients of the module's inputs are complete.
    ms_status (*post_backward)(ms_run *run, void *unit, int64_t use);
    // Fails if the gradient has another number of dimensions or of elements than the whole parameter.
    ms_status (*gradient_fits)(const ms_tensor *param, const ms_tensor *grad);
    // Called when the gradient of a managed parameter (unit_param is set) is complete in this run. Takes ownership of
    // grad if it sets *taken.
    ms_status (*accumulate)(ms_run *run, ms_tensor *param, ms_tensor *grad, bool *taken);
    // Called when the outermost backward has processed all its nodes.
    ms_status (*final)(ms_run *run);
    // Called when runs are aborted, for the reason in text: peers that wait for this rank must learn of it. backward:
    // the outermost backward is among them.
    void (*failed)(const char *text, bool backward);
    // Whether units have run forward whose backward has not ended.
    bool (*expects_backward)(void);
    // Called when the run was aborted: releases what the owner holds for it.
    void (*abort)(ms_run *run);
} ms_run_owner;

extern const ms_run_owner *ms__run_owner;  // NULL: no parameter belongs to a unit

#endif
