// SPDX-License-Identifier: MIT
// autograd/owner.h -- functions of the owner of managed parameters, which runs call (runtime/shard registers them).
//
// A managed parameter is a tensor with unit_param set; its gradients go to the owner instead of to its leaf. Only the
// owner records unit nodes and unit hooks (ms__unit_boundary, ms__unit_hook), so only functions that every run calls
// need a test for NULL.
#ifndef MS_OWNER_H
#define MS_OWNER_H

#include "ops/op.h"

typedef struct ms_run_owner {
    // Runs before the gradient of a module's output is used.
    ms_status (*pre_backward)(ms_run *run, void *unit, int64_t use);
    // Runs after the backward of a unit node: the gradients of a module's inputs are complete.
    ms_status (*post_backward)(ms_run *run, void *unit, int64_t use);
    // Fails unless the gradient has the shape of the whole parameter.
    ms_status (*gradient_fits)(const ms_tensor *param, const ms_tensor *grad);
    // A managed parameter's gradient is complete in this run. Takes over grad if *taken.
    ms_status (*accumulate)(ms_run *run, ms_tensor *param, ms_tensor *grad, bool *taken);
    // The outermost backward has run all its nodes.
    ms_status (*final)(ms_run *run);
    // The number of published errors.
    uint64_t (*epoch)(void);
    // Publishes that runs are aborted because of text. since: the epoch when they began.
    void (*failed)(const char *text, uint64_t since, bool backward);
    // The run was aborted: releases what the owner holds for it.
    void (*abort)(ms_run *run);
} ms_run_owner;

extern const ms_run_owner *ms__run_owner;  // NULL: no parameters are managed

#endif
