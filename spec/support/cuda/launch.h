// SPDX-License-Identifier: MIT
// cuda/launch.h -- runs a kernel block by block.
#pragma once
#include <tuple>

#include "shared.h"
#include "streams.h"

namespace ms_shim
{

// Runs a kernel without barriers: the threads of a block run one after the other.
template <class... P>
void run_independent(void (*kernel)(P...), unsigned blocks, unsigned threads, std::tuple<P...> &args)
{
    place &p = one_thread;
    p = { { 0, 0, 0 }, { 0, 0, 0 }, { threads, 1, 1 }, { blocks, 1, 1 } };
    here.now = &p;
    here.self = nullptr;
    order block_order(blocks);
    for (unsigned b = 0; b < blocks; b++) {
        order thread_order(threads);
        p.block.x = (unsigned)block_order[b];
        for (unsigned t = 0; t < threads; t++) {
            p.thread.x = (unsigned)thread_order[t];
            std::apply(kernel, args);
        }
    }
}

template <class... P>
void run_with_barriers(void (*kernel)(P...), unsigned blocks, unsigned threads, size_t shared, std::tuple<P...> &args)
{
    block_state *&block = here.block;
    if (!block) {
        block = new block_state;  // lives as long as the stream's thread
        block->fibers = new fiber[MAX_THREADS];
    }
    block->n = (int)threads;
    block->dynamic = dynamic_base() + (MOST_SHARED - (shared + 127) / 128 * 128);
    std::function<void()> body = [&] { std::apply(kernel, args); };
    block->body = &body;
    shared_watch watch(shared);
    order block_order(blocks);
    for (unsigned b = 0; b < blocks; b++) {
        for (unsigned t = 0; t < threads; t++)
            block->fibers[t].at = {
                { t, 0, 0 }, { (unsigned)block_order[b], 0, 0 }, { threads, 1, 1 }, { blocks, 1, 1 }
            };
        watch.before_block();
        run_block(*block);
        watch.after_block();
    }
    here.self = nullptr;
    here.now = &one_thread;
}

template <class... P>
cudaError_t launch(stream_state *s, const char *what, bool barriers, void (*kernel)(P...), unsigned blocks,
                   unsigned threads, size_t shared, std::tuple<P...> args)
{
    MS_MAY_FAIL(cudaLaunchKernel);
    if (threads == 0 || threads > MAX_THREADS) return cudaErrorInvalidValue;
    if (shared > shared_limit((const void *)kernel)) return cudaErrorInvalidValue;
    std::string name = what;
    push(s, [=] {
        std::tuple<P...> a = args;
        kernel_name = name.c_str();
        if (barriers) run_with_barriers(kernel, blocks, threads, shared, a);
        else run_independent(kernel, blocks, threads, a);
        kernel_name = nullptr;
    });
    return cudaSuccess;
}

}  // namespace ms_shim

#define threadIdx (ms_shim::here.now->thread)
#define blockIdx (ms_shim::here.now->block)
#define blockDim (ms_shim::here.now->block_dim)
#define gridDim (ms_shim::here.now->grid_dim)
