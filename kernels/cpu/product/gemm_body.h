// SPDX-License-Identifier: MIT
// cpu/product/gemm_body.h -- our own matrix products; gemm.c includes it once per accumulation type. REAL is the type,
// R(name) names its functions, and LANES elements fill 64 bytes.
//
// tile: up to 8 rows by 3 vectors of C stay in registers over the whole depth k. A may have any strides (its elements
// are broadcast); the rows of B have adjacent columns, in a packed panel or in B itself. core: 8 rows from packed
// panels, with prefetches. sweep: calls core for one panel of columns after the other. Prefetch distances were
// measured interleaved, in one process (docs/performance.md#products).

typedef REAL R(vec) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
typedef REAL R(loose) __attribute__((vector_size(64), aligned(2),
                                     may_alias));  // unaligned: a pair of bfloat16 begins at any even address

#define OPERANDS R(ms_operands)

// The operands of rows from i on and columns from j on. (Functions that are not inlined take operands by pointer:
// copying the struct would load as vectors what was just stored as scalars, and stall.)
static inline OPERANDS R(at)(const OPERANDS *o, int64_t i, int64_t j)
{
    const REAL *a = o->a + i * o->a_rs, *bias = o->bias ? o->bias + j : NULL;
    return (OPERANDS) { a, o->a_rs, o->a_cs, o->b + j, o->b_rs, o->c + i * o->c_rs + j, o->c_rs, bias, o->add };
}
// Moves o to the next packed panel of B, which has k rows, and to the panel's columns of C and of the bias.
static inline void R(next_panel)(OPERANDS *o, int64_t k)
{
    o->b += 3 * LANES * k;
    o->c += 3 * LANES;
    if (o->bias) o->bias += 3 * LANES;
}

static inline __attribute__((always_inline)) void R(tile)(const int rows, const int vecs, int64_t k, OPERANDS o)
{
    R(vec) s[8][3];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) s[r][v] = (R(vec)) { 0 };
    if (k > 64)  // with fewer steps the stores come too soon after the prefetches to gain by them
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) __builtin_prefetch(o.c + r * o.c_rs + v * LANES, 1);
#pragma GCC unroll 1  // unrolled, GCC would hoist loads across steps and spill
    for (int64_t p = 0; p < k; p++) {
        R(vec) w[3];
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) w[v] = *(const R(vec) *)(o.b + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            REAL x = o.a[r * o.a_rs];
#pragma GCC unroll 3
            for (int v = 0; v < vecs; v++) s[r][v] += x * w[v];
        }
        o.a += o.a_cs;
        o.b += o.b_rs;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) {
            R(vec) *d = (R(vec) *)(o.c + r * o.c_rs + v * LANES);
            if (o.add) s[r][v] += *d;
            if (o.bias) s[r][v] += *(const R(vec) *)(o.bias + v * LANES);
            *d = s[r][v];
        }
    }
}

// Computes 8 rows from packed panels: each step reads 8 numbers of A's panel and `vecs` of the 3 vectors of B's. Both
// panels are prefetched: B's exceeds the first-level cache, and after A's comes the panel of the next 8 rows. The lines
// of C are prefetched row by row shortly before they are stored (all at once would delay the prefetches of B). Every
// LANES steps, two lines of the data packed next and two lines of its destination are prefetched. first: B is read in
// place, and the loaded vectors are stored as its packed panel, `keep`: half the cost of packing it separately.
enum { R(AHEAD_A) = 8 * 64, R(AHEAD_B) = 3 * LANES * 24, R(NEAR_ROWS) = 4, R(FAR_ROWS) = 24 };

static inline __attribute__((always_inline)) void R(core)(const int vecs, const bool first, int64_t k, OPERANDS o,
                                                          REAL *keep, gemm_ahead *ahead)
{
    R(vec) s[8][3];
    const REAL *a = o.a, *b = o.b;
    const int64_t b_rs = o.b_rs;
    REAL *c = o.c, *row = c;
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
            row += o.c_rs;
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
    for (int r = 0; r < 8; r++, c += o.c_rs)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) {
            R(vec) *d = (R(vec) *)(c + v * LANES);
            if (o.add) s[r][v] += *d;
            if (o.bias) s[r][v] += *(const R(vec) *)(o.bias + v * LANES);
            *d = s[r][v];
        }
}

