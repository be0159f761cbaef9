// SPDX-License-Identifier: MIT
// cuda/fault.h -- which thread of which kernel runs, and how the emulated GPU ends when that thread commits a fault.
#pragma once
#include "modes.h"

namespace ms_shim
{

struct fiber;
struct block_state;
struct place {
    dim3 thread, block, block_dim, grid_dim;
};
// What a stream's thread runs. One variable, because each access to a thread-local variable of a library is a call.
struct running {
    place *now = nullptr;
    fiber *self = nullptr;  // nullptr: in a kernel without barriers
    block_state *block = nullptr;
};
inline thread_local place one_thread;  // the running thread of a kernel without barriers
inline constinit thread_local running here;
inline constinit thread_local const char *kernel_name = nullptr;  // nullptr: no kernel runs in this thread

[[noreturn, gnu::format(printf, 1, 2), gnu::noinline]] inline void fault(const char *fmt, ...)
{
    char what[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    const place *now = here.now;
    if (kernel_name && now)
        fprintf(stderr, "emulated GPU: %s, block %u, thread %u: %s\n", kernel_name, now->block.x, now->thread.x, what);
    else fprintf(stderr, "emulated GPU: %s\n", what);
    abort();
}

// In the mode `align`, a misaligned access ends the process. On a GPU it fails with cudaErrorMisalignedAddress.
inline void check_aligned(const void *p, size_t bytes)
{
    uintptr_t at = (uintptr_t)p;
    __asm__("" : "+r"(at));  // otherwise the compiler drops the test: it assumes that p is aligned for its type
    if (mode.align && at % bytes != 0)
        fault("%zu bytes at address %p, which is not a multiple of %zu", bytes, p, bytes);
}

}  // namespace ms_shim
