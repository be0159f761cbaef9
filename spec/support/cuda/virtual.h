// SPDX-License-Identifier: MIT
// cuda/virtual.h -- the driver's functions for memory that processes share by file descriptors: an allocation is a
// memfd of its own, apart from the device's arena, and a mapping ends with a page that cannot be accessed.
#pragma once
#include <sys/resource.h>

#include "memory.h"

enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY };
enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3, CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAllocationHandleType { CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1 };
enum CUmemAllocationGranularity_flags { CU_MEM_ALLOC_GRANULARITY_MINIMUM };
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
struct CUmemLocation {
    int type, id;
};
struct CUmemAllocationProp {
    int type, requestedHandleTypes;
    CUmemLocation location;
};
struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
};

namespace ms_shim
{
enum { VIRTUAL_PAGE = 4096 };
struct allocation {
    int fd, refs;  // refs: handles and mappings
    size_t bytes;
    int device;  // whose memory it uses; -1: another process's
};
struct virtual_memory {
    std::map<CUmemGenericAllocationHandle, allocation> allocations;
    std::map<char *, CUmemGenericAllocationHandle> mappings;
    std::map<char *, size_t> reserved;
    CUmemGenericAllocationHandle next = 1;
    size_t used[8] = {};
};
inline virtual_memory &virtuals = *new virtual_memory;  // never destroyed: calls during exit find it

// Without the mode `chunks` every memory block of the engine is an allocation of its own, here with a file descriptor.
inline void allow_many_descriptors()
{
    static bool done = false;
    rlimit most;
    if (done || getrlimit(RLIMIT_NOFILE, &most) != 0) return;
    done = true;
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_NOFILE, &most);
}

inline void unref(CUmemGenericAllocationHandle h)
{
    allocation &a = virtuals.allocations[h];
    if (--a.refs > 0) return;
    if (a.device >= 0) virtuals.used[a.device] -= a.bytes;
    close(a.fd);
    virtuals.allocations.erase(h);
}
}  // namespace ms_shim

#define MS_DRIVER_MAY_FAIL(call) \
    if (cudaError_t e__ = ms_shim::injected(#call)) return (CUresult)e__

inline CUresult cuMemGetAllocationGranularity(size_t *unit, const CUmemAllocationProp *,
                                              CUmemAllocationGranularity_flags)
{
    MS_DRIVER_MAY_FAIL(cuMemGetAllocationGranularity);
    *unit = ms_shim::VIRTUAL_PAGE;
    return CUDA_SUCCESS;
}
inline CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t bytes, const CUmemAllocationProp *p,
                            unsigned long long)
{
    MS_DRIVER_MAY_FAIL(cuMemCreate);
    using namespace ms_shim;
    std::lock_guard<std::mutex> hold(memory_lock);
    int device = p->location.id;
    if (bytes % VIRTUAL_PAGE != 0 || p->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    arena &a = arenas[device];
    if (!open_arena(a) || a.bytes - a.used < virtuals.used[device] + bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    allow_many_descriptors();
    int fd = memfd_create("moonshard_emulated_gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    virtuals.used[device] += bytes;
    virtuals.allocations[ *h = virtuals.next++] = { fd, 1, bytes, device };
    return CUDA_SUCCESS;
}
inline CUresult cuMemRelease(CUmemGenericAllocationHandle h)
{
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    ms_shim::unref(h);
    return CUDA_SUCCESS;
}
inline CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t, CUdeviceptr, unsigned long long)
{
    MS_DRIVER_MAY_FAIL(cuMemAddressReserve);
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    void *p =
        mmap(nullptr, bytes + ms_shim::VIRTUAL_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    ms_shim::virtuals.reserved[(char *)p] = bytes;
    *out = (CUdeviceptr)p;
    return CUDA_SUCCESS;
}
inline CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes)
{
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    if (!ms_shim::virtuals.reserved.erase((char *)at)) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)at, bytes + ms_shim::VIRTUAL_PAGE);
    return CUDA_SUCCESS;
}
inline CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle h, unsigned long long)
{
    MS_DRIVER_MAY_FAIL(cuMemMap);
    using namespace ms_shim;
    std::lock_guard<std::mutex> hold(memory_lock);
    auto a = virtuals.allocations.find(h);
    if (a == virtuals.allocations.end() || a->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, a->second.fd, 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    a->second.refs++;
    virtuals.mappings[(char *)at] = h;
    return CUDA_SUCCESS;
}
inline CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *, size_t)
{
    MS_DRIVER_MAY_FAIL(cuMemSetAccess);
    int rights = PROT_READ | PROT_WRITE;
    bool done = mprotect((void *)at, bytes, rights) == 0;
    if (done && ms_shim::key >= 0) pkey_mprotect((void *)at, bytes, rights, ms_shim::key);
    return done ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
// Unmaps at once: a queued kernel that uses the memory crashes.
inline CUresult cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    MS_DRIVER_MAY_FAIL(cuMemUnmap);
    using namespace ms_shim;
    std::lock_guard<std::mutex> hold(memory_lock);
    auto m = virtuals.mappings.find((char *)at);
    if (m == virtuals.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    unref(m->second);
    virtuals.mappings.erase(m);
    return CUDA_SUCCESS;
}
inline CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *h, void *p)
{
    MS_DRIVER_MAY_FAIL(cuMemRetainAllocationHandle);
    using namespace ms_shim;
    std::lock_guard<std::mutex> hold(memory_lock);
    auto m = virtuals.mappings.find((char *)p);
    if (m == virtuals.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    virtuals.allocations[ *h = m->second].refs++;
    return CUDA_SUCCESS;
}
inline CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType,
                                             unsigned long long)
{
    MS_DRIVER_MAY_FAIL(cuMemExportToShareableHandle);
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    int fd = fcntl(ms_shim::virtuals.allocations[h].fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(out, &fd, sizeof fd);
    return CUDA_SUCCESS;
}
inline CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *h, void *there, CUmemAllocationHandleType)
{
    MS_DRIVER_MAY_FAIL(cuMemImportFromShareableHandle);
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    int fd = fcntl((int)(intptr_t)there, F_DUPFD_CLOEXEC, 0);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) return CUDA_ERROR_INVALID_VALUE;
    ms_shim::virtuals.allocations[ *h = ms_shim::virtuals.next++] = { fd, 1, (size_t)st.st_size, -1 };
    return CUDA_SUCCESS;
}
namespace ms_shim
{
inline bool is_virtual(const void *p)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto next = virtuals.mappings.upper_bound((char *)p);
    if (next == virtuals.mappings.begin()) return false;
    auto m = std::prev(next);
    return (const char *)p < m->first + virtuals.allocations[m->second].bytes;
}
}  // namespace ms_shim

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p)
{
    MS_MAY_FAIL(cudaPointerGetAttributes);
    a->type = ms_shim::arena_of(p) || ms_shim::is_virtual(p) ? cudaMemoryTypeDevice
              : ms_shim::is_pinned(p)                        ? cudaMemoryTypeHost
                                                             : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}
