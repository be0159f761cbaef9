// SPDX-License-Identifier: MIT
// shard/views/classic.h -- functions shared by both views of fsdp.FSDP: the flat parameter and the pieces.
#ifndef MS_SHARD_CLASSIC_H
#define MS_SHARD_CLASSIC_H

#include "shard/views/views.h"

ms_status ms__classic_check(const unit *u, const ms_tensor *t, const ms_tensor *first);
ms_tensor *ms__classic_flat(const unit *u);  // makes a flat parameter over the shard
ms_status ms__classic_off_home(const unit *u, const char *device);
ms_status ms__classic_changed(const unit *u, bool stayed);
ms_status ms__classic_take(unit *u);
ms_status ms__classic_reduce(ms_run *run, unit *u, reduction *reducing);
ms_status ms__classic_land(ms_run *run, reduction *reducing);
void ms__classic_drop_waiting(unit *u);

// The fields that both tables of views share.
#define CLASSIC_VIEWS                                                                              \
    .check = ms__classic_check, .whole_for_backward = true, .rewraps = true, .reduces_once = true, \
    .take = ms__classic_take, .reduce = ms__classic_reduce, .land = ms__classic_land,              \
    .drop_waiting = ms__classic_drop_waiting, .off_home = ms__classic_off_home, .changed = ms__classic_changed

static inline ms_tensor *ms__landed(const unit_param *p) { return p->local->leaf ? p->local->leaf->grad : NULL; }

#endif
