// SPDX-License-Identifier: MIT
// cuda/ipc_events.h -- events between processes: counters in a memfd, which other processes map.
#pragma once
#include "streams.h"

namespace ms_shim
{

enum { COUNTERS = 4096 };
struct all_counters {
    std::mutex lock;
    int fd = -1, used = 0;
    counters *own = nullptr;
    std::map<std::pair<long, long>, counters *> mapped;  // of other processes, by process and descriptor
};
inline all_counters &between = *new all_counters;  // never destroyed: streams may use it during exit

inline counters *map_counters(int fd)
{
    void *p = mmap(nullptr, COUNTERS * sizeof(counters), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? nullptr : (counters *)p;
}

inline bool is_demanded()
{
    for (int k = 0; k < between.used; k++)
        if (between.own[k].wanted > between.own[k].reached) return true;
    return false;
}

inline counters *new_counters()
{
    std::lock_guard<std::mutex> hold(between.lock);
    if (!between.own) {
        between.fd = memfd_create("moonshard_emulated_events", MFD_CLOEXEC);
        if (between.fd < 0 || ftruncate(between.fd, COUNTERS * sizeof(counters)) != 0) return nullptr;
        if (!(between.own = map_counters(between.fd))) return nullptr;
    }
    if (between.used == COUNTERS) return nullptr;
    counters *c = &between.own[between.used++];
    if (lazy) {
        std::lock_guard<std::mutex> ready(all.lock);
        all.demanded = is_demanded;
    }
    return c;
}

}  // namespace ms_shim

inline cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e)
{
    MS_MAY_FAIL(cudaIpcGetEventHandle);
    if (!e->between) e->between = ms_shim::new_counters();
    if (!e->between) return cudaErrorMemoryAllocation;
    long where[3] = { getpid(), ms_shim::between.fd, e->between - ms_shim::between.own };
    memset(h, 0, sizeof *h);
    memcpy(h, where, sizeof where);
    return cudaSuccess;
}
inline cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h)
{
    MS_MAY_FAIL(cudaIpcOpenEventHandle);
    long where[3];
    memcpy(where, &h, sizeof where);
    if (where[0] == getpid()) return cudaErrorInvalidValue;
    std::lock_guard<std::mutex> hold(ms_shim::between.lock);
    ms_shim::counters *&at = ms_shim::between.mapped[{ where[0], where[1] }];
    if (!at) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%ld/fd/%ld", where[0], where[1]);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0) return cudaErrorInvalidValue;
        at = ms_shim::map_counters(fd);
        close(fd);
        if (!at) return cudaErrorMemoryAllocation;
    }
    *e = new ms_shim::event_state;
    (*e)->between = at + where[2];
    return cudaSuccess;
}
