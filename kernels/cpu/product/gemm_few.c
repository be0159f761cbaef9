// SPDX-License-Identifier: MIT
// cpu/product/gemm_few.c -- products of up to 16 rows with a weight whose rows are contiguous, y = x W^T: what decoding
// a language model consists of. Nothing is packed, because the weight is read once: a packed copy would take longer
// than the product. The limit is the memory's rate, and for many rows of half types that of multiply-adds.
//
// An element of the result is a dot product. Lane l of LANES (16; 8 in float64) sums the products of positions l,
// l + LANES, ... in order; then lanes l and l + 8 are added, l and l + 4, l and l + 2, l and l + 1. Half types and int8
// are converted to float32 in registers, or, for many rows, once into a buffer in the first-level cache. Here the bits
// of a row depend neither on the other rows nor on the number of threads, and not on the processor's level either,
// except that level 1 has no fma.
//
// Built with -ffp-contract=fast, as gemm.c.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "cpu/elementwise/loops.h"
#include "cpu/product/product.h"

enum {
    FEW_ROWS = 16,
    ROWS = 4,   // rows of a tile
    GROUP = 8,  // rows of a tile if x is packed, and columns
    GROUP_COLS = 3,
    ROW_COLS = 4,          // columns of a tile if x is one row
    ROW_BLOCK = 192,       // columns of a block then
    ROW_AHEAD = 512,       // bytes by which it prefetches the weight
    BLOCK = 48,            // columns computed together: whole tiles on every level
    SHARE = 32 << 10,      // numbers of the weight that a thread reads at a time, at least
    LARGE = 512 << 10,     // numbers of a weight that a second-level cache does not hold
    PAYS = 16 << 10,       // numbers of a weight from which on packing it takes longer for more than 4 rows
    DEPTH_BYTES = 2 << 10  // depth, in bytes of the accumulating type, of the parts of the weight that many rows read
};

typedef struct few_work few_work;
typedef void (*few_block_fn)(const few_work *f, int64_t j, int64_t n);
struct few_work {
    int64_t m, n, k;
    const char *w;   // the rows of the weight, one for each column of the product,
    int64_t w_step;  // and the bytes from one to the next
    int w_dtype;
    const void *x;  // in the accumulating type: contiguous rows, or packed (gemm_few_packed.h)
    int64_t x_rs;
    int64_t x_group;     // numbers of a packed group of rows; 0: x is not packed
    const void *x_last;  // the last k % LANES numbers of each row, padded with zeros to LANES
    int dtype;           // of the bias and the result
    const void *bias;    // NULL: none
    const float *scale;  // a factor for each column; NULL: none
    void *c;
    int64_t c_rs, c_cs;
    few_block_fn block;
    int64_t first;         // the number of columns of the products before this one
    const few_work *next;  // another product with the same x; NULL: none
};

#define SIZE_OF(dtype, REAL) \
    ((dtype) == MS_I8 ? 1 : (dtype) == MS_F16 || (dtype) == MS_BF16 ? 2 : (int64_t)sizeof(REAL))

// Keeps a vector in a register.
#if defined(__x86_64__)
#define KEEP(x) __asm__ volatile("" : "+v"(x))
#else
#define KEEP(x) ((void)0)
#endif

// The loads of STEP numbers as float32. __builtin_convertvector, which the last level uses, becomes five shuffles in
// GCC 12 where AVX-512 and AVX2 have one instruction.
#if MS_CLONES
#define VEC 64
#define COLS 6
#define PACKED
#define TARGET __attribute__((target("arch=x86-64-v4")))
#define LEVEL(x) x##_v4
#define LOAD_BF16(p) (L(vec)) _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(p))), 16)
#define LOAD_F16(p) (L(vec)) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p)))
#define LOAD_I8(p) (L(vec)) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(p))))
#include "cpu/product/gemm_few_types.h"
#define VEC 32
#define COLS 3
#define PACKED
#define TARGET __attribute__((target("arch=x86-64-v3")))
#define LEVEL(x) x##_v3
#define LOAD_BF16(p) (L(vec)) _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(p))), 16)
#define LOAD_F16(p) (L(vec)) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#define LOAD_I8(p) (L(vec)) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(p))))
#include "cpu/product/gemm_few_types.h"
#endif
typedef uint16_t few_halves __attribute__((vector_size(8), aligned(1), may_alias));
typedef uint32_t few_words __attribute__((vector_size(16)));
typedef int8_t few_bytes __attribute__((vector_size(4), aligned(1), may_alias));
typedef int32_t few_numbers __attribute__((vector_size(16)));
typedef float few_floats __attribute__((vector_size(16)));
#define VEC 16
#if defined(__x86_64__)
#define COLS 3
#else
#define COLS 6  // 32 registers
#endif
#define TARGET
#define LEVEL(x) x##_v1
#define LOAD_BF16(p) (L(vec))(__builtin_convertvector(*(const few_halves *)(p), few_words) << 16)
#define LOAD_I8(p) __builtin_convertvector(__builtin_convertvector(*(const few_bytes *)(p), few_numbers), few_floats)
#include "cpu/product/gemm_few_types.h"

