// SPDX-License-Identifier: MIT
// comm/ops.h -- the operations: what each is called, reads and writes.
#ifndef MS_COMM_OPS_H
#define MS_COMM_OPS_H

#include "device/stream.h"
#include "moonshard.h"

// An operation is an MS_DIST_*. A send and its receive are one. OP_REFUSED stands for a call whose argument checks
// failed.
enum { OP_SEND_RECV = MS_DIST_SEND, OP_REFUSED, OPS };

enum {
    REDUCES = 1,         // values of the members are combined
    IN_PLACE = 2,        // the output is the input tensor
    CUT = 4,             // the input has one block per member
    SIZED_BY_INPUT = 8,  // the request's size is the input's; without this flag, the output's
    IN_PAYLOAD = 16,     // a small input is put into the slot's payload
    IN_BLOCK = 32,       // the smaller tensor may be this rank's block within the larger one
    SHARED = 64,         // every member reduces a share of the elements for all
};
// How the numbers of elements of a script's input and output relate. OUT_ALL, IN_ALL: the output, the input has those
// of the other one for each member. Equal ones are a multiple of the number of members if the input is CUT.
typedef enum { ANY_SIZE, OUT_ALL, IN_ALL, EQUAL_SIZE } ms_sizes;
typedef enum { NO_RANK, EVERY_RANK, THE_ROOT, THE_OTHERS } ms_side;  // send/recv: the sender is the root
typedef struct {
    const char *name;
    int kind;
    ms_side reads, writes;
    ms_stream_kind stream;
    ms_sizes sizes;
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
static inline bool is_shared(int op) { return ROW(op)->kind & SHARED; }
static inline bool on_side(ms_side side, int member, int root)
{
    return side == EVERY_RANK || (side == THE_ROOT && member == root) || (side == THE_OTHERS && member != root);
}
static inline bool is_rooted(int op) { return ROW(op)->reads == THE_ROOT || ROW(op)->writes == THE_ROOT; }

#endif
