// SPDX-License-Identifier: MIT
// comm/transport/self.c -- the transport of a process that no launcher started: a world of one, without messages.
#include "comm/transport/self.h"

const ms_transport ms__transport_self = { .version = MS_TRANSPORT_VERSION, .name = "self" };
