// SPDX-License-Identifier: MIT
// shard/make.h -- how a unit is planned.
#ifndef MS_SHARD_MAKE_H
#define MS_SHARD_MAKE_H

#include "shard/unit.h"

ms_status ms__unit_replan(unit *u);  // after a change of dtypes or extensions; the unit must be sharded

#endif
