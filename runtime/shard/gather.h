// SPDX-License-Identifier: MIT
// shard/gather.h -- gathers a unit's parameters and reshards them.
#ifndef MS_SHARD_GATHER_H
#define MS_SHARD_GATHER_H

#include "shard/unit.h"

// Starts the gather, on the gather stream if it is early (prefetched or asynchronous). No-op if the parameters are
// whole or a gather is in flight.
ms_status ms__unit_start_gather(unit *u, bool early, bool prefetched);
ms_status ms__unit_fetch(unit *u);          // waits for the gathered bytes; the parameters are not yet views of them
ms_status ms__unit_finish_gather(unit *u);  // waits for the gather and makes the parameters whole
// Makes each parameter a view of the gathered bytes (whole), or the tensor that it is while sharded (p->resting).
void ms__unit_show(unit *u, bool whole);
void ms__unit_shard(unit *u);  // reshards the parameters unconditionally
// As ms__unit_shard, but the ranks of post_group keep slices of the whole parameters.
ms_status ms__unit_shard_to_post(unit *u);
void ms__unit_drop_post(unit *u);
void ms__unit_keep(unit *u);  // copies the script's changes of whole parameters to the shard

// Gathers one piece of every rank and waits; for whole tensors outside the gather buffer.
ms_status ms__unit_gather_apart(const unit *u, ms_storage *from, ms_storage *to, int dtype, const ms_piece *piece);

uint64_t ms__unit_versions(const unit *u);        // sum of its parameters' versions: increases by one with each change
uint64_t ms__unit_shard_versions(const unit *u);  // as ms__unit_versions, but counts only changes of the shard
ms_status ms__unit_check_home(const unit *u);     // fails if offloaded shards are not on the CPU
void ms__unit_pin(const unit *u, const ms_storage *s);  // pins an offloaded unit's CPU memory if its options say so

#endif
