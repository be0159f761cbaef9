// SPDX-License-Identifier: MIT
// cpu/product/gemm_body.h -- parts of gemm.c that differ between accumulating types; gemm.c includes it once for each.
// REAL is the type, R(name) names its functions, and LANES elements fill 64 bytes.

typedef REAL R(vec) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));

#define SAME(step, l) (l)
#define LOW(step, l) ((l) & (step) ? (l) - (step) + LANES : (l))
#define HIGH(step, l) ((l) & (step) ? (l) + LANES : (l) + (step))
#define STAGE(step)                                                           \
    _Pragma("GCC unroll 8") for (int l = 0; l < 8; l++)                       \
    {                                                                         \
        if (l & (step)) continue;                                             \
        R(vec) y = x[l], z = x[l + (step)];                                   \
        x[l] = __builtin_shufflevector(y, z, EACH_LANE(LOW, step));           \
        x[l + (step)] = __builtin_shufflevector(y, z, EACH_LANE(HIGH, step)); \
    }
// LANES columns of 8 numbers become 8 rows of LANES numbers, with the bias added.
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

// Computes rows [i, i + rows) of the current rows by n columns from j on. Rows of A that are not packed are read in
// place.
static void R(row)(const gemm_work *w, int64_t i, int64_t rows, int64_t j, int64_t n, gemm_ahead *ahead)
{
    const ms_gemm *g = w->g;
    const R(ms_tiles) *t = R(ms__tiles)();
    const REAL *a = (const REAL *)w->a + i * w->kc, *b = (const REAL *)w->b + j * w->kc,
               *bias = w->last && g->bias ? (const REAL *)g->bias + w->j0 + j : NULL;
    REAL *c = (REAL *)g->c + (w->i0 + i) * g->c_rs + w->j0 + j;
    R(ms_operands) o = { a, 1, w->high, b, w->wide, c, g->c_rs, bias, !w->first };
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
