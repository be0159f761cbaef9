// SPDX-License-Identifier: MIT
// cuda/memory.cu -- memory of the device, and sharing it with other processes of this machine.
//
// There are two ways to share an allocation. CUDA IPC has a handle for memory of cudaMalloc. Where the driver gives
// none, memory is made by cuMemCreate instead, which can be exported as a file descriptor. The first allocation decides
// the way for all allocations, because memory of cudaMalloc cannot be exported as a descriptor later.
// MOONSHARD_CUDA_SHARE chooses a way, ipc or fd; if it is staging, memory is not shared.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#if !defined(MS_EMULATED)
#include <crt/../cuda.h>  // the toolkit's: this folder has a cuda.h, too
#include <dlfcn.h>
#endif

#include "cuda/cuda.h"

// ---- memory that is mapped: made by cuMemCreate here, or imported ----

// The driver's functions, found at run time: the plugin does not link the driver.
#define FUNCTIONS(X)                 \
    X(cuMemGetAllocationGranularity) \
    X(cuMemCreate)                   \
    X(cuMemRelease)                  \
    X(cuMemAddressReserve)           \
    X(cuMemAddressFree)              \
    X(cuMemMap)                      \
    X(cuMemUnmap)                    \
    X(cuMemSetAccess)                \
    X(cuMemRetainAllocationHandle)   \
    X(cuMemExportToShareableHandle)  \
    X(cuMemImportFromShareableHandle)

struct driver {
    bool complete = true;
#define DECLARE(f) decltype(&f) f##_;
    FUNCTIONS(DECLARE)
#undef DECLARE
    driver()
    {
#if defined(MS_EMULATED)
#define FIND(f) f##_ = &f;
#else
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#define FIND(f) f##_ = library ? (decltype(&f))dlsym(library, #f) : NULL;
#endif
        FUNCTIONS(FIND)
#undef FIND
#define CHECK(f) complete = complete && f##_ != NULL;
        FUNCTIONS(CHECK)
#undef CHECK
    }
};
static const driver &the_driver()
{
    static const driver d;
    return d;
}

// An entry of the list of mapped memory. No container of the standard library: its templates would be symbols that the
// plugin exports. The list is short, because memory is allocated in slabs.
struct mapping {
    void *p;
    size_t size;
    mapping *next;
};
static std::mutex lock;
static mapping *mapped;

static size_t size_of_allocation(void *p)
{
    std::lock_guard<std::mutex> hold(lock);
    for (const mapping *m = mapped; m; m = m->next)
        if (m->p == p) return m->size;
    return 0;
}

// The driver's results have the values of the runtime's errors.
#define DRIVER_TRY(index, call, result, ...)                                                         \
    do {                                                                                             \
        CUresult r__ = (result);                                                                     \
        if (r__ != CUDA_SUCCESS) return ms__cuda_failed((cudaError_t)r__, call, index, __VA_ARGS__); \
    } while (0)

static CUmemAllocationProp properties(int index)
{
    CUmemAllocationProp p = {};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = index;
    return p;
}

// Maps the memory of a handle for device `index`, and for the other devices that can access it.
static ms_status map_handle(int index, CUmemGenericAllocationHandle h, size_t size, void **out)
{
    const driver &d = the_driver();
    CUdeviceptr at = 0;
    DRIVER_TRY(index, "cuMemAddressReserve", d.cuMemAddressReserve_(&at, size, 0, 0, 0), "%zu bytes of addresses",
               size);
    mapping *m = (mapping *)malloc(sizeof *m);
    CUresult r = m ? d.cuMemMap_(at, size, 0, h, 0) : CUDA_ERROR_OUT_OF_MEMORY;
    const char *call = "cuMemMap";
    if (r == CUDA_SUCCESS) {
        call = "cuMemSetAccess";
        int n = 0;
        cudaGetDeviceCount(&n);
        for (int k = 0; k < n && r == CUDA_SUCCESS; k++) {
            CUmemAccessDesc access = {};
            access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
            access.location.id = k;
            access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            CUresult allowed = d.cuMemSetAccess_(at, size, &access, 1);
            if (k == index) r = allowed;
        }
        if (r != CUDA_SUCCESS) d.cuMemUnmap_(at, size);
    }
    if (r != CUDA_SUCCESS) {
        free(m);
        d.cuMemAddressFree_(at, size);
        return ms__cuda_failed((cudaError_t)r, call, index, "mapping %zu bytes", size);
    }
    *out = (void *)at;
    std::lock_guard<std::mutex> hold(lock);
    *m = { *out, size, mapped };
    mapped = m;
    return MS_OK;
}

