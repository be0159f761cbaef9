// SPDX-License-Identifier: MIT
// cuda/blocks.h -- helpers of kernels that stream through memory: accesses of 16 bytes, sums over warps and groups of
// threads, channels in shared memory, and column sums in two levels. Kernels that sum must be started by launch_blocks
// or launch_shared.
#ifndef MS_CUDA_BLOCKS_H
#define MS_CUDA_BLOCKS_H

#include "cuda/cuda.h"

// ---- WIDE adjacent elements of global memory, in accesses of 16 bytes ----

constexpr int WIDE = 8;

// UNROLL: written before a loop over an array in registers; without it nvcc may keep the array in local memory. ROLLED:
// keeps nvcc from unrolling a loop, such as those over few dimensions, whose four copies would hardly run.
#ifdef MS_EMULATED
#define UNROLL
#define ROLLED
#else
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#endif

static __device__ inline bool is_wide(const void *p) { return ((uintptr_t)p & 15) == 0; }

// load_wide and store_wide: WIDE elements at p, which is aligned to 16 bytes. S: the stored type; T: the type of the
// values.
template <class T> static __device__ __forceinline__ void load_wide(const float *p, T *v)
{
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
template <class T> static __device__ __forceinline__ void load_wide(const double *p, T *v)
{
    for (int k = 0; k < WIDE / 2; k++) {
        double2 a = ((const double2 *)p)[k];
        v[2 * k] = (T)a.x, v[2 * k + 1] = (T)a.y;
    }
}
static __device__ __forceinline__ float half_value(const ms_f16 *, uint16_t bits) { return ms_f16_to_float({ bits }); }
static __device__ __forceinline__ float half_value(const ms_bf16 *, uint16_t bits)
{
    return ms_bf16_to_float({ bits });
}
template <class T, class S> static __device__ __forceinline__ void load_wide(const S *p, T *v)
{
    uint4 a = *(const uint4 *)p;
    unsigned word[4] = { a.x, a.y, a.z, a.w };
    for (int k = 0; k < 4; k++) {
        v[2 * k] = half_value(p, (uint16_t)(word[k] & 0xffff));
        v[2 * k + 1] = half_value(p, (uint16_t)(word[k] >> 16));
    }
}

// Stores 16 bytes of global memory in one access. The compiler may split a plain assignment into several.
template <class V> static __device__ __forceinline__ void put(V *p, V v)
{
#ifdef MS_EMULATED
    *p = v;
#else
    __stwb(p, v);
#endif
}
template <class T> static __device__ __forceinline__ void store_wide(float *p, const T *v)
{
    put((float4 *)p, make_float4((float)v[0], (float)v[1], (float)v[2], (float)v[3]));
    put((float4 *)p + 1, make_float4((float)v[4], (float)v[5], (float)v[6], (float)v[7]));
}
template <class T> static __device__ __forceinline__ void store_wide(double *p, const T *v)
{
    for (int k = 0; k < WIDE / 2; k++) put((double2 *)p + k, make_double2((double)v[2 * k], (double)v[2 * k + 1]));
}
static __device__ __forceinline__ uint16_t half_bits(const ms_f16 *, float x) { return ms_float_to_f16(x).bits; }
static __device__ __forceinline__ uint16_t half_bits(const ms_bf16 *, float x) { return ms_float_to_bf16(x).bits; }
template <class T, class S> static __device__ __forceinline__ void store_wide(S *p, const T *v)
{
    unsigned word[4];
    for (int k = 0; k < 4; k++)
        word[k] = (unsigned)half_bits(p, (float)v[2 * k]) | (unsigned)half_bits(p, (float)v[2 * k + 1]) << 16;
    put((uint4 *)p, make_uint4(word[0], word[1], word[2], word[3]));
}

// load_one and store_one: as load_wide and store_wide, for one element.
template <class T> static __device__ __forceinline__ T load_one(const float *p) { return (T)*p; }
template <class T> static __device__ __forceinline__ T load_one(const double *p) { return (T)*p; }
template <class T, class S> static __device__ __forceinline__ T load_one(const S *p)
{
    return (T)half_value(p, p->bits);
}
template <class T> static __device__ __forceinline__ void store_one(float *p, T v) { *p = (float)v; }
template <class T> static __device__ __forceinline__ void store_one(double *p, T v) { *p = (double)v; }
template <class T, class S> static __device__ __forceinline__ void store_one(S *p, T v)
{
    p->bits = half_bits(p, (float)v);
}

// Calls fn(S, T) for a floating-point dtype: elements are stored as S and computed as T.
#define WITH_FLOAT_TYPE(dtype, fn)          \
    switch (dtype) {                        \
    case MS_F32: fn(float, float); break;   \
    case MS_F64: fn(double, double); break; \
    case MS_F16: fn(ms_f16, float); break;  \
    default: fn(ms_bf16, float);            \
    }

// ---- packs of a row ----

// The type in which elements of type S are computed.
template <class S> using real_of = std::conditional_t<std::is_same_v<S, double>, double, float>;

// A kernel template's instance for the dtype of its elements.
#define TYPED_KERNEL(dtype, kernel)         \
    ((dtype) == MS_F64    ? kernel<double>  \
     : (dtype) == MS_F16  ? kernel<ms_f16>  \
     : (dtype) == MS_BF16 ? kernel<ms_bf16> \
                          : kernel<float>)

template <class S> static __device__ inline real_of<S> one_of(const S *p) { return load_one<real_of<S>>(p); }

// read_pack and write_pack: WIDE elements from j on of a row of n elements: in accesses of 16 bytes if all are in the
// row and aligned, otherwise one by one. Elements outside the row read as `rest` and are not written.
template <class S>
static __device__ __forceinline__ void read_pack(const S *row, int64_t j, int64_t n, real_of<S> rest, real_of<S> *v)
{
    if (j >= 0 && j + WIDE <= n && is_wide(row + j)) load_wide(row + j, v);
    else
        for (int e = 0; e < WIDE; e++) v[e] = in_range(j + e, n) ? one_of(row + j + e) : rest;
}
// As read_pack, for two rows; elements outside read as 0. Where all are inside and aligned, both loads are in flight
// together.
template <class S>
static __device__ __forceinline__ void read_two(const S *a, const S *b, int64_t j, int64_t n, real_of<S> *v,
                                                real_of<S> *w)
{
    if (j >= 0 && j + WIDE <= n && is_wide(a + j) && is_wide(b + j)) {
        load_wide(a + j, v);
        load_wide(b + j, w);
    } else {
        read_pack(a, j, n, (real_of<S>)0, v);
        read_pack(b, j, n, (real_of<S>)0, w);
    }
}
template <class S> static __device__ __forceinline__ void write_pack(S *row, int64_t j, int64_t n, const real_of<S> *v)
{
    if (j >= 0 && j + WIDE <= n && is_wide(row + j)) store_wide(row + j, v);
    else
        for (int e = 0; e < WIDE; e++)
            if (in_range(j + e, n)) store_one(row + j + e, v[e]);
}
// The index at which the packs of a row begin, so that they are aligned: 0, or a few elements before the row (< 0).
template <class S> static __device__ inline int64_t first_pack(const S *row)
{
    return -(int64_t)((uintptr_t)row % 16 / sizeof(S));
}
// Copies up to WIDE of n elements without conversion: in accesses of 16 bytes if n >= WIDE and both addresses are
// aligned. SHARED: to shared memory.
template <class S> constexpr int WORDS = WIDE * sizeof(S) / sizeof(uint4);
template <bool SHARED = false, class S>
static __device__ __forceinline__ void move_pack(S *to, const S *from, int64_t n)
{
    if (n >= WIDE && is_wide(to) && is_wide(from)) {
        uint4 v[WORDS<S>];
        UNROLL
        for (int k = 0; k < WORDS<S>; k++) v[k] = ((const uint4 *)from)[k];
        UNROLL
        for (int k = 0; k < WORDS<S>; k++)
            if (SHARED) ((uint4 *)to)[k] = v[k];
            else put((uint4 *)to + k, v[k]);
    } else UNROLL
    for (int e = 0; e < WIDE; e++)
        if (e < n) to[e] = from[e];
}

// The offset of element i, counted in row-major order, in n dimensions; in the unit of the strides.
static __device__ inline int64_t offset_of(int64_t i, int n, const int64_t *shape, const int64_t *stride)
{
    int64_t at = 0;
    ROLLED
    for (int d = n - 1; d >= 0; d--) {
        if (d == 0) return at + i * stride[0];
        int64_t q = i / shape[d];
        at += (i - q * shape[d]) * stride[d];
        i = q;
    }
    return at;
}

// ---- sums and maxima over a warp or over `width` threads (32 or all of the block); every thread gets the result ----

enum { WARPS = BLOCK / 32 };
template <class T> static __device__ inline T warp_sum(T v)
{
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}
// The larger number; NaN if one of them is NaN.
template <class T> static __device__ inline T larger(T a, T b) { return ((b > a) | (b != b)) ? b : a; }
template <class T> static __device__ inline T warp_max(T v)
{
    for (int step = 16; step > 0; step /= 2) v = larger(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}
template <class T> static __device__ inline T group_sum(T v, int width, T *shared /* WARPS */)
{
    v = warp_sum(v);
    if (width == 32) return v;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int k = 0; k < WARPS; k++) v += shared[k];
    __syncthreads();
    return v;
}
template <class T> static __device__ inline T group_max(T v, int width, T *shared)
{
    v = warp_max(v);
    if (width == 32) return v;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    v = shared[0];
    for (int k = 1; k < WARPS; k++) v = larger(v, shared[k]);
    __syncthreads();
    return v;
}
// The sum over all threads of a block, in a fixed tree: thread t's sum gets that of thread t + 128, then of t + 64, and
// so on. The last warp to be left adds what the others have stored.
template <class T> static __device__ inline T block_sum(T v, T *shared /* BLOCK */)
{
    shared[threadIdx.x] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        T a[WARPS];
        for (int k = 0; k < WARPS; k++) a[k] = shared[threadIdx.x + 32 * k];
        for (int step = WARPS / 2; step > 0; step /= 2)
            for (int k = 0; k < step; k++) a[k] += a[k + step];
        shared[threadIdx.x] = warp_sum(a[0]);
    }
    __syncthreads();
    T all = shared[0];
    __syncthreads();
    return all;
}
template <class T> static __device__ inline T block_max(T v, T *shared)
{
    shared[threadIdx.x] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        T a[WARPS];
        for (int k = 0; k < WARPS; k++) a[k] = shared[threadIdx.x + 32 * k];
        for (int step = WARPS / 2; step > 0; step /= 2)
            for (int k = 0; k < step; k++) a[k] = larger(a[k], a[k + step]);
        shared[threadIdx.x] = warp_max(a[0]);
    }
    __syncthreads();
    T all = shared[0];
    __syncthreads();
    return all;
}
// ---- channels in shared memory ----
//
// Thread t of a block processes elements t, t + BLOCK, ... of a channel, so that the order of a sum does not depend on
// WIDE. Each thread reads WIDE adjacent elements from memory and stores them in a tile in shared memory.

