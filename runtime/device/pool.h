// SPDX-License-Identifier: MIT
// device/pool.h -- caching allocator: one pool per device. Freed blocks wait by size class and are handed
// out again without asking the system. CPU segments are memfds once dist is up, so that peers on the
// node map them and read any tensor in place.
//
// The ledger counts the bytes that were asked for, exactly: `allocated` is the sum over live blocks.
#ifndef MS_POOL_H
#define MS_POOL_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// A device is a type and, from bit 8 on, an index.
static inline int ms__device_type(int device) { return device & 0xff; }
static inline int ms__index(int device) { return device >> 8; }
static inline bool ms__is_cuda(int device) { return ms__device_type(device) == MS_CUDA; }
static inline bool ms__is_meta(int device) { return ms__device_type(device) == MS_META; }

typedef struct ms_segment ms_segment;
typedef struct ms_block {
    void *data;    // 64-byte aligned; NULL for 0 bytes
    size_t bytes;  // as asked for
    size_t size;   // as handed out
    int device;
    ms_segment *segment;    // NULL for foreign memory and for a device's
    struct ms_block *next;  // free list
} ms_block;

// MS_ENOMEM names what (an operator or purpose) and the sizes.
ms_status ms__alloc(ms_block **out, int device, size_t bytes, const char *what);
void ms__free(ms_block *b);

// Where peers find p: fd of the segment in this process and offset; false for memory they cannot map.
bool ms__segment_of(const ms_block *b, int *fd, uint64_t *offset, uint64_t *segment_id, uint64_t *segment_bytes);
// Maps fd (-1: fresh memory) at a huge page's boundary, so that huge pages fit; NULL with errno.
void *ms__map_aligned(int fd, size_t bytes);
// From now on new CPU segments are shareable (called by dist at start-up with peers on the node).
void ms__pool_share(void);
void ms__pool_stats(int device, ms_memory *out);
extern int64_t ms__live_tensors;  // tensor objects alive: counted by tensor/tensor.c, reported by ms__pool_stats

// The driver's allocation that a block of a GPU lies in; NULL: not known.
void *ms__device_base(const ms_block *b);

#ifdef __cplusplus
}
#endif

#endif
