// SPDX-License-Identifier: MIT
// comm/issue/recording.h -- the list of collectives that were issued.
#ifndef MS_COMM_ISSUE_RECORDING_H
#define MS_COMM_ISSUE_RECORDING_H

#include "comm/coll.h"

ms_status ms__record_collective(const ms_coll *c);

#endif
