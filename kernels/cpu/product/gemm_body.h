// SPDX-License-Identifier: MIT
// cpu/product/gemm_body.h -- our own matrix products; gemm.c includes it once per accumulation type. REAL is the type,
// R(name) names its functions, and LANES elements fill 64 bytes.
//
// tile: up to 8 rows by 3 vectors of C stay in registers over the whole depth k. A may have any strides (its elements
// are broadcast); the rows of B have adjacent columns, in a packed panel or in B itself. core: 8 rows from packed
// panels, with prefetches. sweep: calls core for one panel of columns after the other. Prefetch distances were
// measured, in turns in one process (docs/performance.md#products).

typedef REAL R(vec) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
typedef REAL R(loose) __attribute__((vector_size(64), aligned(2),
                                     may_alias));  // unaligned: a pair of bfloat16 begins at any even address

static inline __attribute__((always_inline)) void R(tile)(const int rows, const int vecs, int64_t k, const REAL *a,
                                                          int64_t a_rs, int64_t a_cs, const REAL *b, int64_t b_rs,
                                                          REAL *c, int64_t c_rs, const REAL *bias, bool add)
{
    R(vec) s[8][3];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) {
            s[r][v] = (R(vec)) { 0 };
            __builtin_prefetch(c + r * c_rs + v * LANES, 1);
        }
    }
    // The loop is not unrolled, because GCC would hoist loads across steps and spill.
#pragma GCC unroll 1
    for (int64_t p = 0; p < k; p++) {
        R(vec) w[3];
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) w[v] = *(const R(vec) *)(b + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            REAL x = a[r * a_rs];
#pragma GCC unroll 3
            for (int v = 0; v < vecs; v++) s[r][v] += x * w[v];
        }
        a += a_cs;
        b += b_rs;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) {
            R(vec) *d = (R(vec) *)(c + r * c_rs + v * LANES);
            if (add) s[r][v] += *d;
            if (bias) s[r][v] += *(const R(vec) *)(bias + v * LANES);
            *d = s[r][v];
        }
    }
}

// Computes 8 rows from packed panels: each step reads 8 numbers of A's panel and `vecs` of the 3 vectors of B's. Both
// panels are prefetched: B's exceeds the first-level cache, and after A's comes the panel of the next 8 rows. The lines
// of C are prefetched row by row shortly before they are stored (prefetching all at once would delay B's). Every LANES
// steps, two lines of the data packed next and two lines of its destination are prefetched. first: B is read in place,
// with rows b_rs apart, and the loaded vectors are stored as its packed panel: half the cost of packing it separately.
enum { R(AHEAD_A) = 8 * 64, R(AHEAD_B) = 3 * LANES * 24, R(NEAR_ROWS) = 4, R(FAR_ROWS) = 24 };

static inline __attribute__((always_inline)) void R(core)(const int vecs, const bool first, int64_t k, const REAL *a,
                                                          const REAL *b, const int64_t b_rs, REAL *keep, REAL *c,
                                                          int64_t c_rs, const REAL *bias, bool add, gemm_ahead *ahead)
{
    R(vec) s[8][3];
    REAL *row = c;
    // Forces the addresses of the rows below to be recomputed: there are too few registers to keep them.
    __asm__("" : "+r"(c));
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) s[r][v] = (R(vec)) { 0 };
            // The barriers keep GCC from hoisting loads across steps and spilling.
#define STEP(q)                                                                             \
    {                                                                                       \
        R(vec) w[3];                                                                        \
        _Pragma("GCC unroll 3") for (int v = 0; v < vecs; v++)                              \
        {                                                                                   \
            w[v] = *(const R(vec) *)(b + v * LANES);                                        \
            if (first) *(R(vec) *)(keep + v * LANES) = w[v];                                \
            __builtin_prefetch(b + (first ? R(NEAR_ROWS) * b_rs : R(AHEAD_B)) + v * LANES); \
            if (first) __builtin_prefetch(b + R(FAR_ROWS) * b_rs + v * LANES, 0, 2);        \
        }                                                                                   \
        b += b_rs;                                                                          \
        if (first) keep += 3 * LANES;                                                       \
        if ((q)*8 % LANES == 0) __builtin_prefetch(a + R(AHEAD_A) + (q)*8);                 \
        _Pragma("GCC unroll 8") for (int r = 0; r < 8; r++)                                 \
        {                                                                                   \
            REAL x = a[(q)*8 + r];                                                          \
            _Pragma("GCC unroll 3") for (int v = 0; v < vecs; v++) s[r][v] += x * w[v];     \
        }                                                                                   \
        __asm__ volatile("" ::: "memory");                                                  \
    }