// Computes m rows of C by `vecs` vectors of columns.
static inline __attribute__((always_inline)) void R(rows)(const int vecs, int64_t m, int64_t k, OPERANDS o)
{
    int64_t i = 0;
    for (; i + 8 <= m; i += 8) R(tile)(8, vecs, k, R(at)(&o, i, 0));
    if (m & 4) {
        R(tile)(4, vecs, k, R(at)(&o, i, 0));
        i += 4;
    }
    if (m & 2) {
        R(tile)(2, vecs, k, R(at)(&o, i, 0));
        i += 2;
    }
    if (m & 1) R(tile)(1, vecs, k, R(at)(&o, i, 0));
}

// As R(rows) for 16 registers of 32 bytes (AVX2): tiles of 6 rows by two half vectors. (The compiler would split
// 64-byte vectors through memory.)
typedef REAL R(half) __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));

static inline __attribute__((always_inline)) void R(thin_tile)(const int rows, int64_t k, OPERANDS o)
{
    R(half) s[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) s[r][0] = s[r][1] = (R(half)) { 0 };
#pragma GCC unroll 1
    for (int64_t p = 0; p < k; p++, o.a += o.a_cs, o.b += o.b_rs) {
        R(half) w = *(const R(half) *)o.b, z = *(const R(half) *)(o.b + LANES / 2);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            s[r][0] += o.a[r * o.a_rs] * w;
            s[r][1] += o.a[r * o.a_rs] * z;
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            R(half) *d = (R(half) *)(o.c + r * o.c_rs + v * LANES / 2);
            if (o.add) s[r][v] += *d;
            if (o.bias) s[r][v] += *(const R(half) *)(o.bias + v * LANES / 2);
            *d = s[r][v];
        }
}

static inline __attribute__((always_inline)) void R(thin_rows)(int64_t m, int64_t k, OPERANDS o)
{
    int64_t i = 0;
    for (; i + 6 <= m; i += 6) R(thin_tile)(6, k, R(at)(&o, i, 0));
    for (; i + 2 <= m; i += 2) R(thin_tile)(2, k, R(at)(&o, i, 0));
    if (i < m) R(thin_tile)(1, k, R(at)(&o, i, 0));
}

static THIN_KERNEL void R(thin_strip)(int vecs, int64_t m, int64_t k, const OPERANDS *o, int64_t j)
{
    for (int v = 0; v < vecs; v++) R(thin_rows)(m, k, R(at)(o, 0, j + v * LANES));
}
static WIDE_KERNEL void R(wide_strip)(int vecs, int64_t m, int64_t k, const OPERANDS *all, int64_t j)
{
    const OPERANDS o = R(at)(all, 0, j);
    switch (vecs) {
    case 3: R(rows)(3, m, k, o); break;
    case 2: R(rows)(2, m, k, o); break;
    default: R(rows)(1, m, k, o); break;
    }
}
static void R(strip)(int vecs, int64_t m, int64_t k, const OPERANDS *o, int64_t j)
{
    if (narrow()) R(thin_strip)(vecs, m, k, o, j);
    else R(wide_strip)(vecs, m, k, o, j);
}

