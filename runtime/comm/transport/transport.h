// SPDX-License-Identifier: MIT
// comm/transport/transport.h -- how ranks meet, and how bytes travel between nodes: a table for each transport.
//
// Ranks of one node share memory (comm/job/node.c). A transport connects the ranks at the start, carries messages
// between nodes and disconnects at the end. A new one is a folder here with its table, and a line in transport.c. A
// transport that needs a library is a plugin, loaded when it is chosen; the engine never links MPI.
#ifndef MS_TRANSPORT_H
#define MS_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>
#include "moonshard.h"

enum { MS_TRANSPORT_VERSION = 3 };

// All functions are called under one lock. Only init, all_gather and finalize may block.
typedef struct {
    int version;
    const char *name;
    // 0, or a failure with its reason in text. NULL: a world of one rank, for which no function below is called.
    int (*init)(const ms_launch *launch, char *text, size_t n);
    int (*rank)(void);
    int (*size)(void);
    int (*all_gather)(const void *in, void *out, int bytes);       // at the start
    void *(*isend)(const void *p, size_t bytes, int to, int tag);  // at most 1 GiB; NULL: failed
    void *(*irecv)(void *p, size_t bytes, int from, int tag);
    int (*test)(void **request);                      // 1: complete (and *request is NULL), 0: not yet, < 0: failed
    void (*cancel)(void *request);                    // of a receive; test returns 1 once it has ended
    int (*probe)(int tag, int *from, size_t *bytes);  // 1: a message waits
    int (*finalize)(void);
    // The library's own collectives on float32, for comparisons in benchmarks. op: 0 all-gather, 1 reduce-scatter,
    // 2 all-reduce. May be NULL.
    int (*own)(int op, void *out, const void *in, size_t count);
} ms_transport;

// The symbol of a plugin's table.
#define MS_TRANSPORT_SYMBOL "ms_transport_table"

// The transport of that name; "auto" or NULL: the one that connects the ranks of this launcher.
ms_status ms__transport_choose(const ms_transport **out, const char *name, const ms_launch *launch);

#endif
