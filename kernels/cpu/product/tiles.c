// SPDX-License-Identifier: MIT
// cpu/product/tiles.c -- compiles the micro-kernels (tiles_body.h) for each level, and picks those of this processor.
//
// A tile takes ROWS x VECS registers for sums, VECS for a row of B and one for a number of A. DEPTH: steps after which
// a group of GROUP tiles, one below the other, continues with the next part of the depth. With vectors of 32 bytes,
// panels of B would otherwise be read from the second-level cache at 16 bytes a cycle, half of what it can deliver;
// like this a part of a panel, 18 KiB, stays in the first-level cache (32 KiB) for the whole group. With 64 bytes the
// panels of B take too much of that cache, and the group would write its sums too often: 2 % slower.
//
// Built with -ffp-contract=fast (CMakeLists.txt): here a*b + c may become an fma.
#include "cpu/product/tiles.h"

enum { WHOLE = 1 << 30 };  // DEPTH without parts

// Keeps a vector in a register.
#if defined(__x86_64__)
#define KEEP(x) __asm__ volatile("" : "+v"(x))
#else
#define KEEP(x) ((void)0)
#endif

#if MS_CLONES
#define VEC 64
#define ROWS 8
#define VECS 3
#define DEPTH WHOLE
#define GROUP 1
#define TARGET __attribute__((target("arch=x86-64-v4")))
#define LEVEL(x) x##_v4
#include "cpu/product/tiles_types.h"

#define VEC 32
#define ROWS 4
#define VECS 3
#define DEPTH 192
#define GROUP 8
#define TARGET __attribute__((target("arch=x86-64-v3")))
#define LEVEL(x) x##_v3
#include "cpu/product/tiles_types.h"
#endif

#define VEC 16
#if defined(__aarch64__)  // 32 registers
#define ROWS 8
#define VECS 3
#define GROUP 4
#else
#define ROWS 4
#define VECS 2
#define GROUP 8
#endif
#define DEPTH 256
#define TARGET
#define LEVEL(x) x##_v1
#include "cpu/product/tiles_types.h"

#define PICK(type)                                     \
    const ms_tiles_##type *ms__tiles_##type(void)      \
    {                                                  \
        static const ms_tiles_##type *known;           \
        if (MS_UNLIKELY(!known)) known = LEVELS(type); \
        return known;                                  \
    }
#if MS_CLONES
#define LEVELS(type) \
    ms_cpu_isa()[1] == '4' ? &tiles_##type##_v4 : ms_cpu_isa()[1] == '3' ? &tiles_##type##_v3 : &tiles_##type##_v1
#else
#define LEVELS(type) &tiles_##type##_v1
#endif
PICK(f32)
PICK(f64)

// Pads rows to a multiple of 16 numbers, whatever a vector holds.
#define PACK(type, T)                                                                         \
    void ms__pack_##type(T *out, int64_t out_rs, const ms_matrix *b, int64_t k, int64_t n)    \
    {                                                                                         \
        const ms_tiles_##type *t = ms__tiles_##type();                                        \
        int64_t padded = (n + t->lanes - 1) / t->lanes * t->lanes, wide = (n + 15) / 16 * 16; \
        t->pack(out, out_rs, b, k, n);                                                        \
        for (int64_t p = 0; p < k && padded < wide; p++)                                      \
            memset(out + p * out_rs + padded, 0, (size_t)(wide - padded) * sizeof(T));        \
    }
PACK(f32, float)
PACK(f64, double)
