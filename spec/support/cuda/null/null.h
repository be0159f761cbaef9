// SPDX-License-Identifier: MIT
// null.h -- a GPU that only counts. The plugin's own objects, compiled by nvcc, are linked with this folder instead of
// the CUDA runtime into libmoonshard_cuda_null.so (MOONSHARD_CUDA=null): launches, products by cuBLASLt, copies,
// allocations and waits are counted, and nothing runs.
//
// Device memory is reserved address space that cannot be touched. The host reads back zeros, so a norm is 0 and
// clipping scales nothing.
//
// The bytes that a launch reads and writes, for predictions: all tensors of operators are recorded (table.c wraps the
// plugin's table), all operands of products (product.c), and all filled or copied memory (calls.c). A launch touches
// those whose addresses occur in its arguments, or in a small table that was copied to an address among its arguments
// (places.c). Finding them takes the sizes of the arguments, which a caller reads off the PTX (ms_null_parameters).
// Each occurrence counts once, read or written.
#ifndef MS_NULL_H
#define MS_NULL_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ops/cuda.h"

#define EXPORT __attribute__((visibility("default")))

// The counters. scripts/bench/support/null_device.lua reads them through LuaJIT's FFI.
typedef struct {
    double launches, products, flops, to_device, to_host, on_device, copies, fills, allocations, frees, waits, events;
} ms_null_totals;
// A launch or a product; while bytes are recorded, also a copy on the device (kernel "copy") or a fill ("set"). bytes:
// of half types, of float32 and unknown data, of other data. A product has the kernel "product" and no grid.
typedef struct {
    const char *op, *kernel;
    double bytes[3], flops;
    int32_t blocks, threads, shared;  // shared: dynamic shared memory of a block
} ms_null_launch;

extern ms_null_totals ms__null_totals;
extern _Thread_local const char *ms__null_op;         // the operator that this thread runs
extern bool ms__null_watching;                        // whether the bytes of launches are recorded
ms_null_launch *ms__null_launch(const char *kernel);  // adds a launch to the list
double ms__null_flops(const char *kernel);            // flops of a launch of the current operator (table.c)
bool ms__null_on_device(const void *p);

// places.c: records memory on the device. size: bytes per element; 0: unknown.
void ms__null_note(const void *p, size_t bytes, int size);
void ms__null_note_tensor(const ms_tensor *t);
void ms__null_note_room(const void *p, size_t bytes);
// Records the pointers that a table has, when it is copied to the device: for example an optimizer's list of leaves.
void ms__null_note_table(const void *there, const void *here, size_t bytes);
// Adds to l the memory at all known addresses that occur in a launch's arguments (`bytes` bytes).
void ms__null_touch(ms_null_launch *l, const void *arguments, size_t bytes);

#endif