static int isa_level(void)
{
#if MS_CLONES
    static int level = -1;
    if (MS_UNLIKELY(level < 0)) level = ms_cpu_isa()[1] - '0';
    return level;
#else
    return 1;
#endif
}

static few_block_fn few_block_of(int dtype)
{
#if MS_CLONES
    if (isa_level() == 4) return few_block_v4(dtype);
    if (isa_level() == 3) return few_block_v3(dtype);
#endif
    return few_block_v1(dtype);
}

static void few_task(void *arg, int64_t first, int64_t last, int64_t unused)
{
    (void)unused;
    for (const few_work *f = arg; f; f = f->next) {
        int64_t j = first / f->k - f->first, stop = last / f->k - f->first;
        if (stop > f->n) stop = f->n;
        const int64_t block = f->m == 1 ? ROW_BLOCK : BLOCK;
        for (j = j > 0 ? j : 0; j < stop; j += block) f->block(f, j, stop - j < block ? stop - j : block);
    }
}

// Computes f and the products after it, of which everything but x_last, block and first is set.
static void run_few(few_work *f)
{
    char last[FEW_ROWS * 64] __attribute__((aligned(64))) = { 0 };
    int64_t size = f->w_dtype == MS_F64 ? 8 : 4, lanes = 64 / size, rest = f->k % lanes;
    for (int64_t i = 0; i < f->m && rest && !f->x_group; i++)
        memcpy(last + i * 64, (const char *)f->x + (i * f->x_rs + f->k - rest) * size, (size_t)(rest * size));
    f->x_last = last;
    f->block = few_block_of(f->w_dtype);
    int64_t columns = (SHARE / f->k / BLOCK + 1) * BLOCK, n = f->n;
    for (few_work *g = (few_work *)f->next; g; g = (few_work *)g->next) {
        g->x = f->x, g->x_rs = f->x_rs, g->x_group = f->x_group, g->x_last = last, g->block = f->block, g->first = n;
        n += g->n;
    }
    ms__parallel(n * f->k, columns * f->k, few_task, f);
}

// Whether dot products are the fastest way for `rows` rows.
static bool pays(int64_t rows, int64_t n, int64_t k)
{
    return rows <= 4 || (rows <= FEW_ROWS && k >= 16 && n * k >= PAYS);
}

// Describes g as a product of few rows. One of a few columns is the transposed product of as many rows.
static bool few_of(const ms_gemm *g, few_work *f, ms_matrix *x)
{
    int64_t size = ms__dtype_size(g->dtype);
    if (!ms__is_float(g->dtype) || g->m == 0 || g->n == 0 || g->k == 0 || g->scales_rows) return false;
    if (g->b_rs == 1 && g->b_cs != 1 && pays(g->m, g->n, g->k)) {
        *f = (few_work) {
            .m = g->m, .n = g->n, .w = g->b, .bias = g->bias, .scale = g->scale, .c_rs = g->c_rs, .c_cs = 1
        };
        f->w_step = g->b_cs * (g->scale ? 1 : size);
        *x = (ms_matrix) { g->a, g->a_rs, g->a_cs, g->dtype };
    } else if (g->m > FEW_ROWS && g->a_cs == 1 && !g->bias && !g->scale && pays(g->n, g->m, g->k)) {
        *f = (few_work) { .m = g->n, .n = g->m, .w = g->a, .w_step = g->a_rs * size, .c_rs = 1, .c_cs = g->c_rs };
        *x = (ms_matrix) { g->b, g->b_cs, g->b_rs, g->dtype };
    } else return false;
    f->k = g->k;
    f->dtype = g->dtype;
    f->w_dtype = g->scale ? MS_I8 : g->dtype;
    f->c = g->c;
    return true;
}

