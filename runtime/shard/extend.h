// SPDX-License-Identifier: MIT
// shard/extend.h -- all-gather extensions of a unit.
#ifndef MS_SHARD_EXTEND_H
#define MS_SHARD_EXTEND_H

#include "shard/unit.h"

// n extensions; `which` lists count[e] parameters of each. The unit must be sharded and is replanned afterwards.
ms_status ms__extensions_check(const unit *u, int n, const int32_t *count, const int32_t *which);
ms_status ms__extensions_set(unit *u, int n, const int32_t *count, const int32_t *which);
void ms__extensions_drop(unit *u);
bool ms__extensions_given(const unit *u);            // the script has given the inputs for a gather
int ms__extensions_dtype(const unit *u, int dtype);  // of everything gathered: dtype, or bytes
ms_status ms__extensions_place(unit *u);             // places inputs and outputs behind the other parameters
ms_status ms__extensions_pack(unit *u);              // copies inputs into the cast
ms_status ms__extensions_refill(unit *u);
void ms__extensions_vacate(unit *u);
ms_status ms__extensions_made(const unit *u);  // fails unless every extension has made its whole

#endif
