// SPDX-License-Identifier: MIT
// comm/ops.c -- the operations: what each is called, reads and writes.
#include "comm/ops.h"

// Name; kind; the ranks that read the input; the ranks that write the output; the stream of a script's asynchronous
// call. A rank waits only for the storages of tensors that it reads or writes.
const ms_coll_row ms__coll_rows[OPS] = {
    [OP_BARRIER] = { "barrier", IN_PAYLOAD, EVERY_RANK, NO_RANK, MS_STREAM_COMPUTE },
    [OP_ALL_REDUCE] = { "all_reduce", REDUCES | IN_PLACE | IN_PAYLOAD, EVERY_RANK, EVERY_RANK, MS_STREAM_REDUCE },
    [OP_ALL_GATHER] = { "all_gather", SIZED_BY_INPUT | IN_PAYLOAD | IN_BLOCK, EVERY_RANK, EVERY_RANK,
                        MS_STREAM_GATHER },
    [OP_REDUCE_SCATTER] = { "reduce_scatter", REDUCES | CUT | IN_PAYLOAD | IN_BLOCK, EVERY_RANK, EVERY_RANK,
                            MS_STREAM_REDUCE },
    [OP_BROADCAST] = { "broadcast", IN_PLACE | IN_PAYLOAD, THE_ROOT, THE_OTHERS, MS_STREAM_REDUCE },
    [OP_REDUCE] = { "reduce", REDUCES | IN_PLACE | IN_PAYLOAD, EVERY_RANK, THE_ROOT, MS_STREAM_REDUCE },
    [OP_GATHER] = { "gather", SIZED_BY_INPUT | IN_PAYLOAD, EVERY_RANK, THE_ROOT, MS_STREAM_REDUCE },
    [OP_SCATTER] = { "scatter", CUT, THE_ROOT, EVERY_RANK, MS_STREAM_REDUCE },
    [OP_ALL_TO_ALL] = { "all_to_all", CUT | SIZED_BY_INPUT | IN_PAYLOAD, EVERY_RANK, EVERY_RANK, MS_STREAM_REDUCE },
    // A receive uses this stream, a send the copy stream (comm/script/calls.c).
    [OP_SEND_RECV] = { "send/recv", 0, THE_ROOT, THE_OTHERS, MS_STREAM_REDUCE },
    [OP_REFUSED] = { "refused", IN_PAYLOAD, NO_RANK, NO_RANK, MS_STREAM_COMPUTE },
};

const ms_coll_alias ms__coll_aliases[ALIASES + 1] = {
    [MS_DIST_ALL_GATHER_INTO_TENSOR - MS_DIST_RECV] = { OP_ALL_GATHER, "all_gather_into_tensor" },
    [MS_DIST_REDUCE_SCATTER_TENSOR - MS_DIST_RECV] = { OP_REDUCE_SCATTER, "reduce_scatter_tensor" },
    [MS_DIST_ALL_TO_ALL_SINGLE - MS_DIST_RECV] = { OP_ALL_TO_ALL, "all_to_all_single" },
    [RECOVER] = { OP_ALL_REDUCE, "dist.recover" },
};
