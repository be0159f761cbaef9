// SPDX-License-Identifier: MIT
// shard/script.h -- what other wings ask of managed parameters.
#ifndef MS_SHARD_SCRIPT_H
#define MS_SHARD_SCRIPT_H

#include "autograd/graph.h"

ms_tensor *ms__unit_local(ms_tensor *p);      // this rank's part of p; p itself when it is not managed
void ms__unit_stepped(ms_tensor *p);          // an optimizer has changed its local tensor
bool ms__unit_unreduced(const ms_tensor *p);  // p's grad is whole, and p is not

#endif
