// SPDX-License-Identifier: MIT
// device/move.h -- waits for GPUs, and moves bytes between devices.
#ifndef MS_MOVE_H
#define MS_MOVE_H

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

ms_status ms__cuda_sync(int device, int stream);
// How often the host has waited for all work of each GPU's compute stream.
extern uint64_t ms__cuda_waits[MS_CUDA_DEVICES];
// Waits for all streams of a GPU, without retiring records (device/stream.h). Fails if a peer's GPU keeps this one
// from ending its work (comm/movers/gpu/flights.c).
ms_status ms__cuda_settle(int index);
// Waits for an event. Fails as ms__cuda_settle does.
ms_status ms__cuda_await(void *event);

// Copies bytes between or within devices, in the order of the compute stream. Waits for the end of a copy to the CPU.
ms_status ms__move(int to, void *dst, int from, const void *src, size_t bytes);
ms_status ms__set_bytes(int device, void *p, int byte, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
