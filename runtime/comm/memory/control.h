// SPDX-License-Identifier: MIT
// comm/memory/control.h -- the control memory of a node: where groups, pairs and windows are in it.
#ifndef MS_COMM_MEMORY_CONTROL_H
#define MS_COMM_MEMORY_CONTROL_H

#include <pthread.h>
#include "comm/memory/group.h"

ms_status ms__control_layout(void);  // needs ms__world.node_of
size_t ms__ctl_size(void);
uint64_t ms__ctl_offset(const void *p);
char *ms__window(int world_rank, ms_stream_kind stream);  // WINDOW bytes for input, then WINDOW bytes for results
ms_status ms__group_place(ms_group *g);                   // allocates the group's slots in the control memory
void ms__group_unplace(ms_group *g, bool used);           // frees the slots for other groups; used: zero them first
extern pthread_mutex_t ms__groups_lock;                   // protects the list of groups, which other threads read, too
ms_group *ms__group_listed(double id);                    // also finds groups without this rank; NULL: no such group
ms_group *ms__pair(int from, int to);                     // the two-member group used by send and recv
ms_group *ms__pair_by_id(double id);
void ms__each_group(void (*fn)(ms_group *));  // calls fn for all groups and pairs with this rank; engine thread

#endif
