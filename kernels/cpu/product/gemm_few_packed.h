// SPDX-License-Identifier: MIT
// cpu/product/gemm_few_packed.h -- the part of gemm_few_body.h for more than ROWS rows with AVX-512. The 32 registers
// hold the sums of GROUP rows times GROUP_COLS columns, so 8 rows read the weight once, and convert it once. x is
// packed: groups of GROUP rows, each [step of LANES][row][LANES], padded with zeros; a part of MOST_DEPTH of a group
// stays in the first-level cache while PANEL columns pass along it.

enum { L(PANEL) = 24, L(MOST_DEPTH) = 768 * 4 / sizeof(REAL) };

// A tile: GROUP rows of x times GROUP_COLS of the weight, over k numbers, a multiple of LANES.
// Meanwhile, `lines` cache lines of each row at `ahead` are prefetched for 2 * LANES of depth.
typedef struct L(packed) {
    int64_t k;
    const char *w[GROUP_COLS], *ahead[GROUP_COLS];
    int lines;
    const REAL *x;
    REAL *sums;  // [row][GROUP_COLS][LANES]
    bool fresh;  // sums begin at 0
    REAL *out;   // NULL, or this is the last part: as of columns, from the tile's first column on
} L(packed);

// Adds lanes until four are left.
static inline __attribute__((always_inline)) TARGET L(quad) L(packed_fold)(L(vec) s)
{
#if LANES == 16
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)s), _mm512_extractf32x8_ps((__m512)s, 1));
    return (L(quad))_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    return (L(quad))_mm256_add_pd(_mm512_castpd512_pd256((__m512d)s), _mm512_extractf64x4_pd((__m512d)s, 1));
#endif
}

static inline __attribute__((always_inline)) TARGET void L(packed_dot)(const int dtype, const L(packed) * t)
{
    const int64_t size = SIZE_OF(dtype, REAL), k = t->k;
    const char *w[GROUP_COLS], *ahead[GROUP_COLS];
    const REAL *x = t->x;
    REAL *sums = t->sums;
    const int lines = t->lines;
    L(vec) s[GROUP][GROUP_COLS];
#pragma GCC unroll 8
    for (int c = 0; c < GROUP_COLS; c++) w[c] = t->w[c], ahead[c] = t->ahead[c];
#pragma GCC unroll 8
    for (int r = 0; r < GROUP; r++)
#pragma GCC unroll 8
        for (int c = 0; c < GROUP_COLS; c++)
            s[r][c] = t->fresh ? (L(vec)) { 0 } : *(L(vec) *)(sums + (r * GROUP_COLS + c) * LANES);
// One step: LANES of depth. A number of x stays in a register for all columns: GCC would load it for each.
#define STEP_OF(p, x)                                                                                        \
    do {                                                                                                     \
        L(vec) y[GROUP_COLS];                                                                                \
        _Pragma("GCC unroll 8") for (int c = 0; c < GROUP_COLS; c++) y[c] = L(load)(dtype, w[c] + (p)*size); \
        _Pragma("GCC unroll 8") for (int r = 0; r < GROUP; r++)                                              \
        {                                                                                                    \
            L(vec) z = *(const L(vec) *)((x) + r * LANES);                                                   \
            KEEP(z);                                                                                         \
            _Pragma("GCC unroll 8") for (int c = 0; c < GROUP_COLS; c++) s[r][c] += z * y[c];                \
        }                                                                                                    \
    } while (0)
    int64_t p = 0;
#pragma GCC unroll 1
    for (; p + 2 * LANES <= k; p += 2 * LANES) {
        if (lines) {
#pragma GCC unroll 8
            for (int c = 0; c < GROUP_COLS; c++) __builtin_prefetch(ahead[c] + p * size, 0, 2);
            if (lines > 1) {
#pragma GCC unroll 8
                for (int c = 0; c < GROUP_COLS; c++) __builtin_prefetch(ahead[c] + p * size + 64, 0, 2);
            }
        }
        STEP_OF(p, x);
        STEP_OF(p + LANES, x + GROUP * LANES);
        x += 2 * GROUP * LANES;
    }
    if (p < k) STEP_OF(p, x);
#undef STEP_OF
#pragma GCC unroll 8
    for (int r = 0; r < GROUP; r++)
#pragma GCC unroll 8
        for (int c = 0; c < GROUP_COLS; c++) {
            if (t->out) *(L(quad) *)(t->out + (r * BLOCK + c) * 4) = L(packed_fold)(s[r][c]);
            else *(L(vec) *)(sums + (r * GROUP_COLS + c) * LANES) = s[r][c];
        }
}

