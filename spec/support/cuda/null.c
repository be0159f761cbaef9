// SPDX-License-Identifier: MIT
// null.c -- a GPU that only counts. The plugin's own objects, compiled by nvcc, are linked with this file instead of
// the CUDA runtime into libmoonshard_cuda_null.so (MOONSHARD_CUDA=null): launches, products by cuBLASLt, copies,
// allocations and waits are counted, and nothing runs.
//
// Device memory is reserved address space that cannot be touched. What the host reads back is zeros. So control flow
// that depends on results follows zeros: a norm is 0, and clipping scales nothing.
//
// Bytes of a launch, for predictions: the plugin's table is wrapped, so that every tensor that an operator gets is
// known; so are operands of products and filled or copied memory. A launch touches those whose addresses occur in its
// arguments, or in a small table that was copied to an address among its arguments. It needs the arguments' sizes,
// which a caller reads off the PTX (ms_null_parameters). Each occurrence counts once, read or written.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cuda_runtime_api.h>
#if __has_include(<cublasLt.h>)  // as in product.cu
#define MS_CUBLAS 1
#include <cublasLt.h>
#endif

#include "ops/cuda.h"

#define EXPORT __attribute__((visibility("default")))

// ---- what is counted, read through LuaJIT's FFI (spec/support/null.lua) ----

typedef struct {
    double launches, products, flops, to_device, to_host, on_device, copies, fills, allocations, frees, waits, events;
} ms_null_totals;
// A launch or a product. bytes: of halves, of float32 and unknown data, of other data. A product has the kernel
// "product" and no grid.
typedef struct {
    const char *op, *kernel;
    double bytes[3], flops;
    int32_t blocks, threads, shared;  // shared: dynamic shared memory of a block
} ms_null_launch;

static ms_null_totals totals;
static ms_null_launch *launches;
static int n_launches, cap_launches;
static const char *op = "";  // the operator that runs

EXPORT const ms_null_totals *ms_null_count(void) { return &totals; }
EXPORT int ms_null_launches(const ms_null_launch **out)
{
    *out = launches;
    return n_launches;
}
EXPORT void ms_null_reset(void)
{
    memset(&totals, 0, sizeof totals);
    n_launches = 0;
}

static ms_null_launch *add_launch(const char *kernel)
{
    if (n_launches == cap_launches) {
        cap_launches = cap_launches ? 2 * cap_launches : 4096;
        launches = realloc(launches, (size_t)cap_launches * sizeof *launches);
        if (!launches) abort();
    }
    ms_null_launch *l = &launches[n_launches++];
    *l = (ms_null_launch) { .op = op, .kernel = kernel };
    return l;
}

// ---- device memory: addresses only ----

enum { DEVICES = 8 };
static const size_t SPACE = (size_t)1 << 40;  // addresses of a device
static const size_t UNIT = 2 << 20;           // the driver maps memory in such units
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

static int device_count(void)
{
    const char *s = getenv("MOONSHARD_CUDA_DEVICES");
    int n = s ? atoi(s) : 2;
    return n < 1 ? 1 : n > DEVICES ? DEVICES : n;
}
static size_t device_bytes(void)
{
    const char *s = getenv("MOONSHARD_CUDA_MEMORY");
    return s ? (size_t)atoll(s) : (size_t)141000000000;  // an H200's
}
static bool on_device(const void *p)
{
    for (int d = 0; d < DEVICES; d++)
        if (memory[d].base && (const char *)p >= memory[d].base && (const char *)p < memory[d].base + memory[d].used)
            return true;
    return false;
}

// ---- what lies at an address ----

// Open addressing; the newest entry of an address counts, because memory is used again.
enum { PLACES = 1 << 16, PROBES = 64, TABLES = 16, TABLE_BYTES = 1 << 20 };
static struct {
    const void *p;
    size_t bytes;
    int size;  // of an element; 0: unknown
} places[PLACES];
static struct {
    const void *there;
    const void **pointers;
    int n;
} tables[TABLES];
static int next_table;
// Rooms that operators made for themselves, the newest last, for addresses within them.
static struct {
    const char *p;
    size_t bytes;
} rooms[64];
static int n_rooms;
static const void *whole;  // the place that the launch at hand touched last
static bool watching;