#pragma GCC unroll 1
    for (int64_t left = k / LANES; left > 0; left--) {
        if (left <= 10 && left > 2) {
            for (int v = 0; v < vecs; v++) __builtin_prefetch(row + v * LANES, 1);
            __builtin_prefetch(row + vecs * LANES - 1, 1);
            row += c_rs;
        }
        if (ahead->groups > 0) {
            const char *at = ahead->at;
            __builtin_prefetch(at, 0, 2);
            __builtin_prefetch(at + ahead->apart, 0, 2);
            at += 2 * ahead->apart;
            if (++ahead->pairs * 2 == ahead->lines) {
                at += ahead->jump;
                ahead->pairs = 0;
                ahead->groups--;
            }
            ahead->at = at;
            if (ahead->to) {
                __builtin_prefetch(ahead->to, 1);
                __builtin_prefetch(ahead->to + 64, 1);
                ahead->to += 128;
            }
        }
#pragma GCC unroll 1
        for (int p = 0; p < LANES / 2; p++, a += 16) {
            STEP(0)
            STEP(1)
        }
    }
#pragma GCC unroll 1
    for (k %= LANES; k > 0; k--, a += 8) STEP(0)
#undef STEP
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++, c += c_rs)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) {
            R(vec) *d = (R(vec) *)(c + v * LANES);
            if (add) s[r][v] += *d;
            if (bias) s[r][v] += *(const R(vec) *)(bias + v * LANES);
            *d = s[r][v];
        }
}

// m rows of C by `vecs` vectors of columns.
static inline __attribute__((always_inline)) void R(rows)(const int vecs, int64_t m, int64_t k, const REAL *a,
                                                          int64_t a_rs, int64_t a_cs, const REAL *b, int64_t b_rs,
                                                          REAL *c, int64_t c_rs, const REAL *bias, bool add)
{
    int64_t i = 0;
    for (; i + 8 <= m; i += 8) R(tile)(8, vecs, k, a + i * a_rs, a_rs, a_cs, b, b_rs, c + i * c_rs, c_rs, bias, add);
    if (m & 4) {
        R(tile)(4, vecs, k, a + i * a_rs, a_rs, a_cs, b, b_rs, c + i * c_rs, c_rs, bias, add);
        i += 4;
    }
    if (m & 2) {
        R(tile)(2, vecs, k, a + i * a_rs, a_rs, a_cs, b, b_rs, c + i * c_rs, c_rs, bias, add);
        i += 2;
    }
    if (m & 1) R(tile)(1, vecs, k, a + i * a_rs, a_rs, a_cs, b, b_rs, c + i * c_rs, c_rs, bias, add);
}

// As R(rows) for 16 registers of 32 bytes (AVX2): tiles of 6 rows by two half vectors. (The compiler would split
// 64-byte vectors through memory.)
typedef REAL R(half) __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));

static inline __attribute__((always_inline)) void R(thin_tile)(const int rows, int64_t k, const REAL *a, int64_t a_rs,
                                                               int64_t a_cs, const REAL *b, int64_t b_rs, REAL *c,
                                                               int64_t c_rs, const REAL *bias, bool add)
{
    R(half) s[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) s[r][0] = s[r][1] = (R(half)) { 0 };
#pragma GCC unroll 1
    for (int64_t p = 0; p < k; p++, a += a_cs, b += b_rs) {
        R(half) w = *(const R(half) *)b, z = *(const R(half) *)(b + LANES / 2);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            s[r][0] += a[r * a_rs] * w;
            s[r][1] += a[r * a_rs] * z;
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            R(half) *d = (R(half) *)(c + r * c_rs + v * LANES / 2);
            if (add) s[r][v] += *d;
            if (bias) s[r][v] += *(const R(half) *)(bias + v * LANES / 2);
            *d = s[r][v];
        }
}

