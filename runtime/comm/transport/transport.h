// SPDX-License-Identifier: MIT
// comm/transport/transport.h -- how ranks connect, and how bytes are sent between nodes: one table per transport.
//
// Ranks on one node share memory (comm/memory/control.c). A transport connects the ranks at the start, sends messages
// between nodes and disconnects at the end. To add one, add a folder here with its table, and a line in transport.c. A
// transport that needs a library is a plugin, loaded when the transport is chosen; the engine never links MPI.
#ifndef MS_TRANSPORT_H
#define MS_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>
#include "moonshard.h"

enum { MS_TRANSPORT_VERSION = 4 };

// ---- collectives that a library moves between GPUs itself (NCCL) ----
//
// No call blocks, except abort. A call returns MS_GPU_DONE; or MS_GPU_BUSY, and `poll` then returns MS_GPU_BUSY until
// the call has been carried out; or a failure, with the reason in text. Collectives that have been queued may fail
// later, which `poll` reports. The calls of one communicator are made one at a time, except poll and abort.
enum { MS_GPU_ID = 128 };  // bytes of an id
typedef enum {
    MS_GPU_DONE,
    MS_GPU_BUSY,
    MS_GPU_FAILED,
    MS_GPU_PEER,  // another rank has failed, or cannot be reached
} ms_gpu_result;
typedef struct ms_gpu_group ms_gpu_group;  // a communicator
typedef struct {
    int op;                // MS_DIST_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _BROADCAST, _REDUCE or _ALL_TO_ALL
    int dtype, reduction;  // reduction: an ms_reduction
    int root;              // a member number
    size_t count;          // elements of the tensor, or of a member's block (all-gather, reduce-scatter, all-to-all)
    const void *in;        // NULL on a member that sends nothing; may be `out`
    void *out;             // NULL on a member that receives nothing
} ms_gpu_call;
typedef struct {
    // Makes an id on one rank. All ranks then join with it; the caller has made the rank's GPU current in this thread.
    ms_gpu_result (*make_id)(char id[MS_GPU_ID], char *text, size_t n);
    ms_gpu_result (*join)(ms_gpu_group **out, const char id[MS_GPU_ID], int rank, int size, char *text, size_t n);
    // Makes a communicator of some ranks of `whole`, which `join` has made; all ranks of `whole` call it. member: this
    // rank's number in the new communicator; -1: this rank is not a member.
    ms_gpu_result (*split)(ms_gpu_group **out, ms_gpu_group *whole, int member, char *text, size_t n);
    // Queues the calls as one operation on a stream of the CUDA plugin (ms_cuda_table.native_stream).
    ms_gpu_result (*queue)(ms_gpu_group *g, int n_calls, const ms_gpu_call *calls, void *stream, char *text, size_t n);
    ms_gpu_result (*poll)(ms_gpu_group *g, char *text, size_t n);
    void (*abort)(ms_gpu_group *g);  // ends what is queued, on this rank; only `drop` may follow
    ms_gpu_result (*leave)(ms_gpu_group *g, char *text,
                           size_t n);  // all members call it; only poll and drop may follow
    void (*drop)(ms_gpu_group *g);
} ms_transport_gpu;

// ---- how ranks connect ----

// Once the job has started, all functions are called under one lock. Only init, all_gather, own and finalize may block.
typedef struct {
    int version;
    const char *name;
    // Returns 0, or a failure code with the reason in text. NULL in a transport of one rank: the functions below are
    // then not called.
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
    // all-reduce, 3 barrier. May be NULL.
    int (*own)(int op, void *out, const void *in, size_t count);
    const ms_transport_gpu *gpu;  // NULL: the engine itself runs collectives on GPU tensors
} ms_transport;

// The name under which a plugin exports its table.
#define MS_TRANSPORT_SYMBOL "ms_transport_table"

// Chooses a transport by name; "auto" or NULL: the one that supports this launcher.
ms_status ms__transport_choose(const ms_transport **out, const char *name, const ms_launch *launch);

#endif
