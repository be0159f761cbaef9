// SPDX-License-Identifier: MIT
// cuda_shim.h -- a GPU for specs: the CUDA runtime calls that kernels/cuda/ uses, on the CPU. Compiled
// in place of cuda_runtime.h by g++ with -DMS_EMULATED into libmoonshard_cuda_emulated.so.
//
// Each device's memory is a separate arena, a memfd, so that other processes can map it (IPC handles). If the CPU has
// protection keys, only the streams' threads may access it: a CPU operator that reads device memory crashes. Under ASan
// the space between blocks is poisoned. A stream is a worker thread, so the host runs ahead of its kernels as it does
// on a GPU; an event is a position in its queue. A kernel runs block by block. Threads that meet at barriers are fibers
// that take turns; all other threads run one after the other. Shared memory is thread_local, because a stream's thread
// runs one block at a time.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum {
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaIpcMemLazyEnablePeerAccess = 1,
    cudaHostAllocMapped = 2
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w)
{
    return { x, y, z, w };
}
struct dim3 {
    unsigned x, y, z;
};
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem;
};
struct cudaIpcMemHandle_t {
    char reserved[64];
};

namespace ms_shim
{

enum { MAX_THREADS = 1024, STACK = 256 << 10, GAP = 512 };

// ---- memory ----

struct arena {
    char *base = nullptr;
    size_t bytes = 0, used = 0;
    int fd = -1;
    std::map<char *, size_t> live;
    std::multimap<size_t, char *> free;
};

inline int device_count()
{
    const char *s = getenv("MOONSHARD_CUDA_DEVICES");
    int n = s ? atoi(s) : 2;
    return n < 1 ? 1 : n > 8 ? 8 : n;
}
inline size_t arena_bytes()  // per device; specs of running out of memory reduce it
{
    const char *s = getenv("MOONSHARD_CUDA_MEMORY");
    return s ? (size_t)atoll(s) : (size_t)8 << 30;
}
inline arena arenas[8];
inline std::mutex memory_lock;
inline int key = -1;  // protection key, -1: none

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
    a.base = (char *)p;
    return true;
}

inline arena *arena_of(const void *p)
{
    for (arena &a : arenas)
        if (a.base && (const char *)p >= a.base && (const char *)p < a.base + a.bytes) return &a;
    return nullptr;
}

// ---- streams and events ----

// The latest record. Waiters keep a reference, so an event may be destroyed while a stream still waits for it.
struct event_state {
    std::shared_ptr<std::atomic<int>> done = std::make_shared<std::atomic<int>>(1);
};
struct stream_state {
    std::mutex lock;
    std::condition_variable work, idle;
    std::deque<std::function<void()>> queue;
    bool busy = false, started = false;
};
inline thread_local int current_device = 0;
inline std::atomic<int> sticky { 0 };  // as in CUDA: after a failed kernel every call fails

inline void work(stream_state *s)
{
    may_touch(true);
    std::unique_lock<std::mutex> hold(s->lock);
    for (;;) {
        while (s->queue.empty()) s->work.wait(hold);
        std::function<void()> job = std::move(s->queue.front());
        s->queue.pop_front();
        s->busy = true;
        hold.unlock();
        job();
        job = nullptr;
        hold.lock();
        s->busy = false;
        s->idle.notify_all();
    }
}

