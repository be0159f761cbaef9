// SPDX-License-Identifier: MIT
// comm/process/report.h -- uncaught errors of scripts, with the rank.
#ifndef MS_COMM_PROCESS_REPORT_H
#define MS_COMM_PROCESS_REPORT_H

#include <stdbool.h>

void ms__report_errors(void);  // starts reporting errors
bool ms__error_reported(void);

#endif
