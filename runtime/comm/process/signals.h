// SPDX-License-Identifier: MIT
// comm/process/signals.h -- the signals by which users, mpirun and Slurm end a job.
#ifndef MS_COMM_PROCESS_SIGNALS_H
#define MS_COMM_PROCESS_SIGNALS_H

void ms__signals_start(void);  // in a rank of a launcher: from now on signals that end it are reported

#endif
