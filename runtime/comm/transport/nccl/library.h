// SPDX-License-Identifier: MIT
// comm/transport/nccl/library.h -- the part of NCCL's interface that Moonshard uses. The library is loaded at run time,
// and its header is not needed to build the plugin; spec/support/cuda/nccl_values.c compares this file with that header
// where NCCL is installed.
#ifndef MS_NCCL_LIBRARY_H
#define MS_NCCL_LIBRARY_H

#include <stddef.h>

enum { NCCL_OLDEST = 22800 };  // version 2.28, the first with this configuration and these functions

// clang-format off
#define NCCL_RESULTS(X) \
    X(Success, 0) X(UnhandledCudaError, 1) X(SystemError, 2) X(InternalError, 3) X(InvalidArgument, 4) \
    X(InvalidUsage, 5) X(RemoteError, 6) X(InProgress, 7)
#define NCCL_TYPES(X) \
    X(Int8, 0) X(Uint8, 1) X(Int32, 2) X(Int64, 4) X(Float16, 6) X(Float32, 7) X(Float64, 8) X(Bfloat16, 9)
#define NCCL_REDUCTIONS(X) X(Sum, 0) X(Prod, 1) X(Max, 2) X(Min, 3) X(Avg, 4)
// clang-format on
#define NCCL_VALUE(name, value) NCCL_##name = value,
typedef enum { NCCL_RESULTS(NCCL_VALUE) } nccl_result;
typedef enum { NCCL_TYPES(NCCL_VALUE) } nccl_type;
typedef enum { NCCL_REDUCTIONS(NCCL_VALUE) } nccl_reduction;

enum { NCCL_NOCOLOR = -1, NCCL_ID_BYTES = 128 };
typedef struct ncclComm *nccl_comm;
typedef struct {
    char internal[NCCL_ID_BYTES];
} nccl_id;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share, traffic_class;
    const char *comm_name;
    int collnet_enable, cta_policy, shrink_share, nvls_ctas, channels_per_net_peer, nvlink_centric_sched;
} nccl_config;

enum { NCCL_UNSET = -2147483647 - 1 };  // a setting that NCCL chooses
#define NCCL_CONFIG                                                                                              \
    {                                                                                                            \
        .size = sizeof(nccl_config), .magic = 0xcafebeef, .version = NCCL_OLDEST, .blocking = NCCL_UNSET,        \
        .cga_cluster_size = NCCL_UNSET, .min_ctas = NCCL_UNSET, .max_ctas = NCCL_UNSET, .net_name = NULL,        \
        .split_share = NCCL_UNSET, .traffic_class = NCCL_UNSET, .comm_name = NULL, .collnet_enable = NCCL_UNSET, \
        .cta_policy = NCCL_UNSET, .shrink_share = NCCL_UNSET, .nvls_ctas = NCCL_UNSET,                           \
        .channels_per_net_peer = NCCL_UNSET, .nvlink_centric_sched = NCCL_UNSET                                  \
    }

// X(result type, function without "nccl", parameters)
// clang-format off
#define NCCL_FUNCTIONS(X) \
    X(nccl_result, GetVersion, (int *)) \
    X(nccl_result, GetUniqueId, (nccl_id *)) \
    X(nccl_result, CommInitRankConfig, (nccl_comm *, int, nccl_id, int, nccl_config *)) \
    X(nccl_result, CommSplit, (nccl_comm, int, int, nccl_comm *, nccl_config *)) \
    X(nccl_result, CommFinalize, (nccl_comm)) \
    X(nccl_result, CommDestroy, (nccl_comm)) \
    X(nccl_result, CommAbort, (nccl_comm)) \
    X(nccl_result, CommGetAsyncError, (nccl_comm, nccl_result *)) \
    X(const char *, GetErrorString, (nccl_result)) \
    X(const char *, GetLastError, (nccl_comm)) \
    X(nccl_result, GroupStart, (void)) \
    X(nccl_result, GroupEnd, (void)) \
    X(nccl_result, AllReduce, (const void *, void *, size_t, nccl_type, nccl_reduction, nccl_comm, void *)) \
    X(nccl_result, AllGather, (const void *, void *, size_t, nccl_type, nccl_comm, void *)) \
    X(nccl_result, ReduceScatter, (const void *, void *, size_t, nccl_type, nccl_reduction, nccl_comm, void *)) \
    X(nccl_result, Broadcast, (const void *, void *, size_t, nccl_type, int, nccl_comm, void *)) \
    X(nccl_result, Reduce, (const void *, void *, size_t, nccl_type, nccl_reduction, int, nccl_comm, void *)) \
    X(nccl_result, AlltoAll, (const void *, void *, size_t, nccl_type, nccl_comm, void *))
// clang-format on

#define NCCL_POINTER(result, name, parameters) result(*name) parameters;
typedef struct {
    NCCL_FUNCTIONS(NCCL_POINTER)
} nccl_library;
extern nccl_library nccl;

// Loads the library. Returns 0, or -1 with the reason in text.
int nccl_load(char *text, size_t n);

#endif
