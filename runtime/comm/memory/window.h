// SPDX-License-Identifier: MIT
// comm/memory/window.h -- how much of a staged collective fits in a window (movers/staged.c).
#ifndef MS_COMM_MEMORY_WINDOW_H
#define MS_COMM_MEMORY_WINDOW_H

#include <stddef.h>

typedef struct {
    size_t bytes;  // bytes of a block that a round moves: a multiple of 64
    int blocks;    // blocks of a member that a round moves
} ms_slice;

// The largest slice for which a window of `window` bytes holds the slices of `members` members with `blocks` blocks
// each. With many members and blocks, a round moves only some blocks of each member. window >= 64 * members.
static inline ms_slice ms__slice(size_t window, int blocks, int members)
{
    size_t room = window / (size_t)members, bytes = room / (size_t)blocks & ~(size_t)63;
    if (bytes) return (ms_slice) { bytes, blocks };
    return (ms_slice) { 64, (int)(room / 64) };
}

#endif
