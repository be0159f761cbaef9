// SPDX-License-Identifier: MIT
// cuda/memory.h -- each device's memory, and pinned memory.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

#include "modes.h"

namespace ms_shim
{

struct living {
    size_t bytes;   // it occupies whole pages
    uint64_t born;  // its number
};
struct arena {
    char *base = nullptr;
    size_t bytes = 0, used = 0;
    int fd = -1;
    uint8_t *written = nullptr;  // in the mode `check`: a byte for each of the arena, see below
    std::map<char *, living> live;
    std::multimap<size_t, char *> free;
};

inline int device_count()
{
    const char *s = getenv("MOONSHARD_CUDA_DEVICES");
    int n = s ? atoi(s) : 2;
    return n < 1 ? 1 : n > 8 ? 8 : n;
}
inline size_t arena_bytes()  // bytes per device; specs about running out of memory reduce it
{
    const char *s = getenv("MOONSHARD_CUDA_MEMORY");
    return s ? (size_t)atoll(s) : (size_t)8 << 30;
}
inline arena arenas[8];
inline std::mutex memory_lock;
inline int key = -1;  // protection key, -1: none

// Allows, or forbids, this thread to access the devices' memory.
inline void may_touch(bool yes)
{
    if (key >= 0) pkey_set(key, yes ? 0 : PKEY_DISABLE_ACCESS);
}

inline bool open_arena(arena &a)
{
    if (a.base) return true;
    static bool asked = false;
    if (!asked) {
        asked = true;
        const char *off = getenv("MOONSHARD_CUDA_GUARD");
        if (!off || strcmp(off, "0") != 0) key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    }
    a.bytes = arena_bytes();
    a.fd = memfd_create("moonshard_emulated_gpu", MFD_CLOEXEC);
    if (a.fd < 0 || ftruncate(a.fd, (off_t)a.bytes) != 0) return false;
    void *p = mmap(nullptr, a.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, a.fd, 0);
    if (p == MAP_FAILED) return false;
    if (key >= 0) pkey_mprotect(p, a.bytes, PROT_READ | PROT_WRITE, key);
    if (mode.check) {
        void *w = mmap(nullptr, a.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (w == MAP_FAILED) return false;
        a.written = (uint8_t *)w;
    }
    a.base = (char *)p;
    return true;
}

inline arena *arena_of(const void *p)
{
    for (arena &a : arenas)
        if (a.base && (const char *)p >= a.base && (const char *)p < a.base + a.bytes) return &a;
    return nullptr;
}

inline uint64_t births = 0;
// WRITTEN: since its allocation. BEYOND: behind the bytes for which the engine's pool uses a block.
enum : uint8_t { UNWRITTEN, WRITTEN, BEYOND };
inline void mark_used(const void *p, size_t used, size_t size)
{
    ASAN_UNPOISON_MEMORY_REGION(p, used);
    ASAN_POISON_MEMORY_REGION((const char *)p + used, size - used);
    arena *a = arena_of(p);
    if (!a || !a->written) return;
    uint8_t *marks = a->written + ((const char *)p - a->base);
    memset(marks, UNWRITTEN, used);
    memset(marks + used, BEYOND, size - used);
    std::lock_guard<std::mutex> hold(memory_lock);
    auto block = a->live.find((char *)p);
    if (block != a->live.end()) block->second.born = ++births;
}

// What a library's stand-in writes is not known: allocations up to this number count as written.
inline std::atomic<uint64_t> foreign { 0 };
inline void wrote_foreign()
{
    std::lock_guard<std::mutex> hold(memory_lock);
    foreign = births;
}
// These bytes are written, wherever they lie.
inline void wrote(const void *p, size_t n)
{
    arena *a = mode.check && n ? arena_of(p) : nullptr;
    if (a && a->written) memset(a->written + ((const char *)p - a->base), WRITTEN, n);
}

inline thread_local int current_device = 0;
inline size_t pages(size_t bytes) { return (bytes + 4095) & ~(size_t)4095; }

}  // namespace ms_shim

inline cudaError_t cudaMalloc(void **out, size_t bytes)
{
    MS_MAY_FAIL(cudaMalloc);
    using namespace ms_shim;
    std::lock_guard<std::mutex> hold(memory_lock);
    arena &a = arenas[current_device];
    if (!open_arena(a)) return cudaErrorMemoryAllocation;
    size_t whole = ms_shim::pages(bytes);
    auto f = a.free.find(whole);
    char *p;
    if (f != a.free.end()) {
        p = f->second;
        a.free.erase(f);
    } else {
        if (a.bytes - a.used < whole + 4096) return cudaErrorMemoryAllocation;
        p = a.base + a.used;
        a.used += whole + 4096;  // a page between blocks
        ASAN_POISON_MEMORY_REGION(p + whole, 4096);
    }
    ASAN_POISON_MEMORY_REGION(p + bytes, whole - bytes);
    ASAN_UNPOISON_MEMORY_REGION(p, bytes);
    a.live[p] = { bytes, ++births };
    if (a.written) memset(a.written + (p - a.base), UNWRITTEN, bytes);
    *out = p;
    return cudaSuccess;
}
inline cudaError_t cudaFree(void *p)
{
    MS_MAY_FAIL(cudaFree);
    using namespace ms_shim;
    if (!p) return cudaSuccess;
    std::lock_guard<std::mutex> hold(memory_lock);
    arena *a = arena_of(p);
    if (!a) return cudaErrorInvalidValue;
    auto f = a->live.find((char *)p);
    if (f == a->live.end()) return cudaErrorInvalidValue;
    ASAN_POISON_MEMORY_REGION(p, f->second.bytes);
    a->free.emplace(pages(f->second.bytes), (char *)p);
    a->live.erase(f);
    return cudaSuccess;
}
namespace ms_shim
{

// Sizes of the pieces of pinned memory, by start address. In the mode `late`, copies from pinned memory are not staged.
inline std::map<const char *, size_t> pinned;

inline cudaError_t pin(void **p, size_t n)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    *p = aligned_alloc(4096, (n + 4095) & ~(size_t)4095);
    if (!*p) return cudaErrorMemoryAllocation;
    pinned[(const char *)*p] = n;
    return cudaSuccess;
}
inline bool is_pinned(const void *p)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto next = pinned.upper_bound((const char *)p);
    return next != pinned.begin() && (const char *)p < std::prev(next)->first + std::prev(next)->second;
}

}  // namespace ms_shim

inline cudaError_t cudaMallocHost(void **p, size_t n)
{
    MS_MAY_FAIL(cudaMallocHost);
    return ms_shim::pin(p, n);
}
inline cudaError_t cudaFreeHost(void *p)
{
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    ms_shim::pinned.erase((const char *)p);
    free(p);
    return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void **p, size_t n, unsigned)
{
    MS_MAY_FAIL(cudaHostAlloc);
    return ms_shim::pin(p, n);
}
inline cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned)
{
    MS_MAY_FAIL(cudaHostGetDevicePointer);
    *d = h;
    return cudaSuccess;
}
// Memory that the program has mapped: pinned until the process ends.
inline cudaError_t cudaHostRegister(void *p, size_t n, unsigned)
{
    MS_MAY_FAIL(cudaHostRegister);
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    ms_shim::pinned[(const char *)p] = n;
    return cudaSuccess;
}
