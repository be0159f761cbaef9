// SPDX-License-Identifier: MIT
// comm/movers/native.h -- tensors on GPUs that the transport's library moves.
#ifndef MS_COMM_MOVERS_NATIVE_H
#define MS_COMM_MOVERS_NATIVE_H

#include "device/device.h"
#include "comm/watch/wait.h"

ms_status ms__native_open(const ms_launch *launch);  // called before MPI connects the ranks: fails if there is no GPU
// ms__native_start makes the communicator of all ranks, ms__native_split the communicator of a new group;
// ms__native_leave leaves a group's communicator. All ranks of the communicator must make these calls, which block.
ms_status ms__native_start(ms_group *world);
ms_status ms__native_split(ms_group *g);
ms_status ms__native_leave(ms_group *g);
bool ms__native_serves(const ms_request *r);
// Lists the library's calls for c, whose tensors must be set. narrow: half types are added in their own dtype, not in
// float32.
ms_status ms__native_make(ms_coll *c, bool narrow);
ms_status ms__native_issue(ms_coll *c);  // engine thread; all work that c's tensors wait for must have been queued
// Engine thread: appends c, whose number must be set, to the list of collectives that the GPU has not been given yet.
void ms__native_line_up(ms_coll *c);
// Removes c from that list: the GPU has been given it, or it has failed.
void ms__native_step_out(ms_coll *c);
ms_status ms__native_move(ms_waiter *w);  // queues the collective, and waits until the GPU has completed it
void ms__native_drop(ms_coll *c);

#endif