static inline __attribute__((always_inline)) void R(thin_rows)(int64_t m, int64_t k, const REAL *a, int64_t a_rs,
                                                               int64_t a_cs, const REAL *b, int64_t b_rs, REAL *c,
                                                               int64_t c_rs, const REAL *bias, bool add)
{
    int64_t i = 0;
    for (; i + 6 <= m; i += 6) R(thin_tile)(6, k, a + i * a_rs, a_rs, a_cs, b, b_rs, c + i * c_rs, c_rs, bias, add);
    for (; i + 2 <= m; i += 2) R(thin_tile)(2, k, a + i * a_rs, a_rs, a_cs, b, b_rs, c + i * c_rs, c_rs, bias, add);
    if (i < m) R(thin_tile)(1, k, a + i * a_rs, a_rs, a_cs, b, b_rs, c + i * c_rs, c_rs, bias, add);
}

static MS_KERNEL void R(strip)(int vecs, int64_t m, int64_t k, const REAL *a, int64_t a_rs, int64_t a_cs, const REAL *b,
                               int64_t b_rs, REAL *c, int64_t c_rs, const REAL *bias, bool add)
{
    if (narrow()) {
        for (int v = 0; v < vecs; v++) R(thin_rows)
        (m, k, a, a_rs, a_cs, b + v * LANES, b_rs, c + v * LANES, c_rs, bias ? bias + v * LANES : NULL, add);
        return;
    }
    switch (vecs) {
    case 3: R(rows)(3, m, k, a, a_rs, a_cs, b, b_rs, c, c_rs, bias, add); break;
    case 2: R(rows)(2, m, k, a, a_rs, a_cs, b, b_rs, c, c_rs, bias, add); break;
    default: R(rows)(1, m, k, a, a_rs, a_cs, b, b_rs, c, c_rs, bias, add); break;
    }
}

// Multiplies one packed panel of A, which stays in the first-level cache, by the panels of B for n columns. Rows and
// columns that do not fill a panel go through a buffer; panels are padded with zeros.
static MS_KERNEL void R(sweep)(int64_t n, int64_t rows, int64_t k, const REAL *a, const REAL *b, REAL *c, int64_t c_rs,
                               const REAL *bias, bool add, gemm_ahead *ahead)
{
    REAL t[8 * 3 * LANES] __attribute__((aligned(64))), e[3 * LANES];
    const int64_t high = narrow() ? 6 : 8;
    for (; n > 0; n -= 3 * LANES, b += 3 * LANES * k, c += 3 * LANES, bias += bias ? 3 * LANES : 0) {
        int64_t wide = n < 3 * LANES ? n : 3 * LANES, vecs = (wide + LANES - 1) / LANES, d_rs = c_rs;
        bool whole = rows == high && wide % LANES == 0;
        REAL *d = c;
        const REAL *f = bias;
        if (MS_UNLIKELY(!whole)) {
            d = t;
            d_rs = 3 * LANES;
            memset(t, 0, sizeof t);
            if (add)
                for (int64_t r = 0; r < rows; r++) memcpy(t + r * 3 * LANES, c + r * c_rs, (size_t)wide * sizeof(REAL));
            if (bias) f = memcpy(e, bias, (size_t)wide * sizeof(REAL));
        }
        if (high == 6) {
            for (int64_t v = 0; v < vecs * LANES; v += LANES)
                R(thin_tile)(6, k, a, 1, 6, b + v, 3 * LANES, d + v, d_rs, f ? f + v : NULL, add);
        } else {
            if (ahead->groups == 0 && ahead->then) ahead = ahead->then;
            switch (vecs) {
            case 3: R(core)(3, false, k, a, b, 3 * LANES, NULL, d, d_rs, f, add, ahead); break;
            case 2: R(core)(2, false, k, a, b, 3 * LANES, NULL, d, d_rs, f, add, ahead); break;
            default: R(core)(1, false, k, a, b, 3 * LANES, NULL, d, d_rs, f, add, ahead); break;
            }
        }
        if (MS_UNLIKELY(!whole))
            for (int64_t r = 0; r < rows; r++) memcpy(c + r * c_rs, t + r * 3 * LANES, (size_t)wide * sizeof(REAL));
    }
}

