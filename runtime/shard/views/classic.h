// SPDX-License-Identifier: MIT
// shard/views/classic.h -- what the flat parameter and the pieces of fsdp.FSDP have in common.
#ifndef MS_SHARD_CLASSIC_H
#define MS_SHARD_CLASSIC_H

#include "shard/views/views.h"

// one: the parameters become one, so they agree in whether they require grad.
ms_status ms__classic_check(const char *unit, const ms_tensor *t, const ms_tensor *first, bool one);
ms_status ms__classic_off_home(const unit *u, const char *device);
ms_status ms__classic_changed(const unit *u, bool stayed);
ms_status ms__classic_take(unit *u);
ms_status ms__classic_reduce(ms_run *run, unit *u, reduction *reducing);
ms_status ms__classic_land(ms_run *run, reduction *reducing);
void ms__classic_drop_waiting(unit *u);

static inline ms_tensor *ms__landed(const unit_param *p) { return p->local->leaf ? p->local->leaf->grad : NULL; }

#endif