static int place_of(const void *p)
{
    uint32_t h = (uint32_t)((uintptr_t)p >> 4) * 2654435761u >> 16;
    for (int k = 0; k < PROBES; k++) {
        int at = (int)((h + (uint32_t)k) % PLACES);
        if (!places[at].p || places[at].p == p) return at;
    }
    return -1;
}
static void note(const void *p, size_t bytes, int size)
{
    if (!watching || !p) return;
    int at = place_of(p);
    if (at < 0) return;
    // A room of unknown content keeps the type that a product gave it.
    if (size == 0 && places[at].p == p && places[at].bytes <= bytes) size = places[at].size;
    places[at].p = p;
    places[at].bytes = bytes;
    places[at].size = size;
}
static void note_tensor(const ms_tensor *t)
{
    if (t && t->storage && ms__is_cuda(ms__device(t))) note(ms__data(t), ms__nbytes(t), (int)ms__dtype_size(t->dtype));
}
// Pointers of a table that is copied to the device, for example an optimizer's list of leaves.
static void note_table(const void *there, const void *here, size_t bytes)
{
    if (!watching || bytes > TABLE_BYTES) return;
    int at = 0;
    while (at < TABLES && tables[at].there != there) at++;
    if (at == TABLES) at = next_table++ % TABLES;
    free(tables[at].pointers);
    tables[at].there = there;
    tables[at].pointers = malloc(bytes + 1);
    tables[at].n = 0;
    if (!tables[at].pointers) abort();
    for (size_t k = 0; k + 8 <= bytes; k += 8) {
        const void *p;
        memcpy(&p, (const char *)here + k, 8);
        if (on_device(p)) tables[at].pointers[tables[at].n++] = p;
    }
}
static void touch(ms_null_launch *l, const void *p)
{
    int at = place_of(p);
    if (at >= 0 && places[at].p == p) {
        int size = places[at].size;
        whole = p;
        l->bytes[size == 2 ? 0 : size == 4 || size == 0 ? 1 : 2] += (double)places[at].bytes;
    } else {
        int k = n_rooms - 1, last = n_rooms > MS_COUNT(rooms) ? n_rooms - MS_COUNT(rooms) : 0;
        for (; k >= last; k--) {
            const char *room = rooms[k % MS_COUNT(rooms)].p, *end = room + rooms[k % MS_COUNT(rooms)].bytes;
            if ((const char *)p < room || (const char *)p >= end) continue;
            if (room != whole) l->bytes[1] += (double)(end - (const char *)p);
            break;
        }
    }
    for (int k = 0; k < TABLES; k++)
        for (int i = 0; tables[k].there == p && i < tables[k].n; i++)
            if (tables[k].pointers[i] != p) touch(l, tables[k].pointers[i]);
}

// ---- kernels ----

enum { KERNELS = 1024, PARAMETERS = 32 };
static struct {
    const void *host;
    const char *name;
    int n, sizes[PARAMETERS];
} kernels[KERNELS];
static int n_kernels;

