// SPDX-License-Identifier: MIT
// cuda/modes.h -- modes of the emulated GPU that find faults in kernels and in their callers, chosen by
// MOONSHARD_EMULATOR.
//
//   seed:N   threads, blocks and streams run in an order drawn from N
//   late     a copy from pinned memory reads its source when the stream reaches it
//   chunks   the engine cuts small blocks from chunks, as on a GPU
//   warps    masks and widths of shuffles are checked
//   shared   shared memory is limited, and poisoned before each block
//   align    vector accesses must be aligned
//   check    with MOONSHARD_CUDA=ptx: each access of a kernel is checked (ptx/checks.h), also warps and align
//   compare  with MOONSHARD_CUDA=ptx: each launch runs g++'s kernel, too, which must write the same (ptx/compare.h)
//   approx:N with MOONSHARD_CUDA=ptx: approximate instructions err within the ISA's bounds, drawn from N
//   wide     with MOONSHARD_CUDA=ptx: half of the divisions of small 64-bit numbers take the way of large ones
//   tensor:a100, tensor:h100   products of tensor cores truncate as on these GPUs (tensor.h)
//   fail:CALL:N:ERROR   the N-th call of the CUDA function CALL fails with error code ERROR
#pragma once
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>
#include <unistd.h>

#include "types.h"

namespace ms_shim
{

struct modes {
    bool seed = false, late = false, chunks = false, warps = false, shared = false, align = false;
    bool check = false, compare = false, wide = false;
    uint64_t seeded = 0, approx = 0;
    int tensor = 0;       // tensor cores: of an A100 (80), of an H100 (90), or 0: exact until the last rounding
    std::string failing;  // the function that fails, empty: none
    long failing_call = 0;
    int failing_error = 0;
};

// The functions that the mode `fail` accepts as CALL.
inline const char *const calls[] = {
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemGetAllocationGranularity",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRetainAllocationHandle",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cudaDeviceGetStreamPriorityRange",
    "cudaDriverGetVersion",
    "cudaEventCreateWithFlags",
    "cudaEventQuery",
    "cudaEventRecord",
    "cudaEventSynchronize",
    "cudaFree",
    "cudaFuncSetAttribute",
    "cudaGetDeviceCount",
    "cudaGetDeviceProperties",
    "cudaGraphExecDestroy",
    "cudaGraphInstantiateWithFlags",
    "cudaGraphLaunch",
    "cudaHostAlloc",
    "cudaHostGetDevicePointer",
    "cudaHostRegister",
    "cudaIpcCloseMemHandle",
    "cudaIpcGetEventHandle",
    "cudaIpcGetMemHandle",
    "cudaIpcOpenEventHandle",
    "cudaIpcOpenMemHandle",
    "cudaLaunchHostFunc",
    "cudaLaunchKernel",
    "cudaMalloc",
    "cudaMallocHost",
    "cudaMemcpy2DAsync",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "cudaPointerGetAttributes",
    "cudaSetDevice",
    "cudaStreamBeginCapture",
    "cudaStreamCreateWithFlags",
    "cudaStreamCreateWithPriority",
    "cudaStreamEndCapture",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
};

inline modes read_modes()
{
    modes m;
    const char *text = getenv("MOONSHARD_EMULATOR");
    std::string all = text ? text : "";
    for (size_t at = 0; !all.empty() && at <= all.size();) {
        size_t end = all.find(',', at);
        if (end == std::string::npos) end = all.size();
        std::string word = all.substr(at, end - at);
        at = end + 1;
        char call[64];
        int used = 0;
        bool known = true;
        if (word == "late") m.late = true;
        else if (word == "chunks") m.chunks = true;
        else if (word == "warps") m.warps = true;
        else if (word == "shared") m.shared = true;
        else if (word == "align") m.align = true;
        else if (word == "check") m.check = m.warps = m.align = true;
        else if (word == "tensor:a100") m.tensor = 80;
        else if (word == "tensor:h100") m.tensor = 90;
        else if (word == "compare") m.compare = true;
        else if (word == "wide") m.wide = true;
        else if (word.size() > 7 && word.compare(0, 7, "approx:") == 0 &&
                 word.find_first_not_of("0123456789", 7) == std::string::npos)
            m.approx = strtoull(word.c_str() + 7, nullptr, 10) * 2 + 1;
        else if (word.size() > 5 && word.compare(0, 5, "seed:") == 0 &&
                 word.find_first_not_of("0123456789", 5) == std::string::npos) {
            m.seed = true;
            m.seeded = strtoull(word.c_str() + 5, nullptr, 10);
        } else if (sscanf(word.c_str(), "fail:%63[A-Za-z0-9]:%ld:%d%n", call, &m.failing_call, &m.failing_error,
                          &used) == 3 &&
                   (size_t)used == word.size() && m.failing_call > 0 && m.failing_error > 0) {
            m.failing = call;
            known = false;
            for (const char *name : calls) known = known || m.failing == name;
        } else known = false;
        if (known) continue;
        fprintf(
            stderr,
            "emulated GPU: MOONSHARD_EMULATOR is '%s': '%s' is not one of seed:N, late, chunks, warps, shared, align, "
            "check, compare, wide, approx:N, tensor:a100, tensor:h100 and fail:CALL:N:ERROR (a CUDA function, the "
            "number of "
            "the call, an error code)\n",
            all.c_str(), word.c_str());
        _exit(2);
    }
    return m;
}
inline const modes mode = read_modes();

// ---- random orders ----

inline uint64_t random_state = mode.seeded;  // used only with a seed, by the one thread that runs all streams
inline uint64_t draw()
{
    uint64_t x = random_state += 0x9e3779b97f4a7c15u;  // splitmix64
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// An order of 0 .. n-1: ascending without a seed, otherwise random. If n > 1024, it is k -> (a k + b) mod n, where a
// and n have no common divisor.
struct order {
    uint64_t n, a = 1, b = 0;
    std::vector<uint32_t> drawn;
    explicit order(uint64_t count) : n(count)
    {
        if (!mode.seed || n < 2) return;
        if (n <= 1024) {
            drawn.resize(n);
            for (uint32_t k = 0; k < n; k++) drawn[k] = k;
            for (uint64_t k = n - 1; k > 0; k--) std::swap(drawn[k], drawn[draw() % (k + 1)]);
            return;
        }
        b = draw() % n;
        do a = 1 + draw() % (n - 1);
        while (std::gcd(a, n) != 1);
    }
    uint64_t operator[](uint64_t k) const
    {
        if (!mode.seed) return k;  // avoids a division for each thread and block
        return drawn.empty() ? (a * k + b) % n : drawn[k];
    }
};

// ---- injected failures ----

inline std::atomic<long> counted { 0 };
inline std::atomic<int> sticky { 0 };  // as in CUDA: after a fault of a kernel every call fails

// The error that a call returns without doing anything; cudaSuccess: it runs. An error from 700 on persists: all later
// calls return it, too.
inline cudaError_t injected(const char *call)
{
    if (mode.failing.empty()) return cudaSuccess;
    if (sticky) return (cudaError_t)sticky.load();
    if (mode.failing != call || ++counted != mode.failing_call) return cudaSuccess;
    if (mode.failing_error >= 700) sticky = mode.failing_error;
    return (cudaError_t)mode.failing_error;
}
#define MS_MAY_FAIL(call) \
    if (cudaError_t e__ = ms_shim::injected(#call)) return e__

}  // namespace ms_shim
