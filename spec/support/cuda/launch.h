// SPDX-License-Identifier: MIT
// cuda/launch.h -- runs a kernel block by block.
#pragma once
#include <functional>
#include <tuple>

#include "shared.h"
#include "streams.h"

namespace ms_shim
{

// The kernels' PTX, translated to C, in place of the kernels (ptx/launcher.cpp); nullptr without MOONSHARD_CUDA=ptx.
struct ptx_hooks {
    // The translation of a kernel whose n parameters have these sizes; nullptr: the kernel itself runs, for
    // ptx/mutants.lua. Ends the process if there is none.
    const void *(*find)(const void *kernel, const size_t *sizes, size_t n);
    // Whether the kernel itself runs first (the mode `compare`). Then other_ran restores the memory.
    bool (*before_launch)(const void *translation, const void *const *arguments, const size_t *sizes, size_t n);
    void (*other_ran)();
    void (*after_launch)(const void *translation);
    void (*before_block)(const void *translation, size_t dynamic, unsigned threads);
    void (*run)(const void *translation, const void *const *arguments);  // the running thread
    void (*after_block)();
};
inline const ptx_hooks *ptx = nullptr;

// Runs a kernel without barriers: the threads of a block run one after the other.
template <class Body> void run_independent(const void *translation, unsigned blocks, unsigned threads, const Body &body)
{
    place &p = one_thread;
    p = { { 0, 0, 0 }, { 0, 0, 0 }, { threads, 1, 1 }, { blocks, 1, 1 } };
    here.now = &p;
    here.self = nullptr;
    order block_order(blocks);
    for (unsigned b = 0; b < blocks; b++) {
        order thread_order(threads);
        p.block.x = (unsigned)block_order[b];
        if (translation) ptx->before_block(translation, 0, threads);
        for (unsigned t = 0; t < threads; t++) {
            p.thread.x = (unsigned)thread_order[t];
            body();
        }
        if (translation) ptx->after_block();
    }
}

template <class Body>
void run_with_barriers(const void *translation, unsigned blocks, unsigned threads, size_t shared, const Body &run)
{
    block_state *&block = here.block;
    if (!block) {
        block = new block_state;  // lives as long as the stream's thread
        block->fibers = new fiber[MAX_THREADS];
    }
    block->n = (int)threads;
    block->dynamic = dynamic_base() + (MOST_SHARED - (shared + 127) / 128 * 128);
    std::function<void()> body = std::ref(run);
    block->body = &body;
    shared_watch watch(shared);
    order block_order(blocks);
    for (unsigned b = 0; b < blocks; b++) {
        for (unsigned t = 0; t < threads; t++)
            block->fibers[t].at = {
                { t, 0, 0 }, { (unsigned)block_order[b], 0, 0 }, { threads, 1, 1 }, { blocks, 1, 1 }
            };
        watch.before_block();
        if (translation) ptx->before_block(translation, shared, threads);
        run_block(*block);
        if (translation) ptx->after_block();
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
    if (threads == 0 || threads > MAX_THREADS || blocks == 0 || blocks > 0x7fffffff) return cudaErrorInvalidValue;
    if (shared > shared_limit((const void *)kernel)) return cudaErrorInvalidValue;
    std::string name = what;
    static constexpr size_t sizes[] = { sizeof(P)... };
    const void *translation = ptx ? ptx->find((const void *)kernel, sizes, sizeof...(P)) : nullptr;
    push(s, [=] {
        std::tuple<P...> a = args;
        kernel_name = name.c_str();
        auto run = [&](const void *of, const auto &body) {
            if (barriers) run_with_barriers(of, blocks, threads, shared, body);
            else run_independent(of, blocks, threads, body);
        };
        auto itself = [&] { std::apply(kernel, a); };
        if (translation) {
            const void *at[sizeof...(P)];
            std::apply(
                [&](const auto &...x) {
                    int k = 0;
                    ((at[k++] = &x), ...);
                },
                a);
            if (ptx->before_launch(translation, at, sizes, sizeof...(P))) {
                run(nullptr, itself);
                ptx->other_ran();
            }
            run(translation, [&] { ptx->run(translation, at); });
            ptx->after_launch(translation);
        } else {
            run(nullptr, itself);
            if (ptx) wrote_foreign();
        }
        kernel_name = nullptr;
    });
    return cudaSuccess;
}

}  // namespace ms_shim

#define threadIdx (ms_shim::here.now->thread)
#define blockIdx (ms_shim::here.now->block)
#define blockDim (ms_shim::here.now->block_dim)
#define gridDim (ms_shim::here.now->grid_dim)
