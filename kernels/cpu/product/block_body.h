// SPDX-License-Identifier: MIT
// cpu/product/block_body.h -- ms__block for one type REAL; block.c includes it twice. The vectors are
// those of the level: GCC splits wider ones through memory.
#define OPERANDS R(ms_operands)
typedef REAL R(vec_wide) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
typedef REAL R(vec_avx2) __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
typedef REAL R(vec_base) __attribute__((vector_size(BASE), aligned(sizeof(REAL)), may_alias));
enum { R(LANES) = 64 / sizeof(REAL) };  // the fewest columns that are computed at once

// A product of depth k; scale as in ms__block.
typedef struct R(job) {
    const OPERANDS *o;
    const REAL *scale;
    int64_t m, k;
} R(job);

// NAME(tile): computes `rows` rows from i on by `vecs` vectors of columns from j on. The barrier keeps GCC from
// hoisting loads across steps and spilling.
#define KERNELS(NAME)                                                                                             \
    INLINE void NAME(tile)(const int rows, const int vecs, const R(job) * job, int64_t i, int64_t j)              \
    {                                                                                                             \
        enum { N = sizeof(NAME(vec)) / sizeof(REAL) };                                                            \
        const OPERANDS *o = job->o;                                                                               \
        const REAL *scale = job->scale, *bias = o->bias;                                                          \
        const char *a = (const char *)(o->a + i * o->a_rs), *b = (const char *)(o->b + j);                        \
        const int64_t k = job->k, a_rs = o->a_rs * (int64_t)sizeof(REAL), b_rs = o->b_rs * (int64_t)sizeof(REAL), \
                      c_rs = o->c_rs;                                                                             \
        int64_t a_cs = o->a_cs * (int64_t)sizeof(REAL);                                                           \
        NAME(vec) s[12][16];                                                                                      \
        __asm__("" : "+r"(a_cs)); /* or GCC makes a second loop for a_cs = 1 */                                   \
        EACH(rows, vecs, s[r][v] = (NAME(vec)) { 0 })                                                             \
        _Pragma("GCC unroll 1") for (int64_t p = 0; p < k; p++, a += a_cs, b += b_rs)                             \
        {                                                                                                         \
            NAME(vec) w[16];                                                                                      \
            _Pragma("GCC unroll 16") for (int v = 0; v < vecs; v++) w[v] = ((const NAME(vec) *)b)[v];             \
            EACH(rows, vecs, s[r][v] += *(const REAL *)(a + r * a_rs) * w[v])                                     \
            __asm__ volatile("" ::: "memory");                                                                    \
        }                                                                                                         \
        REAL *c = o->c + i * c_rs + j;                                                                            \
        if (scale) EACH(rows, vecs, s[r][v] += scale[i + r] * *(const NAME(vec) *)(c + r * c_rs + v * N))         \
        else if (o->add) EACH(rows, vecs, s[r][v] += *(const NAME(vec) *)(c + r * c_rs + v * N))                  \
        if (bias) EACH(rows, vecs, s[r][v] += *(const NAME(vec) *)(bias + j + v * N))                             \
        EACH(rows, vecs, *(NAME(vec) *)(c + r * c_rs + v * N) = s[r][v])                                          \
    }
// Tiles of HIGH rows by 64 bytes. Fewer than 4 rows are computed one by one, ACROSS x 64 bytes of each: these are more
// independent sums than a tile of few rows has.
#define BLOCK(NAME, TARGET, HIGH, ACROSS)                                                                             \
    static TARGET void NAME(block)(int64_t n, const R(job) * job)                                                     \
    {                                                                                                                 \
        enum { PARTS = 64 / sizeof(NAME(vec)) };                                                                      \
        int64_t i = 0, j, m = job->m;                                                                                 \
        for (; i + HIGH <= m; i += HIGH)                                                                              \
            for (j = 0; j < n; j += R(LANES)) NAME(tile)(HIGH, PARTS, job, i, j);                                     \
        if (HIGH > 4 && i + 4 <= m) {                                                                                 \
            for (j = 0; j < n; j += R(LANES)) NAME(tile)(4, PARTS, job, i, j);                                        \
            i += 4;                                                                                                   \
        }                                                                                                             \
        for (; i < m; i++) {                                                                                          \
            for (j = 0; j + ACROSS * R(LANES) <= n; j += ACROSS * R(LANES)) NAME(tile)(1, ACROSS * PARTS, job, i, j); \
            for (; j < n; j += R(LANES)) NAME(tile)(1, PARTS, job, i, j);                                             \
        }                                                                                                             \
    }
#define IN_BASE(x) R(x##_base)
KERNELS(IN_BASE)
BLOCK(IN_BASE, , BASE_ROWS, 2)

#if MS_CLONES
#define IN_AVX2(x) R(x##_avx2)
KERNELS(IN_AVX2)
BLOCK(IN_AVX2, AVX2, 6, 4)

#define IN_WIDE(x) R(x##_wide)
KERNELS(IN_WIDE)

// Computes all rows of `vecs` vectors of columns, `high` rows at a time.
INLINE void R(strip)(const int high, const int vecs, const R(job) * job, int64_t j)
{
    int64_t i = 0, m = job->m;
    for (; i + high <= m; i += high) R(tile_wide)(high, vecs, job, i, j);
    if (high > 6 && i + 6 <= m) {
        R(tile_wide)(6, vecs, job, i, j);
        i += 6;
    }
    switch (m - i) {
    case 5: R(tile_wide)(5, vecs, job, i, j); break;
    case 4: R(tile_wide)(4, vecs, job, i, j); break;
    case 3: R(tile_wide)(3, vecs, job, i, j); break;
    case 2: R(tile_wide)(2, vecs, job, i, j); break;
    case 1: R(tile_wide)(1, vecs, job, i, j); break;
    }
}

// 6 rows by 4 vectors, or fewer vectors and more rows.
static AVX512 void R(block_wide)(int64_t n, const R(job) * job)
{
    int64_t left = n / R(LANES);  // vectors, at most 4 at a time
    for (int64_t j = 0, vecs; left > 0; left -= vecs, j += vecs * R(LANES)) {
        int64_t strips = (left + 3) / 4;
        vecs = (left + strips - 1) / strips;
        switch (vecs) {
        case 4: R(strip)(6, 4, job, j); break;
        case 3: R(strip)(8, 3, job, j); break;
        case 2: R(strip)(12, 2, job, j); break;
        default: R(strip)(12, 1, job, j); break;
        }
    }
}

#undef IN_WIDE
#undef IN_AVX2
#endif
#undef IN_BASE
#undef KERNELS
#undef BLOCK

void R(ms__block)(int64_t m, int64_t n, int64_t k, const OPERANDS *o, const REAL *scale)
{
    const R(job) job = { o, scale, m, k };
#if MS_CLONES
    if (block_level() == 4) R(block_wide)(n, &job);
    else if (block_level() == 3) R(block_avx2)(n, &job);
    else
#endif
        R(block_base)(n, &job);
}
#undef OPERANDS
