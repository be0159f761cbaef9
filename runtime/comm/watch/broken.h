// SPDX-License-Identifier: MIT
// comm/watch/broken.h -- whether and why a group is broken, and what this rank's script has received.
#ifndef MS_COMM_WATCH_BROKEN_H
#define MS_COMM_WATCH_BROKEN_H

#include "comm/coll.h"

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

#endif
