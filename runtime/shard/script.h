// SPDX-License-Identifier: MIT
// shard/script.h -- functions on managed parameters (those of units) for other parts of the runtime.
#ifndef MS_SHARD_SCRIPT_H
#define MS_SHARD_SCRIPT_H

#include "autograd/graph.h"

ms_tensor *ms__unit_local(ms_tensor *p);  // this rank's part of p; p itself if it is not managed
void ms__unit_stepped(ms_tensor *p);      // called after an optimizer has changed p's local tensor
// Whether p has a grad that is not reduced: a whole one although p itself is sharded, or this rank's own (nn.DDP).
bool ms__unit_unreduced(const ms_tensor *p);
// Fails because of such a grad. who: the function that refuses it; k: p's index in the script's list, from 0.
ms_status ms__unit_refuse_unreduced(const char *who, int k, const ms_tensor *p);

#endif
