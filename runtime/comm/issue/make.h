// SPDX-License-Identifier: MIT
// comm/issue/make.h -- makes a collective of a request.
#ifndef MS_COMM_ISSUE_MAKE_H
#define MS_COMM_ISSUE_MAKE_H

#include "comm/coll.h"

ms_status ms__coll_make(const ms_request *r, ms_coll **out);
void ms__coll_drop(ms_coll *c);

#endif
