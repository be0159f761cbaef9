// SPDX-License-Identifier: MIT
// device/slab.h -- large blocks of a GPU's memory, cut from slabs (allocations of the driver). A block is cut from the
// smallest free range that fits, and a freed block merges with its free neighbours, so that steps with different sizes
// reuse the same memory. Blocks that outlive a step have slabs of their own: among a step's blocks they would split
// ranges that the next step uses whole. The caller allocates slabs from the driver and frees them.
#ifndef MS_SLAB_H
#define MS_SLAB_H

#include "device/pool.h"

enum { MS_SLAB_UNIT = 4096, MS_SLAB_BINS = 64 };

typedef struct ms_slab_range ms_slab_range;
typedef struct {
    ms_slab_range *free[MS_SLAB_BINS];  // lists of free ranges, by the binary logarithm of their size
    ms_slab_range *unused;              // free list of records of ranges
} ms_slabs;

// Cuts a block of `size` bytes, rounded up to MS_SLAB_UNIT, from a slab for lasting or for other blocks. NULL if no
// free range is large enough.
ms_block *ms__slab_cut(ms_slabs *s, size_t size, bool lasting);
void ms__slab_return(ms_slabs *s, ms_block *b);
// Adds an allocation of the driver as one free range. MS_ENOMEM if there is no memory for its record.
ms_status ms__slab_add(ms_slabs *s, void *base, size_t bytes, bool lasting);
// Removes a slab in which no block is in use, and for which kept(its start) is false. Returns the slab's start; NULL:
// there is none.
void *ms__slab_remove(ms_slabs *s, bool (*kept)(const void *base), size_t *bytes);
// The start of the slab that contains b.
void *ms__slab_base(const ms_block *b);

#endif
