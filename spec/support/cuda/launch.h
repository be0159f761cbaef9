// SPDX-License-Identifier: MIT
// cuda/launch.h -- runs a kernel block by block.
#pragma once
#include <tuple>

#include "fibers.h"
#include "streams.h"

namespace ms_shim
{

template <class... P>
cudaError_t launch(stream_state *s, bool barriers, void (*kernel)(P...), unsigned blocks, unsigned threads,
                   std::tuple<P...> args)
{
    if (threads == 0 || threads > MAX_THREADS) return cudaErrorInvalidValue;
    push(s, [=] {
        std::tuple<P...> a = args;
        if (!barriers) {
            place &p = one_thread;
            now = &p;
            self = nullptr;
            p.block_dim = { threads, 1, 1 };
            p.grid_dim = { blocks, 1, 1 };
            p.thread.y = p.thread.z = p.block.y = p.block.z = 0;
            for (p.block.x = 0; p.block.x < blocks; p.block.x++)
                for (p.thread.x = 0; p.thread.x < threads; p.thread.x++) std::apply(kernel, a);
            return;
        }
        static thread_local block_state state;
        static thread_local std::vector<fiber> fibers(MAX_THREADS);
        block = &state;
        state.fibers = fibers.data();
        state.n = (int)threads;
        std::function<void()> body = [&] { std::apply(kernel, a); };
        state.body = &body;
        for (unsigned b = 0; b < blocks; b++) {
            for (unsigned t = 0; t < threads; t++)
                fibers[t].at = { { t, 0, 0 }, { b, 0, 0 }, { threads, 1, 1 }, { blocks, 1, 1 } };
            run_block(state);
        }
        self = nullptr;
        now = &one_thread;
    });
    return cudaSuccess;
}

}  // namespace ms_shim

#define threadIdx (ms_shim::now->thread)
#define blockIdx (ms_shim::now->block)
#define blockDim (ms_shim::now->block_dim)
#define gridDim (ms_shim::now->grid_dim)
