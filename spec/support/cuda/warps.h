// SPDX-License-Identifier: MIT
// cuda/warps.h -- barriers, shuffles and atomics.
#pragma once
#include "launch.h"

namespace ms_shim
{

// Shuffles alternate between two sets of lanes. A lane that writes a set again has met all its readers at the shuffle
// in between.
template <class T> T shuffle(T v, int from)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
    need_fiber();
    uint64_t *lanes = block->lanes[self->shuffles++ & 1];
    memcpy(&lanes[now->thread.x], &v, sizeof v);
    meet(2);
    T other;
    memcpy(&other, &lanes[from], sizeof other);
    return other;
}

}  // namespace ms_shim

inline void __syncthreads() { ms_shim::meet(1); }
inline void __syncwarp(unsigned = 0xffffffffu) { ms_shim::meet(2); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask)
{
    int me = (int)threadIdx.x, to = me ^ mask;
    return ms_shim::shuffle(v, to < (int)blockDim.x ? to : me);
}
template <class T> T __shfl_down_sync(unsigned, T v, int by)
{
    int me = (int)threadIdx.x, to = me % 32 + by < 32 ? me + by : me;
    return ms_shim::shuffle(v, to < (int)blockDim.x ? to : me);
}
inline int atomicCAS(int *p, int expected, int v)
{
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
inline int atomicAnd(int *p, int v) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }
