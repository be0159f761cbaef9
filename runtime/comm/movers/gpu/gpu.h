// SPDX-License-Identifier: MIT
// comm/movers/gpu/gpu.h -- collectives of tensors that stay on GPUs, in a group within one node.
#ifndef MS_COMM_MOVERS_GPU_GPU_H
#define MS_COMM_MOVERS_GPU_GPU_H

#include "comm/movers/gpu/flights.h"
#include "comm/movers/gpu/memory.h"
#include "comm/movers/mover.h"

// What is prepared for a collective whose tensors stay on a GPU.
typedef struct {
    int index, stream;  // the device, and its stream that moves the bytes
    bool shared;        // peers can map all operands, as far as this rank knows
    bool untried;       // not all peers have tried to map the operands
    bool used;          // the members move the bytes on their GPUs; otherwise through the windows
    ms_gpu_place in, out, *parts;
    int begin, end;     // numbers of this rank's events (ms_slot); -1: none
    void *ready;        // an event of the compute stream: the tensors are then ready; NULL: c runs on that stream
    ms_flight *flight;  // lets the host notice queued work that hangs (flights.h); NULL if `shared` is false
    ms_status failed;
} ms_gpu_coll;

#endif
