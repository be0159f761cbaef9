// SPDX-License-Identifier: MIT
// cpu/product/gemm_small_body.h -- small products, which are not packed; gemm.c includes it after gemm_body.h, with the
// same macros. A small product is computed by tiles; columns of B that cannot be read in place as whole vectors are
// copied.

// Products for which packing B costs more than it saves: small ones, those of few rows, and those whose B stays in the
// second-level cache. The depth of the last is one block's, so that their sums are those of large products.
static bool R(is_small)(const ms_gemm *g)
{
    int64_t size = (int64_t)sizeof(REAL);
    return (double)g->m * (double)g->n * (double)g->k <= SMALL ||
           (g->b_cs == 1 && (g->m <= 16 || (g->k * size <= KC * 4 && g->n * g->k * size <= IN_PLACE)));
}

// The whole vectors of columns of some rows; all rows of some columns.
static void R(strip_rows)(void *arg, int64_t first, int64_t last, int64_t unused)
{
    const ms_gemm *g = arg;
    const R(ms_tiles) *t = R(ms__tiles)();
    const R(ms_operands) o = { (const REAL *)g->a + first * g->a_rs, g->a_rs, g->a_cs, g->b, g->b_rs,
                               (REAL *)g->c + first * g->c_rs,       g->c_rs, g->bias, false };
    (void)unused;
    t->strip(g->n / t->lanes * t->lanes, last - first, g->k, &o);
}

static void R(strip_task)(void *arg, int64_t first, int64_t last, int64_t unused)
{
    const ms_gemm *g = arg;
    int64_t j = first / g->k;
    const R(ms_operands) o = { g->a,    g->a_rs,          g->a_cs, (const REAL *)g->b + j,
                               g->b_rs, (REAL *)g->c + j, g->c_rs, g->bias ? (const REAL *)g->bias + j : NULL,
                               false };
    (void)unused;
    R(ms__tiles)()->strip(last / g->k - j, g->m, g->k, &o);
}

// The first n columns, all whole vectors: few rows are divided by panels, of at least SMALL numbers of B, others by
// rows.
static void R(strips)(const ms_gemm *g, int64_t n)
{
    int64_t wide = R(ms__tiles)()->wide, columns = (SMALL / g->k / wide + 1) * wide;
    if (n == 0) return;
    if (g->m <= 16) ms__parallel(n * g->k, columns * g->k, R(strip_task), (void *)g);
    else ms__parallel(g->m, (TASK / (n * g->k) + 8) / 8 * 8, R(strip_rows), (void *)g);
}

static ms_status R(all_strips)(const ms_gemm *g)
{
    R(strips)(g, g->n);
    return MS_OK;
}

// The function that computes a small product whose columns fill whole vectors, without a copy of B; NULL for others.
static ms_gemm_fn R(direct)(const ms_gemm *g)
{
    return g->b_cs == 1 && g->n % R(ms__tiles)()->lanes == 0 && R(is_small)(g) ? R(all_strips) : NULL;
}

// Computes a small product without packing. Columns of B that cannot be read as whole vectors go through a padded copy:
// only the last ones if b_cs is 1, otherwise all. Returns false if the product does not suit this path.
static bool R(small)(const ms_gemm *g)
{
    enum { ROOM = 32 << 10 };
    ms_gemm_fn direct = R(direct)(g);
    if (direct) return direct(g) == MS_OK;
    REAL pad[ROOM / sizeof(REAL) * 2] __attribute__((aligned(64)));
    const R(ms_tiles) *t = R(ms__tiles)();
    int64_t n = g->n, full = g->b_cs == 1 ? n / t->lanes * t->lanes : 0;
    int64_t wide = (n - full + t->lanes - 1) / t->lanes * t->lanes;

    if (!R(is_small)(g) || wide * g->k > (int64_t)(sizeof pad / sizeof *pad)) return false;
    R(ms_operands) o = { g->a, g->a_rs, g->a_cs, g->b, g->b_rs, g->c, g->c_rs, g->bias, false };
    R(strips)(g, full);
    t->pack(pad, wide, &(ms_matrix) { .data = o.b + full * g->b_cs, .rs = g->b_rs, .cs = g->b_cs }, g->k, n - full);
    o.b = pad;
    o.b_rs = wide;
    o.c += full;
    if (o.bias) o.bias += full;
    t->panel(n - full, g->m, g->k, &o);
    return true;
}
