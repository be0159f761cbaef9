// SPDX-License-Identifier: MIT
// comm/error.h -- publishing and counting errors that a script may survive, for other parts of the runtime.
#ifndef MS_COMM_ERROR_H
#define MS_COMM_ERROR_H

#include <stdbool.h>
#include <stdint.h>

// Publishes `text`, an error of this rank that the script may survive: peers that wait in its collectives raise it.
// since: ms__comm_epoch() when the failed work began. backward: that work was an outermost backward.
void ms__comm_publish_error(const char *text, uint64_t since, bool backward);
// The number of published errors that this rank has met. After this number has grown, ranks may have left the same work
// at different points: state that decides what is communicated next must be made equal again.
uint64_t ms__comm_epoch(void);
// Of the errors that this rank has met and that made some rank abort a backward, the epoch of the latest; 0: none.
uint64_t ms__comm_failed_backward(void);

#endif