// Multiplies one packed panel of A, which stays in the first-level cache, by the panels of B for n columns. Rows that
// do not fill a panel and columns that do not fill a vector go through a buffer; panels are padded with zeros.
static inline __attribute__((always_inline)) void R(sweep_panels)(const int high, int64_t n, int64_t rows, int64_t k,
                                                                  const OPERANDS *all, gemm_ahead *ahead)
{
    REAL t[8 * 3 * LANES] __attribute__((aligned(64))), e[3 * LANES];
    OPERANDS o = R(at)(all, 0, 0);
    o.b_rs = 3 * LANES;
    for (; n > 0; n -= 3 * LANES, R(next_panel)(&o, k)) {
        int64_t wide = n < 3 * LANES ? n : 3 * LANES, vecs = (wide + LANES - 1) / LANES;
        bool whole = rows == high && wide % LANES == 0;
        OPERANDS d = o;
        if (MS_UNLIKELY(!whole)) {
            d.c = t;
            d.c_rs = 3 * LANES;
            memset(t, 0, sizeof t);
            if (o.add)
                for (int64_t r = 0; r < rows; r++)
                    memcpy(t + r * 3 * LANES, o.c + r * o.c_rs, (size_t)wide * sizeof(REAL));
            if (o.bias) d.bias = memcpy(e, o.bias, (size_t)wide * sizeof(REAL));
        }
        if (high == 6) {
            d.a_rs = 1;
            d.a_cs = 6;
            for (int64_t v = 0; v < vecs * LANES; v += LANES) R(thin_tile)(6, k, R(at)(&d, 0, v));
        } else {
            if (ahead->groups == 0 && ahead->then) ahead = ahead->then;
            switch (vecs) {
            case 3: R(core)(3, false, k, d, NULL, ahead); break;
            case 2: R(core)(2, false, k, d, NULL, ahead); break;
            default: R(core)(1, false, k, d, NULL, ahead); break;
            }
        }
        if (MS_UNLIKELY(!whole))
            for (int64_t r = 0; r < rows; r++) memcpy(o.c + r * o.c_rs, t + r * 3 * LANES, (size_t)wide * sizeof(REAL));
    }
}

static THIN_KERNEL void R(thin_sweep)(int64_t n, int64_t rows, int64_t k, const OPERANDS *o)
{
    R(sweep_panels)(6, n, rows, k, o, NULL);
}
static WIDE_KERNEL void R(wide_sweep)(int64_t n, int64_t rows, int64_t k, const OPERANDS *o, gemm_ahead *ahead)
{
    R(sweep_panels)(8, n, rows, k, o, ahead);
}
static void R(sweep)(int64_t n, int64_t rows, int64_t k, const OPERANDS *o, gemm_ahead *ahead)
{
    if (narrow()) R(thin_sweep)(n, rows, k, o);
    else R(wide_sweep)(n, rows, k, o, ahead);
}

// As sweep, for columns of B that fill whole vectors and are not packed yet; packs them on the way. Not called if the
// CPU is narrow.
static WIDE_KERNEL void R(sweep_first)(int64_t n, int64_t k, const OPERANDS *all, REAL *keep, gemm_ahead *ahead)
{
    OPERANDS o = R(at)(all, 0, 0);
    for (; n > 0; n -= 3 * LANES, o = R(at)(&o, 0, 3 * LANES), keep += 3 * LANES * k) switch (n / LANES) {
        default: R(core)(3, true, k, o, keep, ahead); break;
        case 2: R(core)(2, true, k, o, keep, ahead); break;
        case 1: R(core)(1, true, k, o, keep, ahead); break;
        }
}

// The last n < LANES columns of C, which do not fill a vector, go through a buffer.
static void R(strip_part)(int64_t n, int64_t m, int64_t k, const OPERANDS *o, int64_t j)
{
    REAL t[8 * LANES] __attribute__((aligned(64))), e[LANES] = { 0 }, *c = o->c + j;
    OPERANDS d = R(at)(o, 0, j);
    d.c = t;
    d.c_rs = LANES;
    if (d.bias) d.bias = memcpy(e, d.bias, (size_t)n * sizeof(REAL));
    for (; m > 0; m -= 8, d.a += 8 * d.a_rs, c += 8 * o->c_rs) {
        int64_t rows = m < 8 ? m : 8;
        if (d.add)
            for (int64_t r = 0; r < rows; r++) memcpy(t + r * LANES, c + r * o->c_rs, (size_t)n * sizeof(REAL));
        R(strip)(1, rows, k, &d, 0);
        for (int64_t r = 0; r < rows; r++) memcpy(c + r * o->c_rs, t + r * LANES, (size_t)n * sizeof(REAL));
    }
}

// Computes m rows of C by n <= 3 * LANES columns from j on, from a panel of B padded to whole vectors.
static void R(panel)(int64_t n, int64_t m, int64_t k, const OPERANDS *o, int64_t j)
{
    int64_t vecs = n / LANES, rest = n % LANES;
    if (vecs) R(strip)((int)vecs, m, k, o, j);
    if (rest) R(strip_part)(rest, m, k, o, j + vecs * LANES);
}

