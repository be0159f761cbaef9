// SPDX-License-Identifier: MIT
// cuda/cuda.h -- helpers for all CUDA kernel files: checked calls and launches, loads and stores of every dtype, and
// the engine's functions.
//
// The sources are compiled twice: by nvcc for the GPU, and by g++ against spec/support/cuda/shim.h (MS_EMULATED), which
// runs the kernels on the CPU thread by thread. They may use only what the shim provides: launches by the functions
// below, barriers and shared memory only in kernels started by launch_blocks or launch_shared.
//
// Compiled with -fmad=false (no fused multiply-add), so that the shared formulas give the CPU's results bit by bit,
// except where they call libm. The order of a kernel's sums depends only on shapes, strides, dtypes and whether rows
// begin at a multiple of 16 bytes.
#ifndef MS_CUDA_H
#define MS_CUDA_H

#ifdef MS_EMULATED
#include "cuda/shim.h"
#else
#include <cuda_runtime.h>
#endif
#include <cmath>
#include <tuple>
#include <type_traits>

#include "ops/cuda.h"
#include "formulas/math32.h"

extern const ms_cuda_engine *ms__engine;  // set when the plugin starts
#define ms__fail ms__engine->fail
#define ms__call_fail ms__engine->call_fail
#define ms__tensor_text ms__engine->tensor_text
#define ms__shape_text ms__engine->shape_text
#define ms__dtype_name ms__engine->dtype_name
#define ms__promote ms__engine->promote
#define ms__result_dtype ms__engine->result_dtype
#define ms__broadcast ms__engine->broadcast
#define ms__tensor_new ms__engine->tensor_new
#define ms__tensor_like ms__engine->tensor_like
#define ms__tensor_view ms__engine->tensor_view
#define ms__is_contiguous ms__engine->is_contiguous
#define ms__contiguous ms__engine->contiguous
#define ms__retain ms__engine->retain
#define ms__release ms__engine->release
#define ms__alloc ms__engine->alloc
#define ms__free ms__engine->free
#define ms__apart ms__engine->apart
#define ms__largest_below ms__engine->largest_below
#define ms__reduced_dims ms__engine->reduced_dims

// ---- checked calls ----

