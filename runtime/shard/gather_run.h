// SPDX-License-Identifier: MIT
// shard/gather_run.h -- gathers units in runs, which can raise events for the script.
#ifndef MS_SHARD_GATHER_RUN_H
#define MS_SHARD_GATHER_RUN_H

#include "shard/unit.h"

// Pushes a task on run that gathers u, with events for the script if u has all-gather extensions.
ms_status ms__unit_push_gather(ms_run *run, unit *u, bool early, bool prefetched);

#endif
