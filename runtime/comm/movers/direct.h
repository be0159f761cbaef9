// SPDX-License-Identifier: MIT
// comm/movers/direct.h -- tensors that are read and written in place.
#ifndef MS_COMM_MOVERS_DIRECT_H
#define MS_COMM_MOVERS_DIRECT_H

#include "comm/movers/mover.h"

ms_status ms__move_direct(ms_coll *c);  // parts must be in CPU memory

#endif