EXPORT void ms_null_parameters(const char *kernel, int n, const int *sizes)
{
    watching = true;
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
}
// Of a launch with <<<>>>, which kernels/cuda does not use.
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
    int k = 0;
    while (k < n_kernels && kernels[k].host != host) k++;
    if (k == n_kernels) return cudaErrorInvalidDeviceFunction;
    if (block.x == 0 || block.x > 1024 || grid.x == 0) return cudaErrorInvalidConfiguration;
    totals.launches++;
    ms_null_launch *l = add_launch(kernels[k].name);
    l->blocks = (int32_t)(grid.x * grid.y * grid.z);
    l->threads = (int32_t)(block.x * block.y * block.z);
    l->shared = (int32_t)shared;
    whole = NULL;
    for (int i = 0; i < kernels[k].n; i++)
        for (int at = 0; at + 8 <= kernels[k].sizes[i]; at += 8) {
            const void *p;
            memcpy(&p, (const char *)args[i] + at, 8);
            if (on_device(p)) touch(l, p);
        }
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
    totals.allocations++;
    *out = found->p;
    return cudaSuccess;
}
cudaError_t cudaFree(void *p)
{
    if (!p) return cudaSuccess;
    for (int d = 0; d < DEVICES; d++)
        for (int k = 0; k < memory[d].n; k++)
            if (memory[d].list[k].p == p && memory[d].list[k].live) {
                memory[d].list[k].live = false;
                memory[d].live -= memory[d].list[k].size;
                totals.frees++;
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

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)stream;
    bool there = on_device(to), here = on_device(from);
    if (kind != cudaMemcpyDefault &&
        (there != (kind != cudaMemcpyDeviceToHost) || here != (kind != cudaMemcpyHostToDevice)))
        return cudaErrorInvalidMemcpyDirection;
    totals.copies++;
    if (!there) memset(to, 0, bytes);
    if (there && !here) note_table(to, from, bytes);
    if (there) note(to, bytes, 0);
    *(there && here ? &totals.on_device : there ? &totals.to_device : &totals.to_host) += (double)bytes;
    if (there && here && watching) add_launch("copy")->bytes[1] = 2 * (double)bytes;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t stream)
{
    (void)byte, (void)stream;
    if (!on_device(p)) return cudaErrorInvalidValue;
    totals.fills++;
    note(p, bytes, 0);
    if (watching) add_launch("set")->bytes[1] = (double)bytes;
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
    totals.waits++;
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
    *e = (cudaEvent_t)(void *)&events;
    totals.events++;
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
    totals.waits++;
    return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p)
{
    (void)h, (void)p;
    return cudaErrorNotSupported;
}
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned flags)
{
    (void)p, (void)h, (void)flags;
    return cudaErrorNotSupported;
}
cudaError_t cudaIpcCloseMemHandle(void *p)
{
    (void)p;
    return cudaErrorNotSupported;
}

// ---- cuBLASLt: every product is accepted ----

#ifdef MS_CUBLAS
typedef struct {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t batch;
} layout;
typedef struct {
    cublasOperation_t turned;
} description;

static cublasStatus_t lt_Create(cublasLtHandle_t *h)
{
    static char handle;
    *h = (cublasLtHandle_t)(void *)&handle;
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute, cudaDataType_t scale)
{
    (void)compute, (void)scale;
    *d = calloc(1, sizeof(description));
    return *d ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}
static cublasStatus_t lt_MatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what,
                                                const void *v, size_t n)
{
    (void)n;
    if (what == CUBLASLT_MATMUL_DESC_TRANSA) memcpy(&((description *)d)->turned, v, sizeof(cublasOperation_t));
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t type, uint64_t rows,
                                            uint64_t cols, int64_t ld)
{
    (void)ld;
    layout *made = malloc(sizeof *made);
    if (!made) return CUBLAS_STATUS_ALLOC_FAILED;
    *made = (layout) { type, rows, cols, 1 };
    *l = (cublasLtMatrixLayout_t)(void *)made;
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t what,
                                                  const void *v, size_t n)
{
    int32_t batch;
    (void)n;
    if (what == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) {
        memcpy(&batch, v, sizeof batch);
        ((layout *)(void *)l)->batch = batch;
    }
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    return (*p = malloc(1)) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}
static cublasStatus_t lt_MatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                      cublasLtMatmulPreferenceAttributes_t what, const void *v,
                                                      size_t n)
{
    (void)p, (void)what, (void)v, (void)n;
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_destroy(void *p)
{
    free(p);
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                                cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                cublasLtMatrixLayout_t o, cublasLtMatmulPreference_t p, int n,
                                                cublasLtMatmulHeuristicResult_t *results, int *found)
{
    (void)h, (void)d, (void)a, (void)b, (void)c, (void)o, (void)p;
    memset(results, 0, (size_t)n * sizeof *results);
    *found = n > 0;
    return CUBLAS_STATUS_SUCCESS;
}

static void operand(ms_null_launch *l, const void *p, const layout *x)
{
    int size = x->type == CUDA_R_64F ? 8 : x->type == CUDA_R_32F ? 4 : 2;
    size_t bytes = (size_t)x->rows * x->cols * (size_t)x->batch * (size_t)size;
    note(p, bytes, size);
    l->bytes[size == 2 ? 0 : size == 4 ? 1 : 2] += (double)bytes;
}
static cublasStatus_t lt_Matmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha, const void *a,
                                cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,
                                const void *c, cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t lo,
                                const cublasLtMatmulAlgo_t *algo, void *room, size_t bytes, cudaStream_t stream)
{
    const layout *x = (const layout *)(const void *)la, *o = (const layout *)(const void *)lo;
    (void)h, (void)alpha, (void)beta, (void)c, (void)lc, (void)algo, (void)room, (void)bytes, (void)stream;
    uint64_t deep = ((description *)(void *)d)->turned == CUBLAS_OP_N ? x->cols : x->rows;
    double flops = 2.0 * (double)o->rows * (double)o->cols * (double)deep * (double)o->batch;
    totals.products++;
    totals.flops += flops;
    ms_null_launch *l = add_launch("product");
    l->flops = flops;
    operand(l, a, x);
    operand(l, b, (const layout *)(const void *)lb);
    operand(l, out, o);
    return CUBLAS_STATUS_SUCCESS;
}

