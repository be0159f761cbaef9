// SPDX-License-Identifier: MIT
// comm/movers/device.h -- tensors on a GPU that go through CPU memory.
#ifndef MS_COMM_MOVERS_DEVICE_H
#define MS_COMM_MOVERS_DEVICE_H

#include "comm/coll.h"

bool ms__coll_on_device(const ms_coll *c);
// Replaces c's storages by copies on the CPU. *kept: the output's original storage, which carries the collective's
// event.
ms_status ms__coll_stage(ms_coll *c, ms_storage **kept);
ms_status ms__coll_unstage(ms_coll *c);  // copies the output back; called on the thread that ran c
void ms__coll_stage_drop(ms_coll *c);
ms_status ms__coll_alone_there(ms_coll *c, int in_device, int out_device);

#endif