static ms_status create_allocation(int index, size_t bytes, void **out)
{
    const driver &d = the_driver();
    CUmemAllocationProp p = properties(index);
    CUmemGenericAllocationHandle h;
    size_t unit = 0;
    DRIVER_TRY(index, "cuMemGetAllocationGranularity",
               d.cuMemGetAllocationGranularity_(&unit, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
               "reading the granularity of allocations");
    size_t size = (bytes + unit - 1) / unit * unit;
    CUresult r = d.cuMemCreate_(&h, size, &p, 0);
    if (r == CUDA_ERROR_OUT_OF_MEMORY) return MS_ENOMEM;
    DRIVER_TRY(index, "cuMemCreate", r, "%zu bytes", size);
    ms_status st = map_handle(index, h, size, out);
    d.cuMemRelease_(h);  // the mapping keeps the memory
    return st;
}

// Reports a failed release on stderr, because the callers cannot return an error.
void ms__cuda_released(cudaError_t e, int index, const char *call, const void *p)
{
    if (e == cudaSuccess || e == cudaErrorCudartUnloading) return;
    cudaGetLastError();
    fprintf(stderr, "moonshard: cuda:%d: %s of %p: %s (CUDA error %d)\n", index, call, p, cudaGetErrorString(e),
            (int)e);
}

static void unmap(int index, void *p, size_t size)
{
    const driver &d = the_driver();
    {
        std::lock_guard<std::mutex> hold(lock);
        for (mapping **at = &mapped; *at; at = &(*at)->next) {
            mapping *m = *at;
            if (m->p != p) continue;
            *at = m->next;
            free(m);
            break;
        }
    }
    CUresult r = d.cuMemUnmap_((CUdeviceptr)p, size);
    if (r == CUDA_SUCCESS) r = d.cuMemAddressFree_((CUdeviceptr)p, size);
    ms__cuda_released((cudaError_t)r, index, "cuMemUnmap", p);
}

// ---- the way to share ----

enum way { UNDECIDED, IPC, DESCRIPTORS, STAGING };
static std::atomic<int> way { UNDECIDED };

// Sets `way`: by MOONSHARD_CUDA_SHARE if it is set; else, unless p is NULL, to IPC if p, memory of cudaMalloc, has a
// handle or the driver lacks cuMemCreate, otherwise to DESCRIPTORS.
static ms_status decide(int index, void *p)
{
    const char *chosen = getenv("MOONSHARD_CUDA_SHARE");
    if (chosen && *chosen) {
        way = strcmp(chosen, "ipc") == 0       ? IPC
              : strcmp(chosen, "fd") == 0      ? DESCRIPTORS
              : strcmp(chosen, "staging") == 0 ? STAGING
                                               : UNDECIDED;
        if (way == UNDECIDED)
            return ms__fail(MS_EINVAL, "cuda:%d: MOONSHARD_CUDA_SHARE is '%s', expected ipc, fd or staging", index,
                            chosen);
        if (way == DESCRIPTORS && !the_driver().complete)
            return ms__fail(
                MS_EUNSUPPORTED,
                "cuda:%d: MOONSHARD_CUDA_SHARE is fd, but the driver lacks cuMemCreate or related functions", index);
    } else if (p) {
        cudaIpcMemHandle_t h;
        bool has_handle = cudaIpcGetMemHandle(&h, p) == cudaSuccess;
        cudaGetLastError();
        way = has_handle || !the_driver().complete ? IPC : DESCRIPTORS;
    }
    return MS_OK;
}

ms_status ms__cuda_alloc(int index, size_t bytes, void **out)
{
    MS_TRY(ms__cuda_use(index));
    if (way == UNDECIDED) MS_TRY(decide(index, NULL));
    if (way == DESCRIPTORS) return create_allocation(index, bytes, out);
    cudaError_t e = cudaMalloc(out, bytes);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return MS_ENOMEM;
    }
    if (e != cudaSuccess) return ms__cuda_failed(e, "cudaMalloc", index, "%zu bytes", bytes);
    if (way != UNDECIDED) return MS_OK;
    MS_TRY(decide(index, *out));
    if (way != DESCRIPTORS) return MS_OK;
    void *apart;
    if (create_allocation(index, bytes, &apart) != MS_OK) {
        way = IPC;  // sharing will fail, with a message
        return MS_OK;
    }
    cudaFree(*out);
    *out = apart;
    return MS_OK;
}

