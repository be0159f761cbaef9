// SPDX-License-Identifier: MIT
// shard/make.h -- how a unit is planned.
#ifndef MS_SHARD_MAKE_H
#define MS_SHARD_MAKE_H

#include "shard/unit.h"

// Plans u again and makes its gather buffer and views anew, after a change of dtypes or extensions. u must be sharded.
ms_status ms__unit_replan(unit *u);

#endif
