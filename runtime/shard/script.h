// SPDX-License-Identifier: MIT
// shard/script.h -- functions on managed parameters (those of units) for other parts of the runtime.
#ifndef MS_SHARD_SCRIPT_H
#define MS_SHARD_SCRIPT_H

#include "autograd/graph.h"

ms_tensor *ms__unit_local(ms_tensor *p);      // this rank's part of p; p itself if it is not managed
void ms__unit_stepped(ms_tensor *p);          // called after an optimizer has changed p's local tensor
bool ms__unit_unreduced(const ms_tensor *p);  // whether p has a whole, unreduced grad although p itself is sharded

#endif
