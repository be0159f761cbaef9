// SPDX-License-Identifier: MIT
// device/history.h -- the allocations that are live and those at the peak, by the place in the script that made them.
#ifndef MS_HISTORY_H
#define MS_HISTORY_H

#include "device/classes.h"

#ifdef __cplusplus
extern "C" {
#endif

extern bool ms__history_on;

// Called by the allocators: for a new block while the history is on (after the ledger has counted it), for a block with
// a record before it is freed, and before a block with a record changes its kind.
void ms__history_add(ms_block *b, const ms_usage *u, const char *what);
void ms__history_drop(const ms_block *b);
void ms__history_kind(ms_block *b, ms_memory_kind kind);

void ms__history_restart(int device, const ms_usage *u);  // what is in use now becomes the peak
// The part of ms_memory_snapshot that reads the records.
const char *ms__memory_kind_name(int kind);  // NULL if there is none
double ms__history_read(int device, ms_memory *peak, ms_memory_record *out, double room);

static inline void ms__add_allocated(ms_usage *u, ms_block *b, const char *what)
{
    u->allocated += b->bytes;
    if (u->allocated > u->peak) u->peak = u->allocated;
    if (MS_UNLIKELY(ms__history_on)) ms__history_add(b, u, what);
}

// Subtracts a block that is being freed from the usage, and from its record in the history.
static inline void ms__drop_allocated(ms_usage *u, ms_block *b)
{
    u->allocated -= b->bytes;
    if (MS_LIKELY(b->tag == 0)) return;
    if (b->tag == MS_SCRATCH) {
        u->allocated += b->bytes;
        u->scratch -= b->bytes;
        b->tag = 0;
        return;
    }
    if (b->tag > 15) ms__history_drop(b);
    if (ms__kind_of(b)) u->kinds[ms__kind_of(b)] -= b->bytes;
    b->tag = 0;
}

#ifdef __cplusplus
}
#endif

#endif
