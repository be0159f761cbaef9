// SPDX-License-Identifier: MIT
// cpu/product/gemm_few_body.h -- dot products of a few rows with the rows of a weight; gemm_few.c includes it once per
// accumulating type and level of the processor. REAL is the type, LANES elements of it fill 64 bytes, VEC is the size
// of a register in bytes, TARGET the level, and L(name) names the functions. ROWS x COLS sums stay in
// registers.

typedef REAL L(vec) __attribute__((vector_size(VEC), aligned(sizeof(REAL)), may_alias));
typedef REAL L(quad) __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
enum { L(STEP) = VEC / sizeof(REAL), L(PARTS) = 64 / VEC, L(DEPTH) = DEPTH_BYTES / sizeof(REAL) };

// Loads STEP numbers of the weight.
static inline __attribute__((always_inline)) TARGET L(vec) L(load)(const int dtype, const char *p)
{
#ifdef HALVES
    if (dtype == MS_BF16) return LOAD_BF16(p);
    if (dtype == MS_I8) return LOAD_I8(p);
#ifdef LOAD_F16
    if (dtype == MS_F16) return LOAD_F16(p);
#endif
#endif
    (void)dtype;
    return *(const L(vec) *)p;
}

// A tile: rows of x times rows of the weight, over k numbers, a multiple of LANES. While it is computed, what is read
// next is prefetched: `lines` cache lines, at most 6, for every STEP numbers of depth.
typedef struct L(tile) {
    int64_t k;
    const char *w[COLS];
    const REAL *x;
    int64_t x_rs;
    REAL *sums;  // [row][COLS][LANES]
    bool fresh;  // sums begin at 0
    const char *ahead, *ahead_end;
    int lines;
} L(tile);

// Adds the products of `rows` rows of x and COLS of the weight. A register holds STEP of the LANES sums of an
// element; where that is a part of them, the parts follow one another.
static inline __attribute__((always_inline)) TARGET void L(dot)(const int dtype, const int rows, L(tile) * t)
{
    const int64_t size = SIZE_OF(dtype, REAL), x_rs = t->x_rs, k = t->k;
    const char *ahead = t->ahead, *ahead_end = t->ahead_end;
    const int lines = t->lines;
#pragma GCC unroll 1
    for (int64_t part = 0; part < LANES; part += L(STEP)) {
        const char *w[COLS];
        const REAL *x = t->x + part;
        REAL *sums = t->sums + part;
        L(vec) s[ROWS][COLS];
#pragma GCC unroll 8
        for (int c = 0; c < COLS; c++) w[c] = t->w[c] + part * size;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++)
                s[r][c] = t->fresh ? (L(vec)) { 0 } : *(L(vec) *)(sums + (r * COLS + c) * LANES);
#pragma GCC unroll 1
        for (int64_t p = 0; p < k; p += LANES) {
            if (ahead < ahead_end) {
                __builtin_prefetch(ahead, 0, 2);
                if (lines > 1) __builtin_prefetch(ahead + 64, 0, 2);
                if (lines > 2) __builtin_prefetch(ahead + 128, 0, 2);
                if (lines > 3) {
                    __builtin_prefetch(ahead + 192, 0, 2);
                    __builtin_prefetch(ahead + 256, 0, 2);
                    __builtin_prefetch(ahead + 320, 0, 2);
                }
                ahead += lines * 64;
            }
            L(vec) y[COLS];
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) y[c] = L(load)(dtype, w[c] + p * size);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                L(vec) z = *(const L(vec) *)(x + r * x_rs + p);
#pragma GCC unroll 8
                for (int c = 0; c < COLS; c++) s[r][c] += z * y[c];
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) *(L(vec) *)(sums + (r * COLS + c) * LANES) = s[r][c];
    }
    t->ahead = ahead;
}

