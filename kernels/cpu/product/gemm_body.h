// SPDX-License-Identifier: MIT
// cpu/product/gemm_body.h -- parts of gemm.c that differ between accumulating types; gemm.c includes it once for each.
// REAL is the type, R(name) names its functions.

// Computes rows [i, i + rows) of the current rows by n columns from j on. Rows of A that are not packed are read in
// place.
static void R(row)(const gemm_work *w, int64_t i, int64_t rows, int64_t j, int64_t n, gemm_ahead *ahead)
{
    const ms_gemm *g = w->g;
    const R(ms_tiles) *t = R(ms__tiles)();
    const REAL *a = (const REAL *)w->a + i * w->kc, *b = (const REAL *)w->b + j * w->kc,
               *bias = w->last && g->bias ? (const REAL *)g->bias + w->j0 + j : NULL;
    REAL *c = (REAL *)g->c + (w->i0 + i) * g->c_rs + w->j0 + j;
    R(ms_operands) o = { a, 1, w->high, b, w->wide, c, g->c_rs, bias, w->p0 > 0 };
    if (w->fused && i == 0) {
        o.b = (const REAL *)g->b + w->p0 * g->b_rs + w->j0 + j;
        o.b_rs = g->b_rs;
        t->sweep(n, rows, w->kc, &o, (REAL *)w->b + j * w->kc, ahead);
        return;
    }
    if (w->pack_a) {
        t->sweep(n, rows, w->kc, &o, NULL, ahead);
        return;
    }
    o.a = (const REAL *)g->a + (w->i0 + i) * g->a_rs + w->p0;
    o.a_rs = g->a_rs;
    o.a_cs = 1;
    for (; n > 0; n -= w->wide, o.b += w->wide * w->kc, o.c += w->wide) {
        t->panel(n < w->wide ? n : w->wide, rows, w->kc, &o);
        if (o.bias) o.bias += w->wide;
    }
}
