// SPDX-License-Identifier: MIT
// comm/job/job.h -- the start and the end of a job.
#ifndef MS_COMM_JOB_JOB_H
#define MS_COMM_JOB_JOB_H

#include "base/base.h"

// ---- clock.c: the clocks of nodes, compared with rank 0's ----
ms_status ms__clock_measure(void);
void ms__clock_take(void);

// ---- start.c: turns independently launched processes into ranks with shared memory ----
ms_status ms__comm_start(const char *backend, double timeout);  // timeout 0: use the environment's setting

// ---- end.c: the end of a job ----
void ms__comm_stop(void);  // orderly end, with MPI_Finalize
void ms__end_catch(void);  // registers the exit handler

#endif
