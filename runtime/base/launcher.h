// SPDX-License-Identifier: MIT
// base/launcher.h -- which launcher started this process, as which rank of how many.
#ifndef MS_LAUNCHER_H
#define MS_LAUNCHER_H

#include "base/base.h"

int ms__ranks_here(void);  // ranks on this node before they have met; 0: the launcher does not say
// The rank in a process's environment block, by the variable that PMIx gives every process it starts; -1: none.
int ms__pmix_rank(const char *block, size_t n);

#endif
