// SPDX-License-Identifier: MIT
// cpu/product/gemm_few_packed.h -- the part of gemm_few_body.h for 4 or more rows with AVX-512 or AVX2. x is packed:
// groups of rows, each [step of LANES][row][LANES], padded with zeros; a part of a group's depth stays in the
// first-level cache while PANEL columns pass along it.

#if VEC == 64
// AVX-512. The 32 registers hold the sums of GROUP rows times GROUP_COLS columns, so 8 rows read the weight once, and
// convert it once. MOST_DEPTH: the depth of a part.

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

#else
// AVX2. ROWS x COLS sums, COLS vectors of the weight and one of x take all 16 registers; GCC spills some in the loop,
// so they are named here. A tile is one or two groups of ROWS rows; a group passes along the weight twice, for either
// half of LANES.

// DEEP: the parts' depth for two groups; twice as much for one. KEPT: the longest part.
enum { L(PANEL) = 24, L(DEEP) = 2048 / sizeof(REAL), L(KEPT) = L(DEEP) / 2 * 3 };
_Static_assert(ROWS == 4 && COLS == 3 && L(PARTS) == 2 && L(PANEL) % (COLS * L(STEP)) == 0, "as written below");

typedef struct L(tall) {
    int64_t k;  // a multiple of LANES
    const char *w[COLS];
    // What is read later is prefetched: for every 2 * LANES of depth, what lies `at` bytes after these.
    const char *ahead[COLS];
    int64_t at, step;
    const REAL *x;
    int64_t x_group;
    const REAL *from;  // the sums so far, or zeros: [group][row][COLS][LANES]
    REAL *sums;
    REAL *kept;  // [COLS][KEPT]: the weight, once converted
} L(tall);
static const REAL L(zeros)[2 * ROWS * COLS * LANES];

// Step q of a loop: COLS vectors of the weight are loaded, converted, and multiplied with a vector of each row of x.
#define Y(y) "%%ymm1" #y
#define AS_REAL(q, c, y) "vmovup" KIND " " #q "*64(%[w" #c "],%[p]," SIZE "), " Y(y) "\n\t"
#define AS_BF16(q, c, y) "vpmovzxwd " #q "*32(%[w" #c "],%[p],2), " Y(y) "\n\tvpslld $16, " Y(y) ", " Y(y) "\n\t"
#define AS_F16(q, c, y) "vmovups " #q "*32(%[w" #c "],%[p],2), %%xmm1" #y "\n\tvcvtph2ps %%xmm1" #y ", " Y(y) "\n\t"
#define AS_I8(q, c, y) "vpmovsxbd " #q "*16(%[w" #c "],%[p]), " Y(y) "\n\tvcvtdq2ps " Y(y) ", " Y(y) "\n\t"
#define ADD(y, r, c) "vfmadd231p" KIND " " Y(y) ", %%ymm15, %[s" #r #c "]\n\t"
#define ROW(q, r) "vmovup" KIND " (" #q "*4+" #r ")*64(%[x]), %%ymm15\n\t" ADD(2, r, 0) ADD(3, r, 1) ADD(4, r, 2)
#define SUMS(r) [s##r##0] "+x"(s[r][0]), [s##r##1] "+x"(s[r][1]), [s##r##2] "+x"(s[r][2])
#define STEP_AS(AS, q)                                                                           \
    __asm__ volatile(AS(q, 0, 2) AS(q, 1, 3) AS(q, 2, 4) ROW(q, 0) ROW(q, 1) ROW(q, 2) ROW(q, 3) \
                     : SUMS(0), SUMS(1), SUMS(2), SUMS(3)                                        \
                     : [w0] "r"(w0), [w1] "r"(w1), [w2] "r"(w2), [p] "r"(p), [x] "r"(x)          \
                     : "memory", "xmm12", "xmm13", "xmm14", "xmm15")
#define KEEP_AT(q)                                                                                             \
    __asm__ volatile("vmovups %%ymm12, (%0)\n\tvmovups %%ymm13, %c1(%0)\n\tvmovups %%ymm14, %c2(%0)"           \
                     :                                                                                         \
                     : "r"(kept + p + (q)*LANES), "i"(L(KEPT) * sizeof(REAL)), "i"(2 * L(KEPT) * sizeof(REAL)) \
                     : "memory")
