// SPDX-License-Identifier: MIT
// comm/memory/arena.h -- maps the memory of peers on this node.
#ifndef MS_COMM_MEMORY_ARENA_H
#define MS_COMM_MEMORY_ARENA_H

#include "comm/comm.h"

ms_status ms__arenas_start(void);
bool ms__comm_locate(ms_storage *s, const void *p, uint32_t *arena, uint64_t *at);
char *ms__comm_resolve(int rank, uint32_t arena, uint64_t at);  // the address in this process; NULL with the error set
bool ms__comm_can_map(int rank);  // tries to map that rank's arena, at the start of the job

#endif
