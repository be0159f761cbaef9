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

#include "fault.h"
#include "memory.h"

namespace ms_shim
{

enum { MAX_THREADS = 1024, STACK = 256 << 10 };

// A copy from global to shared memory (cp.async), which takes place when its thread waits for its group.
struct async_copy {
    void *to;
    const void *from;
    int bytes, read, group;
};
struct fiber {
    place at;
    void *sp = nullptr;  // the stack pointer at which the fiber was suspended
    char *stack = nullptr;
    bool finished = false;
    int waits = 0;                     // 0: runs, 1: waits at the block's barrier, 2: at its warp's barrier
    unsigned mask = 0, met = 0;        // mask: lanes that it waits for at its warp's barrier; met: lanes that arrived
    int source = 0;                    // in a shuffle: the lane from which it reads
    uint64_t given = 0, received = 0;  // in a shuffle: the lane's value, and the value it reads
    int exchanges = 0;                 // number of products and loads of fragments so far (tensor.h)
    std::vector<async_copy> copies;    // cp.async, not awaited yet
    int group = 0;
    void *fake = nullptr;
};
struct block_state {
    fiber *fibers = nullptr;
    int n = 0;
    char *dynamic = nullptr;  // the block's dynamic shared memory
    const std::function<void()> *body = nullptr;
    void *back = nullptr, *back_fake = nullptr;
    const void *back_bottom = nullptr;
    size_t back_size = 0;
#if !defined(__x86_64__)
    std::vector<ucontext_t> contexts { MAX_THREADS };
#endif
    uint32_t tiles[2][MAX_THREADS][10];  // words that the lanes of a warp exchange; the buffers alternate (tensor.h)
};

#if defined(__x86_64__)
// Saves the callee-saved registers on the present stack, switches stacks and jumps into the other fiber. A `ret` would
// be mispredicted: the processor would predict a return to the caller, which is in the fiber that is left.
__attribute__((naked, noinline)) inline void switch_stacks(void ** /* from */, void * /* to */)
{
    __asm__("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
            "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
            "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n popq %rcx\n jmpq *%rcx\n");
}
#else
inline void switch_stacks(void **from, void *to)
{
    ucontext_t saved;
    *from = &saved;
    swapcontext(&saved, (ucontext_t *)to);
}
#endif

// Functions that ThreadSanitizer must not instrument: a fiber's last frame never returns, so it would stay in the
// sanitizer's shadow stack forever.
#define MS_FIBER __attribute__((no_sanitize("thread")))

MS_FIBER inline void to_scheduler(bool last)
{
    fiber *f = here.self;
    block_state *b = here.block;
    (void)last;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &f->fake, b->back_bottom, b->back_size);
#endif
    switch_stacks(&f->sp, b->back);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f->fake, nullptr, nullptr);
#endif
}

MS_FIBER inline void fiber_main()
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &here.block->back_bottom, &here.block->back_size);
#endif
    (*here.block->body)();
    here.self->finished = true;
    to_scheduler(true);
    abort();
}

inline void prepare(block_state &b, fiber &f)
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
    f.waits = f.exchanges = f.group = 0;
    f.copies.clear();
#if defined(__x86_64__)
    // Stacks that end at the same offset in a page compete for the same cache sets: a block's threads would evict each
    // other's lines at every switch.
    size_t k = (size_t)(&f - b.fibers);
    void **top = (void **)(f.stack + STACK - k % 128 * 704);
    *--top = nullptr;  // aligned as after a call
    *--top = (void *)fiber_main;
    for (int k = 0; k < 6; k++) *--top = nullptr;
    f.sp = top;
#else
    ucontext_t *c = &b.contexts[(size_t)(&f - b.fibers)];
    getcontext(c);
    c->uc_stack = { .ss_sp = f.stack, .ss_flags = 0, .ss_size = STACK };
    c->uc_link = nullptr;
    makecontext(c, fiber_main, 0);
    f.sp = c;
#endif
}