// A contiguous tensor of n x c x s elements; c counts the channels.
struct planes {
    int64_t n, c, s;
};
constexpr int ROUND = BLOCK * WIDE;

// Copies elements [first, first + ROUND) of a channel to a tile, except those from `to` on.
template <class S>
static __device__ __forceinline__ void fill_tile(S *tile, const planes &z, const S *x, int64_t channel, int64_t first,
                                                 int64_t to)
{
    int64_t j = first + threadIdx.x * WIDE;
    if (j >= to) return;
    int64_t image = j / z.s, r = j - image * z.s, n = to - j;
    x += (image * z.c + channel) * z.s + r;
    tile += threadIdx.x * WIDE;
    if (r + WIDE <= z.s && n >= WIDE && is_wide(x)) {
        UNROLL
        for (int k = 0; k < WORDS<S>; k++) ((uint4 *)tile)[k] = ((const uint4 *)x)[k];
        return;
    }
    for (int e = 0; e < WIDE && e < n; e++) {
        tile[e] = *x++;
        if (++r == z.s) r = 0, x += (z.c - 1) * z.s;
    }
}

// Threads for a row of n elements: a warp for up to 256 elements, or up to 2048 if the rows fill the GPU; else a block.
static inline int row_width(int64_t rows, int64_t n) { return n <= 256 || (n <= 2048 && rows >= 1024) ? 32 : BLOCK; }

// ---- column sums in two levels: blocks sum segments of the rows, then the segments' sums are added ----

enum { MOST_JOINED = 64 };
// The number of segments into which the rows of a matrix are divided: enough blocks to fill the GPU, where `tiles`
// blocks cover the columns, but at most MOST_JOINED segments, and at most one for each 32 rows (rounded up).
static inline int64_t column_segments(int64_t rows, int64_t tiles)
{
    int64_t most = up(rows, 32), fill = up(528, tiles);
    if (fill > MOST_JOINED) fill = MOST_JOINED;
    return most < fill ? most : fill;
}

#endif