// As sweep, for columns of B that fill whole vectors and are not packed yet; packs them on the way.
static MS_KERNEL void R(sweep_first)(int64_t n, int64_t k, const REAL *a, const REAL *b, int64_t b_rs, REAL *keep,
                                     REAL *c, int64_t c_rs, const REAL *bias, bool add, gemm_ahead *ahead)
{
    for (; n > 0; n -= 3 * LANES, b += 3 * LANES, c += 3 * LANES, keep += 3 * LANES * k, bias += bias ? 3 * LANES : 0)
        switch (n / LANES) {
        default: R(core)(3, true, k, a, b, b_rs, keep, c, c_rs, bias, add, ahead); break;
        case 2: R(core)(2, true, k, a, b, b_rs, keep, c, c_rs, bias, add, ahead); break;
        case 1: R(core)(1, true, k, a, b, b_rs, keep, c, c_rs, bias, add, ahead); break;
        }
}

// The last n < LANES columns of C, which do not fill a vector, go through a buffer.
static void R(strip_part)(int64_t n, int64_t m, int64_t k, const REAL *a, int64_t a_rs, int64_t a_cs, const REAL *b,
                          int64_t b_rs, REAL *c, int64_t c_rs, const REAL *bias, bool add)
{
    REAL t[8 * LANES] __attribute__((aligned(64))), e[LANES] = { 0 };
    if (bias) memcpy(e, bias, (size_t)n * sizeof(REAL));
    for (int64_t i = 0; i < m; i += 8) {
        int64_t rows = m - i < 8 ? m - i : 8;
        if (add)
            for (int64_t r = 0; r < rows; r++) memcpy(t + r * LANES, c + (i + r) * c_rs, (size_t)n * sizeof(REAL));
        R(strip)(1, rows, k, a + i * a_rs, a_rs, a_cs, b, b_rs, t, LANES, bias ? e : NULL, add);
        for (int64_t r = 0; r < rows; r++) memcpy(c + (i + r) * c_rs, t + r * LANES, (size_t)n * sizeof(REAL));
    }
}

// m rows of C by n <= 3 * LANES columns, from a panel of B padded to whole vectors.
static void R(panel)(int64_t n, int64_t m, int64_t k, const REAL *a, int64_t a_rs, int64_t a_cs, const REAL *b,
                     int64_t b_rs, REAL *c, int64_t c_rs, const REAL *bias, bool add)
{
    int64_t vecs = n / LANES, rest = n % LANES;
    if (vecs) R(strip)((int)vecs, m, k, a, a_rs, a_cs, b, b_rs, c, c_rs, bias, add);
    if (rest) {
        int64_t at = vecs * LANES;
        R(strip_part)(rest, m, k, a, a_rs, a_cs, b + at, b_rs, c + at, c_rs, bias ? bias + at : NULL, add);
    }
}

// One row of C where B's columns are contiguous (x W^T with few rows): dot products, with four vectors of partial sums.
static MS_KERNEL void R(dots)(int64_t n, int64_t k, const REAL *a, const REAL *b, int64_t b_cs, REAL *c,
                              const REAL *bias)
{
    for (int64_t j = 0; j < n; j++) {
        const REAL *w = b + j * b_cs;
        R(vec) s[4] = { { 0 }, { 0 }, { 0 }, { 0 } };
        int64_t p = 0;
        for (; p + 4 * LANES <= k; p += 4 * LANES)
            for (int v = 0; v < 4; v++)
                s[v] += *(const R(vec) *)(a + p + v * LANES) * *(const R(vec) *)(w + p + v * LANES);
        for (; p + LANES <= k; p += LANES) s[0] += *(const R(vec) *)(a + p) * *(const R(vec) *)(w + p);
        s[0] = (s[0] + s[1]) + (s[2] + s[3]);
        REAL sum = 0;
        for (int l = 0; l < LANES; l++) sum += s[0][l];
        for (; p < k; p++) sum += a[p] * w[p];
        c[j] = sum + (bias ? bias[j] : 0);
    }
}

