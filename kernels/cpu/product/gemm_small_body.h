// SPDX-License-Identifier: MIT
// cpu/product/gemm_small_body.h -- small products, which are not packed; gemm.c includes it after gemm_body.h, with the
// same macros. A small product is computed by dot products, by vectors of 8 rows with numbers of B broadcast, or by
// tiles; columns of B that cannot be read in place as whole vectors are copied.

// Row i of C where B's columns are contiguous (x W^T with few rows): dot products, with four vectors of partial sums.
static MS_KERNEL void R(dots)(const ms_gemm *g, int64_t i)
{
    const REAL *a = (const REAL *)g->a + i * g->a_rs, *bias = g->bias;
    REAL *c = (REAL *)g->c + i * g->c_rs;
    int64_t k = g->k;
    for (int64_t j = 0; j < g->n; j++) {
        const REAL *w = (const REAL *)g->b + j * g->b_cs;
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

// The first n columns, a multiple of LANES, of up to 8 rows of C, where the columns of B are contiguous (x W^T): a
// vector holds 8 rows of a column, and numbers of B are broadcast. Packing B would take as long as the product. The
// results are bitwise equal to those of tile (gemm_body.h).
enum { R(FEW_DEPTH) = (16 << 10) / 8 / (int)sizeof(REAL) };
static WIDE_KERNEL void R(few_rows)(const ms_gemm *g, int64_t n)
{
    REAL a[8 * R(FEW_DEPTH)] __attribute__((aligned(64)));
    // Column l begins l steps after the first: with these distances 6 registers address all columns.
    int64_t step = g->b_cs * (int64_t)sizeof(REAL), step3 = 3 * step, step5 = 5 * step, step7 = 7 * step;
    __asm__("" : "+r"(step), "+r"(step3), "+r"(step5), "+r"(step7));
    R(ms__tiles)()->pack_rows(a, &(ms_matrix) { .data = g->a, .rs = g->a_rs, .cs = g->a_cs }, g->m, g->k, g->k);
    for (int64_t j = 0; j < n; j += LANES) {
        R(oct) s[LANES];
        const char *b = (const char *)((const REAL *)g->b + j * g->b_cs);
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) s[l] = (R(oct)) { 0 };
#pragma GCC unroll 1
        for (int64_t p = 0; p < g->k; p++, b += sizeof(REAL)) {
            R(oct) x = *(const R(oct) *)(a + 8 * p);
            const char *at = b;
#pragma GCC unroll 2
            for (int l = 0; l < LANES; l += 8, at += 8 * step) {
                __asm__("" : "+r"(at));
                s[l] += *(const REAL *)at * x;
                s[l + 1] += *(const REAL *)(at + step) * x;
                s[l + 2] += *(const REAL *)(at + 2 * step) * x;
                s[l + 3] += *(const REAL *)(at + step3) * x;
                s[l + 4] += *(const REAL *)(at + 4 * step) * x;
                s[l + 5] += *(const REAL *)(at + step5) * x;
                s[l + 6] += *(const REAL *)(at + 2 * step3) * x;
                s[l + 7] += *(const REAL *)(at + step7) * x;
            }
        }
        R(store_columns)((REAL *)g->c + j, g->c_rs, g->m, s, g->bias ? (const REAL *)g->bias + j : NULL);
    }
}

// Whether few_rows computes the product's whole vectors of columns.
static bool R(takes_few)(const ms_gemm *g)
{
    return g->m <= 8 && g->b_rs == 1 && g->b_cs != 1 && g->k <= R(FEW_DEPTH) && !narrow();
}

static bool R(is_small)(const ms_gemm *g)
{
    return (double)g->m * (double)g->n * (double)g->k <= SMALL || (g->m <= 16 && g->b_cs == 1);
}

static ms_status R(all_dots)(const ms_gemm *g)
{
    for (int64_t i = 0; i < g->m; i++) R(dots)(g, i);
    return MS_OK;
}

static ms_status R(all_few)(const ms_gemm *g)
{
    R(few_rows)(g, g->n);
    return MS_OK;
}

static ms_status R(all_strips)(const ms_gemm *g)
{
    const R(ms_operands) o = { g->a, g->a_rs, g->a_cs, g->b, g->b_rs, g->c, g->c_rs, g->bias, false };
    R(ms__tiles)()->strip(g->n, g->m, g->k, &o);
    return MS_OK;
}

// The function that computes a product without a copy of B: by dot products if it has up to 4 rows, a_cs and b_rs are 1
// and b_cs is not; by tiles or vectors of 8 rows if it is small and its columns fill whole vectors. NULL if the product
// is not small, or if B or a part of it must be copied.
static ms_gemm_fn R(direct)(const ms_gemm *g)
{
    if (g->m <= 4 && g->b_rs == 1 && g->a_cs == 1 && g->b_cs != 1) return R(all_dots);
    if (g->n % R(ms__tiles)()->lanes != 0 || !R(is_small)(g)) return NULL;
    return g->b_cs == 1 ? R(all_strips) : R(takes_few)(g) ? R(all_few) : NULL;
}

// Computes a product without packing: of at most SMALL multiply-adds; of up to 16 rows if b_cs is 1; or by dot
// products. Columns of B that cannot be read as whole vectors go through a padded copy: only the last ones if b_cs is 1
// or few_rows computes the others, otherwise all. Returns false if the product does not suit this path.
static bool R(small)(const ms_gemm *g)
{
    enum { ROOM = 32 << 10 };
    ms_gemm_fn direct = R(direct)(g);
    if (direct) return direct(g) == MS_OK;
    REAL pad[ROOM / sizeof(REAL) * 2] __attribute__((aligned(64)));
    const R(ms_tiles) *t = R(ms__tiles)();
    bool few = R(takes_few)(g);
    int64_t n = g->n, lanes = few ? LANES : t->lanes, full = g->b_cs == 1 || few ? n / lanes * lanes : 0;
    int64_t wide = (n - full + lanes - 1) / lanes * lanes;

    if (!R(is_small)(g) || wide * g->k > (int64_t)(sizeof pad / sizeof *pad)) return false;
    R(ms_operands) o = { g->a, g->a_rs, g->a_cs, g->b, g->b_rs, g->c, g->c_rs, g->bias, false };
    if (few) R(few_rows)(g, full);
    else t->strip(full, g->m, g->k, &o);
    t->pack(pad, wide, &(ms_matrix) { .data = o.b + full * g->b_cs, .rs = g->b_rs, .cs = g->b_cs }, g->k, n - full);
    o.b = pad;
    o.b_rs = wide;
    o.c += full;
    if (o.bias) o.bias += full;
    t->panel(n - full, g->m, g->k, &o);
    return true;
}
