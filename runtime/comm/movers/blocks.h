// SPDX-License-Identifier: MIT
// comm/movers/blocks.h -- operations whose result each rank computes from the inputs of all members.
#ifndef MS_COMM_MOVERS_BLOCKS_H
#define MS_COMM_MOVERS_BLOCKS_H

#include "comm/movers/bytes.h"

// Bytes [at, at + n) of `blocks` blocks, from number `first` on, of every member. An input has one block, or one for
// each member (CUT).
typedef struct {
    const char **from;  // by member: its bytes of the first block; those of the next block are `stride` bytes further
    size_t block, at, n, stride;  // block: the size of a block
    int first, blocks;
    bool windows;  // they are in windows, in CPU memory; otherwise where the tensors are, or in payloads
} ms_blocks;

void ms__move_blocks(ms_coll *c, const ms_blocks *b);
void ms__move_whole_blocks(ms_coll *c, const char **in);  // in: the complete inputs

#endif
