// SPDX-License-Identifier: MIT
// comm/process/clean.h -- removes files left by killed jobs.
#ifndef MS_COMM_PROCESS_CLEAN_H
#define MS_COMM_PROCESS_CLEAN_H

#include <stdbool.h>

#define CONTROL_NAME "moonshard-control-"  // a control memory's file name; the process id and six letters follow
void ms__comm_clean(bool leaving);         // leaving: also removes this process's files

#endif
