// SPDX-License-Identifier: MIT
// ops/philox.h -- the random generator: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy
// as 1, 2, 3", 2011). The seed is the key; the counter is (block, offset). Every operator call uses its own offset
// (ms__rng_next); the block is computed from an element's position in the whole tensor. A number therefore depends only
// on seed, call and position, not on device, threads or world size.
#ifndef MS_PHILOX_H
#define MS_PHILOX_H

#include <stdint.h>
#include "tensor/dtype.h"

// Computes the four 32-bit words of a block. Each word has its own pointer: with one array for all four, GCC does not
// vectorise the CPU's fills, which then take 2.7 times as long.
MS_FN void ms_philox(uint64_t seed, uint64_t offset, uint64_t block, uint32_t *w0, uint32_t *w1, uint32_t *w2,
                     uint32_t *w3)
{
    uint32_t a = (uint32_t)block, b = (uint32_t)(block >> 32), c = (uint32_t)offset, d = (uint32_t)(offset >> 32);
    uint32_t k = (uint32_t)seed, l = (uint32_t)(seed >> 32);
#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC unroll 10  // lets loops over blocks vectorise
#endif
    for (int round = 0; round < 10; round++) {
        uint64_t p = (uint64_t)0xD2511F53u * a, q = (uint64_t)0xCD9E8D57u * c;
        uint32_t x = (uint32_t)(q >> 32) ^ b ^ k, y = (uint32_t)(p >> 32) ^ d ^ l;
        b = (uint32_t)q;
        d = (uint32_t)p;
        a = x;
        c = y;
        k += 0x9E3779B9u;
        l += 0xBB67AE85u;
    }
    *w0 = a;
    *w1 = b;
    *w2 = c;
    *w3 = d;
}

// A number in [0, 1) with 24 bits; never 1.
MS_FN float ms_uniform_f32(uint32_t bits) { return (float)(bits >> 8) * 0x1p-24f; }
MS_FN double ms_uniform_f64(uint32_t high, uint32_t low)
{
    return (double)(((uint64_t)high << 32 | low) >> 11) * 0x1p-53;
}

#endif