// Runs fiber f of block b until it meets a barrier or ends. r: this thread's `here`.
MS_FIBER inline void resume(running &r, block_state &b, fiber &f)
{
    r.self = &f;
    r.now = &f.at;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&b.back_fake, f.stack, STACK);
#endif
    switch_stacks(&b.back, f.sp);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(b.back_fake, nullptr, nullptr);
#endif
}

// Releases each lane of a warp for which all lanes of its mask have arrived. Without the mode `warps`, a mask counts as
// all unfinished lanes of the warp. Returns whether any lane was released.
inline bool release_warp(block_state &b, int first, int end)
{
    bool moved = false;
    for (int k = first; k < end; k++) {
        const fiber &f = b.fibers[k];
        if (f.finished || f.waits != 2) continue;
        unsigned mask = mode.warps ? f.mask : ~0u;
        unsigned met = 0;
        bool all = true;
        for (int j = first; j < end; j++) {
            const fiber &other = b.fibers[j];
            if (!(mask >> (j - first) & 1) || other.finished) continue;
            met |= 1u << (j - first);
            all = all && other.waits == 2 && (!mode.warps || other.mask == mask);
        }
        if (!all) continue;
        for (int j = first; j < end; j++) {
            fiber &other = b.fibers[j];
            if (!(met >> (j - first) & 1)) continue;
            other.waits = 0;
            other.met = met;
            other.received = b.fibers[first + other.source].given;
        }
        moved = true;
    }
    return moved;
}

// Ends the process with a message that names a lane for which others wait, or says that threads wait at different
// barriers.
[[noreturn]] inline void would_hang(block_state &b)
{
    for (int k = 0; k < b.n; k++) {
        fiber &f = b.fibers[k];
        if (f.finished || f.waits != 2) continue;
        for (int j = k / 32 * 32; j < b.n && j < k / 32 * 32 + 32; j++) {
            const fiber &other = b.fibers[j];
            if (!mode.warps || other.finished || !(f.mask >> j % 32 & 1)) continue;
            if (other.waits == 2 && other.mask == f.mask) continue;
            here.now = &f.at;
            fault("waits with mask %08x for lane %d, which does not take part: a GPU would hang", f.mask, j % 32);
        }
    }
    here.now = &b.fibers[0].at;
    fault("the block's threads wait at different barriers: a GPU would hang");
}

// Runs the threads of a block to their end. Threads at a barrier continue when all unfinished threads of the block (or
// of the mask, at a warp's barrier) wait there, too.
MS_FIBER inline void run_block(block_state &b)
{
    int left = b.n;
    running &r = here;
    for (int k = 0; k < b.n; k++) prepare(b, b.fibers[k]);
    while (left > 0) {
        bool moved = false;
        order turn((uint64_t)b.n);
        for (int k = 0; k < b.n; k++) {
            fiber &f = b.fibers[turn[(uint64_t)k]];
            if (f.finished || f.waits) continue;
            if (k + 2 < b.n) __builtin_prefetch(b.fibers[turn[(uint64_t)k + 2]].sp);
            resume(r, b, f);
            moved = true;
            if (f.finished) left--;
        }
        if (left == 0) break;
        for (int w = 0; w < b.n; w += 32) moved |= release_warp(b, w, w + 32 < b.n ? w + 32 : b.n);
        bool all = true;
        for (int k = 0; k < b.n; k++) all = all && (b.fibers[k].finished || b.fibers[k].waits == 1);
        if (all) {
            for (int k = 0; k < b.n; k++) b.fibers[k].waits = 0;
            moved = true;
        }
        if (!moved) would_hang(b);
    }
}

inline void need_fiber()
{
    if (here.self) return;
    fault("a barrier or shuffle in a kernel that was started with launch, not launch_blocks");
}

MS_FIBER inline void meet(int which, unsigned mask = ~0u)
{
    need_fiber();
    here.self->waits = which;
    here.self->mask = mask;
    to_scheduler(false);
}

}  // namespace ms_shim
