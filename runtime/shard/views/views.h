// SPDX-License-Identifier: MIT
// shard/views/views.h -- what scripts see of a unit's parameters, and where their gradients land: `sharded` parameters
// (fully_shard); or, by the rules of fsdp.FSDP, one `flat` parameter or this rank's `pieces` of the parameters.
// The schedule never asks which.
#ifndef MS_SHARD_VIEWS_H
#define MS_SHARD_VIEWS_H

#include "shard/reduce.h"

// A function that may be NULL does nothing there.
struct views {
    const char *name;

    // ---- making ----
    // Fails unless t can be a parameter of the unit, whose first one is `first`.
    ms_status (*check)(const unit *u, const ms_tensor *t, const ms_tensor *first);
    bool one_leaf;     // the parameters become one leaf, so they agree in whether they require grad
    int align;         // flat layout: parameters begin at multiples of so many bytes; 0: one behind the other
    bool keeps_shape;  // flat layout in a world of one: local tensors have the shapes of their parameters
    // The unit has new storages. May be NULL.
    void (*place)(unit *u);
    // What p's parameter is pointed at while the unit is sharded. NULL: the vacated whole, which refuses operators.
    ms_tensor *(*resting)(unit_param *p);
    // The flat parameter's id. NULL: there is none.
    ms_id (*flat)(unit *u);

    // ---- while the parameters are whole ----
    void (*shown)(unit *u);  // they have become whole; may be NULL
    void (*stay)(unit *u);   // they stay whole between two passes; may be NULL
    // Changes that scripts made to the shard through the parameters themselves. May be NULL.
    uint64_t (*written)(const unit *u);
    // A unit stays whole only for a backward to come: a forward without graph reshards it whatever its options say, and
    // so does the end of a backward that did not come to it.
    bool whole_for_backward;
    bool rewraps;  // an idle unit below a root may get a new root, around modules that are wrapped again

    // ---- gradients ----
    bool reduces_once;  // after the last of the unit's passes: its gradient is one, and complete only then
    // Fresh gradients join those that wait to be reduced.
    ms_status (*take)(unit *u);
    // Starts the reduction of the gradients that wait as *reducing; the one that was there before lands.
    ms_status (*reduce)(ms_run *run, unit *u, reduction *reducing);
    // Waits for the reduction under way and lands it.
    ms_status (*land)(ms_run *run, reduction *reducing);
    // Nothing waits to be reduced any more. May be NULL.
    void (*drop_waiting)(unit *u);

    // ---- errors ----
    // An offloaded shard is on `device`.
    ms_status (*off_home)(const unit *u, const char *device);
    // The parameters have changed between forward and backward. stayed: the wholes are still those of the forward.
    ms_status (*changed)(const unit *u, bool stayed);
};

extern const views ms__views_sharded, ms__views_flat, ms__views_pieces;

#endif