#define STEP_OF(q)                                    \
    do {                                              \
        if (dtype == MS_BF16) STEP_AS(AS_BF16, q);    \
        else if (dtype == MS_F16) STEP_AS(AS_F16, q); \
        else if (dtype == MS_I8) STEP_AS(AS_I8, q);   \
        else STEP_AS(AS_REAL, q);                     \
        if (keep) KEEP_AT(q);                         \
    } while (0)

// A pass of a group: half `part` of LANES.
static inline __attribute__((always_inline)) TARGET void L(pass)(const int dtype, const bool keep, L(tall) * t,
                                                                 int group, int part)
{
    const int64_t size = SIZE_OF(dtype, REAL), half = part * L(STEP), step = t->step, k = t->k;
    const int64_t first = group * ROWS * COLS * LANES + half;
    const char *w0 = t->w[0] + half * size, *w1 = t->w[1] + half * size, *w2 = t->w[2] + half * size;
    const char *a0 = t->ahead[0], *a1 = t->ahead[1], *a2 = t->ahead[2];
    const REAL *x = t->x + group * t->x_group + half;
    REAL *kept = t->kept + half;
    int64_t at = t->at, p = 0;
    L(vec) s[ROWS][COLS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COLS; c++) s[r][c] = *(const L(vec) *)(t->from + first + (r * COLS + c) * LANES);
#pragma GCC unroll 1
    for (; p + 2 * LANES <= k; p += 2 * LANES, x += 2 * ROWS * LANES, at += step) {
        __builtin_prefetch(a0 + at, 0, 2);
        STEP_OF(0);
        __builtin_prefetch(a1 + at, 0, 2);
        STEP_OF(1);
        __builtin_prefetch(a2 + at, 0, 2);
    }
    if (p < k) STEP_OF(0);
    t->at = at;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COLS; c++) *(L(vec) *)(t->sums + first + (r * COLS + c) * LANES) = s[r][c];
}
#undef Y
#undef AS_REAL
#undef AS_BF16
#undef AS_F16
#undef AS_I8
#undef ADD
#undef ROW
#undef SUMS
#undef STEP_AS
#undef KEEP_AT
#undef STEP_OF

static inline __attribute__((always_inline)) TARGET void L(tall_dot)(const int dtype, bool two, L(tall) * t)
{
    // Conversions that take the ports of multiply-adds are not repeated.
    const bool keep = dtype == MS_F16 || dtype == MS_I8;
    if (!two) {
        L(pass)(dtype, false, t, 0, 0);
        L(pass)(dtype, false, t, 0, 1);
        return;
    }
    L(pass)(dtype, keep, t, 0, 0);
    L(pass)(dtype, keep, t, 0, 1);
    for (int c = 0; c < COLS && keep; c++) t->w[c] = (const char *)(t->kept + c * L(KEPT));
    L(pass)(keep ? DTYPE : dtype, false, t, 1, 0);
    L(pass)(keep ? DTYPE : dtype, false, t, 1, 1);
}
static TARGET __attribute__((noinline)) void L(tall_real)(bool two, L(tall) * t) { L(tall_dot)(DTYPE, two, t); }

// out[c], c < PANEL: adds the lanes of the sums of a row, of which COLS are in each tile.
static TARGET __attribute__((noinline)) void L(add_lanes)(const REAL *sums, REAL *out)
{
    enum { TILE = 2 * ROWS * COLS * LANES };
#define HALVES_OF(c)                                                    \
    (*(const L(vec) *)(sums + (c) / COLS * TILE + (c) % COLS * LANES) + \
     *(const L(vec) *)(sums + (c) / COLS * TILE + (c) % COLS * LANES + L(STEP)))
#define JOIN(a, b, LOW, HIGH) (__builtin_shufflevector(a, b, LOW) + __builtin_shufflevector(a, b, HIGH))
#if LANES == 16
#define FOUR_LOW 0, 1, 2, 3, 8, 9, 10, 11
#define FOUR_HIGH 4, 5, 6, 7, 12, 13, 14, 15
#define TWO_LOW 0, 1, 8, 9, 4, 5, 12, 13
#define TWO_HIGH 2, 3, 10, 11, 6, 7, 14, 15
#define ONE_LOW 0, 8, 2, 10, 4, 12, 6, 14
#define ONE_HIGH 1, 9, 3, 11, 5, 13, 7, 15
#define QUAD(c) JOIN(HALVES_OF(c), HALVES_OF(c + 4), FOUR_LOW, FOUR_HIGH)
#else
#define TWO_LOW 0, 1, 4, 5
#define TWO_HIGH 2, 3, 6, 7
#define ONE_LOW 0, 4, 2, 6
#define ONE_HIGH 1, 5, 3, 7
#define QUAD(c) HALVES_OF(c)
#endif
#pragma GCC unroll 8
    for (int c = 0; c < L(PANEL); c += L(STEP)) {
        L(vec) even = JOIN(QUAD(c), QUAD(c + 2), TWO_LOW, TWO_HIGH);
        L(vec) odd = JOIN(QUAD(c + 1), QUAD(c + 3), TWO_LOW, TWO_HIGH);
        *(L(vec) *)(out + c) = JOIN(even, odd, ONE_LOW, ONE_HIGH);
    }
#undef HALVES_OF
#undef JOIN
#undef QUAD
#undef FOUR_LOW
#undef FOUR_HIGH
#undef TWO_LOW
#undef TWO_HIGH
#undef ONE_LOW
#undef ONE_HIGH
}

