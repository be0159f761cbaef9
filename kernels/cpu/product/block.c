// SPDX-License-Identifier: MIT
// cpu/product/block.c -- small products whose operands are in the caches: the parts of attention and recurrent layers.
// Tiles of C stay in registers over the whole depth. All levels add in the same order.
//
// Built with -ffp-contract=fast (CMakeLists.txt), as gemm.c.
#include "cpu/product/product.h"

#define INLINE static inline __attribute__((always_inline))
#define EACH(rows, vecs, DO) \
    _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++) _Pragma("GCC unroll 16") for (int v = 0; v < vecs; v++) DO;

// The levels: bytes of a vector, and the rows of a tile that is 64 bytes wide, by the number of registers.
#if MS_CLONES
#define AVX512 __attribute__((target("arch=x86-64-v4")))
#define AVX2 __attribute__((target("arch=x86-64-v3")))
enum { BASE = 16, BASE_ROWS = 3 };  // 16 registers of 16 bytes

static int block_level(void)
{
    static int known;
    if (MS_UNLIKELY(!known)) known = ms_cpu_isa()[1] - '0';
    return known;
}
#else
enum { BASE = 16, BASE_ROWS = 6 };  // as on ARM64: 32 registers
#endif

#define REAL float
#define R(x) x##_f32
#include "cpu/product/block_body.h"
#undef REAL
#undef R
#define REAL double
#define R(x) x##_f64
#include "cpu/product/block_body.h"
