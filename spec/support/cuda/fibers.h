// SPDX-License-Identifier: MIT
// cuda/fibers.h -- a block's threads as fibers that take turns at barriers.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "memory.h"

namespace ms_shim
{

enum { MAX_THREADS = 1024, STACK = 256 << 10 };

struct place {
    dim3 thread, block, block_dim, grid_dim;
};
struct fiber {
    place at;
    void *sp = nullptr;  // the stack pointer at which it was suspended
    char *stack = nullptr;
    bool finished = false;
    int waits = 0;     // 0: runs, 1: at the block's barrier, 2: at its warp's
    int shuffles = 0;  // number of shuffles so far
    void *fake = nullptr;
};
struct block_state {
    fiber *fibers = nullptr;
    int n = 0;
    uint64_t lanes[2][MAX_THREADS];
    const std::function<void()> *body = nullptr;
    void *back = nullptr, *back_fake = nullptr;
    const void *back_bottom = nullptr;
    size_t back_size = 0;
};
inline thread_local place one_thread;  // of a kernel without barriers
inline constinit thread_local place *now = nullptr;
inline constinit thread_local fiber *self = nullptr;
inline constinit thread_local block_state *block = nullptr;

#if defined(__x86_64__)
// Saves the callee-saved registers on the present stack, switches stacks and resumes the other fiber.
__attribute__((naked, noinline)) inline void switch_stacks(void ** /* from */, void * /* to */)
{
    __asm__("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
            "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
            "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
#else
inline void switch_stacks(void **from, void *to)
{
    ucontext_t here;
    *from = &here;
    swapcontext(&here, (ucontext_t *)to);
}
#endif

// A fiber's last frame never returns; in ThreadSanitizer's shadow stack it would stay forever.
#define MS_FIBER __attribute__((no_sanitize("thread")))

MS_FIBER inline void to_scheduler(bool last)
{
    fiber *f = self;
    (void)last;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &f->fake, block->back_bottom, block->back_size);
#endif
    switch_stacks(&f->sp, block->back);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f->fake, nullptr, nullptr);
#endif
}

MS_FIBER inline void fiber_main()
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block->back_bottom, &block->back_size);
#endif
    (*block->body)();
    self->finished = true;
    to_scheduler(true);
    abort();
}

inline void prepare(fiber &f)
{
    if (!f.stack) {
        f.stack =
            (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f.stack == MAP_FAILED) {
            fputs("emulated GPU: no memory for a fiber's stack\n", stderr);
            abort();
        }
    }
    f.finished = false;
    f.waits = f.shuffles = 0;
#if defined(__x86_64__)
    // Stacks that end at the same place of a page share cache lines: a block's threads would evict each other at every
    // switch.
    size_t k = (size_t)(&f - block->fibers);
    void **top = (void **)(f.stack + STACK - k % 128 * 704);
    *--top = nullptr;  // aligned as after a call
    *--top = (void *)fiber_main;
    for (int k = 0; k < 6; k++) *--top = nullptr;
    f.sp = top;
#else
    static thread_local std::vector<ucontext_t> contexts(MAX_THREADS);
    ucontext_t *c = &contexts[(size_t)(&f - block->fibers)];
    getcontext(c);
    c->uc_stack = { .ss_sp = f.stack, .ss_flags = 0, .ss_size = STACK };
    c->uc_link = nullptr;
    makecontext(c, fiber_main, 0);
    f.sp = c;
#endif
}

MS_FIBER inline void resume(fiber &f)
{
    self = &f;
    now = &f.at;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&block->back_fake, f.stack, STACK);
#endif
    switch_stacks(&block->back, f.sp);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(block->back_fake, nullptr, nullptr);
#endif
}

// Waiting threads continue when all unfinished threads of their block (or warp) wait there, too.
MS_FIBER inline void run_block(block_state &b)
{
    int left = b.n;
    for (int k = 0; k < b.n; k++) prepare(b.fibers[k]);
    while (left > 0) {
        bool moved = false;
        for (int k = 0; k < b.n; k++) {
            fiber &f = b.fibers[k];
            if (f.finished || f.waits) continue;
            if (k + 2 < b.n) __builtin_prefetch(b.fibers[k + 2].sp);
            resume(f);
            moved = true;
            if (f.finished) left--;
        }
        if (left == 0) break;
        for (int w = 0; w < b.n; w += 32) {
            int end = w + 32 < b.n ? w + 32 : b.n;
            bool all = true, some = false;
            for (int k = w; k < end; k++) {
                if (b.fibers[k].finished) continue;
                some = true;
                all = all && b.fibers[k].waits == 2;
            }
            if (!some || !all) continue;
            for (int k = w; k < end; k++) b.fibers[k].waits = 0;
            moved = true;
        }
        bool all = true;
        for (int k = 0; k < b.n; k++) all = all && (b.fibers[k].finished || b.fibers[k].waits == 1);
        if (all) {
            for (int k = 0; k < b.n; k++) b.fibers[k].waits = 0;
            moved = true;
        }
        if (!moved) {
            fputs("emulated GPU: a block's threads wait at different barriers: it would hang\n", stderr);
            abort();
        }
    }
}

inline void need_fiber()
{
    if (self) return;
    fputs("emulated GPU: a barrier or shuffle in a kernel that was started with launch, not launch_blocks\n", stderr);
    abort();
}

MS_FIBER inline void meet(int which)
{
    need_fiber();
    self->waits = which;
    to_scheduler(false);
}

}  // namespace ms_shim
