// SPDX-License-Identifier: MIT
// cpu/attention/few.c -- attention of few rows of queries: their scores with keys, and the sums of values that they
// weigh. Keys and values are read once and in their own type; half types are converted in registers.
//
// A score is a dot product as in gemm_few.c: lane l of LANES (16; 8 in float64) sums the products of positions l,
// l + LANES, ... in order; then lanes l and l + 8 are added, l and l + 4, l and l + 2, l and l + 1. The bits depend
// neither on the other rows nor on the number of threads, and not on the processor's level either, except that level 1
// has no fma.
//
// Built with -ffp-contract=fast, as gemm.c.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "cpu/attention/few.h"

#define INLINE static inline __attribute__((always_inline))
#define EACH(n, i) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

// The indices of a shuffle of two vectors a and b of STEP lanes, whose blocks of w lanes are the partial sums of one
// dot product each: block 2 k is the lower half of block k of a, block 2 k + 1 that of b. HIGHER: the upper halves.
#define LOWER(w, e) ((e) % (w) / ((w) / 2) * STEP + (e) / (w) * (w) + (e) % ((w) / 2))
#define HIGHER(w, e) (LOWER(w, e) + (w) / 2)
#define LANES_2(AT, w) AT(w, 0), AT(w, 1)
#define LANES_4(AT, w) LANES_2(AT, w), AT(w, 2), AT(w, 3)
#define LANES_8(AT, w) LANES_4(AT, w), AT(w, 4), AT(w, 5), AT(w, 6), AT(w, 7)
#define LANES_16(AT, w) \
    LANES_8(AT, w), AT(w, 8), AT(w, 9), AT(w, 10), AT(w, 11), AT(w, 12), AT(w, 13), AT(w, 14), AT(w, 15)

// The loads of STEP numbers as float32, as in gemm_few.c.
#if MS_CLONES
#define TARGET __attribute__((target("arch=x86-64-v4")))
#define LEVEL(x) x##_v4
#define LOAD_BF16(p) (L(vec)) _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(p))), 16)
#define LOAD_F16(p) (L(vec)) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p)))
#define VEC 64
#define F32_STEP 16
#define F64_STEP 8
#define F32_LANES LANES_16
#define F64_LANES LANES_8
#define MOST 16  // sums in registers
#include "cpu/attention/few_types.h"
#define TARGET __attribute__((target("arch=x86-64-v3")))
#define LEVEL(x) x##_v3
#define LOAD_BF16(p) (L(vec)) _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(p))), 16)
#define LOAD_F16(p) (L(vec)) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#define VEC 32
#define F32_STEP 8
#define F64_STEP 4
#define F32_LANES LANES_8
#define F64_LANES LANES_4
#define MOST 8
#include "cpu/attention/few_types.h"
#endif
typedef uint16_t few_halves __attribute__((vector_size(8), aligned(1), may_alias));
typedef uint32_t few_words __attribute__((vector_size(16)));
#define TARGET
#define LEVEL(x) x##_v1
#define LOAD_BF16(p) (L(vec))(__builtin_convertvector(*(const few_halves *)(p), few_words) << 16)
#define VEC 16
#define F32_STEP 4
#define F64_STEP 2
#define F32_LANES LANES_4
#define F64_LANES LANES_2
#define MOST 8
#include "cpu/attention/few_types.h"

static int few_level(void)
{
#if MS_CLONES
    static int known;
    if (MS_UNLIKELY(!known)) known = ms_cpu_isa()[1] - '0';
    return known;
#else
    return 1;
#endif
}

bool ms__few_reads(int dtype) { return dtype != MS_F16 || few_level() > 2; }

#if MS_CLONES
#define BY_LEVEL(fn)                           \
    void ms__few_##fn(const ms_few *f)         \
    {                                          \
        if (few_level() == 4) fn##_v4(f);      \
        else if (few_level() == 3) fn##_v3(f); \
        else fn##_v1(f);                       \
    }
#else
#define BY_LEVEL(fn) \
    void ms__few_##fn(const ms_few *f) { fn##_v1(f); }
#endif
BY_LEVEL(scores_f32)
BY_LEVEL(scores_f64)
BY_LEVEL(sums_f32)
BY_LEVEL(sums_f64)
