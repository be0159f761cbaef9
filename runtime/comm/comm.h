// SPDX-License-Identifier: MIT
// comm/comm.h -- process groups and works, for the engine's own use. Scripts reach them through moonshard.h's `dist`
// section.
#ifndef MS_COMM_H
#define MS_COMM_H

#include "tensor/tensor.h"

typedef struct ms_group ms_group;
typedef struct ms_work ms_work;

int ms__group_rank(const ms_group *g);  // -1: not a member
int ms__group_size(const ms_group *g);
ms_group *ms__group_world(void);       // a world of one before dist.init
ms_group *ms__group_by_id(double id);  // NULL with the error set
// Keeps the address of g valid for the life of the process; NULL allowed. Collectives fail once the group was freed.
ms_group *ms__group_hold(ms_group *g);

ms_status ms__work_wait(ms_work *w);  // NULL allowed; reports the collective's failure
bool ms__work_done(ms_work *w);
void ms__work_release(ms_work *w);  // NULL allowed

#endif
