// SPDX-License-Identifier: MIT
// comm/error.h -- errors that a script survives, as other wings publish and count them.
#ifndef MS_COMM_ERROR_H
#define MS_COMM_ERROR_H

#include <stdbool.h>
#include <stdint.h>

// Work failed on this rank with an error that the script may survive: peers that wait in its collectives raise `text`.
// since: ms__comm_epoch() when the work began. backward: the work was an outermost backward.
void ms__comm_publish_error(const char *text, uint64_t since, bool backward);
// The number of such errors that this rank has met. After it has grown, ranks may have left the same work at different
// places: state that decides what is communicated next must be made equal again.
uint64_t ms__comm_epoch(void);
// The epoch of the latest error by which a rank gave up a backward.
uint64_t ms__comm_failed_backward(void);

#endif
