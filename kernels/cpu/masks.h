// masks.h -- dropout's bits: element k of a call has word k % 4 of Philox block k / 4 and stays when
// that word is >= p * 2^32. Nothing is stored: backward draws the same words again.
#ifndef MS_MASKS_H
#define MS_MASKS_H

#include "op.h"

enum { MS_MASK_BLOCKS = 64 };       // 256 elements at a time

// Words of blocks first .. first + n, n <= MS_MASK_BLOCKS, in the order of the elements (philox.h's rounds, unrolled so
// that the loop over blocks vectorises).
static inline __attribute__((always_inline)) void ms__mask_words(uint32_t *out, int64_t n, uint64_t seed, uint64_t offset, uint64_t first)
{
    for (int64_t k = 0; k < n; k++) {
        uint32_t a = (uint32_t)(first + (uint64_t)k), b = (uint32_t)((first + (uint64_t)k) >> 32), c = (uint32_t)offset, d = (uint32_t)(offset >> 32);
        uint32_t key = (uint32_t)seed, lock = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            uint64_t p = (uint64_t)0xD2511F53u * a, q = (uint64_t)0xCD9E8D57u * c;
            uint32_t x = (uint32_t)(q >> 32) ^ b ^ key, y = (uint32_t)(p >> 32) ^ d ^ lock;
            b = (uint32_t)q;
            d = (uint32_t)p;
            a = x;
            c = y;
            key += 0x9E3779B9u;
            lock += 0xBB67AE85u;
        }
        out[4 * k] = a, out[4 * k + 1] = b, out[4 * k + 2] = c, out[4 * k + 3] = d;
    }
}

// Words below it are dropped; p = 1 drops all (limit 2^32).
static inline uint64_t ms__mask_limit(double p) { return (uint64_t)(p * 4294967296.0); }

#endif
