// SPDX-License-Identifier: MIT
// comm/recover.h -- failed work and recoveries, for other parts of the runtime.
#ifndef MS_COMM_RECOVER_H
#define MS_COMM_RECOVER_H

#include <stdbool.h>
#include <stdint.h>

// To be called when a piece of work that may communicate in several groups, such as a forward, has failed on this rank
// for the reason in `text`: takes a number in each of this rank's groups, as a refused call does, so that peers that
// wait there for this rank fail. backward: the work was an outermost backward.
void ms__comm_failed(const char *text, bool backward);
// Counts of failed work on this rank and of recoveries: after they have grown, state that decides what is communicated
// next must be made equal on all ranks. backwards: counts only backwards, and recoveries after which a rank's backward
// has failed.
typedef struct {
    uint32_t work, backwards;
} ms_failures;
ms_failures ms__comm_failures(void);

#endif
