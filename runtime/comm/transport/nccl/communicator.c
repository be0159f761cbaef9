// SPDX-License-Identifier: MIT
// comm/transport/nccl/communicator.c -- communicators, which are non-blocking, and the collectives on them.
//
// A call on a non-blocking communicator returns ncclInProgress while NCCL works on it in a thread of its own. The
// communicator may be used again only when ncclCommGetAsyncError no longer returns ncclInProgress.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "comm/transport/nccl/communicator.h"
#include "comm/transport/nccl/library.h"

struct ms_gpu_group {
    nccl_comm comm;       // NULL: this rank is not a member, or the split is not complete yet
    ms_gpu_group *whole;  // set until the split is complete: the communicator that is split
    const char *call;     // the latest call, for messages
    bool aborted, left;
    ms_gpu_group *next;
};

static struct {
    ms_gpu_group *list;  // every communicator of this process that has not been dropped
    pthread_mutex_t lock;
} made = { .lock = PTHREAD_MUTEX_INITIALIZER };

static ms_gpu_group *communicator_new(ms_gpu_group *whole, const char *call)
{
    ms_gpu_group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->whole = whole;
    g->call = call;
    pthread_mutex_lock(&made.lock);
    g->next = made.list;
    made.list = g;
    pthread_mutex_unlock(&made.lock);
    return g;
}

static void communicator_free(ms_gpu_group *g)
{
    pthread_mutex_lock(&made.lock);
    for (ms_gpu_group **at = &made.list; *at; at = &(*at)->next)
        if (*at == g) {
            *at = g->next;
            break;
        }
    pthread_mutex_unlock(&made.lock);
    free(g);
}

// ---- results --------------------------------------------------------------------------------------

static ms_gpu_result describe_failure(nccl_result r, nccl_comm comm, const char *call, char *text, size_t n)
{
    const char *more = nccl.GetLastError(comm);
    int used = snprintf(text, n, "%s: %s (NCCL error %d)", call, nccl.GetErrorString(r), (int)r);
    if (more && *more && used > 0 && (size_t)used < n) snprintf(text + used, n - (size_t)used, ": %s", more);
    return r == NCCL_RemoteError ? MS_GPU_PEER : MS_GPU_FAILED;
}

static ms_gpu_result describe_no_memory(char *text, size_t n)
{
    snprintf(text, n, "NCCL: there is no memory for a communicator");
    return MS_GPU_FAILED;
}

// The result of a call that has been made on g.
static ms_gpu_result result_of(ms_gpu_group *g, nccl_result r, const char *call, char *text, size_t n)
{
    g->call = call;
    if (r == NCCL_InProgress) return MS_GPU_BUSY;
    return r == NCCL_Success ? MS_GPU_DONE : describe_failure(r, g->comm, call, text, n);
}

static ms_gpu_result poll_one(ms_gpu_group *g, nccl_comm comm, char *text, size_t n)
{
    nccl_result state = NCCL_Success, r = nccl.CommGetAsyncError(comm, &state);
    if (r != NCCL_Success) return describe_failure(r, comm, "ncclCommGetAsyncError", text, n);
    if (state == NCCL_InProgress) return MS_GPU_BUSY;
    return state == NCCL_Success ? MS_GPU_DONE : describe_failure(state, comm, g->call, text, n);
}

static ms_gpu_result poll_group(ms_gpu_group *g, char *text, size_t n)
{
    if (g->whole) {
        // NCCL stores the address of the new communicator when the split of the old one is complete.
        ms_gpu_result r = poll_one(g, g->whole->comm, text, n);
        if (r != MS_GPU_DONE) return r;
        g->whole = NULL;
    }
    return g->comm ? poll_one(g, g->comm, text, n) : MS_GPU_DONE;
}

// ---- communicators --------------------------------------------------------------------------------

static ms_gpu_result make_id(char id[MS_GPU_ID], char *text, size_t n)
{
    nccl_id made;
    _Static_assert(sizeof made == MS_GPU_ID, "MS_GPU_ID is the size of an id of NCCL");
    nccl_result r = nccl.GetUniqueId(&made);
    if (r != NCCL_Success) return describe_failure(r, NULL, "ncclGetUniqueId", text, n);
    memcpy(id, &made, sizeof made);
    return MS_GPU_DONE;
}

static ms_gpu_result join_group(ms_gpu_group **out, const char id[MS_GPU_ID], int rank, int size, char *text, size_t n)
{
    nccl_id given;
    nccl_config config = NCCL_CONFIG;
    const char *call = "ncclCommInitRankConfig";
    ms_gpu_group *g = communicator_new(NULL, call);
    if (!g) return describe_no_memory(text, n);
    memcpy(&given, id, sizeof given);
    config.blocking = 0;
    *out = g;
    return result_of(g, nccl.CommInitRankConfig(&g->comm, size, given, rank, &config), call, text, n);
}

static ms_gpu_result split(ms_gpu_group **out, ms_gpu_group *whole, int member, char *text, size_t n)
{
    const char *call = "ncclCommSplit";
    ms_gpu_group *g = communicator_new(whole, call);
    if (!g) return describe_no_memory(text, n);
    *out = g;
    int color = member < 0 ? NCCL_NOCOLOR : 0;
    nccl_result r = nccl.CommSplit(whole->comm, color, member < 0 ? 0 : member, &g->comm, NULL);
    g->call = call;
    // Even after ncclSuccess the new communicator may still be in progress.
    return r == NCCL_Success || r == NCCL_InProgress ? MS_GPU_BUSY : describe_failure(r, whole->comm, call, text, n);
}

