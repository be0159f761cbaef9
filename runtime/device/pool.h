// SPDX-License-Identifier: MIT
// device/pool.h -- the caching allocator: one pool per device. Freed blocks are reused without a system call: they are
// kept by size class; large blocks of a GPU are instead merged with their neighbours (slab.h). In a job of
// several ranks the CPU's arenas are memfds if possible, so that peers on the node can map them and read tensors in
// place.
//
// The ledger counts requested bytes exactly: `allocated` is their sum over all live blocks, `kinds` their sums by what
// the blocks hold. Scratch memory, which a kernel uses while it runs, is counted apart: it depends on the processor,
// its caches and the number of threads; `allocated` and its peak do not.
#ifndef MS_POOL_H
#define MS_POOL_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// A device is a number: its type in the low 8 bits, its index above them.
static inline int ms__device_type(int device) { return device & 0xff; }
static inline int ms__index(int device) { return device >> 8; }
static inline bool ms__is_cuda(int device) { return ms__device_type(device) == MS_CUDA; }
static inline bool ms__is_meta(int device) { return ms__device_type(device) == MS_META; }

typedef struct ms_segment ms_segment;
typedef struct ms_captured ms_captured;  // device/capture.h
typedef struct ms_pins ms_pins;
typedef struct ms_block {
    void *data;    // 64-byte aligned; NULL for 0 bytes
    size_t bytes;  // the requested size
    size_t size;   // the size of its class, or of its range on a GPU; 0: not from a pool
    int device;
    uint32_t tag;         // the kind in the low 4 bits, above it the record of history.c; 0: neither
    ms_segment *segment;  // the CPU's arena that contains it; NULL: none
    // The next block of a free list; in the copy of a block that a captured step keeps: the original
    struct ms_block *next;
    ms_pins *pins;  // the captured step that has pinned it; NULL: none
} ms_block;

// Allocates a block of `bytes` bytes. On MS_ENOMEM the text names `what` (an operator or purpose) and the sizes.
ms_status ms__alloc(ms_block **out, int device, size_t bytes, const char *what);
// Allocates scratch memory of a kernel of the CPU, which the kernel frees before it returns.
ms_status ms__alloc_scratch(ms_block **out, size_t bytes, const char *what);
void ms__free(ms_block *b);
static inline ms_memory_kind ms__kind_of(const ms_block *b) { return (ms_memory_kind)(b->tag & 15); }
void ms__set_kind(ms_block *b, ms_memory_kind kind);  // records what b holds; a new block is MS_MEMORY_OTHER

// Memory of a captured step. Blocks that are allocated while ms__pinning (capturing.h) is set are pinned: when they are
// freed they return to the pins, where only allocations of the same recording find them, and to the pool when the pins
// are freed. Free pinned blocks count as allocated: with the size of their class, or on a GPU with the size of their
// latest use.
ms_pins *ms__pins_new(void);  // NULL: no memory
void ms__pins_free(ms_pins *p);
size_t ms__pins_bytes(const ms_pins *p);  // what the ledger counts for all its blocks
int ms__pins_in_use(const ms_pins *p);    // the number of its blocks that are in use

// Finds what peers need to map b: the file descriptor of its arena in this process, the arena's id and size, and b's
// offset. False if peers cannot map b.
bool ms__segment_of(const ms_block *b, int *fd, uint64_t *offset, uint64_t *segment_id, uint64_t *segment_bytes);
// Maps fd (-1: anonymous memory) at a multiple of the huge page size. NULL with errno on failure.
void *ms__map_aligned(int fd, size_t bytes);
// Makes new arenas of the CPU shareable. dist.init calls it in a job of several ranks.
void ms__pool_share(void);
void ms__pool_stats(int device, ms_memory *out);
// Number of tensor objects alive: counted by tensor/tensor.c, reported by ms__pool_stats.
extern int64_t ms__live_tensors;

#ifdef __cplusplus
}
#endif

#endif