// Transposes a square of LANES x LANES in registers; its columns are in_cs bytes apart. Each stage exchanges the
// off-diagonal blocks of side `step`.
#define LOW(step, l) ((l) & (step) ? (l) - (step) + LANES : (l))
#define HIGH(step, l) ((l) & (step) ? (l) + LANES : (l) + (step))
static inline __attribute__((always_inline)) void R(transpose)(REAL *out, int64_t out_rs, const void *in, int64_t in_cs)
{
    R(vec) x[LANES];
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) x[l] = *(const R(loose) *)((const char *)in + l * in_cs);
#define STAGE(step)                                                           \
    _Pragma("GCC unroll 16") for (int l = 0; l < LANES; l++)                  \
    {                                                                         \
        if (l & (step)) continue;                                             \
        R(vec) y = x[l], z = x[l + (step)];                                   \
        x[l] = __builtin_shufflevector(y, z, EACH_LANE(LOW, step));           \
        x[l + (step)] = __builtin_shufflevector(y, z, EACH_LANE(HIGH, step)); \
    }
    if (LANES == 16) { STAGE(8 % LANES) }
    STAGE(4)
    STAGE(2)
    STAGE(1)
#undef STAGE
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) *(R(vec) *)(out + l * out_rs) = x[l];
}
// 8 rows of LANES numbers, in_rs bytes apart, become LANES contiguous rows of 8.
static inline __attribute__((always_inline)) void R(transpose_8)(REAL *out, const void *in, int64_t in_rs)
{
    R(vec) x[8];
#pragma GCC unroll 8
    for (int l = 0; l < 8; l++) x[l] = *(const R(loose) *)((const char *)in + l * in_rs);
#define STAGE(step)                                                           \
    _Pragma("GCC unroll 8") for (int l = 0; l < 8; l++)                       \
    {                                                                         \
        if (l & (step)) continue;                                             \
        R(vec) y = x[l], z = x[l + (step)];                                   \
        x[l] = __builtin_shufflevector(y, z, EACH_LANE(LOW, step));           \
        x[l + (step)] = __builtin_shufflevector(y, z, EACH_LANE(HIGH, step)); \
    }
    STAGE(4)
    STAGE(2)
    STAGE(1)
#undef STAGE
#pragma GCC unroll 8
    for (int l = 0; l < 8; l++) {
        if (LANES == 8) *(R(vec) *)(out + l * 8) = x[l];
        else if (l % 2 == 0) {  // row l in the lower half of x[l], row l + 8 in the upper
            *(R(vec) *)(out + l * 8) = __builtin_shufflevector(x[l], x[l + 1], EACH_LANE(LOW, 8 % LANES));
            *(R(vec) *)(out + (l + 8) * 8) = __builtin_shufflevector(x[l], x[l + 1], EACH_LANE(HIGH, 8 % LANES));
        }
    }
}
#undef LOW
#undef HIGH

// out[p * out_rs + j] = b[p * rs + j * cs] for p < k, j < n. Pads rows with zeros to a multiple of LANES.
static MS_KERNEL void R(pack)(REAL *out, int64_t out_rs, const REAL *b, int64_t rs, int64_t cs, int64_t k, int64_t n)
{
    int64_t j = 0, full = n / LANES * LANES, wide = (n + LANES - 1) / LANES * LANES;
    if (cs == 1) {
        for (int64_t p = 0; p < k; p++) {
            for (j = 0; j < full; j += LANES) *(R(vec) *)(out + p * out_rs + j) = *(const R(vec) *)(b + p * rs + j);
            for (; j < n; j++) out[p * out_rs + j] = b[p * rs + j];
            for (; j < wide; j++) out[p * out_rs + j] = 0;
        }
        return;
    }
    int64_t done = 0;
    if (rs == 1) {  // LANES columns at a time: the hardware prefetcher follows only a few streams
        done = k / LANES * LANES;
        for (j = 0; j < full; j += LANES)
            for (int64_t p = 0; p < done; p += LANES)
                R(transpose)(out + p * out_rs + j, out_rs, b + p + j * cs, cs * (int64_t)sizeof(REAL));
    }
    for (int64_t p = full == wide ? done : 0; p < k; p++) {
        for (j = p < done ? full : 0; j < n; j++) out[p * out_rs + j] = b[p * rs + j * cs];
        for (; j < wide; j++) out[p * out_rs + j] = 0;
    }
}

