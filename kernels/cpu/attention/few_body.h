// SPDX-License-Identifier: MIT
// cpu/attention/few_body.h -- scores and weighed sums of few rows; few.c includes it once per accumulating type and
// level of the processor. REAL is the type, a register holds STEP of them, and L(name) names the functions.

typedef REAL L(vec) __attribute__((vector_size(VEC), aligned(sizeof(REAL)), may_alias));
enum { L(LANES) = 64 / sizeof(REAL), L(PARTS) = 64 / VEC };

// Loads STEP numbers.
INLINE TARGET L(vec) L(load)(const int dtype, const char *p)
{
#ifdef HALVES
    if (dtype == MS_BF16) return LOAD_BF16(p);
#ifdef LOAD_F16
    if (dtype == MS_F16) return LOAD_F16(p);
#endif
#endif
    (void)dtype;
    return *(const L(vec) *)p;
}
INLINE int64_t L(size)(const int dtype) { return dtype == MS_BF16 || dtype == MS_F16 ? 2 : (int64_t)sizeof(REAL); }

// Adds the lanes of STEP vectors, each to one number.
#define JOIN(w)                                                                \
    EACH((w) / 2, i)                                                           \
    s[i] = __builtin_shufflevector(s[i], s[i + (w) / 2], SHUFFLED(LOWER, w)) + \
           __builtin_shufflevector(s[i], s[i + (w) / 2], SHUFFLED(HIGHER, w));
INLINE TARGET L(vec) L(joined)(L(vec) * s)
{
#if STEP > 8
    JOIN(16)
#endif
#if STEP > 4
    JOIN(8)
#endif
#if STEP > 2
    JOIN(4)
#endif
    JOIN(2)
    return s[0];
}
#undef JOIN

// Whether rows without gaps are fetched in the order of their addresses instead of that of their use. With AVX2 (Zen 2)
// one query then takes 0.7 to 0.9 of the time.
INLINE TARGET bool L(in_order)(const ms_few *f, int64_t x_rs) { return VEC == 32 && x_rs == f->d * L(size)(f->dtype); }

// The scores of rows [r, r + rows) with STEP / rows keys from j on, as far as they exist.
INLINE TARGET void L(dots)(const int dtype, const int rows, const ms_few *f, int64_t r0, int64_t j)
{
    const int cols = STEP / rows;
    const int64_t size = L(size)(dtype), d = f->d, x_rs = f->x_rs * size, ahead = f->ahead, n = f->n - j;
    const char *x = (const char *)f->x + j * x_rs;
    const REAL *q = (const REAL *)f->rows + r0 * d;
    REAL *s = (REAL *)f->scores + r0 * f->scores_rs + j;
    L(vec) sums[L(PARTS)][STEP];
    const bool dense = L(in_order)(f, x_rs);
    const int bytes = cols * L(LANES) * (int)size / L(PARTS), lines = bytes < 64 ? 1 : bytes / 64;
    const char *at[STEP], *next = x + ahead;
    EACH(cols, c) at[c] = x + (c < n ? c : n - 1) * x_rs;
#pragma GCC unroll 1
    for (int part = 0; part < L(PARTS); part++) {
        L(vec) a[STEP];
        EACH(STEP, i) a[i] = (L(vec)) { 0 };
#pragma GCC unroll 1
        for (int64_t p = part * STEP; p < d; p += L(LANES)) {
            L(vec) y[STEP];
            if (dense) {
                EACH(lines, l) __builtin_prefetch(next + l * 64);
                next += bytes;
            } else if (p * size % 64 == 0) EACH(cols, c) __builtin_prefetch(at[c] + p * size + ahead);
            EACH(cols, c) y[c] = L(load)(dtype, at[c] + p * size);
            EACH(rows, r)
            {
                L(vec) z = *(const L(vec) *)(q + r * d + p);
                EACH(cols, c) a[r * cols + c] += z * y[c];
            }
        }
        EACH(STEP, i) sums[part][i] = a[i];
    }
    for (int part = L(PARTS) / 2; part > 0; part /= 2)
        for (int k = 0; k < part; k++) EACH(STEP, i) sums[k][i] += sums[k + part][i];
    L(vec) all = L(joined)(sums[0]);
    for (int r = 0; r < rows; r++)
        memcpy(s + r * f->scores_rs, (const REAL *)&all + r * cols, (size_t)(n < cols ? n : cols) * sizeof(REAL));
}

