// SPDX-License-Identifier: MIT
// comm/transport/mpi/mpi.h -- what the MPI plugin (libmoonshard_mpi.so) exports: one versioned table. The engine never
// links MPI; it loads the plugin when the environment says that mpirun, srun or PMIx started the process.
// Every function is called under one lock (MPI is initialised SERIALIZED); the requests are polled.
#ifndef MS_COMM_MPI_H
#define MS_COMM_MPI_H

#include <stddef.h>
#include <stdint.h>

enum { MS_MPI_TABLE_VERSION = 2 };

typedef struct {
    int version;
    // 0, or a failure with its reason in text. one_node: all ranks are here, so shared-memory transports do.
    int (*init)(int one_node, char *text, size_t n);
    int (*rank)(void);
    int (*size)(void);
    int (*all_gather)(const void *in, void *out, int bytes);       // bootstrap only: it blocks
    void *(*isend)(const void *p, size_t bytes, int to, int tag);  // at most 1 GiB; NULL: failed
    void *(*irecv)(void *p, size_t bytes, int from, int tag);
    int (*test)(void **request);                      // 1: complete (and *request is NULL), 0: not yet, < 0: failed
    void (*cancel)(void *request);                    // a reception; test then says when it has ended
    int (*probe)(int tag, int *from, size_t *bytes);  // 1: a message waits
    void (*abort)(int code);
    int (*finalize)(void);
    const char *(*library)(void);
    // MPI's own collectives on float32, for benchmarks that measure beside it. op: 0 all-gather, 1 reduce-scatter, 2
    // all-reduce.
    int (*own)(int op, void *out, const void *in, size_t count);
} ms_mpi_table;

// The symbol that the plugin exports.
#define MS_MPI_SYMBOL "ms_mpi_table_v1"

#endif
