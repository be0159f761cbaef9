// SPDX-License-Identifier: MIT
// shard/views/views.h -- how scripts see a unit's parameters, and where their gradients land: `sharded` parameters
// (fully_shard), or, with fsdp.FSDP, one `flat` parameter or this rank's `pieces` of the parameters. The schedule does
// not know which.
#ifndef MS_SHARD_VIEWS_H
#define MS_SHARD_VIEWS_H

#include "shard/reduce.h"

struct views {
    const char *name;

    // ---- construction ----
    // Fails if t cannot be a parameter of the unit. first: the unit's first parameter.
    ms_status (*check)(const unit *u, const ms_tensor *t, const ms_tensor *first);
    bool one_leaf;     // the parameters become one leaf, so they agree in whether they require grad
    int align;         // flat layout: parameters begin at multiples of this many bytes; 0: no alignment
    bool keeps_shape;  // flat layout in a world of one: local tensors have the shapes of their parameters
    // Called when the unit has new storages. May be NULL.
    void (*place)(unit *u);
    // The tensor that p's parameter views while the unit is sharded. NULL: the vacated whole, which operators refuse.
    ms_tensor *(*resting)(unit_param *p);
    // The flat parameter's id. NULL: these views have none.
    ms_id (*flat)(unit *u);

    // ---- while the parameters are whole ----
    void (*shown)(unit *u);  // called when they have become whole; may be NULL
    void (*stay)(unit *u);   // called when they stay whole between two passes; may be NULL
    // The version of changes that scripts made to the shard through the parameters. May be NULL.
    uint64_t (*written)(const unit *u);
    // A unit stays whole only for a backward: a forward without graph reshards it whatever its options say, and so does
    // the end of a backward that did not reach it.
    bool whole_for_backward;
    bool rewraps;  // an idle unit below a root may get a new root, around modules that are wrapped again

    // ---- gradients ----
    bool reduces_once;  // after the last of the unit's passes, when its one flat gradient is complete
    // Adds fresh gradients to those that wait to be reduced.
    ms_status (*take)(unit *u);
    // Lands *reducing, then starts the reduction of the waiting gradients as *reducing.
    ms_status (*reduce)(ms_run *run, unit *u, reduction *reducing);
    // Waits for the reduction in flight and lands it.
    ms_status (*land)(ms_run *run, reduction *reducing);
    // Drops the gradients that wait to be reduced. May be NULL.
    void (*drop_waiting)(unit *u);

    // ---- errors ----
    // The error that an offloaded shard is on `device`.
    ms_status (*off_home)(const unit *u, const char *device);
    // The parameters have changed between forward and backward. stayed: the wholes of the forward are still there.
    ms_status (*changed)(const unit *u, bool stayed);
};

extern const views ms__views_sharded, ms__views_flat, ms__views_pieces;

#endif
