// SPDX-License-Identifier: MIT
// comm/watch/wait.h -- waiting for the members of a collective.
#ifndef MS_COMM_WATCH_WAIT_H
#define MS_COMM_WATCH_WAIT_H

#include "comm/coll.h"

typedef struct {
    ms_coll *c;
    // In ns (ms__now_ns). begun: start of the wait, 0: not begun; now, last: the current and the previous poll;
    // checked: the latest check of the peers, 0: none.
    int64_t begun, now, last, checked;
    int polls;
    bool committed;
    bool told;       // ms__far_recovers was called
    uint64_t round;  // staged moves: the round that this rank has reached
    uint32_t flags;  // SLOT_* that all members have set
} ms_waiter;
void ms__wait_begin(ms_waiter *w, ms_coll *c);
// Yields or sleeps. From time to time checks for broken groups, dead peers, deadlocks and the timeout.
ms_status ms__wait_poll(ms_waiter *w);
void ms__wait_moved(ms_waiter *w);  // to be called when a wait has succeeded: resets the waiter for the next wait
void ms__wait_end(ms_waiter *w);
ms_status ms__wait_round(ms_waiter *w, uint64_t round);  // waits until every member on this node has reached the round
// Waits until all members on this node have completed collective `number`: c, or an earlier one that used c's slots.
ms_status ms__wait_done(ms_waiter *w, uint64_t number);

#endif
