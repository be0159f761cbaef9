// SPDX-License-Identifier: MIT
// comm/transport/transport.h -- how ranks meet, and how bytes travel between nodes: a table for each transport.
//
// Ranks of one node share memory (comm/job/node.c). A transport brings the ranks together at the start, carries
// messages between nodes and leaves at the end. To add one: a folder here with its table, and its line in transport.c.
// A transport that needs a library is a plugin, loaded when it is chosen; the engine never links MPI.
#ifndef MS_TRANSPORT_H
#define MS_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>
#include "moonshard.h"

enum { MS_TRANSPORT_VERSION = 3 };

// Every function is called under one lock. Only init, all_gather and finalize may block.
typedef struct {
    int version;
    const char *name;
    // 0, or a failure with its reason in text. NULL: there are no other ranks, and no function below is called.
    int (*init)(const ms_launch *launch, char *text, size_t n);
    int (*rank)(void);
    int (*size)(void);
    int (*all_gather)(const void *in, void *out, int bytes);       // at the start
    void *(*isend)(const void *p, size_t bytes, int to, int tag);  // at most 1 GiB; NULL: failed
    void *(*irecv)(void *p, size_t bytes, int from, int tag);
    int (*test)(void **request);                      // 1: complete (and *request is NULL), 0: not yet, < 0: failed
    void (*cancel)(void *request);                    // a reception; test then says when it has ended
    int (*probe)(int tag, int *from, size_t *bytes);  // 1: a message waits
    int (*finalize)(void);
    // Its own collectives on float32, for benchmarks that measure beside them. op: 0 all-gather, 1 reduce-scatter,
    // 2 all-reduce. May be NULL.
    int (*own)(int op, void *out, const void *in, size_t count);
} ms_transport;

// The symbol that a plugin exports: its table.
#define MS_TRANSPORT_SYMBOL "ms_transport_table"

// The transport called name; "auto" or NULL: the one that joins the ranks of this launcher.
ms_status ms__transport_choose(const ms_transport **out, const char *name, const ms_launch *launch);

#endif
