// SPDX-License-Identifier: MIT
// cpu/square.h -- transposes squares of N x N elements of a word's size in N vectors of 16 bytes: log2(N) times, it
// interleaves each vector of the first half with that of the second half. All instruction sets have these two shuffles.
#ifndef MS_CPU_SQUARE_H
#define MS_CPU_SQUARE_H

#include <stdint.h>

#define ZIP16(h) ZIP16_HALF(h), ZIP16_HALF(h + 4)
#define ZIP16_HALF(h) h, h + 16, h + 1, h + 17, h + 2, h + 18, h + 3, h + 19
#define ZIP8(h) h, h + 8, h + 1, h + 9, h + 2, h + 10, h + 3, h + 11
#define ZIP4(h) h, h + 4, h + 1, h + 5
#define ZIP2(h) h, h + 2
#define SQUARE(T, N)                                                                       \
    typedef T vector_##T __attribute__((vector_size(16), aligned(1)));                     \
    static inline __attribute__((always_inline)) void square_##T(vector_##T v[N])          \
    {                                                                                      \
        for (int stage = N; stage > 1; stage /= 2) {                                       \
            vector_##T w[N];                                                               \
            for (int k = 0; k < N / 2; k++) {                                              \
                w[2 * k] = __builtin_shufflevector(v[k], v[k + N / 2], ZIP##N(0));         \
                w[2 * k + 1] = __builtin_shufflevector(v[k], v[k + N / 2], ZIP##N(N / 2)); \
            }                                                                              \
            for (int k = 0; k < N; k++) v[k] = w[k];                                       \
        }                                                                                  \
    }
SQUARE(uint8_t, 16)
SQUARE(uint16_t, 8)
SQUARE(uint32_t, 4)
SQUARE(uint64_t, 2)

#endif
