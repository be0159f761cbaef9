// SPDX-License-Identifier: MIT
// null/calls.c -- the CUDA runtime's functions: they count launches, copies, fills, waits and events, track
// allocations, and run nothing.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "null.h"

// ---- counters ----

// Calls come from several threads, such as the threads that run collectives.
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static void unlock(int *held) { (void)held, pthread_mutex_unlock(&lock); }
#define HOLD                                             \
    __attribute__((cleanup(unlock), unused)) int held__; \
    pthread_mutex_lock(&lock)

ms_null_totals ms__null_totals;
static ms_null_launch *launches;
static int n_launches, cap_launches;
_Thread_local const char *ms__null_op = "";

EXPORT const ms_null_totals *ms_null_count(void) { return &ms__null_totals; }
EXPORT int ms_null_launches(const ms_null_launch **out)
{
    *out = launches;
    return n_launches;
}
EXPORT void ms_null_reset(void)
{
    memset(&ms__null_totals, 0, sizeof ms__null_totals);
    n_launches = 0;
}

ms_null_launch *ms__null_launch(const char *kernel)
{
    if (n_launches == cap_launches) {
        cap_launches = cap_launches ? 2 * cap_launches : 4096;
        launches = realloc(launches, (size_t)cap_launches * sizeof *launches);
        if (!launches) abort();
    }
    ms_null_launch *l = &launches[n_launches++];
    *l = (ms_null_launch) { .op = ms__null_op, .kernel = kernel };
    return l;
}

// ---- device memory: addresses only ----

enum { DEVICES = 8 };
static const size_t SPACE = (size_t)1 << 40;  // size of a device's range of addresses
static const size_t UNIT = 2 << 20;           // the unit in which the driver maps memory
typedef struct {
    char *p;
    size_t size;
    bool live;
} allocation;
static struct {
    char *base;
    size_t used, live;
    allocation *list;
    int n, cap;
} memory[DEVICES];
static _Thread_local int current;

// Devices of other processes, each with a range of addresses that is reserved for it in this process.
enum { PEERS = 64 };
static struct {
    long pid, device;
    char *base;
} peers[PEERS];
static int n_peers;

static int device_count(void)
{
    const char *s = getenv("MOONSHARD_CUDA_DEVICES");
    int n = s ? atoi(s) : 2;
    return n < 1 ? 1 : n > DEVICES ? DEVICES : n;
}
static size_t device_bytes(void)
{
    const char *s = getenv("MOONSHARD_CUDA_MEMORY");
    return s ? (size_t)atoll(s) : (size_t)141000000000;  // the memory of an H200
}
bool ms__null_on_device(const void *p)
{
    for (int d = 0; d < DEVICES; d++)
        if (memory[d].base && (const char *)p >= memory[d].base && (const char *)p < memory[d].base + memory[d].used)
            return true;
    for (int k = 0; k < n_peers; k++)
        if ((const char *)p >= peers[k].base && (const char *)p < peers[k].base + SPACE) return true;
    return false;
}

// ---- kernels ----

enum { KERNELS = 1024, PARAMETERS = 32 };
static struct {
    const void *host;
    const char *name;
    int n, sizes[PARAMETERS];
} kernels[KERNELS];
static int n_kernels;
// The numbers of kernels, plus 1, by their host pointers: a hash table with open addressing, because the time of a
// launch must not grow with the number of kernels, as it does not on a GPU.
static uint16_t kernels_by_host[4 * KERNELS];
static uint16_t *kernel_slot(const void *host)
{
    uint32_t at = (uint32_t)((uintptr_t)host >> 4) * 2654435761u >> 16;
    for (;; at++) {
        uint16_t *slot = &kernels_by_host[at % (4 * KERNELS)];
        if (!*slot || kernels[*slot - 1].host == host) return slot;
    }
}

EXPORT void ms_null_parameters(const char *kernel, int n, const int *sizes)
{
    ms__null_watching = true;
    for (int k = 0; k < n_kernels; k++)
        if (strcmp(kernels[k].name, kernel) == 0 && n <= PARAMETERS) {
            kernels[k].n = n;
            memcpy(kernels[k].sizes, sizes, (size_t)n * sizeof *sizes);
        }
}

