// SPDX-License-Identifier: MIT
// comm/movers/move.h -- moves the bytes of a collective after the members have agreed on it.
#ifndef MS_COMM_MOVERS_MOVE_H
#define MS_COMM_MOVERS_MOVE_H

#include "comm/watch/wait.h"

ms_status ms__move_inline(ms_coll *c);
ms_status ms__move_direct(ms_coll *c);
ms_status ms__move_staged(ms_waiter *w);
ms_status ms__coll_alone(ms_coll *c);  // runs c in a group of one rank

#endif
