// SPDX-License-Identifier: MIT
// shard/gather.h -- a unit's parameters become whole and go back to their shards.
#ifndef MS_SHARD_GATHER_H
#define MS_SHARD_GATHER_H

#include "shard/unit.h"

// Starts the gather (on a queue when it is early: prefetched or asynchronous). No-op when whole or under way.
ms_status ms__unit_start_gather(unit *u, bool early, bool prefetched);
ms_status ms__unit_fetch(unit *u);          // waits for the gathered bytes only
ms_status ms__unit_finish_gather(unit *u);  // waits; parameters are whole afterwards
// Points the parameters at the gathered bytes, or at what they are while sharded.
void ms__unit_show(unit *u, bool whole);
void ms__unit_shard(unit *u);               // back to the shards, whatever the schedule says
ms_status ms__unit_shard_to_post(unit *u);  // back to slices among post_group
void ms__unit_drop_post(unit *u);
void ms__unit_keep(unit *u);  // what the script changed in place in the wholes goes into the shard

// Gathers one piece of every rank at once; for wholes beside the gather buffer.
ms_status ms__unit_gather_apart(const unit *u, ms_storage *from, ms_storage *to, int dtype, const ms_piece *piece);

uint64_t ms__unit_versions(const unit *u);        // of its parameters, together: one more with each change
uint64_t ms__unit_shard_versions(const unit *u);  // of the shard alone
ms_status ms__unit_check_home(const unit *u);     // offloaded shards are on the CPU

#endif
