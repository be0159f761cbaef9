// SPDX-License-Identifier: MIT
// comm/movers/mover.h -- the ways in which the bytes of a collective move.
//
//  nccl      on GPUs, by the transport's library
//  gpu       on GPUs of one node, by the engine
//  host      from a GPU to CPU memory before, and back after: then one of the following moves the bytes
//  inline    every input is in a payload in the control memory
//  nodes     one member on every node: by messages alone
//  direct    peers' tensors are read and written in place
//  staged    in rounds through the windows: for memory that peers cannot map, and for several nodes
//
// A mover is a table of functions, and a line in mover.c; nothing outside asks which one moves a collective. All but
// NCCL add in rank order, so they give the same bits.
#ifndef MS_COMM_MOVERS_MOVER_H
#define MS_COMM_MOVERS_MOVER_H

#include "comm/watch/watch.h"
#include "device/device.h"

// All functions but name may be NULL, except move and finish of a mover that serves, and drop of one that prepares.
typedef struct ms_mover {
    const char *name;
    // Engine thread, for a collective with a tensor on a GPU, before it has its number. Sets c->mover if it prepares
    // the tensors; then no other mover is asked. ready: the work that c waits for has been queued. enter: c has its
    // number.
    ms_status (*prepare)(ms_coll *c);
    ms_status (*ready)(ms_coll *c);
    void (*enter)(ms_coll *c);
    // Any thread, as all below. Fills this rank's slot; NULL: tensors in CPU memory.
    void (*publish)(ms_coll *c, ms_slot *s);
    // *yes: whether it moves the bytes of a collective to which all members have committed: the same on all of them.
    ms_status (*serves)(ms_waiter *w, bool *yes);
    ms_status (*move)(ms_waiter *w);
    // After move, which has returned `moved`: sets `done`, and waits for peers that access this rank's tensors.
    ms_status (*finish)(ms_waiter *w, ms_status moved);
    ms_status (*leave)(ms_coll *c, ms_status status);  // c has ended with `status`; returns how it ends
    void (*drop)(ms_coll *c);                          // engine thread: frees c->prepared
    // Engine thread. open: before the ranks connect. join, part: the world or a group was made, is freed; all ranks of
    // the world make these calls, which block. check: called while this rank waits for a GPU. stop: at the job's end.
    ms_status (*open)(const ms_transport *t, const ms_launch *launch);
    ms_status (*join)(ms_group *g);
    ms_status (*part)(ms_group *g);
    ms_status (*check)(void);
    void (*stop)(void);
} ms_mover;

// How the movers access tensors that are not in CPU memory. All but resolve queue work on the collective's stream, and
// keep the first failure, which sync returns.
typedef struct ms_bytes {
    void (*copy)(ms_coll *c, void *dst, const void *src, size_t n, ms_direction way);
    void (*lines)(ms_coll *c, char *dst, size_t dst_line, const char *src, size_t line, size_t n);
    void (*reduce)(ms_coll *c, ms_cuda_reduction *r);  // sets what follows from c: dtype, reduction, scale
    char *(*resolve)(ms_coll *c, int rank, uint32_t arena, uint64_t at);  // NULL with the error set
    ms_status (*sync)(ms_coll *c);                                        // waits for the stream
} ms_bytes;

ms_status ms__mover_prepare(ms_coll *c);
ms_status ms__mover_choose(ms_waiter *w, const ms_mover **out);
ms_status ms__movers_open(const ms_transport *t, const ms_launch *launch);
ms_status ms__movers_join(ms_group *g);
ms_status ms__movers_part(ms_group *g);
ms_status ms__movers_check(void);
void ms__movers_stop(void);

#endif
