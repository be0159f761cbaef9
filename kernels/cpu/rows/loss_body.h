// SPDX-License-Identifier: MIT
// cpu/rows/loss_body.h -- cross_entropy and blocks of mse_loss; loss.c includes it once per accumulation type.

// loss = (1 - s) w[t] (lse - x[t]) + s / n sum over c of w[c] (lse - x[c]); s: label smoothing, t: target class.
static MS_KERNEL void R(cross_rows)(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const cross *q = arg;
    int64_t n = q->n;
    REAL *room = (REAL *)(q->room + q->room_bytes * (size_t)ms__thread_num());
    const REAL *w = q->w ? ROW_IN(q->dtype, q->w, 0, 1, n, room) : NULL;
    REAL smooth = (REAL)q->smooth, weights = w ? R(ms__row_sum)(w, n) : (REAL)n;
    for (int64_t r = first / n; r < last / n; r++) {
        const REAL *x = ROW_IN(q->dtype, q->x, r * n, 1, n, room + n);
        REAL *e = room + 2 * n, m = R(ms__row_max)(x, n);
        if (m == -(REAL)INFINITY) m = 0;
        REAL lse = m + LOG(R(ms__row_exp)(e, x, m, n));
        ((REAL *)q->lse)[r] = lse;
        int64_t t = q->ids[r];
        if (t == q->ignore) {
            ((REAL *)q->losses)[r] = 0;
            continue;
        }
        REAL loss = (1 - smooth) * (w ? w[t] : 1) * (lse - x[t]);
        if (smooth != 0) {
            REAL s = w ? R(ms__row_dot)(w, x, n) : R(ms__row_sum)(x, n);
            loss += smooth / (REAL)n * (weights * lse - s);
        }
        ((REAL *)q->losses)[r] = loss;
    }
}

// dx[c] = scale (exp(x[c] - lse) ((1 - s) w[t] + s / n sum w) - s / n w[c] - (1 - s) w[t] [c = t])
// plus the gradient of the logsumexp output, if any, times exp(x[c] - lse). [c = t] is 1 if c = t, else 0. s: label
// smoothing, t: target class.
static MS_KERNEL void R(cross_rows_backward)(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const cross *q = arg;
    int64_t n = q->n;
    REAL *room = (REAL *)(q->room + q->room_bytes * (size_t)ms__thread_num());
    const REAL *w = q->w ? ROW_IN(q->dtype, q->w, 0, 1, n, room) : NULL;
    REAL smooth = (REAL)q->smooth, part = smooth / (REAL)n, weights = w ? R(ms__row_sum)(w, n) : (REAL)n;
    for (int64_t r = first / n; r < last / n; r++) {
        int64_t t = q->ids[r];
        REAL *dx = ROW_AT(q->dtype, q->out, r * n, 1, room + n);
        if (t == q->ignore && !q->g_lse) memset(dx, 0, (size_t)n * sizeof *dx);
        else {
            const REAL *x = ROW_IN(q->dtype, q->x, r * n, 1, n, room + 2 * n);
            bool counts = t != q->ignore;
            REAL scale = counts ? (REAL)(q->g_rows ? q->scale * ONE(q->g_dtype, q->g, r) : q->scale) : 0;
            REAL own = (1 - smooth) * (w && counts ? w[t] : 1), all = scale * (own + part * weights),
                 lse = ((const REAL *)q->lse)[r];
            if (q->g_lse) all += ((const REAL *)q->g_lse)[r];
            if (smooth == 0)
                for (int64_t j = 0; j < n; j++) dx[j] = all * R(ms__soft_exp)(x[j] - lse);
            else
                for (int64_t j = 0; j < n; j++)
                    dx[j] = all * R(ms__soft_exp)(x[j] - lse) - scale * part * (w ? w[j] : 1);
            if (counts) dx[t] -= scale * own;
        }
        ROW_OUT(q->dtype, q->out, r * n, 1, n, dx);
    }
}

// Computes (a - b)^2, stored in out or added to *sum.
static MS_KERNEL void R(squares)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const mse *q = arg;
    REAL ra[PIECE], rb[PIECE], ro[PIECE];
    double *sum = q->sums ? q->sums + block : NULL;
    if (sum) *sum = 0;
    for (int64_t at = first; at < last; at += PIECE) {
        int64_t n = last - at < PIECE ? last - at : PIECE;
        const REAL *a = ROW_IN(q->dtype, q->a, at, 1, n, ra), *b = ROW_IN(q->dtype, q->b, at, 1, n, rb);
        REAL *o = sum ? ro : ROW_AT(q->dtype, q->out, at, 1, ro);
        for (int64_t j = 0; j < n; j++) o[j] = (a[j] - b[j]) * (a[j] - b[j]);
        if (sum) *sum += R(ms__row_sum)(o, n);
        else ROW_OUT(q->dtype, q->out, at, 1, n, o);
    }
}

// da = 2 scale g (a - b), db = -da
static MS_KERNEL void R(squares_backward)(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const mse *q = arg;
    REAL ra[PIECE], rb[PIECE], rg[PIECE], ro[PIECE], scale = (REAL)(2 * q->scale);
    for (int64_t at = first; at < last; at += PIECE) {
        int64_t n = last - at < PIECE ? last - at : PIECE;
        const REAL *a = ROW_IN(q->dtype, q->a, at, 1, n, ra), *b = ROW_IN(q->dtype, q->b, at, 1, n, rb);
        const REAL *g = q->g ? ROW_IN(q->dtype, q->g, at, 1, n, rg) : NULL;
        for (int sign = 0; sign < 2; sign++) {
            void *out = sign ? q->db : q->da;
            if (!out) continue;
            REAL *o = ROW_AT(q->dtype, out, at, 1, ro), s = sign ? -scale : scale;
            if (g)
                for (int64_t j = 0; j < n; j++) o[j] = s * g[j] * (a[j] - b[j]);
            else
                for (int64_t j = 0; j < n; j++) o[j] = s * (a[j] - b[j]);
            ROW_OUT(q->dtype, out, at, 1, n, o);
        }
    }
}
