// SPDX-License-Identifier: MIT
// comm/comm.h -- process groups, for the engine's own use. Scripts reach them through moonshard.h's `dist` section,
// which has the functions of works too.
#ifndef MS_COMM_H
#define MS_COMM_H

#include "tensor/tensor.h"

typedef struct ms_group ms_group;

int ms__group_rank(const ms_group *g);  // -1: not a member
int ms__group_size(const ms_group *g);
ms_group *ms__group_world(void);       // a world of one before dist.init
ms_group *ms__group_by_id(double id);  // NULL with the error set
// Keeps the address of g valid until it is released; NULL allowed. Collectives fail once the group was freed.
ms_group *ms__group_hold(ms_group *g);
void ms__group_release(ms_group *g);

#endif