ms_status ms__cuda_failed(cudaError_t e, const char *call, int index, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void ms__cuda_released(cudaError_t e, int index, const char *call, const void *p);  // e: the result of releasing p
cudaStream_t ms__cuda_stream(int index, int kind);
ms_status ms__cuda_use(int index);          // makes device `index` current
extern thread_local int ms__launch_stream;  // the stream of this thread's launches: an ms_stream_kind
// While an object of this type is in scope, this thread's launches go to the given stream, not the compute stream.
struct on_stream {
    int before = ms__launch_stream;
    explicit on_stream(int kind) { ms__launch_stream = kind; }
    ~on_stream() { ms__launch_stream = before; }
};

// Makes a CUDA call. If it fails, returns from the enclosing function with an error that names the call, the device and
// the purpose of the call.
#define CUDA_TRY(index, expr, ...)                                                      \
    do {                                                                                \
        cudaError_t e__ = (expr);                                                       \
        if (e__ != cudaSuccess) return ms__cuda_failed(e__, #expr, index, __VA_ARGS__); \
    } while (0)

static inline int index_of(const ms_tensor *t) { return ms__index(ms__device(t)); }

// copy_tensor, which converts to dst's dtype, and fill_tensor are in copy.cu. convert, in elementwise.cu, is what
// copy_tensor calls where the dtypes differ.
ms_status ms__cuda_copy_tensor(ms_tensor *dst, const ms_tensor *src);
ms_status ms__cuda_convert(ms_tensor *dst, const ms_tensor *src);
ms_status ms__cuda_fill_tensor(ms_tensor *t, double value);

static inline void *data_of(const ms_tensor *t) { return t ? ms__data(t) : NULL; }
// The output for the gradient of input k; NULL if the mask (the last integer) says that it is not needed (rows/grad.h).
static inline ms_tensor *ms__grad_out(const ms_call *c, int k)
{
    int64_t mask = c->i[c->n_i - 1];
    return mask >> k & 1 ? c->out[__builtin_popcountll((uint64_t)mask & (((uint64_t)1 << k) - 1))] : NULL;
}

// The seed and offset of a call's random numbers (ops/philox.h). Kernels get them from rng_now, because a launch in a
// CUDA graph reads those of its repetition from memory.
struct rng {
    uint64_t seed, offset;
    const uint64_t *there;  // in a graph: the seed, and after it the offset; NULL: not in a graph
};
static inline rng rng_of(const ms_call *c) { return { c->saved_rng[0], c->saved_rng[1], c->rng_there }; }
// For the gradient of a call with random numbers (MS_OP_SEEDED): the seed and offset of that call.
static inline rng rng_of_seeded(const ms_call *c)
{
    return { (uint64_t)c->i[c->n_i - 3], (uint64_t)c->i[c->n_i - 2], c->rng_there };
}
static __device__ inline rng rng_now(const rng &r)
{
    return { r.there ? r.there[0] : r.seed, r.there ? r.there[1] : r.offset, NULL };
}

// The first n inputs of a call, made contiguous; NULL where an input is absent. Released at the end of the scope.
struct held_inputs {
    ms_tensor *in[8] = {};
    ms_status hold(const ms_call *c, int n = 8)
    {
        for (int k = 0; k < n && k < c->n_in; k++)
            if (c->in[k]) MS_TRY(ms__contiguous(&in[k], c->in[k]));
        return MS_OK;
    }
    ~held_inputs()
    {
        for (ms_tensor *t : in)
            if (t) ms__release(t);
    }
};
// Memory of a device that is freed at the end of the scope. data is NULL before alloc.
struct scratch {
    ms_block *block = NULL;
    char *data = NULL;
    ms_status alloc(const ms_call *c, int device, int64_t bytes)
    {
        MS_TRY(ms__alloc(&block, device, (size_t)bytes, c->op->name));
        data = (char *)block->data;
        return MS_OK;
    }
    ~scratch()
    {
        if (block) ms__free(block);
    }
};

// ---- launches: `what` names the operator. Nothing is launched for 0 blocks. ----

// How a launch holds an argument: as a reference to the caller's, or converted if the kernel's parameter has another
// type.
template <class P, class A> using argument = std::conditional_t<std::is_same_v<P, A>, const P &, P>;

struct block_size {
    int threads, shared;  // shared: bytes of dynamic shared memory
};

template <bool BARRIERS, class... P, class... A>
static ms_status launch_any(const char *what, int index, void (*kernel)(P...), int64_t blocks, block_size block,
                            const A &...a)
{
    if (blocks <= 0) return MS_OK;
    if (blocks > 0x7fffffff)
        return ms__fail(MS_EUNSUPPORTED, "%s: needs %lld blocks of threads, but cuda:%d launches at most 2147483647",
                        what, (long long)blocks, index);
    MS_TRY(ms__cuda_use(index));
    cudaStream_t stream = ms__cuda_stream(index, ms__launch_stream);
    unsigned threads = (unsigned)block.threads;
    size_t shared = (size_t)block.shared;
#ifdef MS_EMULATED
    std::tuple<P...> args(static_cast<P>(a)...);
    cudaError_t e = ms_shim::launch(stream, what, BARRIERS, kernel, (unsigned)blocks, threads, shared, args);
#else
    std::tuple<argument<P, A>...> args(static_cast<argument<P, A>>(a)...);
    void *p[sizeof...(P)];
    std::apply(
        [&](const auto &...x) {
            int i = 0;
            ((p[i++] = (void *)&x), ...);
        },
        args);
    cudaError_t e = cudaLaunchKernel((const void *)kernel, dim3((unsigned)blocks), dim3(threads), p, shared, stream);
#endif
    if (e != cudaSuccess)
        return ms__cuda_failed(e, what, index, "launching %lld block%s of %u threads", (long long)blocks,
                               blocks == 1 ? "" : "s", threads);
    return MS_OK;
}

// Launches a kernel whose threads are independent.
template <class... P, class... A>
static ms_status launch(const char *what, int index, void (*kernel)(P...), int64_t blocks, int threads, const A &...a)
{
    return launch_any<false>(what, index, kernel, blocks, { threads, 0 }, a...);
}
// Launches a kernel that uses barriers.
template <class... P, class... A>
static ms_status launch_blocks(const char *what, int index, void (*kernel)(P...), int64_t blocks, int threads,
                               const A &...a)
{
    return launch_any<true>(what, index, kernel, blocks, { threads, 0 }, a...);
}
// Like launch_blocks, with block.shared bytes of dynamic shared memory (tensor_core.h: dynamic_shared).
template <class... P, class... A>
static ms_status launch_shared(const char *what, int index, void (*kernel)(P...), int64_t blocks, block_size block,
                               const A &...a)
{
    MS_TRY(ms__cuda_use(index));
    CUDA_TRY(index, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, block.shared),
             "%s: %d bytes of shared memory", what, block.shared);
    return launch_any<true>(what, index, kernel, blocks, block, a...);
}

static inline int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }
// The grid of at least `threads` threads of a kernel without barriers: blocks of 64 threads where blocks of 256 would
// be fewer than two for each of an H100's 132 multiprocessors.
struct grid {
    int64_t blocks;
    int threads;
};
static inline grid grid_of(int64_t threads)
{
    int block = threads < 2 * 132 * 256 ? 64 : 256;
    return { up(threads, block), block };
}

