// SPDX-License-Identifier: MIT
// comm/watch/watch.h -- waits for peers, and what ends them: broken groups, deadlocks, the timeout.
#ifndef MS_COMM_WATCH_WATCH_H
#define MS_COMM_WATCH_WATCH_H

#include "comm/coll.h"

// ---- text.c: what messages say about groups, ranks and collectives ----
void ms__group_text(const ms_group *g, char *out, size_t n);
void ms__rank_text(int rank, char *out, size_t n);  // writes what a rank does, as far as this node knows
// Both fail with MS_ECOMM and a text that names the collective.
ms_status ms__coll_fail(const ms_coll *c, const char *what);
ms_status ms__request_fail(const ms_group *g, uint64_t number, const ms_fingerprint *p, const char *what);

// ---- broken.c: whether and why a group is broken, and what this rank's script has received ----
bool ms__break_here(ms_group *g, uint64_t epoch, const char *text);  // on this node only; true: was not broken
static inline bool ms__is_broken(const ms_group *g, uint64_t epoch)
{
    return atomic_load_explicit(&g->broken->claimed, memory_order_acquire) > epoch;
}
void ms__broken_reason(const ms_group *g, uint64_t epoch, char *text);  // copies TEXT bytes: why g is broken
ms_status ms__broken_fail(ms_coll *c);  // fails c, whose group is broken, with the reason
// Whether a collective of g that has begun cannot complete: g is broken, and the job is ending.
bool ms__comm_is_lost(const ms_group *g, uint64_t epoch);

// Since the latest recovery; engine thread only, as all below.
typedef struct {
    bool failed, backward;  // a call of this rank was refused or has failed; a backward has
    char reason[TEXT];      // why the group was broken whose error this rank raised last; "": there was none
} ms_errors;
extern ms_errors ms__errors;
void ms__received(const char *text);                       // the script receives `text`, the error of a collective
void ms__group_received(ms_group *g);                      // the script receives ms_error(), of a collective of g
ms_status ms__group_whole(ms_group *g, const char *call);  // fails if g is broken. call: its name, for the message

// ---- break.c: breaks groups on all nodes, and asks ranks of other nodes what they wait for ----
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

// ---- deadlock.c: ranks of one host that wait for each other in different groups ----
// Breaks the groups of a deadlock that the wait of c is part of, and fails.
ms_status ms__wait_deadlock(ms_coll *c);

// ---- wait.c: waiting for the members of a collective ----
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