// Transposes a square of LANES x LANES in registers; its columns are in_cs bytes apart. Each stage exchanges the
// off-diagonal blocks of side `step`.
#define SAME(step, l) (l)
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
#pragma GCC unroll 8
    for (int l = 0; l < 8; l++) {
        if (LANES == 8) *(R(vec) *)(out + l * 8) = x[l];
        else if (l % 2 == 0) {  // row l in the lower half of x[l], row l + 8 in the upper
            *(R(vec) *)(out + l * 8) = __builtin_shufflevector(x[l], x[l + 1], EACH_LANE(LOW, 8 % LANES));
            *(R(vec) *)(out + (l + 8) * 8) = __builtin_shufflevector(x[l], x[l + 1], EACH_LANE(HIGH, 8 % LANES));
        }
    }
}
// As transpose_8, backwards: LANES columns of 8 numbers become 8 rows of LANES numbers, with the bias added.
typedef REAL R(oct) __attribute__((vector_size(8 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
static inline __attribute__((always_inline)) void R(store_columns)(REAL *out, int64_t out_rs, int64_t rows,
                                                                   const R(oct) * in, const REAL *bias)
{
    R(vec) x[8], e = bias ? *(const R(vec) *)bias : (R(vec)) { 0 };
#pragma GCC unroll 8
    for (int l = 0; l < 8; l++)  // column l in the lower half of x[l], column l + 8 in the upper
        x[l] = __builtin_shufflevector(in[l], in[(l + 8) % LANES], EACH_LANE(SAME, 0));
    STAGE(4)
    STAGE(2)
    STAGE(1)
#pragma GCC unroll 8
    for (int l = 0; l < 8; l++) {
        if (bias) x[l] += e;
        if (l < rows) *(R(vec) *)(out + l * out_rs) = x[l];
    }
}
#undef STAGE
#undef LOW
#undef HIGH
#undef SAME

// out[p * out_rs + j] = m(p, j) for p < k, j < n. Pads rows with zeros to a multiple of LANES.
static MS_KERNEL void R(pack)(REAL *out, int64_t out_rs, const ms_matrix *m, int64_t k, int64_t n)
{
    const REAL *b = m->data;
    const int64_t rs = m->rs, cs = m->cs;
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
static MS_KERNEL void R(pack_rows)(REAL *out, const ms_matrix *from, int64_t m, int64_t k, int64_t high, int64_t depth)
{
    const REAL *a = from->data;
    const int64_t rs = from->rs, cs = from->cs;
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
    const REAL *a = (const REAL *)w->a + i * w->kc, *b = (const REAL *)w->b + j * w->kc,
               *bias = w->last && g->bias ? (const REAL *)g->bias + w->j0 + j : NULL;
    REAL *c = (REAL *)g->c + (w->i0 + i) * g->c_rs + w->j0 + j;
    OPERANDS o = { a, 1, w->high, b, w->wide, c, g->c_rs, bias, !w->first };
    if (w->fused && i == 0) {
        o.b = (const REAL *)g->b + w->p0 * g->b_rs + w->j0 + j;
        o.b_rs = g->b_rs;
        R(sweep_first)(n, w->kc, &o, (REAL *)w->b + j * w->kc, ahead);
        return;
    }
    if (w->pack_a) {
        R(sweep)(n, rows, w->kc, &o, ahead);
        return;
    }
    o.a = (const REAL *)g->a + (w->i0 + i) * g->a_rs + w->p0;
    o.a_rs = g->a_rs;
    o.a_cs = 1;
    for (; n > 0; n -= w->wide, R(next_panel)(&o, w->kc)) R(panel)(n < w->wide ? n : w->wide, rows, w->kc, &o, 0);
}

void R(ms__block)(int64_t m, int64_t n, int64_t k, const OPERANDS *o)
{
    for (int64_t j = 0; j < n; j += 3 * LANES)
        R(strip)((int)((n - j < 3 * LANES ? n - j : 3 * LANES) / LANES), m, k, o, j);
}

void R(ms__pack)(REAL *out, int64_t out_rs, const ms_matrix *b, int64_t k, int64_t n)
{
    R(pack)(out, out_rs, b, k, n);
    for (int64_t j = (n + LANES - 1) / LANES * LANES; j < (n + 15) / 16 * 16; j++)
        for (int64_t p = 0; p < k; p++) out[p * out_rs + j] = 0;
}
#undef OPERANDS