#endif

// The objects look for cuBLASLt with dlopen and dlsym, which the linker turns to these (--wrap).
static char library;
extern void *__real_dlopen(const char *name, int flags);
extern void *__real_dlsym(void *lib, const char *name);
extern int __real_dlclose(void *lib);
void *__wrap_dlopen(const char *name, int flags)
{
    return name && strstr(name, "libcublasLt.so") ? &library : __real_dlopen(name, flags);
}
int __wrap_dlclose(void *lib) { return lib == &library ? 0 : __real_dlclose(lib); }
void *__wrap_dlsym(void *lib, const char *name)
{
    static const struct {
        const char *name;
        void *f;
    } functions[] = {
        { "", NULL },
#ifdef MS_CUBLAS
#define LT(name) { "cublasLt" #name, (void *)lt_##name }
        LT(Create),
        LT(MatmulDescCreate),
        LT(MatmulDescSetAttribute),
        LT(MatrixLayoutCreate),
        LT(MatrixLayoutSetAttribute),
        LT(MatmulPreferenceCreate),
        LT(MatmulPreferenceSetAttribute),
        LT(MatmulAlgoGetHeuristic),
        LT(Matmul),
        { "cublasLtMatmulDescDestroy", (void *)lt_destroy },
        { "cublasLtMatrixLayoutDestroy", (void *)lt_destroy },
        { "cublasLtMatmulPreferenceDestroy", (void *)lt_destroy },
#endif
    };
    if (lib != &library) return __real_dlsym(lib, name);
    for (int k = 0; k < MS_COUNT(functions); k++)
        if (strcmp(functions[k].name, name) == 0) return functions[k].f;
    return NULL;
}

// ---- the plugin's table, wrapped: it says which operator runs, and where its tensors lie ----

extern const ms_cuda_table ms_cuda_table_v1;
static const ms_cuda_engine *engine;
static ms_cuda_engine watched;

enum { OPERATORS = 1024 };  // a power of two
static struct {
    const char *name;
    ms_status (*run)(ms_call *c);
} operators[OPERATORS];

static int slot_of(const char *name)
{
    uint32_t h = 2166136261u;
    for (const char *s = name; *s; s++) h = (h ^ (uint8_t)*s) * 16777619u;
    int at = (int)(h % OPERATORS);
    while (operators[at].name && strcmp(operators[at].name, name) != 0) at = (at + 1) % OPERATORS;
    return at;
}

