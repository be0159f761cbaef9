// SPDX-License-Identifier: MIT
// comm/movers/alone.h -- collectives in a group of one rank.
#ifndef MS_COMM_MOVERS_ALONE_H
#define MS_COMM_MOVERS_ALONE_H

#include "comm/coll.h"

ms_status ms__move_alone(ms_coll *c);

#endif