inline void push(stream_state *s, std::function<void()> job)
{
    std::unique_lock<std::mutex> hold(s->lock);
    if (!s->started) {
        s->started = true;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        std::thread(work, s).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    s->queue.push_back(std::move(job));
    s->work.notify_one();
}

inline void drain(stream_state *s)
{
    std::unique_lock<std::mutex> hold(s->lock);
    while (s->busy || !s->queue.empty()) s->idle.wait(hold);
}

// ---- kernels ----

struct place {
    dim3 thread, block, block_dim, grid_dim;
};
struct fiber {
    place at;
    void *sp = nullptr;  // the stack pointer at which it was suspended
    char *stack = nullptr;
    bool finished = false;
    int waits = 0;     // 0: runs, 1: at the block's barrier, 2: at its warp's
    int shuffles = 0;  // number of shuffles so far
    void *fake = nullptr;
};
struct block_state {
    fiber *fibers = nullptr;
    int n = 0;
    uint64_t lanes[2][MAX_THREADS];
    const std::function<void()> *body = nullptr;
    void *back = nullptr, *back_fake = nullptr;
    const void *back_bottom = nullptr;
    size_t back_size = 0;
};
inline thread_local place one_thread;  // of a kernel without barriers
inline constinit thread_local place *now = nullptr;
inline constinit thread_local fiber *self = nullptr;
inline constinit thread_local block_state *block = nullptr;

#if defined(__x86_64__)
// Saves the callee-saved registers on the present stack, switches stacks and resumes the other fiber.
__attribute__((naked, noinline)) inline void switch_stacks(void ** /* from */, void * /* to */)
{
    __asm__("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
            "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
            "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
#else
inline void switch_stacks(void **from, void *to)
{
    ucontext_t here;
    *from = &here;
    swapcontext(&here, (ucontext_t *)to);
}
#endif

// A fiber's last frame never returns; in ThreadSanitizer's shadow stack it would stay forever.
#define MS_FIBER __attribute__((no_sanitize("thread")))

MS_FIBER inline void to_scheduler(bool last)
{
    fiber *f = self;
    (void)last;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &f->fake, block->back_bottom, block->back_size);
#endif
    switch_stacks(&f->sp, block->back);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f->fake, nullptr, nullptr);
#endif
}

MS_FIBER inline void fiber_main()
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block->back_bottom, &block->back_size);
#endif
    (*block->body)();
    self->finished = true;
    to_scheduler(true);
    abort();
}

inline void prepare(fiber &f)
{
    if (!f.stack) {
        f.stack =
            (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f.stack == MAP_FAILED) {
            fputs("cuda_shim: no memory for a fiber's stack\n", stderr);
            abort();
        }
    }
    f.finished = false;
    f.waits = f.shuffles = 0;
#if defined(__x86_64__)
    // Stacks that end at the same place of a page share cache lines: a block's threads would evict each other at every
    // switch.
    size_t k = (size_t)(&f - block->fibers);
    void **top = (void **)(f.stack + STACK - k % 128 * 704);
    *--top = nullptr;  // aligned as after a call
    *--top = (void *)fiber_main;
    for (int k = 0; k < 6; k++) *--top = nullptr;
    f.sp = top;
#else
    static thread_local std::vector<ucontext_t> contexts(MAX_THREADS);
    ucontext_t *c = &contexts[(size_t)(&f - block->fibers)];
    getcontext(c);
    c->uc_stack = { .ss_sp = f.stack, .ss_flags = 0, .ss_size = STACK };
    c->uc_link = nullptr;
    makecontext(c, fiber_main, 0);
    f.sp = c;
#endif
}

MS_FIBER inline void resume(fiber &f)
{
    self = &f;
    now = &f.at;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&block->back_fake, f.stack, STACK);
#endif
    switch_stacks(&block->back, f.sp);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(block->back_fake, nullptr, nullptr);
#endif
}

// Waiting threads continue when all unfinished threads of their block (or warp) wait there, too.
MS_FIBER inline void run_block(block_state &b)
{
    int left = b.n;
    for (int k = 0; k < b.n; k++) prepare(b.fibers[k]);
    while (left > 0) {
        bool moved = false;
        for (int k = 0; k < b.n; k++) {
            fiber &f = b.fibers[k];
            if (f.finished || f.waits) continue;
            if (k + 2 < b.n) __builtin_prefetch(b.fibers[k + 2].sp);
            resume(f);
            moved = true;
            if (f.finished) left--;
        }
        if (left == 0) break;
        for (int w = 0; w < b.n; w += 32) {
            int end = w + 32 < b.n ? w + 32 : b.n;
            bool all = true, some = false;
            for (int k = w; k < end; k++) {
                if (b.fibers[k].finished) continue;
                some = true;
                all = all && b.fibers[k].waits == 2;
            }
            if (!some || !all) continue;
            for (int k = w; k < end; k++) b.fibers[k].waits = 0;
            moved = true;
        }
        bool all = true;
        for (int k = 0; k < b.n; k++) all = all && (b.fibers[k].finished || b.fibers[k].waits == 1);
        if (all) {
            for (int k = 0; k < b.n; k++) b.fibers[k].waits = 0;
            moved = true;
        }
        if (!moved) {
            fputs("cuda_shim: a block's threads wait at different barriers: it would hang\n", stderr);
            abort();
        }
    }
}

