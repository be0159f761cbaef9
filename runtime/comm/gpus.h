// SPDX-License-Identifier: MIT
// comm/gpus.h -- collectives of tensors that stay on GPUs, in a group within one node. A part of comm/internal.h, and
// included only there.
#ifndef MS_COMM_GPUS_H
#define MS_COMM_GPUS_H

#include "comm/internal.h"

// ---- comm/gpu.c ----
typedef struct {  // number of an arena, from 1 (0: no bytes), and the offset in that arena
    uint32_t arena;
    uint64_t at;
} ms_gpu_place;
typedef struct ms_flight ms_flight;
struct ms_there {
    int index, stream;  // the device, and its stream that moves the bytes
    bool shared;        // peers can map all operands, as far as this rank knows
    bool untried;       // not all peers have tried to map the operands
    bool used;          // the members move the bytes on their GPUs; otherwise through the windows
    ms_gpu_place in, out, *parts;
    int begin, end;     // numbers of this rank's events (ms_slot); -1: none
    void *ready;        // an event of the compute stream: the tensors are then ready; NULL: c runs on that stream
    ms_flight *flight;  // lets the host notice queued work that hangs (gpu_wait.c); NULL if `shared` is false
    ms_status failed;
};
// Engine thread: decides whether c's tensors stay on their GPU. If so, sets c->gpu.there, finds their places and takes
// events.
ms_status ms__gpu_take(ms_coll *c);
ms_status ms__gpu_begin(ms_coll *c);  // engine thread: records that the tensors are ready
// Makes the collective's stream wait until this rank's tensors are ready, and fills this rank's slot.
void ms__gpu_publish(ms_coll *c, ms_slot *s);
ms_status ms__gpu_agree(ms_waiter *w, bool *all);  // *all: whether the members move the bytes on their GPUs
ms_status ms__gpu_start(ms_coll *c);               // makes the stream wait until every member's tensors are ready
// Records the event `end`, before this rank sets `done` in its slot. Returns the first failure.
ms_status ms__gpu_moved(ms_coll *c);
// done: whether every member has set `done` in its slot; if so, makes the stream wait for every member's `end`. Sets
// `left` in this rank's slot in any case.
ms_status ms__gpu_finish(ms_coll *c, bool done);
void ms__gpu_drop(ms_coll *c);
void ms__gpu_stop(void);  // waits for this rank's GPUs, and unmaps peers' memory
// ms__gpu_copy, ms__gpu_lines and ms__gpu_reduce queue work on the collective's stream, and keep the first failure.
void ms__gpu_copy(ms_coll *c, void *dst, const void *src, size_t n, ms_direction way);
void ms__gpu_lines(ms_coll *c, char *dst, size_t dst_line, const char *src, size_t line, size_t n);
void ms__gpu_reduce(ms_coll *c, ms_cuda_reduction *r);  // sets what follows from c: dtype, reduction, n_ranks, scale
ms_status ms__gpu_sync(ms_coll *c);                     // waits for the stream; returns the first failure

// ---- comm/gpu_memory.c: memory and events of GPUs that ranks share ----
bool ms__gpu_shares(void);           // engine thread: whether this rank can share GPU memory, as far as it knows
void ms__gpu_share_no_more(void);    // any thread: from now on ms__gpu_shares returns false
bool ms__gpu_has_events(int index);  // engine thread: whether this rank can make events for its peers
bool ms__gpu_place(ms_storage *s, const void *p, ms_gpu_place *out);  // engine thread; false: peers cannot map it
// Returns 1 if the peer has mapped this rank's arena, -1 if it cannot, 0 if it has not tried.
int ms__gpu_mapped(uint32_t arena, int rank);
// Returns the address of byte `at` of a rank's arena in this process; NULL with the error set.
char *ms__gpu_resolve(int index, int rank, uint32_t arena, uint64_t at);
ms_status ms__gpu_event_take(int index, int *number);  // engine thread
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
void ms__gpu_memory_stop(void);

// ---- comm/gpu_fd.c: file descriptors of GPU memory ----
// Starts to send descriptors to peers, and says so on stderr; later calls do nothing. base returns the address of an
// arena; another thread calls it.
ms_status ms__gpu_fd_serve(char *(*base)(uint32_t arena));
ms_status ms__gpu_fd_fetch(int rank, uint32_t arena, int *fd);  // any thread; the caller closes *fd

// ---- comm/gpu_wait.c: collectives that are queued on this rank's GPU (engine thread, unless stated otherwise) ----
// Makes an entry of the list of collectives that are queued on a GPU, for a collective of g. NULL with the error set if
// there is no memory.
ms_flight *ms__flight_new(ms_group *g);
// Any thread, when all work of c has been queued: reads the numbers of the members' events from their slots, and
// records the event `passed`.
ms_status ms__flight_queued(ms_flight *f, const ms_coll *c);
// Lists the entry of c until the GPU has passed c; if the work of c was not queued, frees the entry at once. When
// the entry is freed, this rank's two events are given back.
void ms__flight_begin(ms_flight *f, const ms_coll *c);
void ms__flight_free(ms_flight *f);  // frees an entry that is not listed
void ms__flights_land(void);         // removes the collectives that the GPU has passed, and gives their events back
// Called while the engine thread waits for a GPU or a stream. Fails if a peer's GPU has not done its part of the oldest
// collective within the timeout, or if a peer has reported that.
ms_status ms__flights_check(void);

#endif
