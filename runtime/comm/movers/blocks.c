// SPDX-License-Identifier: MIT
// comm/movers/blocks.c -- operations whose result each rank computes from the inputs of all members.
#include "comm/movers/blocks.h"

static void put_slice(ms_coll *c, const ms_blocks *b, char *to, const char *from)
{
    if (b->windows) put_out(c, to, from, b->n);
    else copy_block(c, to, from, b->n);
}

void ms__move_blocks(ms_coll *c, const ms_blocks *b)
{
    int n = c->g->n, me = c->g->me;
    char *out = c->out.data + b->at;
    // Whether this rank's block is among them, and where.
    bool mine = me >= b->first && me < b->first + b->blocks;
    size_t own = mine ? (size_t)(me - b->first) * b->stride : 0;
    switch (c->op) {
    case MS_DIST_REDUCE_SCATTER:  // never in windows
        for (int k = 0; k < n; k++) b->from[k] += own;
        reduce_block(c, n, b->from, 1, &out, b->n / (size_t)ms__dtype_size(c->reducer.dtype));
        break;
    case MS_DIST_BROADCAST:
        if (c->root != me) put_slice(c, b, out, b->from[c->root]);
        break;
    case MS_DIST_GATHER:
        for (int k = 0; k < n && c->root == me; k++) put_slice(c, b, out + (size_t)k * b->block, b->from[k]);
        break;
    case MS_DIST_SCATTER:
        if (mine) put_slice(c, b, out, b->from[c->root] + own);
        break;
    case MS_DIST_ALL_TO_ALL:
        for (int j = 0; j < n && mine; j++) {
            int k = (me + j) % n;
            put_slice(c, b, out + (size_t)k * b->block, b->from[k] + own);
        }
        break;
    case OP_SEND_RECV:
        if (me == 1) put_slice(c, b, out, b->from[0]);
        break;
    default: break;
    }
}

void ms__move_whole_blocks(ms_coll *c, const char **in)
{
    size_t block = c->count * (size_t)ms__dtype_size(c->reducer.dtype);
    const ms_blocks all = { .from = in, .block = block, .n = block, .stride = block, .blocks = c->g->n };
    ms__move_blocks(c, &all);
}