inline void need_fiber()
{
    if (self) return;
    fputs("cuda_shim: a barrier or shuffle in a kernel that was started with launch, not launch_blocks\n", stderr);
    abort();
}

MS_FIBER inline void meet(int which)
{
    need_fiber();
    self->waits = which;
    to_scheduler(false);
}

template <class... P>
cudaError_t launch(stream_state *s, bool barriers, void (*kernel)(P...), unsigned blocks, unsigned threads,
                   std::tuple<P...> args)
{
    if (threads == 0 || threads > MAX_THREADS) return cudaErrorInvalidValue;
    push(s, [=] {
        std::tuple<P...> a = args;
        if (!barriers) {
            place &p = one_thread;
            now = &p;
            self = nullptr;
            p.block_dim = { threads, 1, 1 };
            p.grid_dim = { blocks, 1, 1 };
            p.thread.y = p.thread.z = p.block.y = p.block.z = 0;
            for (p.block.x = 0; p.block.x < blocks; p.block.x++)
                for (p.thread.x = 0; p.thread.x < threads; p.thread.x++) std::apply(kernel, a);
            return;
        }
        static thread_local block_state state;
        static thread_local std::vector<fiber> fibers(MAX_THREADS);
        block = &state;
        state.fibers = fibers.data();
        state.n = (int)threads;
        std::function<void()> body = [&] { std::apply(kernel, a); };
        state.body = &body;
        for (unsigned b = 0; b < blocks; b++) {
            for (unsigned t = 0; t < threads; t++)
                fibers[t].at = { { t, 0, 0 }, { b, 0, 0 }, { threads, 1, 1 }, { blocks, 1, 1 } };
            run_block(state);
        }
        self = nullptr;
        now = &one_thread;
    });
    return cudaSuccess;
}

// Shuffles alternate between two sets of lanes. A lane that writes a set again has met all its readers at the shuffle
// in between.
template <class T> T shuffle(T v, int from)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
    need_fiber();
    uint64_t *lanes = block->lanes[self->shuffles++ & 1];
    memcpy(&lanes[now->thread.x], &v, sizeof v);
    meet(2);
    T other;
    memcpy(&other, &lanes[from], sizeof other);
    return other;
}

}  // namespace ms_shim

typedef ms_shim::stream_state *cudaStream_t;
typedef ms_shim::event_state *cudaEvent_t;

#define threadIdx (ms_shim::now->thread)
#define blockIdx (ms_shim::now->block)
#define blockDim (ms_shim::now->block_dim)
#define gridDim (ms_shim::now->grid_dim)

inline void __syncthreads() { ms_shim::meet(1); }
inline void __syncwarp(unsigned = 0xffffffffu) { ms_shim::meet(2); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask)
{
    int me = (int)threadIdx.x, to = me ^ mask;
    return ms_shim::shuffle(v, to < (int)blockDim.x ? to : me);
}
template <class T> T __shfl_down_sync(unsigned, T v, int by)
{
    int me = (int)threadIdx.x, to = me % 32 + by < 32 ? me + by : me;
    return ms_shim::shuffle(v, to < (int)blockDim.x ? to : me);
}
inline int atomicCAS(int *p, int expected, int v)
{
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
inline int atomicAnd(int *p, int v) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }

// ---- the runtime's calls ----

