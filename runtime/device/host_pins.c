// SPDX-License-Identifier: MIT
// device/host_pins.c -- blocks of CPU memory that are pinned: GPUs copy from and to them without the driver's staging.
//
// A block that has pages of its own is pinned when a caller first asks for it. It stays pinned when it is freed, and
// the pool keeps its pages: pinning takes longer than a copy, and training uses the same blocks in every step.
#include <stdio.h>

#include "device/device.h"
#include "device/host_pins.h"

enum { PAGE = 4096, LEAST = 256 << 10 };  // LEAST: blocks from this size on have pages of their own (pool.c)

static const void **pinned;  // addresses of the pinned blocks, ascending
static int n_pinned, cap_pinned;
static bool refused;

// The index of the first pinned block that does not begin before p.
static int place_of(const void *p)
{
    int low = 0, high = n_pinned;
    while (low < high) {
        int mid = (low + high) / 2;
        if ((const char *)pinned[mid] < (const char *)p) low = mid + 1;
        else high = mid;
    }
    return low;
}

bool ms__host_pinned(const ms_block *b)
{
    int k = place_of(b->data);
    return k < n_pinned && pinned[k] == b->data;
}

void ms__host_pin(const ms_block *b)
{
    if (refused || !b || !b->segment || b->size < LEAST || !ms__cuda() || ms__host_pinned(b)) return;
    ms_status st = ms__grow(&pinned, &cap_pinned, n_pinned, sizeof *pinned, "pinned memory", "blocks");
    if (st == MS_OK) st = ms__cuda()->ranks.pin(b->data, (b->size + PAGE - 1) & ~(size_t)(PAGE - 1));
    if (st != MS_OK) {
        refused = true;
        fprintf(stderr, "moonshard: CPU memory is not pinned, so copies to and from GPUs are staged: %s\n", ms_error());
        return;
    }
    int k = place_of(b->data);
    memmove(pinned + k + 1, pinned + k, (size_t)(n_pinned - k) * sizeof *pinned);
    pinned[k] = b->data;
    n_pinned++;
}
