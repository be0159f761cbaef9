// SPDX-License-Identifier: MIT
// comm/process/join.h -- the ranks of this node, from loading this library until they share a board.
#ifndef MS_COMM_PROCESS_JOIN_H
#define MS_COMM_PROCESS_JOIN_H

#include <stdbool.h>
#include <stdint.h>

void ms__join_watch(int expected, bool all_here);  // expects so many peers; all_here: mpirun started all ranks here
void ms__join_begin(double limit);                 // called when the script calls dist.init
void ms__join_end(bool through);                   // through: dist.init has succeeded
bool ms__error_reported_by_peer(uint64_t hash);    // whether a peer reports the error with this hash

#endif
