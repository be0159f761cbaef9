// SPDX-License-Identifier: MIT
// comm/issue/issue.h -- issues collectives.
#ifndef MS_COMM_ISSUE_ISSUE_H
#define MS_COMM_ISSUE_ISSUE_H

#include "comm/coll.h"

extern uint64_t ms__comm_issued;     // number of collectives that this rank has issued; engine thread only
extern double ms__comm_delays[OPS];  // seconds by which a spec delays collectives (ms_dist_set_delay)
// Takes ownership of c, but not of its storages. On the compute stream c is complete on return. work may be NULL.
ms_status ms__coll_issue(ms_coll *c, ms_work **work);
// As ms__collective (comm/request.h), also while a captured step runs.
ms_status ms__coll_request(const ms_request *r, ms_work **work);
ms_pending *ms__work_event(const ms_work *w);  // borrowed; NULL if w is NULL

#endif