// Packs whole panels of B, whose rows are contiguous: row by row, all panels of a row together. Prefetches later rows
// into the second-level cache.
static MS_KERNEL void R(pack_panels)(REAL *out, const REAL *b, int64_t rs, int64_t k, int64_t panels)
{
    for (int64_t p = 0; p < k; p++, b += rs, out += 3 * LANES) {
        const REAL *x = b, *next = b + (p + 8 < k ? 8 * rs : 0);
        REAL *o = out;
        for (int64_t j = 0; j < panels; j++, x += 3 * LANES, next += 3 * LANES, o += 3 * LANES * k)
#pragma GCC unroll 3
            for (int v = 0; v < 3; v++) {
                *(R(vec) *)(o + v * LANES) = *(const R(vec) *)(x + v * LANES);
                __builtin_prefetch(next + v * LANES, 0, 2);
            }
    }
}

// Packs rows of A into panels of `high` rows: out[panel][p][row], each panel `depth` long. Pads the last panel with
// zeros.
static MS_KERNEL void R(pack_rows)(REAL *out, const REAL *a, int64_t rs, int64_t cs, int64_t m, int64_t k, int64_t high,
                                   int64_t depth)
{
    int64_t whole = m / high * high;
    if (whole < m) memset(out + whole * depth, 0, (size_t)(high * k) * sizeof(REAL));
    if (rs == 1) {  // columns are contiguous: a part of each column goes to every panel
        int64_t p = 0;
        if (high == 8)  // 8 at a time: whole cache lines, prefetched explicitly because the hardware does not
            for (; p + 8 <= k && whole == m; p += 8, a += 8 * cs, out += 64) {
                REAL *o = out;
                for (int64_t i = 0; i < m; i += 8, o += 8 * depth) {
                    for (int l = 0; l < 64 / LANES; l++) __builtin_prefetch(o + 128 + l * LANES, 1);
                    for (int q = 0; q < 8; q++) memcpy(o + q * 8, a + q * cs + i, 8 * sizeof(REAL));
                }
            }
        for (; p < k; p++, a += cs, out += high) {
            REAL *o = out;
            int64_t i = 0;
            if (high == 8)
                for (; i + 8 <= m; i += 8, o += 8 * depth) memcpy(o, a + i, 8 * sizeof(REAL));
            else
                for (; i + high <= m; i += high, o += high * depth) memcpy(o, a + i, (size_t)high * sizeof(REAL));
            if (i < m) memcpy(o, a + i, (size_t)(m - i) * sizeof(REAL));
        }
        return;
    }
    for (; m > 0; m -= high, a += high * rs, out += high * depth) {
        int64_t rows = m < high ? m : high, p = 0;
        if (cs == 1 && rows == 8 && high == 8)
            for (; p + LANES <= k; p += LANES) R(transpose_8)(out + p * 8, a + p, rs * (int64_t)sizeof(REAL));
        for (; p < k; p++)
            for (int64_t r = 0; r < rows; r++) out[p * high + r] = a[r * rs + p * cs];
    }
}

