// SPDX-License-Identifier: MIT
// device/classes.h -- what the pools of the CPU (pool.c) and of GPUs (gpu_pool.c) share: size classes, records and
// lists of blocks, the ledger, the limit.
#ifndef MS_CLASSES_H
#define MS_CLASSES_H

#include "device/pool.h"

enum {
    MS_POOL_UNIT = 64,        // alignment, and size of the smallest block
    MS_CLASSES = 8 + 8 * 32,  // up to 2^41 bytes
    MS_SCRATCH = 15,          // the tag of a block of scratch memory
};

typedef struct {
    size_t allocated, peak, reserved, peak_reserved, scratch, peak_scratch;
    size_t kinds[MS_MEMORY_KINDS];  // kinds[MS_MEMORY_OTHER] stays 0: other memory is the rest of `allocated`
} ms_usage;

// Free blocks of a captured step. Blocks on GPUs are in one list, `there`; `bytes` of such a block is the size for
// which it was last used.
struct ms_pins {
    ms_block *free[MS_CLASSES], *there;
    size_t bytes;  // what the ledger counts for all blocks
    int in_use;
    bool over;  // the step was freed: blocks in use return to the pool
};

static inline void ms__kinds_out(const size_t *kinds, ms_memory *out)
{
    out->parameters = (double)kinds[MS_MEMORY_PARAMETERS];
    out->gradients = (double)kinds[MS_MEMORY_GRADIENTS];
    out->optimizer = (double)kinds[MS_MEMORY_OPTIMIZER];
    out->gathered = (double)kinds[MS_MEMORY_GATHERED];
}

static inline void ms__add_scratch(ms_usage *u, ms_block *b)
{
    b->tag = MS_SCRATCH;
    u->scratch += b->bytes;
    if (u->scratch > u->peak_scratch) u->peak_scratch = u->scratch;
}

static inline void ms__add_reserved(ms_usage *u, size_t bytes)
{
    u->reserved += bytes;
    if (u->reserved > u->peak_reserved) u->peak_reserved = u->reserved;
}

// The size class of a block of `bytes` bytes; *size: the size in bytes of the blocks in that class. There are eight
// classes of 1 to 8 units, then eight per power of two.
static inline int ms__class_of(size_t bytes, size_t *size)
{
    size_t n = (bytes + MS_POOL_UNIT - 1) / MS_POOL_UNIT;
    if (n <= 8) {
        *size = n * MS_POOL_UNIT;
        return (int)n - 1;
    }
    int shift = 60 - __builtin_clzll(n - 1);
    size_t m = (n - 1) >> shift;  // in 8..15
    *size = ((m + 1) << shift) * MS_POOL_UNIT;
    return 8 * shift + (int)m;
}

ms_block *ms__header_new(void);  // a block's record; NULL: no memory
void ms__header_drop(ms_block *b);

static inline bool ms__over_limit(size_t allocated, size_t bytes)
{
    return ms__state.memory_limit > 0 && (double)allocated + (double)bytes > ms__state.memory_limit;
}
// Fails with MS_ENOMEM. u: the device's ledger; why: the reason, in parentheses.
ms_status ms__pool_no_memory(const ms_usage *u, int device, size_t bytes, const char *what, const char *why);

static inline ms_block *ms__pop(ms_block **list)
{
    ms_block *b = *list;
    if (b) *list = b->next;
    return b;
}

static inline void ms__push(ms_block **list, ms_block *b)
{
    b->next = *list;
    *list = b;
}

#endif