#if VEC == 32
// One row of x with columns [j, j + n) of the weight, n <= ROW_BLOCK: to out[column - j][4], whose four numbers are
// still to be added. The columns of a tile are those at the same place in ROW_COLS parts of the block, so that the
// weight is read as ROW_COLS streams, which the processor fetches ahead by itself. Zen 2 loses a stream where it
// crosses a page, hence the prefetch: a core reads 26 GB/s in this way, 19 from three streams of 16 columns of 576
// numbers without it.
static inline __attribute__((always_inline)) TARGET void L(row)(const int dtype, const few_work *f, int64_t j,
                                                                int64_t n, REAL *out)
{
    const int64_t size = SIZE_OF(dtype, REAL), whole = f->k / LANES * LANES, rest = f->k - whole;
    const int64_t tiles = (n + ROW_COLS - 1) / ROW_COLS;
    const REAL *x = f->x;
    for (int64_t i = 0; i < tiles; i++) {
        const char *w[ROW_COLS];
        L(vec) s[ROW_COLS][L(PARTS)] = { 0 };
        for (int64_t c = 0; c < ROW_COLS; c++)
            w[c] = f->w + (j + (i + c * tiles < n ? i + c * tiles : n - 1)) * f->w_step;
#pragma GCC unroll 1
        for (int64_t p = 0; p < whole; p += LANES) {
            if (p * size % 64 == 0)
#pragma GCC unroll 8
                for (int c = 0; c < ROW_COLS; c++) __builtin_prefetch(w[c] + p * size + ROW_AHEAD);
#pragma GCC unroll 4
            for (int v = 0; v < L(PARTS); v++) {
                const int64_t at = p + v * L(STEP);
                L(vec) z = *(const L(vec) *)(x + at);
#pragma GCC unroll 8
                for (int c = 0; c < ROW_COLS; c++) s[c][v] += z * L(load)(dtype, w[c] + at * size);
            }
        }
        if (rest) {
#pragma GCC unroll 8
            for (int c = 0; c < ROW_COLS; c++) {
                REAL last[LANES] = { 0 };
                ms__load(CLASS, dtype, rest, last, w[c] + whole * size, size);
#pragma GCC unroll 4
                for (int v = 0; v < L(PARTS); v++)
                    s[c][v] += ((const L(vec) *)f->x_last)[v] * *(const L(vec) *)(last + v * L(STEP));
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < ROW_COLS; c++) {
            if (i + c * tiles >= n) break;
            const L(vec) sum = s[c][0] + s[c][1];
            L(quad) four = *(const L(quad) *)&sum;
            if (LANES == 16) four += ((const L(quad) *)&sum)[1];
            *(L(quad) *)(out + (i + c * tiles) * 4) = four;
        }
    }
}
#endif

// Adds the products of m rows to the tile's sums, ROWS rows at a time.
static inline __attribute__((always_inline)) TARGET void L(dots)(const int dtype, int64_t m, L(tile) * t)
{
    const REAL *x = t->x;
    REAL *sums = t->sums;
    for (; m >= ROWS; m -= ROWS) {
        L(dot)(dtype, ROWS, t);
        t->x += ROWS * t->x_rs;
        t->sums += ROWS * COLS * LANES;
    }
    if (m == 3) L(dot)(dtype, 3, t);
    else if (m == 2) L(dot)(dtype, 2, t);
    else if (m == 1) L(dot)(dtype, 1, t);
    t->x = x;
    t->sums = sums;
}
static TARGET __attribute__((noinline)) void L(dots_real)(int64_t m, L(tile) * t) { L(dots)(DTYPE, m, t); }

// Columns [j, j + n) of the product, n <= BLOCK: to out[row][column - j][4], whose four numbers are still to be added.
static inline __attribute__((always_inline)) TARGET void L(columns)(const int dtype, const few_work *f, int64_t j,
                                                                    int64_t n, REAL *out)
{
    const int64_t m = f->m, whole = f->k / LANES * LANES, rest = f->k - whole, size = SIZE_OF(dtype, REAL);
    // A weight that is read several times is read in parts that stay in the first-level cache, and converted once.
    const bool several = m > ROWS, wide = dtype != DTYPE && (several || !CONVERTS(dtype));
    const int64_t passes = (m + ROWS - 1) / ROWS, part = several || wide || L(PARTS) > 1 ? L(DEPTH) : whole;
    REAL sums[FEW_ROWS * COLS * LANES] __attribute__((aligned(64))),
        buffer[COLS * L(DEPTH)] __attribute__((aligned(64)));
    for (int64_t c0 = 0; c0 < n; c0 += COLS) {
        L(tile)
        t = { .x = f->x,
              .x_rs = f->x_rs,
              .sums = sums,
              .fresh = true,
              .lines = (int)((COLS * L(STEP) * size + 64 * passes - 1) / (64 * passes)) };
        const char *w[COLS];
        for (int64_t c = 0; c < COLS; c++) w[c] = f->w + (j + (c0 + c < n ? c0 + c : n - 1)) * f->w_step;
        for (int64_t p = 0; p < whole; p += part) {
            t.k = whole - p < part ? whole - p : part;
            t.ahead = w[0] + COLS * (f->w_step + p * size);
            t.ahead_end = t.ahead + COLS * t.k * size;
            if (wide) {
                for (int64_t c = 0; c < COLS; c++) {
                    const char *from = w[c] + p * size;
                    REAL *to = buffer + c * L(DEPTH);
                    t.w[c] = (const char *)to;
                    if (!CONVERTS(dtype)) {
                        ms__load(MS_C_F32, dtype, t.k, to, from, size);
                        continue;
                    }
#pragma GCC unroll 1
                    for (int64_t q = 0; q < t.k; q += LANES) {
#pragma GCC unroll 4
                        for (int v = 0; v < L(PARTS); v++)
                            *(L(vec) *)(to + q + v * L(STEP)) = L(load)(dtype, from + (q + v * L(STEP)) * size);
                    }
                }
                L(dots_real)(m, &t);
            } else {
                for (int64_t c = 0; c < COLS; c++) t.w[c] = w[c] + p * size;
                if (dtype == DTYPE) L(dots_real)(m, &t);
                else L(dots)(dtype, m, &t);
            }
            t.x += part;
            t.fresh = false;
        }
        if (rest) {
            REAL last[COLS][LANES] __attribute__((aligned(64)));
            for (int64_t c = 0; c < COLS; c++) {
                memset(last[c], 0, sizeof last[c]);
                ms__load(CLASS, dtype, rest, last[c], w[c] + whole * size, size);
                t.w[c] = (const char *)last[c];
            }
            t.k = LANES;
            t.x = f->x_last;
            t.x_rs = LANES;
            t.ahead = t.ahead_end;
            L(dots_real)(m, &t);
        }
        for (int64_t i = 0; i < m; i++)
            for (int64_t c = 0; c < COLS && c0 + c < n; c++) {
                const L(quad) *q = (const L(quad) *)(sums + (i * COLS + c) * LANES);
                *(L(quad) *)(out + (i * BLOCK + c0 + c) * 4) =
                    LANES == 16 ? (q[0] + q[2]) + (q[1] + q[3]) : q[0] + q[1];
            }
    }
}

#ifdef PACKED
#include "cpu/product/gemm_few_packed.h"
#endif

// Computes columns [j, j + n) of the product: adds what columns has left, scales, adds the bias and stores.
static inline __attribute__((always_inline)) TARGET void L(block)(const int dtype, const few_work *f, int64_t j,
                                                                  int64_t n)
{
    REAL sums[FEW_ROWS * BLOCK * 4] __attribute__((aligned(64))), bias[ROW_BLOCK], room[ROW_BLOCK];
    const int64_t size = ms__dtype_size(f->dtype);
    const bool added = VEC == 32 && f->x_group;  // sums are [row][BLOCK]
#ifdef PACKED
    if (f->x_group) L(packed_columns)(dtype, f, j, n, sums);
    else
#endif
#if VEC == 32
        if (f->m == 1)
        L(row)(dtype, f, j, n, sums);
    else
#endif
        L(columns)(dtype, f, j, n, sums);
    if (f->bias) ms__load(CLASS, f->dtype, n, bias, (const char *)f->bias + j * size, size);
    for (int64_t i = 0; i < f->m; i++) {
        char *to = (char *)f->c + (i * f->c_rs + j * f->c_cs) * size;
        const REAL *s = sums + i * BLOCK * (added ? 1 : 4);
        if (added) memcpy(room, s, (size_t)n * sizeof(REAL));
        else
            for (int64_t c = 0; c < n; c++) room[c] = (s[4 * c] + s[4 * c + 2]) + (s[4 * c + 1] + s[4 * c + 3]);
        if (f->scale)
            for (int64_t c = 0; c < n; c++) room[c] *= f->scale[j + c];
        if (f->bias)
            for (int64_t c = 0; c < n; c++) room[c] += bias[c];
        if (f->dtype == DTYPE && f->c_cs == 1) memcpy(to, room, (size_t)n * sizeof(REAL));
        else ms__store(CLASS, f->dtype, n, to, f->c_cs * size, room);
    }
}

static TARGET void L(block_real)(const few_work *f, int64_t j, int64_t n) { L(block)(DTYPE, f, j, n); }
#ifdef HALVES
static TARGET void L(block_f16)(const few_work *f, int64_t j, int64_t n) { L(block)(MS_F16, f, j, n); }
static TARGET void L(block_bf16)(const few_work *f, int64_t j, int64_t n) { L(block)(MS_BF16, f, j, n); }
static TARGET void L(block_i8)(const few_work *f, int64_t j, int64_t n) { L(block)(MS_I8, f, j, n); }
#endif
