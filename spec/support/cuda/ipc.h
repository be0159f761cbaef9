// SPDX-License-Identifier: MIT
// cuda/ipc.h -- memory of other processes.
#pragma once
#include "memory.h"

namespace ms_shim
{
struct mapping {
    size_t bytes;
    std::string name;
    int count;
};
// Never destroyed, so that calls during exit find it.
inline std::map<void *, mapping> &opened = *new std::map<void *, mapping>;
}  // namespace ms_shim

inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p)
{
    MS_MAY_FAIL(cudaIpcGetMemHandle);
    ms_shim::arena *a = ms_shim::arena_of(p);
    if (!a || !a->live.count((char *)p)) return cudaErrorInvalidValue;
    struct {
        long pid, fd;
        size_t at, bytes;
    } where = { getpid(), a->fd, (size_t)((char *)p - a->base), a->live[(char *)p].bytes };
    static_assert(sizeof where <= sizeof *h, "");
    ms_shim::wrote(p, where.bytes);  // by other processes, perhaps
    memset(h, 0, sizeof *h);
    memcpy(h, &where, sizeof where);
    return cudaSuccess;
}
inline cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t h, unsigned)
{
    MS_MAY_FAIL(cudaIpcOpenMemHandle);
    struct {
        long pid, fd;
        size_t at, bytes;
    } where;
    memcpy(&where, &h, sizeof where);
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/fd/%ld", where.pid, where.fd);
    if (where.pid == getpid()) return cudaErrorInvalidValue;  // as in CUDA: the exporter cannot open it
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    std::string name((const char *)&where, sizeof where);
    for (auto &o : ms_shim::opened)
        if (o.second.name == name) {  // as in CUDA: an allocation is mapped once, and opens are counted
            o.second.count++;
            *out = o.first;
            return cudaSuccess;
        }
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return cudaErrorInvalidValue;
    void *p = mmap(nullptr, where.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)where.at);
    close(fd);
    if (p == MAP_FAILED) return cudaErrorMemoryAllocation;
    if (ms_shim::key >= 0) pkey_mprotect(p, where.bytes, PROT_READ | PROT_WRITE, ms_shim::key);
    ms_shim::opened[p] = { where.bytes, name, 1 };
    *out = p;
    return cudaSuccess;
}
// Unmaps at once: a queued kernel that uses the memory crashes.
inline cudaError_t cudaIpcCloseMemHandle(void *p)
{
    MS_MAY_FAIL(cudaIpcCloseMemHandle);
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    auto o = ms_shim::opened.find(p);
    if (o == ms_shim::opened.end()) return cudaErrorInvalidValue;
    if (--o->second.count == 0) {
        munmap(p, o->second.bytes);
        ms_shim::opened.erase(o);
    }
    return cudaSuccess;
}
