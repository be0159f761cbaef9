// SPDX-License-Identifier: MIT
// cpu/elementwise/masks.h -- dropout's random words. Element k of a call uses word k % 4 of Philox block k / 4 and is
// kept if that word is at least p * 2^32, rounded down. Backward generates the same words again, so no mask is stored.
#ifndef MS_MASKS_H
#define MS_MASKS_H

#include "ops/op.h"
#include "ops/philox.h"

enum { MS_MASK_BLOCKS = 64 };  // 256 elements at a time

// Writes the words of n <= MS_MASK_BLOCKS blocks, starting at block `first`, in element order.
static inline __attribute__((always_inline)) void ms__mask_words(uint32_t *out, int64_t n, uint64_t seed,
                                                                 uint64_t offset, uint64_t first)
{
    uint32_t w[4][MS_MASK_BLOCKS];
#pragma omp simd
    for (int64_t k = 0; k < n; k++)
        ms_philox(seed, offset, first + (uint64_t)k, &w[0][k], &w[1][k], &w[2][k], &w[3][k]);
    for (int64_t k = 0; k < n; k++) {
        out[4 * k] = w[0][k];
        out[4 * k + 1] = w[1][k];
        out[4 * k + 2] = w[2][k];
        out[4 * k + 3] = w[3][k];
    }
}

// Elements whose word is below the limit are dropped; p = 1 drops all (limit 2^32).
static inline uint64_t ms__mask_limit(double p) { return (uint64_t)(p * 4294967296.0); }

#endif
