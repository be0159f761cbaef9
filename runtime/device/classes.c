// SPDX-License-Identifier: MIT
// device/classes.c -- records of blocks, and the error of an allocation.
#include <stdio.h>

#include "device/classes.h"

static ms_block *unused;  // records

ms_block *ms__header_new(void)
{
    enum { SLAB = 64 };
    if (!unused) {
        ms_block *slab = calloc(SLAB, sizeof *slab);
        for (int i = 0; slab && i < SLAB; i++) ms__push(&unused, &slab[i]);
    }
    return ms__pop(&unused);
}

void ms__header_drop(ms_block *b) { ms__push(&unused, b); }

ms_status ms__pool_no_memory(const ms_usage *u, int device, size_t bytes, const char *what, const char *why)
{
    char name[24] = "cpu";
    if (ms__is_cuda(device)) snprintf(name, sizeof name, "cuda:%d", ms__index(device));
    return ms__fail(MS_ENOMEM, "%s: no memory for %zu bytes on %s (%s; %zu bytes allocated, %zu reserved)",
                    what ? what : "allocation", bytes, name, why, u->allocated, u->reserved);
}