// As columns, for x packed, but to out[row][column - j]: the lanes are added.
static inline __attribute__((always_inline)) TARGET void L(packed_columns)(const int dtype, const few_work *f,
                                                                           int64_t j, int64_t n, REAL *out)
{
    const int64_t whole = f->k / LANES * LANES, size = SIZE_OF(dtype, REAL), m = f->m;
    const int64_t most = m > ROWS ? L(DEEP) : 2 * L(DEEP), depth = whole <= most / 2 * 3 ? whole : most;
    const bool many = m > 2 * ROWS;
    REAL sums[FEW_ROWS * L(PANEL) * LANES] __attribute__((aligned(64))),
        kept[COLS * L(KEPT)] __attribute__((aligned(64)));
    for (int64_t first = 0; first < n; first += L(PANEL)) {
        const int64_t columns = n - first < L(PANEL) ? n - first : L(PANEL);
        const char *w = f->w + (j + first) * f->w_step;
        for (int64_t p = 0, k; p < f->k; p += k) {
            k = p == whole ? LANES : whole - p < depth ? whole - p : depth;
            for (int64_t i = 0; i < m; i += 2 * ROWS) {
                REAL *to = sums + i * L(PANEL) * LANES;
                for (int64_t c0 = 0; c0 < columns; c0 += COLS, to += 2 * ROWS * COLS * LANES) {
                    REAL last[COLS][LANES] __attribute__((aligned(64)));
                    L(tall)
                    t = { .k = k,
                          .x = (const REAL *)f->x + i / ROWS * f->x_group + p * ROWS,
                          .x_group = f->x_group,
                          .from = p ? to : L(zeros),
                          .sums = to,
                          .kept = kept };
                    for (int c = 0; c < COLS; c++)
                        t.w[c] = w + (c0 + c < columns ? c0 + c : columns - 1) * f->w_step + p * size;
                    if (p == whole) {
                        for (int c = 0; c < COLS; c++) {
                            memset(last[c], 0, sizeof last[c]);
                            ms__load(CLASS, dtype, f->k - whole, last[c], t.w[c], size);
                            t.ahead[c] = t.w[c] = (const char *)last[c];
                        }
                        L(tall_real)(m - i > ROWS, &t);
                        continue;
                    }
                    // The next tile is prefetched, or with more than two groups, which read the weight again, the same
                    // columns of the next part or of the next panel, while all groups are computed.
                    const int64_t at = c0 + (many ? (int64_t)L(PANEL) : COLS);
                    const int64_t next = at < columns    ? at * f->w_step + p * size
                                         : p + k < whole ? (at - columns) * f->w_step + (p + k) * size
                                                         : at * f->w_step;
                    const int64_t step = 2 * LANES * size / (2 * ((m + ROWS - 1) / ROWS));
                    const bool stream = f->w_step == k * size && f->w_step <= 2048;  // short rows without gaps
                    for (int c = 0; c < COLS; c++) t.ahead[c] = w + next + c * (stream ? step : f->w_step);
                    t.step = stream ? COLS * step : step;
                    t.at = i ? k / (2 * LANES) * t.step * 4 : 0;
                    if (dtype == DTYPE) L(tall_real)(m - i > ROWS, &t);
                    else L(tall_dot)(dtype, m - i > ROWS, &t);
                }
            }
        }
        for (int64_t i = 0; i < m; i++) L(add_lanes)
        (sums + (i / (2 * ROWS) * L(PANEL) * 2 * ROWS + i % (2 * ROWS) * COLS) * LANES, out + i * BLOCK + first);
    }
}
#endif
