// SPDX-License-Identifier: MIT
// comm/ops.h -- the operations: what each is called, reads and writes.
#ifndef MS_COMM_OPS_H
#define MS_COMM_OPS_H

#include "device/stream.h"
#include "moonshard.h"

// A send and its receive are one collective. OP_REFUSED stands for a call whose argument checks failed.
enum {
    OP_BARRIER = MS_DIST_BARRIER,
    OP_ALL_REDUCE = MS_DIST_ALL_REDUCE,
    OP_ALL_GATHER = MS_DIST_ALL_GATHER,
    OP_REDUCE_SCATTER = MS_DIST_REDUCE_SCATTER,
    OP_BROADCAST = MS_DIST_BROADCAST,
    OP_REDUCE = MS_DIST_REDUCE,
    OP_GATHER = MS_DIST_GATHER,
    OP_SCATTER = MS_DIST_SCATTER,
    OP_ALL_TO_ALL = MS_DIST_ALL_TO_ALL,
    OP_SEND_RECV = MS_DIST_SEND,
    OP_REFUSED,
    OPS
};

enum {
    REDUCES = 1,
    IN_PLACE = 2,        // the output is the input tensor
    CUT = 4,             // the input has one block per member
    SIZED_BY_INPUT = 8,  // the request's size is the input's; without this flag, the output's
    IN_PAYLOAD = 16,     // a small input is put into the slot's payload
    IN_BLOCK = 32,       // the smaller tensor may be this rank's block within the larger one
};
typedef enum { NO_RANK, EVERY_RANK, THE_ROOT, THE_OTHERS } ms_side;  // send/recv: the sender is the root
typedef struct {
    const char *name;
    int kind;
    ms_side reads, writes;
    ms_stream_kind stream;
} ms_coll_row;
extern const ms_coll_row ms__coll_rows[OPS];
#define ROW(op) (&ms__coll_rows[op])

// Other names of operations, by the MS_DIST_* of the name less MS_DIST_RECV; 0: none.
enum { ALIASES = MS_DIST_ALL_TO_ALL_SINGLE - MS_DIST_RECV + 1 };
typedef struct {
    int op;
    const char *name;
} ms_coll_alias;
enum { RECOVER = ALIASES };  // the meeting of dist.recover
extern const ms_coll_alias ms__coll_aliases[ALIASES + 1];
static inline bool reduces(int op) { return ROW(op)->kind & REDUCES; }
static inline bool on_side(ms_side side, int member, int root)
{
    return side == EVERY_RANK || (side == THE_ROOT && member == root) || (side == THE_OTHERS && member != root);
}
static inline bool is_rooted(int op) { return ROW(op)->reads == THE_ROOT || ROW(op)->writes == THE_ROOT; }

#endif
