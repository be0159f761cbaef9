// SPDX-License-Identifier: MIT
// comm/world/world.c -- the ranks: how many there are, which this one is, and on which node each runs.
#include "comm/world/world.h"
#include "comm/transport/self.h"

ms_world ms__world = {
    .rank = 0, .size = 1, .local_size = 1, .nodes = 1, .transport = &ms__transport_self, .timeout = 60, .step = -1
};

uint64_t ms__comm_epoch(void) { return atomic_load_explicit(&ms__world.epoch, memory_order_relaxed); }
