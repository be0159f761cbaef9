// SPDX-License-Identifier: MIT
// comm/movers/gpu/memory.h -- memory and events of GPUs that ranks share.
#ifndef MS_COMM_MOVERS_GPU_MEMORY_H
#define MS_COMM_MOVERS_GPU_MEMORY_H

#include "comm/memory/group.h"

typedef struct {  // number of an arena, from 1 (0: no bytes), and the offset in that arena
    uint32_t arena;
    uint64_t at;
} ms_gpu_place;
bool ms__gpu_shares(void);           // engine thread: whether this rank can share GPU memory, as far as it knows
void ms__gpu_share_no_more(void);    // any thread: from now on ms__gpu_shares returns false
bool ms__gpu_has_events(int index);  // engine thread: whether this rank can make events for its peers
bool ms__gpu_place(ms_storage *s, const void *p, ms_gpu_place *out);  // engine thread; false: peers cannot map it
// Returns 1 if the peer has mapped this rank's arena, -1 if it cannot, 0 if it has not tried.
int ms__gpu_mapped(uint32_t arena, int rank);
// Returns the address of byte `at` of a rank's arena in this process; NULL with the error set.
char *ms__gpu_resolve(int index, int rank, uint32_t arena, uint64_t at);
// Engine thread. take: false if no event is free; make: one more, of at most GPU_EVENTS.
enum { GPU_EVENTS = 1024 };
bool ms__gpu_event_take(int index, int *number);
ms_status ms__gpu_event_make(int index, int *number);
int ms__gpu_events(void);  // the number of events that have been made
// ms__gpu_event_drop (engine thread) gives an event back. used: the collective in which peers wait for it; NULL: none.
typedef struct {
    const ms_group *g;
    uint64_t seq, number;
} ms_event_use;
void ms__gpu_event_drop(int number, const ms_event_use *used);
bool ms__gpu_event_reached(int number, int rank);  // whether that rank's GPU has reached the event's latest record
ms_status ms__gpu_event_record(int number, int index, int stream);
// Opens an event of a peer for streams of device `index`.
ms_status ms__gpu_event_open(int index, int rank, uint32_t number, void **event);
ms_status ms__gpu_event_wait(int index, int stream, int rank, uint32_t number);
void ms__gpu_forget_group(const ms_group *g);  // engine thread, when all members have finished g's collectives
void ms__gpu_stop(void);                       // waits for this rank's GPUs, and unmaps peers' memory

#endif