EXPORT void **__cudaRegisterFatBinary(void *binary) { return (void **)binary; }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *tid, void *bid, void *block, void *grid, int *warp)
{
    (void)handle, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    if (n_kernels == KERNELS) abort();
    kernels[n_kernels].host = host;
    kernels[n_kernels++].name = name;
    *kernel_slot(host) = (uint16_t)n_kernels;
}
// nvcc's code for a kernel<<<>>>() launch calls the next three functions; kernels/cuda launches by cudaLaunchKernel.
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    (void)grid, (void)block, (void)shared, (void)stream;
    return cudaErrorNotSupported;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host)
{
    (void)kernel, (void)host;
    return cudaErrorNotSupported;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                      cudaStream_t stream)
{
    (void)kernel, (void)grid, (void)block, (void)args, (void)shared, (void)stream;
    return cudaErrorNotSupported;
}

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
    (void)stream;
    HOLD;
    int k = *kernel_slot(host) - 1;
    if (k < 0) return cudaErrorInvalidDeviceFunction;
    if (block.x == 0 || block.x > 1024 || grid.x == 0) return cudaErrorInvalidConfiguration;
    ms__null_totals.launches++;
    ms_null_launch *l = ms__null_launch(kernels[k].name);
    l->blocks = (int32_t)(grid.x * grid.y * grid.z);
    l->threads = (int32_t)(block.x * block.y * block.z);
    l->shared = (int32_t)shared;
    l->flops = ms__null_flops(l->kernel);
    for (int i = 0; i < kernels[k].n; i++) ms__null_touch(l, args[i], (size_t)kernels[k].sizes[i]);
    return cudaSuccess;
}

// ---- the runtime's other calls ----

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaSuccess                 ? "no error"
           : e == cudaErrorMemoryAllocation ? "out of memory"
                                            : "not supported by the null device";
}
const char *cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *n)
{
    *n = device_count();
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v)
{
    *v = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v) { return cudaDriverGetVersion(v); }
