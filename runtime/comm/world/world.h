// SPDX-License-Identifier: MIT
// comm/world/world.h -- the ranks: how many there are, which this one is, and on which node each runs.
#ifndef MS_COMM_WORLD_WORLD_H
#define MS_COMM_WORLD_WORLD_H

#include <stdatomic.h>
#include "comm/comm.h"
#include "comm/transport/transport.h"

typedef struct ms_board ms_board;

typedef struct {
    int rank, size, local_rank, local_size, nodes, node;
    int *node_of;   // the node of each rank, indexed by world rank
    int *local_of;  // rank within this node, indexed by world rank; -1: on another node
    // up: dist.init has succeeded; mapped: every rank of the node can map the others' arenas; stopped: dist.finalize
    // was called, or the script has ended
    bool up, mapped, stopped;
    const ms_transport *transport;
    char *ctl;  // the control memory
    size_t ctl_bytes;
    ms_board *board;
    double timeout;          // in seconds
    _Atomic uint64_t epoch;  // number of recoveries
    int64_t step;
} ms_world;
extern ms_world ms__world;

static inline bool ms__is_here(int rank) { return ms__world.node_of[rank] == ms__world.node; }  // on this node

#endif