void ms__cuda_free(int index, void *p)
{
    if (ms__cuda_use(index) != MS_OK) return;
    size_t size = size_of_allocation(p);
    if (size) unmap(index, p, size);
    else ms__cuda_released(cudaFree(p), index, "cudaFree", p);
}

// ---- between processes ----

ms_status ms__cuda_share(void *p, uint8_t handle[MS_CUDA_HANDLE])
{
    cudaIpcMemHandle_t h;
    static_assert(sizeof h <= MS_CUDA_HANDLE, "CUDA's IPC handle is larger than MS_CUDA_HANDLE");
    if (way == STAGING)
        return ms__fail(MS_EUNSUPPORTED, "cuda: memory at %p is not shared: MOONSHARD_CUDA_SHARE is staging", p);
    if (size_of_allocation(p))
        return ms__fail(MS_EUNSUPPORTED, "cuda: memory at %p is shared by file descriptors, so it has no IPC handle",
                        p);
    CUDA_TRY(0, cudaIpcGetMemHandle(&h, p), "sharing memory at %p", p);
    memcpy(handle, &h, sizeof h);
    return MS_OK;
}

ms_status ms__cuda_open(int index, const uint8_t handle[MS_CUDA_HANDLE], void **out)
{
    cudaIpcMemHandle_t h;
    memcpy(&h, handle, sizeof h);
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index, cudaIpcOpenMemHandle(out, h, cudaIpcMemLazyEnablePeerAccess), "mapping memory of another process");
    return MS_OK;
}

void ms__cuda_close(int index, void *p)
{
    if (ms__cuda_use(index) != MS_OK) return;
    size_t size = size_of_allocation(p);
    if (size) unmap(index, p, size);
    else ms__cuda_released(cudaIpcCloseMemHandle(p), index, "cudaIpcCloseMemHandle", p);
}

ms_status ms__cuda_to_fd(void *p, int *fd, size_t *bytes)
{
    *fd = -1;
    if (!(*bytes = size_of_allocation(p))) return MS_OK;
    const driver &d = the_driver();
    CUmemGenericAllocationHandle h;
    DRIVER_TRY(0, "cuMemRetainAllocationHandle", d.cuMemRetainAllocationHandle_(&h, p), "sharing memory at %p", p);
    CUresult r = d.cuMemExportToShareableHandle_(fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    d.cuMemRelease_(h);
    DRIVER_TRY(0, "cuMemExportToShareableHandle", r, "sharing memory at %p", p);
    return MS_OK;
}

ms_status ms__cuda_from_fd(int index, int fd, size_t bytes, void **out)
{
    const driver &d = the_driver();
    CUmemGenericAllocationHandle h;
    MS_TRY(ms__cuda_use(index));
    if (!d.complete)
        return ms__fail(
            MS_EUNSUPPORTED,
            "cuda:%d: memory of another rank cannot be mapped: the driver lacks cuMemCreate or related functions",
            index);
    DRIVER_TRY(index, "cuMemImportFromShareableHandle",
               d.cuMemImportFromShareableHandle_(&h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "mapping memory of another process");
    ms_status st = map_handle(index, h, bytes, out);
    d.cuMemRelease_(h);
    return st;
}
