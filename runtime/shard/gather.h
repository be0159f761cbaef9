// SPDX-License-Identifier: MIT
// shard/gather.h -- a unit's parameters become whole and go back to their shards.
#ifndef MS_SHARD_GATHER_H
#define MS_SHARD_GATHER_H

#include "shard/unit.h"

// Starts the gather, on the gather stream if it is early (prefetched or asynchronous). No-op when whole or in flight.
ms_status ms__unit_start_gather(unit *u, bool early, bool prefetched);
ms_status ms__unit_fetch(unit *u);          // waits for the gathered bytes only
ms_status ms__unit_finish_gather(unit *u);  // waits; parameters are whole afterwards
// Makes the parameters views of the gathered bytes, or of what they show while sharded.
void ms__unit_show(unit *u, bool whole);
void ms__unit_shard(unit *u);               // shards the parameters, whatever the schedule says
ms_status ms__unit_shard_to_post(unit *u);  // the same, but post_group keeps slices of the wholes
void ms__unit_drop_post(unit *u);
void ms__unit_keep(unit *u);  // copies the script's changes of wholes to the shard

// Gathers one piece of every rank at once; for wholes beside the gather buffer.
ms_status ms__unit_gather_apart(const unit *u, ms_storage *from, ms_storage *to, int dtype, const ms_piece *piece);

uint64_t ms__unit_versions(const unit *u);        // sum over its parameters: grows by one with each change
uint64_t ms__unit_shard_versions(const unit *u);  // of the shard alone
ms_status ms__unit_check_home(const unit *u);     // fails unless offloaded shards are on the CPU

#endif