bool ms__gemm_takes_few(const ms_gemm *g)
{
    few_work f;
    ms_matrix x;
    return few_of(g, &f, &x);
}

// Rows in a group of packed x; 0: x is not packed. Where the weight stays in a cache, packing gains nothing. With
// AVX-512, x is packed for one group, or two that are nearly full: two groups read the weight twice, so that types that
// are converted take longer than with smaller tiles. With AVX2, a row beyond whole groups takes the time of a group,
// which is less than the time of a row of half types without it.
static int64_t packed_rows(const few_work *f)
{
    bool converted = f->w_dtype != MS_F32 && f->w_dtype != MS_F64;
    if (f->n < 512 || f->n * f->k < LARGE) return 0;
    if (isa_level() == 3)
        return f->m == ROWS || (f->m > ROWS && (f->m % ROWS != 1 || ms__is_half(f->w_dtype))) ? ROWS : 0;
    bool pays = f->m > ROWS && (f->m <= GROUP || (f->m > GROUP + ROWS && !converted));
    return isa_level() == 4 && pays ? GROUP : 0;
}

// Packs x in groups of `rows` rows (gemm_few_packed.h). row: memory for a row of k numbers.
static void pack_x(const few_work *f, int64_t rows, const ms_matrix *x, char *packed, char *row)
{
    int64_t from = ms__dtype_size(x->dtype), to = f->dtype == MS_F64 ? 8 : 4, lanes = 64 / to;
    memset(packed, 0, (size_t)((f->m + rows - 1) / rows * f->x_group * to));
    for (int64_t i = 0; i < f->m; i++) {
        char *at = packed + (i / rows * f->x_group + i % rows * lanes) * to;
        ms__load(ms__class_of(x->dtype), x->dtype, f->k, row, (const char *)x->data + i * x->rs * from, x->cs * from);
        for (int64_t p = 0; p < f->k; p += lanes, at += rows * 64)
            memcpy(at, row + p * to, (size_t)((f->k - p < lanes ? f->k - p : lanes) * to));
    }
}

// Computes the product g, and those of the list that begins at `next`, if that is not NULL.
static ms_status few_products(const ms_gemm *g, few_work *next)
{
    few_work f = { 0 };
    ms_matrix x = { 0 };
    ms_block *copy = NULL;
    few_of(g, &f, &x);
    f.next = next;
    int64_t size = ms__dtype_size(g->dtype), to = g->dtype == MS_F64 ? 8 : 4, lanes = 64 / to;
    f.x = x.data;
    f.x_rs = x.rs;
    int64_t rows = packed_rows(&f);
    if (rows) {
        f.x_group = (f.k + lanes - 1) / lanes * lanes * rows;
        size_t bytes = (size_t)((f.m + rows - 1) / rows * f.x_group * to);
        MS_TRY(ms__alloc_scratch(&copy, bytes + (size_t)(f.k * to), g->what));
        pack_x(&f, rows, &x, copy->data, (char *)copy->data + bytes);
        f.x = copy->data;
    } else if (ms__is_half(g->dtype) || x.cs != 1) {
        MS_TRY(ms__alloc_scratch(&copy, (size_t)(f.m * f.k * to), g->what));
        for (int64_t i = 0; i < f.m; i++)
            ms__load(ms__class_of(g->dtype), g->dtype, f.k, (char *)copy->data + i * f.k * to,
                     (const char *)x.data + i * x.rs * size, x.cs * size);
        f.x = copy->data;
        f.x_rs = f.k;
    }
    run_few(&f);
    if (copy) ms__free(copy);
    return MS_OK;
}

ms_status ms__gemm_few(const ms_gemm *g) { return few_products(g, NULL); }

bool ms__gemm_few_parts(const ms_gemm *g, int n, ms_status *st)
{
    few_work rest[MS_GEMM_PARTS];
    ms_matrix x;
    bool few = n > 1 && g->m <= FEW_ROWS;
    for (int k = 0; k < n && few; k++) {
        few = few_of(&g[k], &rest[k], &x);
        if (k) rest[k - 1].next = &rest[k];
    }
    if (few) *st = few_products(g, &rest[1]);
    return few;
}
