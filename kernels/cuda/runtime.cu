// SPDX-License-Identifier: MIT
// cuda/runtime.cu -- the plugin's function table: devices, streams, events, copies. Errors name the CUDA runtime call,
// the device and sizes. Memory of the device: memory.cu.
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <time.h>

#include "cuda/cuda.h"

const ms_cuda_engine *ms__engine;

typedef struct {
    bool ready;
    cudaStream_t stream[MS_STREAMS];
    ms_complaint *complaint;        // in pinned memory, mapped to the device
    ms_complaint *complaint_there;  // its address on the device
} gpu;
static gpu gpus[MS_CUDA_DEVICES];
// Index of the device that is current in this thread (the engine thread, or a thread that finishes collectives); -1:
// none.
static thread_local int current = -1;

ms_status ms__cuda_failed(cudaError_t e, const char *call, int index, const char *fmt, ...)
{
    char what[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    cudaGetLastError();  // clears the error, unless it is sticky
    // An error from 700 on may come from a kernel that was queued earlier. If the context is lost, every later call
    // returns the error.
    char more[2000] = "";
    if (e >= 700) {
        char queued[1200];
        ms__engine->queued_text(index, queued, sizeof queued);
        snprintf(more, sizeof more, "%s. %s%s%sMOONSHARD_CUDA_SYNC=1 names the operator",
                 cudaFree(NULL) == cudaSuccess ? "" : "; this process cannot use its GPUs any more",
                 *queued ? "The cause may be work that the GPU had not ended, newest first: "
                         : "An earlier operator may have caused it",
                 queued, *queued ? ". " : ": ");
    }
    cudaGetLastError();
    int name = (int)strcspn(call, "(");  // CUDA_TRY passes the whole call
    return ms__fail(e == cudaErrorMemoryAllocation ? MS_ENOMEM : MS_ESTATE, "cuda:%d: %.*s, %s: %s (CUDA error %d)%s",
                    index, name, call, what, cudaGetErrorString(e), (int)e, more);
}

// Whether the plugin has no code for a GPU: it is compiled for compute capability 8.0 and newer.
static bool too_old(int index, char *text, size_t n)
{
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, index) != cudaSuccess || p.major >= 8) return false;
    snprintf(text, n, "%s has compute capability %d.%d, moonshard needs 8.0 or newer", p.name, p.major, p.minor);
    return true;
}

// Makes streams that do not wait for the legacy default stream, and the memory in which kernels record errors.
static ms_status prepare_device(int index)
{
    gpu *g = &gpus[index];
    char text[512];
    if (too_old(index, text, sizeof text)) return ms__fail(MS_EUNSUPPORTED, "cuda:%d: %s", index, text);
    // Gathers and reductions go before kernels of the compute stream that have not started yet.
    int least = 0, most = 0;
    CUDA_TRY(index, cudaDeviceGetStreamPriorityRange(&least, &most), "asking for the priorities of streams");
    for (int k = 0; k < MS_STREAMS; k++)
        if (!g->stream[k])
            CUDA_TRY(index,
                     cudaStreamCreateWithPriority(&g->stream[k], cudaStreamNonBlocking,
                                                  k == MS_STREAM_GATHER || k == MS_STREAM_REDUCE ? most : least),
                     "creating stream %d", k);
    if (!g->complaint) {
        void *p, *there;
        CUDA_TRY(index, cudaHostAlloc(&p, sizeof(ms_complaint), cudaHostAllocMapped), "%zu bytes of pinned memory",
                 sizeof(ms_complaint));
        memset(p, 0, sizeof(ms_complaint));
        cudaError_t e = cudaHostGetDevicePointer(&there, p, 0);
        if (e != cudaSuccess) {
            cudaFreeHost(p);
            return ms__cuda_failed(e, "cudaHostGetDevicePointer", index, "mapping %zu bytes of pinned memory",
                                   sizeof(ms_complaint));
        }
        g->complaint_there = (ms_complaint *)there;
        g->complaint = (ms_complaint *)p;
    }
    g->ready = true;
    return MS_OK;
}

ms_status ms__cuda_use(int index)
{
    if (current == index) return MS_OK;
    current = -1;  // until the device is ready: the next call tries again
    CUDA_TRY(index, cudaSetDevice(index), "choosing the device");
    if (!gpus[index].ready) MS_TRY(prepare_device(index));
    current = index;
    return MS_OK;
}

