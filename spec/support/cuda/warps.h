// SPDX-License-Identifier: MIT
// cuda/warps.h -- barriers, shuffles and atomics.
#pragma once
#include "launch.h"

namespace ms_shim
{

inline int lane() { return (int)here.now->thread.x % 32; }

// Gives v to the lanes that read it, and returns what lane `from` gives.
template <class T> T shuffle(const char *name, unsigned mask, T v, int from, int width)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
    need_fiber();
    fiber *self = here.self;
    int first = (int)self->at.thread.x / 32 * 32;
    if (mode.warps) {
        if (width < 1 || width > 32 || (width & (width - 1)))
            fault("%s: width %d, expected a power of two up to 32", name, width);
        if (!(mask >> lane() & 1)) fault("%s: lane %d is outside its mask %08x", name, lane(), mask);
        if (!(mask >> from & 1)) fault("%s: lane %d reads lane %d, outside its mask %08x", name, lane(), from, mask);
    }
    self->source = first + from < here.block->n ? from : lane();
    memcpy(&self->given, &v, sizeof v);
    meet(2, mask);
    if (mode.warps && !(self->met >> from & 1))
        fault("%s: lane %d reads lane %d, which does not take part", name, lane(), from);
    memcpy(&v, &self->received, sizeof v);
    return v;
}

}  // namespace ms_shim

inline void __syncthreads() { ms_shim::meet(1); }
inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    if (ms_shim::mode.warps && !(mask >> ms_shim::lane() & 1))
        ms_shim::fault("__syncwarp: lane %d is outside its mask %08x", ms_shim::lane(), mask);
    ms_shim::meet(2, mask);
}
template <class T> T __shfl_sync(unsigned mask, T v, int from, int width = 32)
{
    int me = ms_shim::lane();
    return ms_shim::shuffle("__shfl_sync", mask, v, (me & ~(width - 1)) | (from & (width - 1)), width);
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32)
{
    int me = ms_shim::lane(), from = me ^ by;
    return ms_shim::shuffle("__shfl_xor_sync", mask, v, from < (me | (width - 1)) + 1 ? from : me, width);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, int by, int width = 32)
{
    int me = ms_shim::lane(), from = me - by;
    return ms_shim::shuffle("__shfl_up_sync", mask, v, from >= (me & ~(width - 1)) ? from : me, width);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, int by, int width = 32)
{
    int me = ms_shim::lane(), from = me + by;
    return ms_shim::shuffle("__shfl_down_sync", mask, v, from <= (me | (width - 1)) ? from : me, width);
}
inline int atomicCAS(int *p, int expected, int v)
{
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
inline int atomicAnd(int *p, int v) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }
