// SPDX-License-Identifier: MIT
// comm/process/link.h -- connections between nodes, which the kernel closes when a process dies.
#ifndef MS_COMM_PROCESS_LINK_H
#define MS_COMM_PROCESS_LINK_H

#include "base/base.h"

#define MS_OUT_OF_MEMORY "if by SIGKILL, memory may have run out"
// Listens or connects, and tells in *watches whether ms__link_wait must then be called by a thread of this rank.
// ms__link_made ends the exchange: afterwards every connection has been made.
ms_status ms__link_open(bool *watches);
ms_status ms__link_made(void);
// Waits until a rank of another node has reported why the job ends (returns true, *rank -1), or a node is lost: *rank
// is its first rank, and text says why. False: there is nothing more to wait for.
bool ms__link_wait(int *rank, char *text, size_t n);
void ms__link_left(void);   // tells the other nodes that the scripts of this node have ended
void ms__link_ended(void);  // tells them that a rank of this node has reported why the job ends

#endif
