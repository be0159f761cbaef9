// SPDX-License-Identifier: MIT
// cuda/shared.h -- shared memory: the dynamic part of a block, its limits, and poison before each block.
//
// A kernel's static shared memory is thread_local. Together the kernels' variables are the library's thread-local
// storage, less what the emulator keeps there itself; the mode `shared` poisons all of it and counts what a block
// wrote.
#pragma once
#include <map>
#include <mutex>
#include <tuple>
#include <link.h>

#include "fibers.h"
#include "memory.h"

namespace ms_shim
{

// POISON: the value of each byte; read as float or half, the bytes are NaN, as int -1.
enum { STATIC_SHARED = 48 << 10, MOST_SHARED = 227 << 10, POISON = 0xff };

// Bytes of dynamic shared memory to which cudaFuncSetAttribute raised a kernel's limit.
inline std::map<const void *, size_t> shared_limits;

inline size_t shared_limit(const void *kernel)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto f = shared_limits.find(kernel);
    return f == shared_limits.end() ? (size_t)STATIC_SHARED : f->second;
}

inline thread_local char *dynamic_shared = nullptr;  // MOST_SHARED bytes; a block uses the end of them

inline char *dynamic_base()
{
    if (!dynamic_shared) {
        const size_t page = 4096, pages = (MOST_SHARED + page - 1) / page * page;  // an inaccessible page follows
        char *p = (char *)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect(p + pages, page, PROT_NONE) != 0) fault("no memory for shared memory");
        dynamic_shared = p + pages - MOST_SHARED;
    }
    return dynamic_shared;
}

struct storage {
    char *base = nullptr;
    size_t bytes = 0;
};
inline int find_storage(dl_phdr_info *info, size_t, void *out)
{
    for (int k = 0; k < info->dlpi_phnum; k++) {
        char *base = (char *)info->dlpi_tls_data;
        size_t bytes = info->dlpi_phdr[k].p_memsz;
        if (info->dlpi_phdr[k].p_type != PT_TLS || !base) continue;
        if ((char *)&kernel_name < base || (char *)&kernel_name >= base + bytes) continue;
        *(storage *)out = { base, bytes };
        return 1;
    }
    return 0;
}

// Poisons a block's shared memory before the block runs; afterwards counts how much of the static part the block wrote,
// in units of 16 bytes.
class shared_watch
{
    storage all;
    size_t dynamic;

    // Fills everything; the emulator's own variables keep their values.
    void poison()
    {
        auto kept = std::make_tuple(one_thread, here, kernel_name, current_device, dynamic_shared);
        memset(all.base, POISON, all.bytes);
        std::tie(one_thread, here, kernel_name, current_device, dynamic_shared) = kept;
        memset(dynamic_base(), POISON, MOST_SHARED);
    }

  public:
    explicit shared_watch(size_t bytes) : dynamic(bytes)
    {
        if (mode.shared) dl_iterate_phdr(find_storage, &all);
    }
    void before_block()
    {
        if (mode.shared) poison();
    }
    void after_block()
    {
        if (!mode.shared) return;
        // OWN: bytes of the emulator's own variables, at most.
        static constexpr size_t UNIT = 16, OWN = sizeof one_thread + sizeof here + 4 * 2 * UNIT;
        size_t written = 0;
        for (size_t at = 0; at < all.bytes; at += UNIT) {
            bool changed = false;
            for (size_t k = at; k < at + UNIT && k < all.bytes; k++) changed |= (unsigned char)all.base[k] != POISON;
            written += changed ? UNIT : 0;
        }
        written -= written < OWN ? written : OWN;
        if (written > STATIC_SHARED)
            fault("%zu bytes of static shared memory, the limit is %d", written, STATIC_SHARED);
        if (written + dynamic > MOST_SHARED)
            fault("%zu bytes of static and %zu of dynamic shared memory, the limit is %d", written, dynamic,
                  MOST_SHARED);
    }
};

}  // namespace ms_shim

inline cudaError_t set_shared_limit(const void *kernel, int bytes)
{
    MS_MAY_FAIL(cudaFuncSetAttribute);
    if (bytes < 0 || bytes > ms_shim::MOST_SHARED) return cudaErrorInvalidValue;
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    ms_shim::shared_limits[kernel] = (size_t)bytes;
    return cudaSuccess;
}
template <class K> cudaError_t cudaFuncSetAttribute(K *kernel, cudaFuncAttribute, int bytes)
{
    return set_shared_limit((const void *)kernel, bytes);
}
