// SPDX-License-Identifier: MIT
// comm/transport/nccl/communicator.h -- NCCL's communicators and the collectives on them.
#ifndef MS_NCCL_COMMUNICATOR_H
#define MS_NCCL_COMMUNICATOR_H

#include "comm/transport/transport.h"

extern const ms_transport_gpu nccl_communicators;
void nccl_leave_all(void);  // at the end of the job: leaves all communicators that remain; may block

#endif
