// SPDX-License-Identifier: MIT
// cuda/tensor_core.h -- products of tiles on tensor cores, loads of their fragments, asynchronous copies to shared
// memory: PTX of sm_80 and later, or its emulation. All 32 lanes of a warp call a product or a fragment's load
// together.
//
// Lane l holds, with g = l / 4 and t = l % 4:
//   a, 16 x 16:  a[0]: row g,     columns 2t, 2t+1    a[1]: row g + 8, the same columns
//                a[2]: row g,     columns 2t+8, 2t+9  a[3]: row g + 8, the same columns
//   b, 16 x 8:   b[0]: rows 2t, 2t+1 of column g      b[1]: rows 2t+8, 2t+9 of column g
//   d, 16 x 8:   d[0], d[1]: row g, columns 2t, 2t+1  d[2], d[3]: row g + 8, the same columns
// The first of two 16-bit numbers is in the lower half of a register.
#ifndef MS_TENSOR_CORE_H
#define MS_TENSOR_CORE_H

#include <cstdint>

#ifdef MS_EMULATED
#include "cuda/tensor.h"
#else

static __device__ inline unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

#define MS_MMA(name, type)                                                                   \
    static __device__ inline void name(float d[4], const uint32_t a[4], const uint32_t b[2]) \
    {                                                                                        \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "          \
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"       \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));    \
    }
MS_MMA(mma_bf16, "bf16")  // d += a b
MS_MMA(mma_f16, "f16")
#undef MS_MMA

// Loads N (1, 2 or 4) matrices of 8 rows of 8 numbers of 16 bits from shared memory. Lane 8 m + r gives the address of
// row r of matrix m, aligned to 16 bytes. In lane l, register m receives row l / 4, columns 2 (l % 4) and the next, of
// matrix m; with TRANSPOSED, of its transpose.
template <int N, bool TRANSPOSED = false> static __device__ inline void load_matrices(uint32_t *r, const void *row)
{
    static_assert(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices");
    unsigned at = shared_address(row);
    if constexpr (N == 1 && !TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at) : "memory");
    else if constexpr (N == 1)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at) : "memory");
    else if constexpr (N == 2 && !TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1])
                     : "r"(at)
                     : "memory");
    else if constexpr (N == 2)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1])
                     : "r"(at)
                     : "memory");
    else if constexpr (!TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
}

// Begins to copy the first `read` bytes at `from` to shared memory, followed by zeros up to BYTES (4, 8 or 16).
// This thread can read the bytes after copy_async_wait, other threads after a barrier that follows it.
template <int BYTES> static __device__ inline void copy_async(void *to, const void *from, int read = BYTES)
{
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "4, 8 or 16 bytes");
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(read)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :
                     : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "n"(BYTES), "r"(read)
                     : "memory");
}
// Makes a group of the copies that this thread began since it last called this function.
static __device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all groups of this thread except the last LEFT are complete.
template <int LEFT> static __device__ inline void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Rounds two numbers to 16 bits and packs them into one register, `low` in the lower half.
static __device__ inline uint32_t pack_bf16(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
static __device__ inline uint32_t pack_f16(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// 2^x with a relative error of 2^-22; 2^-inf is 0.
static __device__ inline float exp2_fast(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// The block's dynamic shared memory, aligned to 128 bytes.
static __device__ inline void *dynamic_shared()
{
    extern __shared__ __align__(128) unsigned char ms_dynamic_shared[];
    return ms_dynamic_shared;
}

#endif
#endif
