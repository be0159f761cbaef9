// SPDX-License-Identifier: MIT
// comm/job/start.h -- turns independently launched processes into ranks with shared memory.
#ifndef MS_COMM_JOB_START_H
#define MS_COMM_JOB_START_H

#include "base/base.h"

ms_status ms__comm_start(const char *backend, double timeout);  // timeout 0: use the environment's setting

#endif