static TARGET __attribute__((noinline)) void L(packed_real)(const L(packed) * t) { L(packed_dot)(DTYPE, t); }

// Tiles of `columns` columns from j on, for a group of rows, over depths [p, p + t.k).
static inline __attribute__((always_inline)) TARGET void L(packed_tiles)(const int dtype, const few_work *f,
                                                                         L(packed) t, int64_t j, int64_t columns,
                                                                         int64_t p)
{
    const int64_t size = SIZE_OF(dtype, REAL), whole = f->k / LANES * LANES;
    for (int64_t c0 = 0; c0 < columns; c0 += GROUP_COLS) {
        REAL last[GROUP_COLS][LANES] __attribute__((aligned(64)));
        for (int c = 0; c < GROUP_COLS; c++) {
            int64_t at = j + (c0 + c < columns ? c0 + c : columns - 1);
            t.w[c] = f->w + at * f->w_step + p * size;
            // After the last columns come the first ones in the next part, or the next columns.
            if (c0 + GROUP_COLS < columns) t.ahead[c] = t.w[c] + GROUP_COLS * f->w_step;
            else if (p + t.k < whole) t.ahead[c] = f->w + (j + c) * f->w_step + (p + t.k) * size;
            else t.ahead[c] = f->w + (j + columns + c) * f->w_step;
        }
        if (p < whole) {
            if (dtype == DTYPE) L(packed_real)(&t);
            else L(packed_dot)(dtype, &t);
        } else {
            for (int c = 0; c < GROUP_COLS; c++) {
                memset(last[c], 0, sizeof last[c]);
                ms__load(CLASS, dtype, f->k - whole, last[c], t.w[c], size);
                t.w[c] = (const char *)last[c];
            }
            L(packed_real)(&t);
        }
        t.sums += GROUP * GROUP_COLS * LANES;
        if (t.out) t.out += GROUP_COLS * 4;
    }
}

// As columns, for x packed.
static inline __attribute__((always_inline)) TARGET void L(packed_columns)(const int dtype, const few_work *f,
                                                                           int64_t j, int64_t n, REAL *out)
{
    const int64_t whole = f->k / LANES * LANES, size = SIZE_OF(dtype, REAL);
    REAL sums[FEW_ROWS * L(PANEL) * LANES] __attribute__((aligned(64)));
    for (int64_t first = 0; first < n; first += L(PANEL)) {
        const int64_t columns = n - first < L(PANEL) ? n - first : L(PANEL);
        for (int64_t p = 0, k; p < f->k; p += k) {
            k = p == whole ? LANES : whole - p < L(MOST_DEPTH) ? whole - p : L(MOST_DEPTH);
            for (int64_t i = 0; i < f->m; i += GROUP) {
                L(packed)
                t = { .k = k,
                      .lines = i > 0 || p == whole     ? 0
                               : 2 * LANES * size > 64 ? 2
                                                       : 1,
                      .x = (const REAL *)f->x + i / GROUP * f->x_group + p * GROUP,
                      .sums = sums + i * L(PANEL) * LANES,
                      .fresh = p == 0,
                      .out = p + k < f->k ? NULL : out + (i * BLOCK + first) * 4 };
                L(packed_tiles)(dtype, f, t, j + first, columns, p);
            }
        }
    }
}
