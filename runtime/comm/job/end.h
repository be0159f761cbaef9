// SPDX-License-Identifier: MIT
// comm/job/end.h -- the end of a job.
#ifndef MS_COMM_JOB_END_H
#define MS_COMM_JOB_END_H

void ms__comm_stop(void);  // orderly end, with MPI_Finalize
void ms__end_catch(void);  // registers the exit handler

#endif
