// SPDX-License-Identifier: MIT
// comm/watch/break.h -- breaks groups on all nodes, and asks ranks of other nodes what they wait for.
#ifndef MS_COMM_WATCH_BREAK_H
#define MS_COMM_WATCH_BREAK_H

#include "comm/coll.h"

// Breaks g in that epoch, unless it is broken already: `text` then is the error of all its collectives. Any thread.
void ms__break(ms_group *g, uint64_t epoch, const char *text);
void ms__break_by_me(ms_group *g, uint64_t epoch, const char *why);  // as ms__break, by an error of this rank
// Breaks the group of c, which has failed on this rank with `status` and the text in ms_error().
void ms__coll_failed(ms_coll *c, ms_status status);
void ms__far_recovers(const ms_coll *c);  // tells missing members on other nodes that this rank waits in dist.recover
void ms__far_poll(void);
// Asks a rank on another node what it waits for. That rank answers only while it waits in a collective.
void ms__far_ask(int rank);
int ms__far_answered(char *out, size_t n);  // writes an answer to out, returns its sender; -1: none has arrived

#endif