static void abort_one(ms_gpu_group *g)
{
    if (g->comm && !g->aborted) nccl.CommAbort(g->comm);
    g->aborted = true;
}

static ms_gpu_result leave_group(ms_gpu_group *g, char *text, size_t n)
{
    if (!g->comm || g->aborted || g->left) return MS_GPU_DONE;
    g->left = true;
    return result_of(g, nccl.CommFinalize(g->comm), "ncclCommFinalize", text, n);
}

static void drop(ms_gpu_group *g)
{
    if (g->comm && !g->aborted) nccl.CommDestroy(g->comm);
    communicator_free(g);
}

static double now_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// Leaves the newest communicators first, so that each is left before the one from which it was split.
void nccl_leave_all(void)
{
    char text[512];
    for (double until = now_seconds() + 5; made.list;) {
        ms_gpu_group *g = made.list;
        ms_gpu_result r = leave_group(g, text, sizeof text);
        while (r == MS_GPU_BUSY && now_seconds() < until) {
            nanosleep(&(struct timespec) { .tv_nsec = 100000 }, NULL);
            r = poll_group(g, text, sizeof text);
        }
        if (r == MS_GPU_DONE) {
            drop(g);
        } else {  // the process ends: what NCCL still holds ends with it
            communicator_free(g);
        }
    }
}

// ---- collectives ----------------------------------------------------------------------------------

static nccl_type nccl_type_of(int dtype)
{
    switch (dtype) {
    case MS_F64: return NCCL_Float64;
    case MS_F16: return NCCL_Float16;
    case MS_BF16: return NCCL_Bfloat16;
    case MS_I64: return NCCL_Int64;
    case MS_I32: return NCCL_Int32;
    case MS_I8: return NCCL_Int8;
    case MS_U8:
    case MS_BOOL: return NCCL_Uint8;
    default: return NCCL_Float32;
    }
}

// Booleans are bytes 0 and 1: their sum is "or", which is the maximum; their product is "and", the minimum.
static nccl_reduction reduction_of(const ms_gpu_call *c)
{
    static const nccl_reduction of[] = { NCCL_Sum, NCCL_Avg, NCCL_Max, NCCL_Min, NCCL_Prod };
    nccl_reduction r = of[c->reduction];
    if (c->dtype != MS_BOOL) return r;
    return r == NCCL_Min || r == NCCL_Prod ? NCCL_Min : NCCL_Max;
}

static nccl_result queue_one(const ms_gpu_call *c, nccl_comm comm, void *stream, const char **name)
{
    nccl_type type = nccl_type_of(c->dtype);
    switch (c->op) {
    case MS_DIST_ALL_REDUCE:
        *name = "ncclAllReduce";
        return nccl.AllReduce(c->in, c->out, c->count, type, reduction_of(c), comm, stream);
    case MS_DIST_ALL_GATHER:
        *name = "ncclAllGather";
        return nccl.AllGather(c->in, c->out, c->count, type, comm, stream);
    case MS_DIST_REDUCE_SCATTER:
        *name = "ncclReduceScatter";
        return nccl.ReduceScatter(c->in, c->out, c->count, type, reduction_of(c), comm, stream);
    case MS_DIST_BROADCAST:
        *name = "ncclBroadcast";
        return nccl.Broadcast(c->in, c->out, c->count, type, c->root, comm, stream);
    case MS_DIST_REDUCE:
        *name = "ncclReduce";
        return nccl.Reduce(c->in, c->out, c->count, type, reduction_of(c), c->root, comm, stream);
    default: *name = "ncclAlltoAll"; return nccl.AlltoAll(c->in, c->out, c->count, type, comm, stream);
    }
}

static bool goes_on(nccl_result r) { return r == NCCL_Success || r == NCCL_InProgress; }

static ms_gpu_result queue(ms_gpu_group *g, int n_calls, const ms_gpu_call *calls, void *stream, char *text, size_t n)
{
    const char *name = "ncclGroupStart", *bad;
    bool many = n_calls > 1;
    nccl_result r = many ? nccl.GroupStart() : NCCL_Success;
    if (r != NCCL_Success) return describe_failure(r, g->comm, name, text, n);
    for (int k = 0; k < n_calls && goes_on(r); k++) r = queue_one(&calls[k], g->comm, stream, &name);
    bad = goes_on(r) ? "ncclGroupEnd" : name;
    if (many) {
        nccl_result end = nccl.GroupEnd();  // needed after a failure, too
        if (goes_on(r)) r = end;
    } else if (goes_on(r)) {
        bad = name;
    }
    g->call = name;
    return r == NCCL_InProgress ? MS_GPU_BUSY
           : r == NCCL_Success  ? MS_GPU_DONE
                                : describe_failure(r, g->comm, bad, text, n);
}

const ms_transport_gpu nccl_communicators = {
    .make_id = make_id,
    .join = join_group,
    .split = split,
    .queue = queue,
    .poll = poll_group,
    .abort = abort_one,
    .leave = leave_group,
    .drop = drop,
};