cudaStream_t ms__cuda_stream(int index, int kind) { return gpus[index].stream[kind]; }
thread_local int ms__launch_stream = MS_STREAM_COMPUTE;
static void *native_stream(int index, int kind)
{
    return ms__cuda_use(index) == MS_OK ? gpus[index].stream[kind] : NULL;
}
ms_complaint *ms__complaints(int index) { return gpus[index].complaint_there; }

static int start_plugin(const ms_cuda_engine *engine, char *text, size_t n)
{
    ms__engine = engine;
    int count = 0, driver = 0, runtime = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess || count < 1) {
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&runtime);
        cudaGetLastError();
        if (driver && runtime && driver / 1000 < runtime / 1000)
            snprintf(text, n,
                     "the NVIDIA driver is too old: it supports CUDA %d.%d, the plugin was built with CUDA %d.%d",
                     driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
        else
            snprintf(text, n, "there is no CUDA device: %s",
                     e != cudaSuccess ? cudaGetErrorString(e) : "the driver lists none");
        return -1;
    }
    // An older GPU beside a capable one is refused when it is used.
    for (int k = 0; k < count; k++)
        if (!too_old(k, text, n)) return count;
    return -1;
}

static ms_status describe_gpu(int index, char *text, size_t n)
{
    cudaDeviceProp p;
    CUDA_TRY(index, cudaGetDeviceProperties(&p, index), "reading the properties of the device");
    snprintf(text, n, "%s (%d multiprocessors, %.0f GiB)", p.name, p.multiProcessorCount,
             (double)p.totalGlobalMem / (1 << 30));
    return MS_OK;
}

// ---- memory ----

static ms_status host_alloc(size_t bytes, void **out)
{
    CUDA_TRY(current < 0 ? 0 : current, cudaMallocHost(out, bytes), "%zu bytes of pinned memory", bytes);
    return MS_OK;
}
static void host_free(void *p) { cudaFreeHost(p); }

#if defined(MS_EMULATED)
// Tells AddressSanitizer, and the mode `check`, that of the `size` bytes at p only the first `used` may be accessed: in
// stream order, because kernels queued earlier may still use the others.
static void mark_used(int index, void *p, size_t used, size_t size)
{
#if !defined(__SANITIZE_ADDRESS__)
    if (!ms_shim::mode.check) return;
#endif
    if (ms__cuda_use(index)) return;
    ms_shim::push(ms__cuda_stream(index, MS_STREAM_COMPUTE), [=] { ms_shim::mark_used(p, used, size); });
}
#endif

// ---- copies ----

static ms_status copy_between(int index, int stream, void *dst, const void *src, size_t bytes, ms_direction way)
{
    static const cudaMemcpyKind kinds[] = { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice,
                                            cudaMemcpyHostToDevice };
    static const char *const names[] = { "to the device", "to the host", "on the device", "to the device" };
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index, cudaMemcpyAsync(dst, src, bytes, kinds[way], gpus[index].stream[stream]), "%zu bytes %s", bytes,
             names[way]);
    if (way != MS_TO_DEVICE) return MS_OK;
    // The caller may write to the source as soon as this function returns. Pageable memory has been staged; pinned
    // memory is still being read.
    cudaPointerAttributes a;
    CUDA_TRY(index, cudaPointerGetAttributes(&a, src), "memory at %p", src);
    if (a.type != cudaMemoryTypeUnregistered)
        CUDA_TRY(index, cudaStreamSynchronize(gpus[index].stream[stream]), "waiting for a copy of pinned memory");
    return MS_OK;
}

static ms_status fill_bytes(int index, int stream, void *p, int byte, size_t bytes)
{
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index, cudaMemsetAsync(p, byte, bytes, gpus[index].stream[stream]), "%zu bytes", bytes);
    return MS_OK;
}

static ms_status copy_lines(int index, int stream, const ms_cuda_lines *l)
{
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index,
             cudaMemcpy2DAsync(l->dst, l->dst_line, l->src, l->src_line, l->bytes, l->lines, cudaMemcpyDeviceToDevice,
                               gpus[index].stream[stream]),
             "%zu lines of %zu bytes", l->lines, l->bytes);
    return MS_OK;
}

static ms_status pin_host(void *p, size_t bytes)
{
    CUDA_TRY(current < 0 ? 0 : current, cudaHostRegister(p, bytes, cudaHostRegisterDefault), "pinning %zu bytes",
             bytes);
    return MS_OK;
}

// ---- waiting ----

