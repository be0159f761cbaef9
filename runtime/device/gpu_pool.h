// SPDX-License-Identifier: MIT
// device/gpu_pool.h -- the caching allocator of GPUs, behind the functions of pool.h.
#ifndef MS_GPU_POOL_H
#define MS_GPU_POOL_H

#include "device/classes.h"

ms_usage *ms__gpu_usage(int index);  // NULL if index >= MS_CUDA_DEVICES
ms_status ms__gpu_alloc(ms_block **out, int device, size_t bytes, const char *what);
extern bool ms__gpu_lasting;  // whether blocks that are allocated now outlive the step, as optimizers' states do
void ms__gpu_free(ms_block *b);
void ms__gpu_empty_caches(void);
// The pool's block that has b's memory: b itself, or if b is a captured step's copy of a pinned block (size 0), that
// block.
static inline const ms_block *ms__owner_of(const ms_block *b) { return b && !b->size && b->next ? b->next : b; }
// The start of the driver's allocation that contains the block; NULL if unknown.
void *ms__device_base(const ms_block *b);
// Keeps the driver's allocation at `base` as long as the process runs: peers have it mapped.
ms_status ms__gpu_keep(void *base);

#endif