static ms_status run(ms_call *c)
{
    const char *before = op;
    op = c->op->name;
    for (int k = 0; watching && k < c->n_in; k++) note_tensor(c->in[k]);
    for (int k = 0; watching && k < c->n_out; k++) note_tensor(c->out[k]);
    ms_status st = operators[slot_of(op)].run(c);
    op = before;
    return st;
}
static ms_status copy_tensor(ms_tensor *dst, const ms_tensor *src)
{
    const char *before = op;
    op = *op ? op : "copy";
    note_tensor(dst);
    note_tensor(src);
    ms_status st = ms_cuda_table_v1.copy_tensor(dst, src);
    op = before;
    return st;
}
static ms_status fill_tensor(ms_tensor *t, double v)
{
    const char *before = op;
    op = *op ? op : "fill";
    note_tensor(t);
    ms_status st = ms_cuda_table_v1.fill_tensor(t, v);
    op = before;
    return st;
}
static ms_status optim(int index, int n, const ms_optim_job *jobs, int64_t blocks, int64_t block)
{
    op = "optimizer";
    for (int k = 0; k < n && watching; k++) {
        const ms_optim_job *j = &jobs[k];
        int size = (int)ms__dtype_size(j->dtype), wide = size == 2 ? 4 : size;  // states of halves are float32
        note(j->p, (size_t)j->numel * (size_t)size, size);
        note(j->g, (size_t)j->numel * (size_t)size, size);
        for (int s = 0; s < MS_OPTIM_STATES; s++) note(j->state[s], (size_t)j->numel * (size_t)wide, wide);
    }
    ms_status st = ms_cuda_table_v1.optim(index, n, jobs, blocks, block);
    op = "";
    return st;
}
static ms_status norm(int index, int dtype, const void *g, int64_t n, double p, double *out)
{
    op = "clip_grad_norm_";
    ms_status st = ms_cuda_table_v1.norm(index, dtype, g, n, p, out);
    op = "";
    return st;
}
static ms_status scale(int index, int dtype, void *g, int64_t n, double f)
{
    op = "clip_grad_norm_";
    ms_status st = ms_cuda_table_v1.scale(index, dtype, g, n, f);
    op = "";
    return st;
}

static ms_status tensor_new(ms_tensor **out, int dtype, int device, int ndim, const int64_t *shape, const char *what)
{
    ms_status st = engine->tensor_new(out, dtype, device, ndim, shape, what);
    if (st == MS_OK) note_tensor(*out);
    return st;
}
static ms_status tensor_like(ms_tensor **out, const ms_tensor *t, const char *what)
{
    ms_status st = engine->tensor_like(out, t, what);
    if (st == MS_OK) note_tensor(*out);
    return st;
}
static ms_status contiguous(ms_tensor **out, ms_tensor *t)
{
    ms_status st = engine->contiguous(out, t);
    if (st == MS_OK) note_tensor(*out);
    return st;
}
static ms_status alloc(ms_block **out, int device, size_t bytes, const char *what)
{
    ms_status st = engine->alloc(out, device, bytes, what);
    if (st != MS_OK || !watching || !bytes) return st;
    note((*out)->data, bytes, 0);
    rooms[n_rooms % MS_COUNT(rooms)].p = (*out)->data;
    rooms[n_rooms++ % MS_COUNT(rooms)].bytes = bytes;
    return st;
}
static int start(const ms_cuda_engine *given, char *text, size_t n)
{
    engine = given;
    watched = *given;
    watched.tensor_new = tensor_new;
    watched.tensor_like = tensor_like;
    watched.contiguous = contiguous;
    watched.alloc = alloc;
    return ms_cuda_table_v1.start(&watched, text, n);
}

EXPORT const ms_cuda_table *ms_cuda_null_table(void)
{
    static ms_cuda_table table;
    static ms_cuda_kernel rows[OPERATORS];
    static const ms_cuda_kernel *families[] = { rows, NULL };
    table = ms_cuda_table_v1;
    table.start = start;
    table.copy_tensor = copy_tensor;
    table.fill_tensor = fill_tensor;
    table.optim = optim;
    table.norm = norm;
    table.scale = scale;
    int n = 0;
    for (const ms_cuda_kernel *const *f = ms_cuda_table_v1.families; *f; f++)
        for (const ms_cuda_kernel *k = *f; k->op && n < OPERATORS / 2; k++) {
            int at = slot_of(k->op);
            operators[at].name = k->op;
            operators[at].run = k->run;
            rows[n++] = (ms_cuda_kernel) { k->op, run };
        }
    table.families = families;
    return &table;
}