// Computes rows [i, i + rows) of the current rows by n columns from j on. Rows of A that are not packed are read in
// place.
static void R(row)(const gemm_work *w, int64_t i, int64_t rows, int64_t j, int64_t n, gemm_ahead *ahead)
{
    const ms_gemm *g = w->g;
    const REAL *bias = w->last && g->bias ? (const REAL *)g->bias + w->j0 + j : NULL,
               *b = (const REAL *)w->b + j * w->kc;
    REAL *c = (REAL *)g->c + (w->i0 + i) * g->c_rs + w->j0 + j;
    if (w->fused && i == 0) {
        const REAL *from = (const REAL *)g->b + w->p0 * g->b_rs + w->j0 + j;
        R(sweep_first)
        (n, w->kc, (const REAL *)w->a, from, g->b_rs, (REAL *)w->b + j * w->kc, c, g->c_rs, bias, !w->first, ahead);
        return;
    }
    if (w->pack_a) {
        R(sweep)(n, rows, w->kc, (const REAL *)w->a + i * w->kc, b, c, g->c_rs, bias, !w->first, ahead);
        return;
    }
    const REAL *a = (const REAL *)g->a + (w->i0 + i) * g->a_rs + w->p0;
    for (int64_t q = 0; q < n; q += w->wide) R(panel)
    (n - q < w->wide ? n - q : w->wide, rows, w->kc, a, g->a_rs, 1, b + q * w->kc, w->wide, c + q, g->c_rs,
     bias ? bias + q : NULL, !w->first);
}

// Computes a product of at most SMALL multiply-adds. Does not pack if B's columns are adjacent, except for the last
// columns, which do not fill a vector and go through a padded copy. Returns false if the product does not suit this
// path.
static bool R(small)(const ms_gemm *g)
{
    enum { ROOM = 32 << 10 };
    const REAL *a = g->a, *b = g->b, *bias = g->bias;
    REAL *c = g->c, pad[ROOM / sizeof(REAL) * 2] __attribute__((aligned(64)));
    int64_t n = g->n, full = g->b_cs == 1 ? n / LANES * LANES : 0, j = 0;
    int64_t wide = (n - full + LANES - 1) / LANES * LANES;

    if (g->m <= 4 && g->b_rs == 1 && g->a_cs == 1 && g->b_cs != 1) {
        for (int64_t i = 0; i < g->m; i++) R(dots)(n, g->k, a + i * g->a_rs, b, g->b_cs, c + i * g->c_rs, bias);
        return true;
    }
    if ((double)g->m * (double)n * (double)g->k > SMALL && (g->m > 16 || g->b_cs != 1)) return false;
    if (wide * g->k > (int64_t)(sizeof pad / sizeof *pad)) return false;
    for (; j < full; j += 3 * LANES) R(panel)
    (full - j < 3 * LANES ? full - j : 3 * LANES, g->m, g->k, a, g->a_rs, g->a_cs, b + j, g->b_rs, c + j, g->c_rs,
     bias ? bias + j : NULL, false);
    if (full == n) return true;
    R(pack)(pad, wide, b + full * g->b_cs, g->b_rs, g->b_cs, g->k, n - full);
    for (j = full; j < n; j += 3 * LANES) R(panel)
    (n - j < 3 * LANES ? n - j : 3 * LANES, g->m, g->k, a, g->a_rs, g->a_cs, pad + j - full, wide, c + j, g->c_rs,
     bias ? bias + j : NULL, false);
    return true;
}

void R(ms__block)(int64_t m, int64_t n, int64_t k, const REAL *a, int64_t a_rs, int64_t a_cs, const REAL *b,
                  int64_t b_rs, REAL *c, int64_t c_rs, bool add)
{
    for (int64_t j = 0; j < n; j += 3 * LANES) R(strip)
    ((int)((n - j < 3 * LANES ? n - j : 3 * LANES) / LANES), m, k, a, a_rs, a_cs, b + j, b_rs, c + j, c_rs, NULL, add);
}

void R(ms__pack)(REAL *out, int64_t out_rs, const REAL *b, int64_t rs, int64_t cs, int64_t k, int64_t n)
{
    R(pack)(out, out_rs, b, rs, cs, k, n);
    for (int64_t j = (n + LANES - 1) / LANES * LANES; j < (n + 15) / 16 * 16; j++)
        for (int64_t p = 0; p < k; p++) out[p * out_rs + j] = 0;
}
