// SPDX-License-Identifier: MIT
// comm/watch/deadlock.h -- ranks of one host that wait for each other in different groups.
#ifndef MS_COMM_WATCH_DEADLOCK_H
#define MS_COMM_WATCH_DEADLOCK_H

#include "comm/coll.h"

// Breaks the groups of a deadlock that the wait of c is part of, and fails.
ms_status ms__wait_deadlock(ms_coll *c);

#endif
