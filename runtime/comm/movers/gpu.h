// SPDX-License-Identifier: MIT
// comm/movers/gpu.h -- collectives of tensors that stay on GPUs, in a group within one node.
#ifndef MS_COMM_MOVERS_GPU_H
#define MS_COMM_MOVERS_GPU_H

#include "device/device.h"
#include "comm/movers/gpu_memory.h"
#include "comm/movers/gpu_wait.h"
#include "comm/watch/wait.h"

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
// ms__gpu_copy, ms__gpu_lines and ms__gpu_reduce queue work on the collective's stream, and keep the first failure.
void ms__gpu_copy(ms_coll *c, void *dst, const void *src, size_t n, ms_direction way);
void ms__gpu_lines(ms_coll *c, char *dst, size_t dst_line, const char *src, size_t line, size_t n);
void ms__gpu_reduce(ms_coll *c, ms_cuda_reduction *r);  // sets what follows from c: dtype, reduction, n_ranks, scale
ms_status ms__gpu_sync(ms_coll *c);                     // waits for the stream; returns the first failure

#endif
