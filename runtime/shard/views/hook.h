// SPDX-License-Identifier: MIT
// shard/views/hook.h -- divides gradients before and after their sum, for units and communication hooks.
#ifndef MS_SHARD_HOOK_H
#define MS_SHARD_HOOK_H

#include "shard/reduce.h"

ms_status ms__divide(ms_tensor *t, double by);  // divides in place; no-op if by <= 1

#endif
