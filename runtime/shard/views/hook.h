// SPDX-License-Identifier: MIT
// shard/views/hook.h -- gradients are divided before and after they are summed, by units and by communication hooks.
#ifndef MS_SHARD_HOOK_H
#define MS_SHARD_HOOK_H

#include "shard/reduce.h"

ms_status ms__divide(ms_tensor *t, double by);  // in place; by <= 1: not at all

#endif
