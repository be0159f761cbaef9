// SPDX-License-Identifier: MIT
// device/host_pins.c -- blocks of CPU memory that are pinned: GPUs copy from and to them without the driver's staging.
//
// A block that has pages of its own is pinned when a caller first asks for it. It stays pinned when it is freed, and
// the pool keeps its pages: pinning takes longer than a copy, and training uses the same blocks in every step.
#include <stdio.h>

#include "device/device.h"
#include "device/host_pins.h"

enum { PAGE = 4096, LEAST = 256 << 10 };  // LEAST: blocks from this size on have pages of their own (pool.c)

static struct {
    const void **blocks;  // their addresses, ascending
    int n, cap;
    bool refused;
} pinned;

// The index of the first pinned block that does not begin before p.
static int pin_index(const void *p)
{
    int low = 0, high = pinned.n;
    while (low < high) {
        int mid = (low + high) / 2;
        if ((const char *)pinned.blocks[mid] < (const char *)p) low = mid + 1;
        else high = mid;
    }
    return low;
}

bool ms__host_pinned(const ms_block *b)
{
    int k = pin_index(b->data);
    return k < pinned.n && pinned.blocks[k] == b->data;
}

void ms__host_pin(const ms_block *b)
{
    if (pinned.refused || !b || !b->segment || b->size < LEAST || !ms__cuda() || ms__host_pinned(b)) return;
    ms_status st = ms__grow(&pinned.blocks, &pinned.cap, pinned.n, sizeof *pinned.blocks, "pinned memory", "blocks");
    if (st == MS_OK) st = ms__cuda()->ranks.pin(b->data, (b->size + PAGE - 1) & ~(size_t)(PAGE - 1));
    if (st != MS_OK) {
        pinned.refused = true;
        fprintf(stderr, "moonshard: CPU memory is not pinned, so copies to and from GPUs are staged: %s\n", ms_error());
        return;
    }
    int k = pin_index(b->data);
    memmove(pinned.blocks + k + 1, pinned.blocks + k, (size_t)(pinned.n - k) * sizeof *pinned.blocks);
    pinned.blocks[k] = b->data;
    pinned.n++;
}
