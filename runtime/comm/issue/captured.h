// SPDX-License-Identifier: MIT
// comm/issue/captured.h -- collectives as work of a captured step.
#ifndef MS_COMM_ISSUE_CAPTURED_H
#define MS_COMM_ISSUE_CAPTURED_H

#include "comm/request.h"

// Issues a collective, and adds it to the captured step that is being recorded.
ms_status ms__capture_collective(const ms_request *r, ms_work **work);

#endif