static ms_status complained(int index)
{
    ms_complaint *c = gpus[index].complaint;
    if (!c || !*(volatile int *)&c->taken) return MS_OK;
    static const char *const who[] = { "", "embedding: id", "cross_entropy: id", "index: position" };
    int what = c->what;
    long long value = c->value, limit = c->limit;
    memset(c, 0, sizeof *c);
    return ms__fail(MS_EINVAL,
                    "%s %lld is out of range, expected 0 or more and below %lld; a kernel on cuda:%d found this after "
                    "the call had returned",
                    who[what], value, limit, index);
}

static ms_status sync(int index, int stream)
{
    MS_TRY(ms__cuda_use(index));
    for (int k = 0; k < MS_STREAMS; k++)
        if (stream < 0 || k == stream)
            CUDA_TRY(index, cudaStreamSynchronize(gpus[index].stream[k]), "waiting for stream %d", k);
    return stream < 0 || stream == MS_STREAM_COMPUTE ? complained(index) : MS_OK;
}

// An event that the functions of the table pass as void *. Dropped events that are not shared with other processes are
// kept for reuse, in a list per device.
typedef struct event {
    cudaEvent_t event;
    int index;
    bool shared;
    struct event *next;
} event;
static std::mutex events_lock;
static event *events[MS_CUDA_DEVICES];

static ms_status new_event(int index, unsigned flags, event **out)
{
    event *e = (event *)calloc(1, sizeof *e);
    if (!e) return ms__fail(MS_ENOMEM, "cuda:%d: no CPU memory for an event", index);
    cudaError_t st = cudaEventCreateWithFlags(&e->event, flags | cudaEventDisableTiming);
    if (st != cudaSuccess) {
        free(e);
        return ms__cuda_failed(st, "cudaEventCreateWithFlags", index, "creating an event");
    }
    e->index = index;
    *out = e;
    return MS_OK;
}

static void drop_event(void *p)
{
    event *e = (event *)p;
    if (e->shared) {
        cudaEventDestroy(e->event);
        free(e);
        return;
    }
    std::lock_guard<std::mutex> hold(events_lock);
    e->next = events[e->index];
    events[e->index] = e;
}

static ms_status event_record(int index, int stream, void *e)
{
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index, cudaEventRecord(((event *)e)->event, gpus[index].stream[stream]), "recording an event in stream %d",
             stream);
    return MS_OK;
}

static ms_status record_event(int index, int stream, void **out)
{
    event *e;
    MS_TRY(ms__cuda_use(index));
    {
        std::lock_guard<std::mutex> hold(events_lock);
        if ((e = events[index])) events[index] = e->next;
    }
    if (!e) MS_TRY(new_event(index, 0, &e));
    ms_status st = event_record(index, stream, e);
    if (st != MS_OK) drop_event(e);
    else *out = e;
    return st;
}
static int done(void *p)
{
    cudaError_t e = cudaEventQuery(((event *)p)->event);
    if (e == cudaSuccess || e == cudaErrorNotReady) return e == cudaSuccess;
    ms__cuda_failed(e, "cudaEventQuery", ((event *)p)->index, "asking whether an event has been reached");
    return -1;
}
static ms_status wait(void *p)
{
    event *e = (event *)p;
    CUDA_TRY(e->index, cudaEventSynchronize(e->event), "waiting for an event");
    return MS_OK;
}
static ms_status stream_wait(int index, int stream, void *e)
{
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index, cudaStreamWaitEvent(gpus[index].stream[stream], ((event *)e)->event, 0),
             "making stream %d wait for an event", stream);
    return MS_OK;
}

static ms_status event_new(int index, void **out, uint8_t handle[MS_CUDA_HANDLE])
{
    event *e = NULL;
    cudaIpcEventHandle_t h;
    static_assert(sizeof h <= MS_CUDA_HANDLE, "CUDA's IPC handle is larger than MS_CUDA_HANDLE");
    MS_TRY(ms__cuda_use(index));
    MS_TRY(new_event(index, cudaEventInterprocess, &e));
    e->shared = true;
    cudaError_t st = cudaIpcGetEventHandle(&h, e->event);
    if (st != cudaSuccess) {
        drop_event(e);
        return ms__cuda_failed(st, "cudaIpcGetEventHandle", index, "sharing an event");
    }
    memcpy(handle, &h, sizeof h);
    *out = e;
    return MS_OK;
}
static ms_status event_open(int index, const uint8_t handle[MS_CUDA_HANDLE], void **out)
{
    cudaIpcEventHandle_t h;
    memcpy(&h, handle, sizeof h);
    MS_TRY(ms__cuda_use(index));
    event *e = (event *)calloc(1, sizeof *e);
    if (!e) return ms__fail(MS_ENOMEM, "cuda:%d: no CPU memory for an event", index);
    cudaError_t st = cudaIpcOpenEventHandle(&e->event, h);
    if (st != cudaSuccess) {
        free(e);
        return ms__cuda_failed(st, "cudaIpcOpenEventHandle", index, "opening an event of another process");
    }
    e->index = index;
    e->shared = true;
    *out = e;
    return MS_OK;
}

