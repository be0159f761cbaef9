// SPDX-License-Identifier: MIT
// shard/views/views.h -- how scripts see a unit's parameters, and where their gradients land: `sharded` parameters
// (fully_shard); or, with fsdp.FSDP, one `flat` parameter, or this rank's `pieces` of the parameters. Forward and
// backward gather and reduce at the same points for all three.
#ifndef MS_SHARD_VIEWS_H
#define MS_SHARD_VIEWS_H

#include "shard/reduce.h"

struct views {
    const char *name;

    // ---- construction ----
    // Fails if t cannot be a parameter of the unit. first: the unit's first parameter.
    ms_status (*check)(const unit *u, const ms_tensor *t, const ms_tensor *first);
    bool one_leaf;     // the parameters become one leaf, so all or none must require grad
    int align;         // flat layout: parameters begin at multiples of this many bytes; 0: not aligned
    bool keeps_shape;  // flat layout in a world of one: local tensors have the shapes of their parameters
    // Called when the unit has new storages. May be NULL.
    void (*place)(unit *u);
    // Makes a tensor with the view that p's parameter has while sharded. NULL: a view of the vacated gather buffer,
    // which operators refuse.
    ms_tensor *(*resting)(unit_param *p);
    // Returns the flat parameter's id. NULL: these views have no flat parameter.
    ms_id (*flat)(unit *u);

    // ---- while the parameters are whole ----
    void (*shown)(unit *u);  // called after the parameters have become whole; may be NULL
    void (*stay)(unit *u);   // called when the root after forward, or a unit after backward, stays whole; may be NULL
    // Returns a version that counts changes that scripts made to the shard through the parameters. May be NULL.
    uint64_t (*written)(const unit *u);
    // A unit stays whole only if a backward follows: a forward without a graph reshards it whatever its options say,
    // and so does the end of a backward that did not reach it.
    bool whole_for_backward;
    bool rewraps;  // an idle unit below a root may get a new root, when modules around it are wrapped again

    // ---- gradients ----
    // Gradients are reduced once, after the last of the unit's passes, when its flat gradient is complete.
    bool reduces_once;
    // Adds fresh gradients to those waiting to be reduced.
    ms_status (*take)(unit *u);
    // Lands *reducing, then reduces the waiting gradients: at once, in a task of run, or as the new *reducing.
    ms_status (*reduce)(ms_run *run, unit *u, reduction *reducing);
    // Waits for the reduction in flight and lands it.
    ms_status (*land)(ms_run *run, reduction *reducing);
    // Drops the gradients waiting to be reduced.
    void (*drop_waiting)(unit *u);
    // Drops p's part of the gradients waiting to be reduced. May be NULL.
    void (*clear_waiting)(unit_param *p);

    // ---- errors ----
    // Fails because an offloaded shard is on `device`.
    ms_status (*off_home)(const unit *u, const char *device);
    // Fails because the parameters have changed between forward and backward. stayed: the whole parameters of the
    // forward still exist.
    ms_status (*changed)(const unit *u, bool stayed);
};

extern const views ms__views_sharded, ms__views_flat, ms__views_pieces;

#endif
