// SPDX-License-Identifier: MIT
// comm/agree/mismatch.h -- the error of requests that differ.
#ifndef MS_COMM_AGREE_MISMATCH_H
#define MS_COMM_AGREE_MISMATCH_H

#include "comm/watch/watch.h"

bool ms__is_refused(const ms_coll *c);  // whether a member has refused this call, or a later one
ms_status ms__mismatch(ms_waiter *w);   // breaks the group with the requests of all members that have arrived

#endif
