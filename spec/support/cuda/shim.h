// SPDX-License-Identifier: MIT
// cuda/shim.h -- a GPU for specs: the CUDA runtime calls that kernels/cuda/ uses, on the CPU. Compiled
// in place of cuda_runtime.h by g++ with -DMS_EMULATED into libmoonshard_cuda_emulated.so.
//
// Each device's memory is a separate arena, a memfd, so that other processes can map it (IPC handles). If the CPU has
// protection keys, only the streams' threads may access it: a CPU operator that reads device memory crashes. Under ASan
// the space between blocks is poisoned. A stream is a worker thread, so the host runs ahead of its kernels as it does
// on a GPU (in the modes `seed` and `late` one thread runs all streams); an event is a position in a stream's queue. A
// kernel runs block by block. Threads that meet at barriers are fibers that take turns; all other threads run one after
// the other. Shared memory is thread_local, because a stream's thread runs one block at a time.
#pragma once
#include "types.h"
#include "modes.h"
#include "fault.h"
#include "memory.h"
#include "virtual.h"
#include "streams.h"
#include "graphs.h"
#include "copies.h"
#include "fibers.h"
#include "shared.h"
#include "launch.h"
#include "warps.h"
#include "device.h"
#include "ipc.h"
#include "ipc_events.h"
