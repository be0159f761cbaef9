// SPDX-License-Identifier: MIT
// shard/make.h -- the dtypes, layout and buffers of a unit, chosen again after a change.
#ifndef MS_SHARD_MAKE_H
#define MS_SHARD_MAKE_H

#include "shard/unit.h"

// Chooses u's dtypes and layout again and makes a new gather buffer and views, after a change of dtypes or extensions.
// u must be sharded.
ms_status ms__unit_replan(unit *u);

#endif