#define GLOBAL_INDEX ((int64_t)blockIdx.x * blockDim.x + threadIdx.x)

// An error that a kernel finds in its data (an id out of range). The host raises it when it next waits for the device.
enum { MS_COMPLAINT_EMBEDDING = 1, MS_COMPLAINT_CLASS, MS_COMPLAINT_POSITION };
typedef struct {
    int what, taken;         // taken: 1 if an error is recorded
    long long value, limit;  // value is not in [0, limit)
} ms_complaint;
ms_complaint *ms__complaints(int index);  // the device's record of the first error; in pinned host memory
// Records an error, unless an earlier one is recorded.
static __device__ inline void complain(ms_complaint *c, int what, int64_t value, int64_t limit)
{
    if (atomicCAS(&c->taken, 0, 1) != 0) return;
    c->value = value;
    c->limit = limit;
    c->what = what;
}

// ---- values of every dtype, as float, double or int64 ----

// Converts as the CPU does: NaN and numbers out of range become INT64_MIN.
static __device__ inline int64_t to_whole(double x) { return x >= -0x1p63 && x < 0x1p63 ? (int64_t)x : INT64_MIN; }
template <class T, class U> static __device__ inline T convert(U v)
{
    if constexpr (std::is_integral_v<T> && std::is_floating_point_v<U>) return (T)to_whole(v);
    else return (T)v;
}

template <class T> struct value {
    static __device__ inline T load(int dtype, const void *p)
    {
        switch (dtype) {
        case MS_F32: return convert<T>(*(const float *)p);
        case MS_F64: return convert<T>(*(const double *)p);
        case MS_F16: return convert<T>(ms_f16_to_float(*(const ms_f16 *)p));
        case MS_BF16: return convert<T>(ms_bf16_to_float(*(const ms_bf16 *)p));
        case MS_I64: return convert<T>(*(const int64_t *)p);
        case MS_I32: return convert<T>(*(const int32_t *)p);
        case MS_I8: return convert<T>(*(const int8_t *)p);
        case MS_I16: return convert<T>(*(const int16_t *)p);
        default: return convert<T>(*(const uint8_t *)p);
        }
    }
    static __device__ inline void store(int dtype, void *p, T v)
    {
        switch (dtype) {
        case MS_F32: *(float *)p = (float)v; break;
        case MS_F64: *(double *)p = (double)v; break;
        case MS_F16: *(ms_f16 *)p = ms_float_to_f16((float)v); break;
        case MS_BF16: *(ms_bf16 *)p = ms_float_to_bf16((float)v); break;
        case MS_I64: *(int64_t *)p = convert<int64_t>(v); break;
        case MS_I32: *(int32_t *)p = convert<int32_t>(v); break;
        case MS_U8: *(uint8_t *)p = convert<uint8_t>(v); break;
        case MS_I8: *(int8_t *)p = convert<int8_t>(v); break;
        case MS_I16: *(int16_t *)p = convert<int16_t>(v); break;
        default: *(uint8_t *)p = v != 0; break;
        }
    }
};

