// SPDX-License-Identifier: MIT
// cuda/planted.cpp -- programs for the emulated GPU, each with one fault of a kind that the emulator's modes must find
// (spec/cuda/emulator_spec.lua), and programs without a fault, some of which check the emulated tensor cores.
#include "cuda/shim.h"
#include <cmath>
#include <cstdint>

#include "cuda/tensor_core.h"

namespace
{

enum { THREADS = 64, BLOCKS = 8 };
cudaStream_t stream, other;

void open_streams()
{
    cudaSetDevice(0);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
}
template <class T> T *zeros(size_t n)
{
    void *p;
    if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess) abort();
    cudaMemsetAsync(p, 0, n * sizeof(T), stream);
    cudaStreamSynchronize(stream);
    return (T *)p;
}
template <class T> std::vector<T> read(const T *p, size_t n)
{
    std::vector<T> out(n);
    cudaMemcpyAsync(out.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    return out;
}
template <class... P, class... A>
cudaError_t run(const char *what, bool barriers, void (*kernel)(P...), unsigned blocks, unsigned threads, A... a)
{
    return ms_shim::launch(stream, what, barriers, kernel, blocks, threads, 0, std::tuple<P...>(a...));
}
bool counts_up(const int *p, size_t n)
{
    std::vector<int> got = read(p, n);
    for (size_t k = 0; k < n; k++)
        if (got[k] != (int)k) return false;
    return true;
}

// ---- order: each thread or block reads what the one before it wrote ----

__global__ void after_thread(int *out)
{
    int k = (int)threadIdx.x;
    out[k] = k ? out[k - 1] + 1 : 0;
}
bool threads()
{
    int *out = zeros<int>(THREADS);
    run("after_thread", false, after_thread, 1, THREADS, out);
    return counts_up(out, THREADS);
}
__global__ void after_block(int *out)
{
    int k = (int)blockIdx.x;
    out[k] = k ? out[k - 1] + 1 : 0;
}
bool blocks()
{
    int *out = zeros<int>(BLOCKS);
    run("after_block", false, after_block, BLOCKS, 1, out);
    return counts_up(out, BLOCKS);
}
__global__ void without_barrier(int *out)
{
    __shared__ int all[THREADS];
    int k = (int)threadIdx.x;
    all[k] = k;
    out[k] = k ? all[k - 1] + 1 : 0;  // the barrier before this line is missing
    __syncthreads();
}
bool barrier()
{
    int *out = zeros<int>(THREADS);
    run("without_barrier", true, without_barrier, 1, THREADS, out);
    return counts_up(out, THREADS);
}
// The other stream reads without waiting for an event. It is usually late enough, so most runs give the right result.
bool streams()
{
    bool right = true;
    for (int round = 0; round < 8; round++) {
        int *a = zeros<int>(1), *b = zeros<int>(1);
        cudaMemsetAsync(a, 1, sizeof *a, stream);
        usleep(20000);
        cudaMemcpyAsync(b, a, sizeof *a, cudaMemcpyDeviceToDevice, other);
        cudaStreamSynchronize(other);
        right = right && read(b, 1)[0] == 0x01010101;
    }
    return right;
}

// ---- host memory ----

bool pinned_source(bool waits)
{
    void *p;
    if (cudaHostAlloc(&p, sizeof(int), 0) != cudaSuccess) abort();
    int *there = zeros<int>(1), *host = (int *)p;
    *host = 1;
    cudaMemcpyAsync(there, host, sizeof *host, cudaMemcpyHostToDevice, stream);
    if (waits) cudaStreamSynchronize(stream);
    *host = 2;
    bool right = read(there, 1)[0] == 1;
    cudaFreeHost(p);
    return right;
}
bool pinned() { return pinned_source(false); }
bool pinned_in_time() { return pinned_source(true); }
bool pageable()
{
    int *there = zeros<int>(1), host = 1;
    cudaMemcpyAsync(there, &host, sizeof host, cudaMemcpyHostToDevice, stream);
    host = 2;
    return read(there, 1)[0] == 1;
}

// ---- warps ----

__global__ void sum_of_warp(int *out, unsigned mask, int width)
{
    int v = 1;
    for (int by = width / 2; by; by /= 2) v += __shfl_xor_sync(mask, v, by, width);
    out[threadIdx.x] = v;
}
bool warp_sum(unsigned mask, int width, unsigned threads, int expected)
{
    int *out = zeros<int>(threads);
    run("sum_of_warp", true, sum_of_warp, 1, threads, out, mask, width);
    return read(out, 1)[0] == expected;
}
bool shuffle() { return warp_sum(~0u, 32, 64, 32) && warp_sum(~0u, 8, 64, 8); }
bool width() { return warp_sum(~0u, 12, 32, 8); }
__global__ void without_me(int *out)
{
    int v = (int)threadIdx.x;  // lanes 30 and 31 read themselves
    out[v] = __shfl_xor_sync(v == 31 ? 0x7fffffffu : 0xffffffffu, v, v < 30 ? 1 : 0);
}
bool without_reader()
{
    int *out = zeros<int>(32);
    run("without_me", true, without_me, 1, 32, out);
    return read(out, 1)[0] == 1;
}
__global__ void half_warp(int *out)
{
    if (threadIdx.x >= 16) return;
    out[threadIdx.x] = __shfl_down_sync(0xffffu, (int)threadIdx.x, 8);  // lanes 8 to 15 read lanes 16 to 23
}
bool source_outside_mask()
{
    int *out = zeros<int>(16);
    run("half_warp", true, half_warp, 1, 32, out);
    return read(out, 8)[0] == 8;
}
__global__ void two_halves(int *out)
{
    int v = (int)threadIdx.x;
    if (v < 16) v = __shfl_xor_sync(0xffffffffu, v, 1);  // the mask has lanes that never reach this call
    else v = __shfl_xor_sync(0xffff0000u, v, 1);
    __syncthreads();
    out[threadIdx.x] = v;
}
bool lane_stays_away()
{
    int *out = zeros<int>(32);
    run("two_halves", true, two_halves, 1, 32, out);
    return read(out, 1)[0] == 1;
}

// ---- shared memory ----

__global__ void adds_to_old(int *out)
{
    __shared__ int all[THREADS];
    if (blockIdx.x == 0) all[threadIdx.x] = 0;  // later blocks rely on these zeros
    __syncthreads();
    all[threadIdx.x] += 0;
    out[blockIdx.x * THREADS + threadIdx.x] = all[threadIdx.x];
}
bool old_shared()
{
    int *out = zeros<int>(2 * THREADS);
    run("adds_to_old", true, adds_to_old, 2, THREADS, out);
    return read(out, 2 * THREADS)[2 * THREADS - 1] == 0;
}
template <int BYTES> __global__ void takes_shared(int *out)
{
    __shared__ char all[BYTES];
    for (int k = (int)threadIdx.x; k < BYTES; k += THREADS) all[k] = 1;
    __syncthreads();
    out[threadIdx.x] = all[threadIdx.x];
}
template <int BYTES> bool takes()
{
    int *out = zeros<int>(THREADS);
    run("takes_shared", true, takes_shared<BYTES>, 1, THREADS, out);
    return read(out, 1)[0] == 1;
}
__global__ void takes_dynamic(int *out, int bytes)
{
    char *all = (char *)dynamic_shared();
    for (int k = (int)threadIdx.x; k < bytes; k += THREADS) all[k] = 1;
    __syncthreads();
    out[threadIdx.x] = all[bytes - 1 - (int)threadIdx.x];
}
// The runtime refuses more than 48 KiB if the kernel's attribute does not allow it, and always more than 227 KiB.
bool dynamic_limits()
{
    int *out = zeros<int>(THREADS);
    auto launch = [&](int bytes) {
        return ms_shim::launch(stream, "takes_dynamic", true, takes_dynamic, 1, THREADS, (size_t)bytes,
                               std::tuple<int *, int>(out, bytes));
    };
    auto allow = [](int bytes) {
        return cudaFuncSetAttribute(takes_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    };
    return launch(48 << 10) == cudaSuccess && launch((48 << 10) + 1) == cudaErrorInvalidValue &&
           allow((227 << 10) + 1) == cudaErrorInvalidValue && allow(227 << 10) == cudaSuccess &&
           launch(227 << 10) == cudaSuccess && read(out, 1)[0] == 1;
}

// The runtime refuses a grid without blocks, one of 2^31, and blocks without threads or of more than 1,024.
bool launch_limits()
{
    int *out = zeros<int>(1025);
    auto refused = [&](unsigned blocks, unsigned threads) {
        return run("after_thread", false, after_thread, blocks, threads, out) == cudaErrorInvalidValue;
    };
    return refused(0, 1) && refused(0x80000000u, 1) && refused(1, 0) && refused(1, 1025) && read(out, 2)[1] == 0 &&
           run("after_thread", false, after_thread, 1, 1024, out) == cudaSuccess;
}

// ---- alignment ----

template <class V> __global__ void reads_vector(const char *p, int *out)
{
    V v = *(const V *)p;
    out[0] = (int)v.x;
}
template <class V> __global__ void writes_vector(char *p, int *out)
{
    V v = {};
    *(V *)p = v;
    out[0] = 0;
}
template <class V> bool vector(int offset)
{
    char *p = zeros<char>(256);
    int *out = zeros<int>(1);
    run("reads_vector", false, reads_vector<V>, 1, 1, p + offset, out);
    run("writes_vector", false, writes_vector<V>, 1, 1, p + offset, out);
    return read(out, 1)[0] == 0;
}
bool aligned() { return vector<float4>(16) && vector<int2>(8) && vector<ushort4>(8) && vector<uint4>(32); }

struct program {
    const char *name;
    bool (*run)();
};
#include "planted_tiles.h"

const program programs[] = {
    { "threads", threads },
    { "blocks", blocks },
    { "barrier", barrier },
    { "streams", streams },
    { "pinned", pinned },
    { "pinned_in_time", pinned_in_time },
    { "pageable", pageable },
    { "shuffle", shuffle },
    { "without_reader", without_reader },
    { "source_outside_mask", source_outside_mask },
    { "width", width },
    { "lane_stays_away", lane_stays_away },
    { "old_shared", old_shared },
    { "static_48k", takes<(48 << 10)> },
    { "static_50k", takes<(50 << 10)> },
    { "dynamic_limits", dynamic_limits },
    { "launch_limits", launch_limits },
    { "aligned", aligned },
    { "float4", [] { return vector<float4>(4); } },
    { "uint4", [] { return vector<uint4>(8); } },
    { "int2", [] { return vector<int2>(4); } },
    { "ushort4", [] { return vector<ushort4>(2); } },
    { "mma", mma },
    { "sums_exact", sums_exact },
    { "sums_a100", sums_a100 },
    { "sums_h100", sums_h100 },
    { "ldmatrix", ldmatrix },
    { "cp_async", cp_async },
    { "cp_async_groups", cp_async_groups },
    { "cp_async_without_wait", cp_async_without_wait },
};

}  // namespace

// 0: the program's result is right, 1: wrong, 2: there is no such program.
extern "C" __attribute__((visibility("default"))) int planted(const char *name)
{
    open_streams();
    for (const program &p : programs)
        if (strcmp(p.name, name) == 0) return p.run() ? 0 : 1;
    return 2;
}