INLINE TARGET void L(all_dots)(const int dtype, const ms_few *f)
{
    enum { FOUR = STEP > 4 ? 4 : 1, TWO = STEP > 2 ? 2 : 1 };
    int64_t r = 0;
    for (; FOUR > 1 && r + FOUR <= f->m; r += FOUR)
        for (int64_t j = 0; j < f->n; j += STEP / FOUR) L(dots)(dtype, FOUR, f, r, j);
    for (; TWO > 1 && r + TWO <= f->m; r += TWO)
        for (int64_t j = 0; j < f->n; j += STEP / TWO) L(dots)(dtype, TWO, f, r, j);
    for (; r < f->m; r++)
        for (int64_t j = 0; j < f->n; j += STEP) L(dots)(dtype, 1, f, r, j);
}

// Columns [j, j + vecs STEP) of rows [r, r + rows) of the outputs.
INLINE TARGET void L(strip)(const int dtype, const int rows, const int vecs, const ms_few *f, int64_t r0, int64_t j)
{
    const int64_t size = L(size)(dtype), x_rs = f->x_rs * size, n = f->n, d = f->d, s_rs = f->scores_rs,
                  ahead = f->ahead;
    const char *x = (const char *)f->x + j * size;
    const bool dense = L(in_order)(f, x_rs);
    const int bytes = vecs * STEP * (int)size, lines = bytes < 64 ? 1 : bytes / 64;
    const char *next = (const char *)f->x + ahead + j * n * size;
    const REAL *s = (const REAL *)f->scores + r0 * s_rs;
    REAL *o = (REAL *)f->rows + r0 * d + j;
    L(vec) a[4][8];
    EACH(rows, r) EACH(vecs, v) a[r][v] = *(const L(vec) *)(o + r * d + v * STEP);
#pragma GCC unroll 1
    for (int64_t k = 0; k < n; k++, x += x_rs) {
        L(vec) y[8];
        if (dense) {
            EACH(lines, l) __builtin_prefetch(next + l * 64);
            next += bytes;
        } else {
            EACH(vecs, v) if (v * STEP * size % 64 == 0) __builtin_prefetch(x + v * STEP * size + ahead);
        }
        EACH(vecs, v) y[v] = L(load)(dtype, x + v * STEP * size);
        EACH(rows, r) EACH(vecs, v) a[r][v] += s[r * s_rs + k] * y[v];
    }
    EACH(rows, r) EACH(vecs, v) * (L(vec) *)(o + r * d + v * STEP) = a[r][v];
}
INLINE TARGET void L(strips)(const int dtype, const int rows, const ms_few *f, int64_t r)
{
    const int most = MOST / rows < 8 ? MOST / rows : 8;
    int64_t j = 0;
    for (; j + most * STEP <= f->d; j += most * STEP) L(strip)(dtype, rows, most, f, r, j);
    if (most > 4 && j + 4 * STEP <= f->d) {
        L(strip)(dtype, rows, 4, f, r, j);
        j += 4 * STEP;
    }
    if (most > 2 && j + 2 * STEP <= f->d) {
        L(strip)(dtype, rows, 2, f, r, j);
        j += 2 * STEP;
    }
    if (j < f->d) L(strip)(dtype, rows, 1, f, r, j);
}
INLINE TARGET void L(all_sums)(const int dtype, const ms_few *f)
{
    int64_t r = 0;
    for (; r + 4 <= f->m; r += 4) L(strips)(dtype, 4, f, r);
    for (; r + 2 <= f->m; r += 2) L(strips)(dtype, 2, f, r);
    for (; r < f->m; r++) L(strips)(dtype, 1, f, r);
}

#ifdef HALVES
#define EACH_DTYPE(dtype, DO)        \
    switch (dtype) {                 \
    case MS_BF16: DO(MS_BF16) break; \
    case MS_F16: DO(MS_F16) break;   \
    default: DO(MS_F32)              \
    }
#else
#define EACH_DTYPE(dtype, DO) DO(MS_F64)
#endif
static TARGET void L(scores)(const ms_few *f)
{
#define DO(dtype) L(all_dots)(dtype, f);
    EACH_DTYPE(f->dtype, DO)
#undef DO
}
static TARGET void L(sums)(const ms_few *f)
{
#define DO(dtype) L(all_sums)(dtype, f);
    EACH_DTYPE(f->dtype, DO)
#undef DO
}
#undef EACH_DTYPE
