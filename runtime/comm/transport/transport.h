// SPDX-License-Identifier: MIT
// comm/transport/transport.h -- how ranks connect, and how bytes are sent between nodes: one table per transport.
//
// Ranks on one node share memory (comm/job/node.c). A transport connects the ranks at the start, sends messages between
// nodes and disconnects at the end. To add one, add a folder here with its table, and a line in transport.c. A
// transport that needs a library is a plugin, loaded when the transport is chosen; the engine never links MPI.
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
    // Returns 0, or a failure code with the reason in text. NULL: a world of one rank, for which no function below is
    // called.
    int (*init)(const ms_launch *launch, char *text, size_t n);
    int (*rank)(void);
    int (*size)(void);
    int (*all_gather)(const void *in, void *out, int bytes);       // used at the start of a job
    void *(*isend)(const void *p, size_t bytes, int to, int tag);  // at most 1 GiB; returns NULL on failure
    void *(*irecv)(void *p, size_t bytes, int from, int tag);
    int (*test)(void **request);                      // 1: complete (and *request is NULL), 0: not yet, < 0: failed
    void (*cancel)(void *request);                    // cancels a receive; test returns 1 once it has ended
    int (*probe)(int tag, int *from, size_t *bytes);  // returns 1 if a message is waiting
    int (*finalize)(void);
    // The library's own collectives on float32, for comparison in benchmarks. op: 0 all-gather, 1 reduce-scatter, 2
    // all-reduce. May be NULL.
    int (*own)(int op, void *out, const void *in, size_t count);
} ms_transport;

// The name under which a plugin exports its table.
#define MS_TRANSPORT_SYMBOL "ms_transport_table"

// Chooses a transport by name; "auto" or NULL: the one that supports this launcher.
ms_status ms__transport_choose(const ms_transport **out, const char *name, const ms_launch *launch);

#endif