inline const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    default: return "unspecified launch failure";
    }
}
inline const char *cudaGetErrorName(cudaError_t e)
{
    return e == cudaSuccess                 ? "cudaSuccess"
           : e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
                                            : "cudaError";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int *n)
{
    *n = ms_shim::device_count();
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int *v)
{
    *v = 0;
    return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int *v)
{
    *v = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int d)
{
    if (d < 0 || d >= ms_shim::device_count()) return cudaErrorInvalidValue;
    ms_shim::current_device = d;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int)
{
    *p = cudaDeviceProp {};
    snprintf(p->name, sizeof p->name, "emulated GPU");
    p->multiProcessorCount = 1;
    p->totalGlobalMem = ms_shim::arena_bytes();
    return cudaSuccess;
}
inline cudaError_t cudaMalloc(void **out, size_t bytes)
{
    using namespace ms_shim;
    std::lock_guard<std::mutex> hold(memory_lock);
    arena &a = arenas[current_device];
    if (!open_arena(a)) return cudaErrorMemoryAllocation;
    size_t whole = (bytes + 4095) & ~(size_t)4095;
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
    a.live[p] = whole;
    *out = p;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize();
inline cudaError_t cudaFree(void *p)
{
    using namespace ms_shim;
    if (!p) return cudaSuccess;
    std::lock_guard<std::mutex> hold(memory_lock);
    arena *a = arena_of(p);
    if (!a) return cudaErrorInvalidValue;
    auto f = a->live.find((char *)p);
    if (f == a->live.end()) return cudaErrorInvalidValue;
    ASAN_POISON_MEMORY_REGION(p, f->second);
    a->free.emplace(f->second, (char *)p);
    a->live.erase(f);
    return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void **p, size_t n)
{
    return (*p = aligned_alloc(4096, (n + 4095) & ~(size_t)4095)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFreeHost(void *p)
{
    free(p);
    return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return cudaMallocHost(p, n); }
inline cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned)
{
    *d = h;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned)
{
    *s = new ms_shim::stream_state;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    ms_shim::drain(s);
    return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, cudaMemcpyKind kind, cudaStream_t s)
{
    if (kind == cudaMemcpyHostToDevice) {  // from memory that is not pinned: staged, as CUDA does
        char *stage = (char *)malloc(n ? n : 1);
        if (!stage) return cudaErrorMemoryAllocation;
        memcpy(stage, src, n);
        ms_shim::push(s, [=] {
            memcpy(dst, stage, n);
            free(stage);
        });
        return cudaSuccess;
    }
    ms_shim::push(s, [=] { memmove(dst, src, n); });
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s)
{
    ms_shim::push(s, [=] { memset(p, v, n); });
    return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    *e = new ms_shim::event_state;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    auto flag = std::make_shared<std::atomic<int>>(0);
    e->done = flag;
    ms_shim::push(s, [=] { *flag = 1; });
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t e) { return *e->done ? cudaSuccess : cudaErrorNotReady; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    while (!*e->done) usleep(20);
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    auto flag = e->done;
    ms_shim::push(s, [=] {
        while (!*flag) usleep(20);
    });
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete e;
    return cudaSuccess;
}

inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p)
{
    ms_shim::arena *a = ms_shim::arena_of(p);
    if (!a || !a->live.count((char *)p)) return cudaErrorInvalidValue;
    struct {
        long pid, fd;
        size_t at, bytes;
    } where = { getpid(), a->fd, (size_t)((char *)p - a->base), a->live[(char *)p] };
    static_assert(sizeof where <= sizeof *h, "");
    memset(h, 0, sizeof *h);
    memcpy(h, &where, sizeof where);
    return cudaSuccess;
}
inline cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t h, unsigned)
{
    struct {
        long pid, fd;
        size_t at, bytes;
    } where;
    memcpy(&where, &h, sizeof where);
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/fd/%ld", where.pid, where.fd);
    if (where.pid == getpid()) return cudaErrorInvalidValue;  // as in CUDA: not in the process that made it
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return cudaErrorInvalidValue;
    void *p = mmap(nullptr, where.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)where.at);
    close(fd);
    if (p == MAP_FAILED) return cudaErrorMemoryAllocation;
    if (ms_shim::key >= 0) pkey_mprotect(p, where.bytes, PROT_READ | PROT_WRITE, ms_shim::key);
    std::lock_guard<std::mutex> hold(ms_shim::memory_lock);
    static std::map<void *, size_t> &opened = *new std::map<void *, size_t>;
    opened[p] = where.bytes;
    *out = p;
    return cudaSuccess;
}
inline cudaError_t cudaIpcCloseMemHandle(void *)
{
    return cudaSuccess;
}  // the mapping stays: queued kernels may use it