static void CUDART_CB nap(void *seconds)
{
    double s;
    memcpy(&s, &seconds, sizeof s);
    struct timespec t = { (time_t)s, (long)((s - (double)(time_t)s) * 1e9) };
    nanosleep(&t, NULL);
}
static ms_status pause(int index, int stream, double seconds)
{
    void *bits;
    memcpy(&bits, &seconds, sizeof bits);
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index, cudaLaunchHostFunc(gpus[index].stream[stream], nap, bits), "pausing stream %d", stream);
    return MS_OK;
}

// ---- graphs ----

static ms_status graph_begin(int index)
{
    MS_TRY(ms__cuda_use(index));
    // Relaxed: an operator may allocate memory while its launches are recorded.
    CUDA_TRY(index, cudaStreamBeginCapture(gpus[index].stream[MS_STREAM_COMPUTE], cudaStreamCaptureModeRelaxed),
             "beginning a graph");
    return MS_OK;
}

static ms_status graph_end(int index, void **out)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t ready = NULL;
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index, cudaStreamEndCapture(gpus[index].stream[MS_STREAM_COMPUTE], &graph), "ending a graph");
    cudaError_t e = cudaGraphInstantiateWithFlags(&ready, graph, 0);
    cudaGraphDestroy(graph);
    if (e != cudaSuccess) return ms__cuda_failed(e, "cudaGraphInstantiateWithFlags", index, "preparing a graph");
    *out = ready;
    return MS_OK;
}

static ms_status graph_launch(int index, void *graph)
{
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index, cudaGraphLaunch((cudaGraphExec_t)graph, gpus[index].stream[MS_STREAM_COMPUTE]),
             "launching a graph");
    return MS_OK;
}

static void graph_drop(int index, void *graph)
{
    if (ms__cuda_use(index) != MS_OK) return;
    // The wait protects the memory that the graph uses, which is freed next. The graph itself is destroyed even if the
    // wait fails.
    cudaError_t waited = cudaStreamSynchronize(gpus[index].stream[MS_STREAM_COMPUTE]),
                gone = cudaGraphExecDestroy((cudaGraphExec_t)graph);
    ms__cuda_released(waited == cudaSuccess ? gone : waited, index, "cudaGraphExecDestroy", graph);
}

// The compute stream of device `from` copies. It first waits for the work queued in the compute stream of `to`, which
// may use the old bytes at dst; the compute stream of `to` then waits for the copy.
static ms_status copy_peer(int to, void *dst, int from, const void *src, size_t bytes)
{
    void *free = NULL, *there = NULL;
    MS_TRY(ms__cuda_use(to));
    MS_TRY(record_event(to, MS_STREAM_COMPUTE, &free));
    ms_status st = stream_wait(from, MS_STREAM_COMPUTE, free);
    drop_event(free);
    MS_TRY(st);
    CUDA_TRY(from, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, gpus[from].stream[MS_STREAM_COMPUTE]),
             "copying %zu bytes to cuda:%d", bytes, to);
    MS_TRY(record_event(from, MS_STREAM_COMPUTE, &there));
    st = stream_wait(to, MS_STREAM_COMPUTE, there);
    drop_event(there);
    return st;
}

// ---- the table ----

ms_status ms__cuda_optim(int index, const ms_optim_pass *p, const ms_cuda_step *reads);
ms_status ms__cuda_scale(int index, int dtype, void *g, int64_t n, double f);
ms_status ms__cuda_norms(int index, ms_norm_job *j, ms_norm_part *list);
ms_status ms__cuda_clip(int index, const ms_norm_job *j, const double *total, double max_norm, int dtype, void *out);
ms_status ms__cuda_unscale(int index, ms_norm_job *j, ms_norm_part *list, const float *inverse, float *found,
                           bool stop);
