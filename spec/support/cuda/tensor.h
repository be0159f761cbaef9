// SPDX-License-Identifier: MIT
// cuda/tensor.h -- the emulation behind kernels/cuda/tensor_core.h, which describes these functions.
//
// A product adds in double and rounds once, or, in the modes tensor:a100 and tensor:h100, truncates as measurements of
// these GPUs describe. A destination of copy_async is poisoned until the copy takes place, at the wait.
#pragma once
#include <cmath>
#include <limits>

#include "tensor/dtype.h"
#include "warps.h"

namespace ms_shim
{

inline float from_bf16(uint16_t v) { return ms_bf16_to_float({ v }); }
inline float from_f16(uint16_t v) { return ms_f16_to_float({ v }); }

// Stores n words of this lane, waits for all lanes of the warp, and returns the words of all lanes. Two buffers
// alternate: before a lane overwrites one, all lanes have met at the exchange that uses the other, so none still reads
// it.
typedef uint32_t fragment[10];
inline fragment *exchange(const char *name, const uint32_t *mine, int n)
{
    need_fiber();
    fiber *self = here.self;
    block_state *block = here.block;
    int first = (int)self->at.thread.x / 32 * 32;
    if (first + 32 > block->n) fault("%s: the warp has %d threads, expected 32", name, block->n - first);
    fragment *all = block->tiles[self->exchanges++ & 1] + first;
    memcpy(all[lane()], mine, (size_t)n * sizeof *mine);
    meet(2);
    if (self->met != ~0u) fault("%s: only the lanes %08x of the warp take part", name, self->met);
    return all;
}

// A format of 16 bits: its value, and the exponent of its subnormal numbers.
struct half_format {
    float (*value)(uint16_t);
    int least;
};

// c and the products a[k] b[k] (k < 16), added as the tensor cores of an A100 (gpu 80) or an H100 (90) add them. They
// take `block` products at a time. The products are exact; they and the sum so far are aligned to the largest exponent,
// that of a product being the sum of its factors' exponents. Bits below 2^-(23 + extra) of it are dropped, the rest is
// added without loss and truncated to float. Fasi, Higham, Mikaitis, Pranesh: "Numerical behavior of NVIDIA tensor
// cores", PeerJ Computer Science 2021 (e330), measured the truncation, and blocks of 8 on the A100; Li et al., "FTTN",
// CCGrid 2024 (arXiv:2403.00232), the extra bits; Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores", 2025
// (arXiv:2512.07004), give 1 extra bit for the A100, blocks of 16 and 2 extra bits for the H100. What they say about
// exponents below -126 is left out.
inline float add_truncated(int gpu, float c, const double *a, const double *b, int least)
{
    const int block = gpu == 80 ? 8 : 16, extra = gpu == 80 ? 1 : 2;
    auto exponent = [](double x, int floor) { return std::max(std::ilogb(x), floor); };
    for (int from = 0; from < 16; from += block) {
        int top = c != 0 ? exponent(c, -126) : std::numeric_limits<int>::min();
        for (int k = from; k < from + block; k++)
            if (a[k] * b[k] != 0) top = std::max(top, exponent(a[k], least) + exponent(b[k], least));
        if (top == std::numeric_limits<int>::min()) continue;
        double sum = std::trunc(std::ldexp(c, 23 + extra - top));
        for (int k = from; k < from + block; k++) sum += std::trunc(std::ldexp(a[k] * b[k], 23 + extra - top));
        sum = std::ldexp(sum, top - 23 - extra);
        c = (float)sum;
        if (std::fabs(c) > std::fabs(sum) && (std::isfinite(c) || std::fabs(sum) < 0x1p128)) c = std::nextafterf(c, 0);
    }
    return c;
}

// The same sum, rounded to float once: of doubles, which add most products without loss, otherwise in binary128, which
// does so while the terms lie within 2^84 of each other.
inline float add_exactly(float c, const double *a, const double *b)
{
    double sum = c;
    bool lost = false;
    for (int k = 0; k < 16; k++) {
        double one = a[k] * b[k], next = sum + one, added = next - sum;
        lost |= (sum - (next - added)) + (one - added) != 0;  // what the addition rounds off (Knuth's two-sum)
        sum = next;
    }
    if (!lost) return (float)sum;
    __float128 wide = c;
    for (int k = 0; k < 16; k++) wide += a[k] * b[k];
    return (float)wide;
}

inline void mma(const char *name, half_format type, float d[4], const uint32_t a[4], const uint32_t b[2])
{
    uint32_t mine[6] = { a[0], a[1], a[2], a[3], b[0], b[1] };
    const fragment *all = exchange(name, mine, 6);
    int g = lane() / 4, t = lane() % 4;
    auto half = [&](uint32_t two, int k) { return (double)type.value((uint16_t)(k & 1 ? two >> 16 : two)); };
    for (int i = 0; i < 4; i++) {
        int row = g + (i / 2) * 8, column = 2 * t + i % 2;
        double sum = d[i], x[16], y[16];
        for (int k = 0; k < 16; k++) {
            const uint32_t *of_a = all[row % 8 * 4 + k % 8 / 2], *of_b = all[column * 4 + k % 8 / 2] + 4;
            x[k] = half(of_a[row / 8 + k / 8 * 2], k), y[k] = half(of_b[k / 8], k);
            sum += x[k] * y[k];
        }
        // A sum of float and products of halves is infinite or NaN only if one of them is.
        if (!std::isfinite(sum)) d[i] = (float)sum;
        else d[i] = mode.tensor ? add_truncated(mode.tensor, d[i], x, y, type.least) : add_exactly(d[i], x, y);
    }
}

inline void finish_copies(int groups)  // finishes the copies of groups before number `groups`
{
    std::vector<async_copy> &copies = here.self->copies;
    for (async_copy &c : copies) {
        if (c.group >= groups) continue;
        memcpy(c.to, c.from, (size_t)c.read);
        memset((char *)c.to + c.read, 0, (size_t)(c.bytes - c.read));
    }
    std::erase_if(copies, [=](const async_copy &c) { return c.group < groups; });
}

}  // namespace ms_shim

inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    ms_shim::mma("mma_bf16", { ms_shim::from_bf16, -126 }, d, a, b);
}
inline void mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    ms_shim::mma("mma_f16", { ms_shim::from_f16, -14 }, d, a, b);
}

template <int N, bool TRANSPOSED = false> void load_matrices(uint32_t *r, const void *row)
{
    static_assert(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices");
    using namespace ms_shim;
    if (lane() < 8 * N) check_aligned(row, 16);
    uint32_t mine[2] = { (uint32_t)(uintptr_t)row, (uint32_t)((uintptr_t)row >> 32) };
    const fragment *all = exchange("load_matrices", mine, 2);
    for (int m = 0; m < N; m++) {
        uint16_t two[2];
        for (int k = 0; k < 2; k++) {
            int i = lane() / 4, j = lane() % 4 * 2 + k;
            if (TRANSPOSED) std::swap(i, j);
            const uint32_t *from = all[8 * m + i];
            two[k] = ((const uint16_t *)(from[0] | (uintptr_t)from[1] << 32))[j];
        }
        r[m] = two[0] | (uint32_t)two[1] << 16;
    }
    meet(2);  // no lane overwrites a row that another one still reads
}

template <int BYTES> void copy_async(void *to, const void *from, int read = BYTES)
{
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "4, 8 or 16 bytes");
    using namespace ms_shim;
    need_fiber();
    check_aligned(to, BYTES);
    check_aligned(from, BYTES);
    if (read < 0 || read > BYTES) fault("copy_async: reads %d of %d bytes", read, BYTES);
    memset(to, POISON, BYTES);
    here.self->copies.push_back({ to, from, BYTES, read, here.self->group });
}
inline void copy_async_commit()
{
    ms_shim::need_fiber();
    ms_shim::here.self->group++;
}
template <int LEFT> void copy_async_wait()
{
    ms_shim::need_fiber();
    ms_shim::finish_copies(ms_shim::here.self->group - LEFT);
}

inline uint32_t pack_bf16(float low, float high)
{
    return ms_float_to_bf16(low).bits | (uint32_t)ms_float_to_bf16(high).bits << 16;
}
inline uint32_t pack_f16(float low, float high)
{
    return ms_float_to_f16(low).bits | (uint32_t)ms_float_to_f16(high).bits << 16;
}
inline float exp2_fast(float x) { return (float)exp2((double)x); }  // correctly rounded, as the executor of PTX does

inline void *dynamic_shared() { return ms_shim::here.block->dynamic; }