// Values of the dtypes that are computed as T: float32 and half types as float, these and float64 as double, integers
// and bool as int64. store_truth: results of these dtypes or, of a comparison, bool.
template <class T> struct own_value {
    static __device__ inline T load(int dtype, const void *p)
    {
        if constexpr (std::is_integral_v<T>) {
            switch (dtype) {
            case MS_I64: return *(const int64_t *)p;
            case MS_I32: return *(const int32_t *)p;
            case MS_I16: return *(const int16_t *)p;
            case MS_I8: return *(const int8_t *)p;
            default: return *(const uint8_t *)p;
            }
        } else {
            if constexpr (sizeof(T) == 8) {
                if (dtype == MS_F64) return *(const double *)p;
            }
            switch (dtype) {
            case MS_F16: return ms_f16_to_float(*(const ms_f16 *)p);
            case MS_BF16: return ms_bf16_to_float(*(const ms_bf16 *)p);
            default: return *(const float *)p;
            }
        }
    }
    static __device__ inline void store(int dtype, void *p, T v)
    {
        if constexpr (std::is_integral_v<T>) {
            switch (dtype) {
            case MS_I64: *(int64_t *)p = v; break;
            case MS_I32: *(int32_t *)p = (int32_t)v; break;
            case MS_I16: *(int16_t *)p = (int16_t)v; break;
            case MS_BOOL: *(uint8_t *)p = v != 0; break;
            default: *(uint8_t *)p = (uint8_t)v;  // also int8
            }
        } else {
            if constexpr (sizeof(T) == 8) {
                if (dtype == MS_F64) {
                    *(double *)p = v;
                    return;
                }
            }
            switch (dtype) {
            case MS_F16: *(ms_f16 *)p = ms_float_to_f16((float)v); break;
            case MS_BF16: *(ms_bf16 *)p = ms_float_to_bf16((float)v); break;
            default: *(float *)p = (float)v;
            }
        }
    }
    static __device__ inline void store_truth(int dtype, void *p, T v)
    {
        if (std::is_floating_point_v<T> && dtype == MS_BOOL) *(uint8_t *)p = v != 0;
        else store(dtype, p, v);
    }
};

// Element i of contiguous memory, of the dtypes of own_value.
template <class T> static __device__ inline T load(int dtype, const void *p, int64_t i)
{
    return own_value<T>::load(dtype, (const char *)p + i * ms__dtype_size(dtype));
}
template <class T> static __device__ inline void store(int dtype, void *p, int64_t i, T v)
{
    own_value<T>::store(dtype, (char *)p + i * ms__dtype_size(dtype), v);
}
// Whether 0 <= i < n, by one comparison.
static __device__ __forceinline__ bool in_range(int64_t i, int64_t n) { return (uint64_t)i < (uint64_t)n; }
// Position i of a list of positions, which are int64 or int32.
static __device__ inline int64_t load_position(int dtype, const void *p, int64_t i)
{
    return dtype == MS_I32 ? ((const int32_t *)p)[i] : ((const int64_t *)p)[i];
}

enum { BLOCK = 256 };  // threads per block of a kernel that uses the sums and maxima of blocks.h

// exp, log and sqrt, overloaded for both accumulation types.
static __device__ inline float exp_of(float x) { return ms_exp_f32(x); }
static __device__ inline double exp_of(double x) { return ms_exp_f64(x); }
static __device__ inline float log_of(float x) { return ms_log_f32(x); }
static __device__ inline double log_of(double x) { return ms_log_f64(x); }
static __device__ inline float sqrt_of(float x) { return ms_sqrt_f32(x); }
static __device__ inline double sqrt_of(double x) { return ms_sqrt_f64(x); }

// The instance of a kernel template that computes tensors of a dtype: in float for half types and float32.
#define REAL_KERNEL(dtype, kernel) ((dtype) == MS_F64 ? kernel<double> : kernel<float>)

#endif
