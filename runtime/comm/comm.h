// SPDX-License-Identifier: MIT
// comm/comm.h -- process groups, for use inside the engine. Scripts use the `dist` section of moonshard.h, which also
// has the functions of ms_work.
#ifndef MS_COMM_H
#define MS_COMM_H

#include "tensor/tensor.h"

typedef struct ms_group ms_group;

int ms__group_rank(const ms_group *g);  // -1: not a member
int ms__group_size(const ms_group *g);
// Whether tensors on a GPU stay in its memory during collectives. ms__group_maps: because the ranks map each other's
// memory. ms__group_stays: for that reason, or because the transport's library (NCCL) moves the bytes.
bool ms__group_maps(const ms_group *g);
bool ms__group_stays(const ms_group *g);
bool ms__group_near(const ms_group *g);  // whether all members are on this node
ms_group *ms__group_world(void);         // the world; before dist.init it has one rank
ms_group *ms__group_by_id(double id);    // NULL with the error set
// Keeps g's address valid until ms__group_release; g may be NULL. Collectives of g fail after dist.free_group.
ms_group *ms__group_hold(ms_group *g);
void ms__group_release(ms_group *g);
// The number of recoveries (ms_dist_recover): the same on all ranks whenever they communicate.
uint64_t ms__comm_epoch(void);

#endif