cudaError_t cudaSetDevice(int d)
{
    if (d < 0 || d >= device_count()) return cudaErrorInvalidDevice;
    current = d;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *d)
{
    *d = current;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d)
{
    (void)d;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "null device");
    p->major = 9;
    p->multiProcessorCount = 132;
    p->totalGlobalMem = device_bytes();
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr what, int d)
{
    (void)d;
    *v = what == cudaDevAttrComputeCapabilityMajor         ? 9
         : what == cudaDevAttrMultiProcessorCount          ? 132
         : what == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 << 10
                                                           : 0;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *all)
{
    *all = device_bytes();
    *left = *all - memory[current].live;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute what, int v)
{
    (void)f, (void)what, (void)v;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    HOLD;
    typeof(memory[0]) *m = &memory[current];
    size_t size = (bytes + UNIT - 1) / UNIT * UNIT;
    if (!m->base) {
        m->base = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (m->base == MAP_FAILED) m->base = NULL;
        if (!m->base) return cudaErrorMemoryAllocation;
    }
    if (m->live + size > device_bytes()) return cudaErrorMemoryAllocation;
    allocation *found = NULL;
    for (int k = 0; k < m->n && !found; k++)
        if (!m->list[k].live && m->list[k].size == size) found = &m->list[k];
    if (!found) {
        if (SPACE - m->used < size) return cudaErrorMemoryAllocation;
        if (m->n == m->cap) {
            m->cap = m->cap ? 2 * m->cap : 1024;
            m->list = realloc(m->list, (size_t)m->cap * sizeof *m->list);
            if (!m->list) abort();
        }
        found = &m->list[m->n++];
        *found = (allocation) { .p = m->base + m->used, .size = size };
        m->used += size;
    }
    found->live = true;
    m->live += size;
    ms__null_totals.allocations++;
    *out = found->p;
    return cudaSuccess;
}
cudaError_t cudaFree(void *p)
{
    if (!p) return cudaSuccess;
    HOLD;
    for (int d = 0; d < DEVICES; d++)
        for (int k = 0; k < memory[d].n; k++)
            if (memory[d].list[k].p == p && memory[d].list[k].live) {
                memory[d].list[k].live = false;
                memory[d].live -= memory[d].list[k].size;
                ms__null_totals.frees++;
                return cudaSuccess;
            }
    return cudaErrorInvalidValue;
}
cudaError_t cudaMallocHost(void **p, size_t n)
{
    return (*p = aligned_alloc(4096, (n + 4095) & ~(size_t)4095)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *p)
{
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags)
{
    (void)flags;
    return cudaMallocHost(p, n);
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    (void)flags;
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
    a->type = ms__null_on_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)stream;
    HOLD;
    bool there = ms__null_on_device(to), here = ms__null_on_device(from);
    if (kind != cudaMemcpyDefault &&
        (there != (kind != cudaMemcpyDeviceToHost) || here != (kind != cudaMemcpyHostToDevice)))
        return cudaErrorInvalidMemcpyDirection;
    ms__null_totals.copies++;
    if (!there) memset(to, 0, bytes);
    if (there && !here) ms__null_note_table(to, from, bytes);
    if (there) ms__null_note(to, bytes, 0);
    if (there && here) ms__null_totals.on_device += (double)bytes;
    else if (there) ms__null_totals.to_device += (double)bytes;
    else ms__null_totals.to_host += (double)bytes;
    if (there && here && ms__null_watching) ms__null_launch("copy")->bytes[1] = 2 * (double)bytes;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t stream)
{
    (void)byte, (void)stream;
    if (!ms__null_on_device(p)) return cudaErrorInvalidValue;
    HOLD;
    ms__null_totals.fills++;
    ms__null_note(p, bytes, 0);
    if (ms__null_watching) ms__null_launch("set")->bytes[1] = (double)bytes;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    static char streams;
    (void)flags;
    *s = (cudaStream_t)(void *)&streams;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
{
    (void)priority;
    return cudaStreamCreateWithFlags(s, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = *greatest = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    (void)s;
    HOLD;
    ms__null_totals.waits++;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { return cudaStreamSynchronize(NULL); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    (void)s, (void)e, (void)flags;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    static char events;
    (void)flags;
    HOLD;
    *e = (cudaEvent_t)(void *)&events;
    ms__null_totals.events++;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    (void)e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    (void)e, (void)s;
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    (void)e;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    (void)e;
    HOLD;
    ms__null_totals.waits++;
    return cudaSuccess;
}

// There are no graphs, so that every launch is counted.
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    (void)s, (void)mode;
    return cudaErrorNotSupported;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph)
{
    (void)s, (void)graph;
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    (void)out, (void)graph, (void)flags;
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s)
{
    (void)graph, (void)s;
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    (void)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph)
{
    (void)graph;
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_line, const void *from, size_t from_line, size_t bytes, size_t lines,
                              enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)to_line, (void)from_line;
    return cudaMemcpyAsync(to, from, bytes * lines, kind, stream);
}
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags)
{
    (void)p, (void)n, (void)flags;
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *data)
{
    (void)s, (void)fn, (void)data;
    return cudaSuccess;
}

// ---- between processes ----

typedef struct {
    long pid, device;
    size_t at;
} place;
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p)
{
    HOLD;
    for (int d = 0; d < DEVICES; d++)
        for (int k = 0; k < memory[d].n; k++)
            if (memory[d].list[k].p == p && memory[d].list[k].live) {
                place where = { getpid(), d, (size_t)((char *)p - memory[d].base) };
                memset(h, 0, sizeof *h);
                memcpy(h, &where, sizeof where);
                return cudaSuccess;
            }
    return cudaErrorInvalidValue;
}
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned flags)
{
    HOLD;
    (void)flags;
    place where;
    memcpy(&where, &h, sizeof where);
    if (where.pid == getpid()) return cudaErrorInvalidValue;
    int k = 0;
    while (k < n_peers && (peers[k].pid != where.pid || peers[k].device != where.device)) k++;
    if (k == PEERS) return cudaErrorMemoryAllocation;
    if (k == n_peers) {
        void *base = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
        peers[k].pid = where.pid;
        peers[k].device = where.device;
        peers[k].base = base;
        n_peers++;
    }
    *p = peers[k].base + where.at;
    return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *p)
{
    (void)p;
    return cudaSuccess;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e)
{
    (void)e;
    memset(h, 0, sizeof *h);
    return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h)
{
    (void)h;
    return cudaEventCreateWithFlags(e, 0);
}
