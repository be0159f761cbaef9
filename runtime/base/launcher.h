// SPDX-License-Identifier: MIT
// base/launcher.h -- the launcher that started this process, its rank and the number of ranks.
#ifndef MS_LAUNCHER_H
#define MS_LAUNCHER_H

#include "base/base.h"

int ms__ranks_here(void);  // number of ranks on this node, from the launcher's variables; 0 if unknown
// The rank that the variable PMIX_RANK gives in a process's environment block; -1 if it is unset.
int ms__pmix_rank(const char *block, size_t n);

#endif
