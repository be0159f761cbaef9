// SPDX-License-Identifier: MIT
// nccl_values.c -- checks at compile time that the values and structs of comm/transport/nccl/library.h agree with
// NCCL's header, if NCCL is installed.
#include "comm/transport/nccl/library.h"
#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

#define SAME(name, value) _Static_assert((int)nccl##name == value, #name);
NCCL_RESULTS(SAME)
NCCL_TYPES(SAME)
NCCL_REDUCTIONS(SAME)
_Static_assert(NCCL_NOCOLOR == NCCL_SPLIT_NOCOLOR && NCCL_UNSET == NCCL_CONFIG_UNDEF_INT, "constants");
_Static_assert(sizeof(nccl_id) == sizeof(ncclUniqueId), "an id");

// Later versions append fields to the configuration.
#define AT(ours, theirs) _Static_assert(offsetof(nccl_config, ours) == offsetof(ncclConfig_t, theirs), #theirs);
AT(size, size)
AT(magic, magic)
AT(version, version)
AT(blocking, blocking)
AT(net_name, netName)
AT(split_share, splitShare)
AT(comm_name, commName)
AT(nvlink_centric_sched, nvlinkCentricSched)
_Static_assert(sizeof(nccl_config) <= sizeof(ncclConfig_t), "the configuration");

// Compares the numbers of parameters, and their types except enumerations.
#define CALLED(name, ...) ((void)sizeof(nccl##name(__VA_ARGS__)))
void ms_standin_calls(const void *in, void *out, ncclComm_t c, cudaStream_t s);
void ms_standin_calls(const void *in, void *out, ncclComm_t c, cudaStream_t s)
{
    CALLED(AllReduce, in, out, (size_t)1, ncclFloat32, ncclSum, c, s);
    CALLED(AllGather, in, out, (size_t)1, ncclFloat32, c, s);
    CALLED(ReduceScatter, in, out, (size_t)1, ncclFloat32, ncclSum, c, s);
    CALLED(Broadcast, in, out, (size_t)1, ncclFloat32, 0, c, s);
    CALLED(Reduce, in, out, (size_t)1, ncclFloat32, ncclSum, 0, c, s);
    CALLED(AlltoAll, in, out, (size_t)1, ncclFloat32, c, s);
    CALLED(CommInitRankConfig, &c, 1, (ncclUniqueId) { "" }, 0, (ncclConfig_t *)0);
    CALLED(CommSplit, c, 0, 0, &c, (ncclConfig_t *)0);
}
#endif