ms_status ms__cuda_adapt(int index, float *scale, const float *found, double bad, double good);
ms_status ms__cuda_choose(int index, const ms_optim_choice *c);
ms_status ms__cuda_adapt_by(int index, const ms_scale_change *c);
ms_status ms__cuda_finish(int index, int stream, const ms_cuda_finish *f);

ms_status ms__cuda_alloc(int index, size_t bytes, void **out);
void ms__cuda_free(int index, void *p);
ms_status ms__cuda_share(void *p, uint8_t handle[MS_CUDA_HANDLE]);
ms_status ms__cuda_open(int index, const uint8_t handle[MS_CUDA_HANDLE], void **out);
void ms__cuda_close(int index, void *p);
ms_status ms__cuda_to_fd(void *p, int *fd, size_t *bytes);
ms_status ms__cuda_from_fd(int index, int fd, size_t bytes, void **out);

ms_status ms__cuda_reduce_ranks(int index, int stream, const ms_cuda_reduction *r);
ms_status ms__cuda_copy_all(int index, int stream, int n, const ms_cuda_copy *list);

#define FAMILIES(X) \
    X(elementwise)  \
    X(copy)         \
    X(random)       \
    X(reduce)       \
    X(product_rows) \
    X(int8_rows)    \
    X(rows)         \
    X(loss)         \
    X(mse)          \
    X(norm)         \
    X(rotary)       \
    X(embedding)    \
    X(attention)    \
    X(recurrent)    \
    X(batch_norm)   \
    X(conv)         \
    X(pooling)      \
    X(resample)     \
    X(columns)      \
    X(sort)         \
    X(scan)         \
    X(search)       \
    X(fft)          \
    X(ctc)          \
    X(draws)
#define DECLARE(f) extern const ms_cuda_kernel ms__cuda_##f[];
FAMILIES(DECLARE)
#define ENTRY(f) ms__cuda_##f,
static const ms_cuda_kernel *const families[] = { FAMILIES(ENTRY) NULL };

static ms_cuda_table table()
{
    ms_cuda_table t = {};
    t.version = MS_CUDA_TABLE_VERSION;
#if defined(MS_EMULATED)
    t.separate = !ms_shim::read_modes().chunks;  // clang initialises this table before ms_shim::mode
    t.mark = mark_used;
#endif
    t.start = start_plugin;
    t.describe = describe_gpu;
    t.alloc = ms__cuda_alloc;
    t.free = ms__cuda_free;
    t.host_alloc = host_alloc;
    t.host_free = host_free;
    t.copy = copy_between;
    t.copy_peer = copy_peer;
    t.fill = fill_bytes;
    t.sync = sync;
    t.record = record_event;
    t.done = done;
    t.wait = wait;
    t.stream_wait = stream_wait;
    t.drop = drop_event;
    t.share = ms__cuda_share;
    t.open = ms__cuda_open;
    t.close = ms__cuda_close;
    t.copy_tensor = ms__cuda_copy_tensor;
    t.fill_tensor = ms__cuda_fill_tensor;
    t.families = families;
    t.optim = ms__cuda_optim;
    t.scale = ms__cuda_scale;
    t.gradients.norms = ms__cuda_norms;
    t.gradients.clip = ms__cuda_clip;
    t.gradients.unscale = ms__cuda_unscale;
    t.gradients.adapt = ms__cuda_adapt;
    t.gradients.choose = ms__cuda_choose;
    t.gradients.adapt_by = ms__cuda_adapt_by;
    t.ranks.event_new = event_new;
    t.ranks.event_open = event_open;
    t.ranks.event_record = event_record;
    t.ranks.copy_lines = copy_lines;
    t.ranks.reduce = ms__cuda_reduce_ranks;
    t.ranks.copy_all = ms__cuda_copy_all;
    t.ranks.pin = pin_host;
    t.ranks.pause = pause;
    t.ranks.native_stream = native_stream;
    t.ranks.finish = ms__cuda_finish;
    t.ranks.to_fd = ms__cuda_to_fd;
    t.ranks.from_fd = ms__cuda_from_fd;
    t.graphs.begin = graph_begin;
    t.graphs.end = graph_end;
    t.graphs.launch = graph_launch;
    t.graphs.drop = graph_drop;
    return t;
}
extern "C" __attribute__((visibility("default"))) const ms_cuda_table ms_cuda_table_v1 = table();
