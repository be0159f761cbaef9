// SPDX-License-Identifier: MIT
// comm/agree/exchange.h -- one collective on one rank, from its ready flag to its completion.
#ifndef MS_COMM_AGREE_EXCHANGE_H
#define MS_COMM_AGREE_EXCHANGE_H

#include "comm/coll.h"

ms_status ms__coll_run(ms_coll *c);

#endif
