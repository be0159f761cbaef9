// SPDX-License-Identifier: MIT
// base/launcher.h -- which launcher started this process, as which rank of how many.
#ifndef MS_LAUNCHER_H
#define MS_LAUNCHER_H

#include "base/base.h"

int ms__ranks_here(void);  // ranks on this node by the launcher's variables; 0: unknown
// The rank in a process's environment block, from the variable PMIX_RANK; -1: none.
int ms__pmix_rank(const char *block, size_t n);

#endif
