// SPDX-License-Identifier: MIT
// shard/extend.h -- all-gather extensions of a unit.
#ifndef MS_SHARD_EXTEND_H
#define MS_SHARD_EXTEND_H

#include "shard/unit.h"

// Check and set n extensions; `which` lists count[e] parameters of extension e. The unit must be sharded; after
// ms__extensions_set, call ms__unit_replan.
ms_status ms__extensions_check(const unit *u, int n, const int32_t *count, const int32_t *which);
ms_status ms__extensions_set(unit *u, int n, const int32_t *count, const int32_t *which);
void ms__extensions_drop(unit *u);
bool ms__extensions_given(const unit *u);  // whether the script has passed the inputs for a gather
// The dtype of the gathered data; MS_U8 if it has several. dtype: of the parameters without extension; -1: none.
int ms__extensions_dtype(const unit *u, int dtype);
ms_status ms__extensions_place(unit *u);  // sets the offsets of inputs and outputs, after the other parameters
ms_status ms__extensions_pack(unit *u);   // copies the inputs into u->memory.cast
ms_status ms__extensions_refill(unit *u);
void ms__extensions_vacate(unit *u);
ms_status ms__extensions_made(const unit *u);  // fails if the script has not built all whole parameters

#endif
