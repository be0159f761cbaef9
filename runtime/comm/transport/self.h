// SPDX-License-Identifier: MIT
// comm/transport/self.h -- the transport of a process that no launcher started.
#ifndef MS_TRANSPORT_SELF_H
#define MS_TRANSPORT_SELF_H

#include "comm/transport/transport.h"

extern const ms_transport ms__transport_self;  // a world of one rank

#endif
