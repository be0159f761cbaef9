// SPDX-License-Identifier: MIT
// comm/job/clock.h -- the clocks of nodes, compared with rank 0's.
#ifndef MS_COMM_JOB_CLOCK_H
#define MS_COMM_JOB_CLOCK_H

#include "base/base.h"

ms_status ms__clock_measure(void);
void ms__clock_take(void);

#endif
