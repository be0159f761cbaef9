// SPDX-License-Identifier: MIT
// cpu/product/attention_body.h -- attention over one head; attention.c includes it once per accumulation type.

#define OPERANDS R(ms_operands)

// Loads rows of a head as [n][wide], multiplied by scale; columns from d on become 0.
static MS_KERNEL void R(load_rows)(const attend *w, REAL *out, head_rows h, REAL scale)
{
    const part *x = h.of;
    int64_t start = head_start(x, h.head), first = h.first, n = h.n, d = w->d, wide = w->wide;
    if (x->dtype == (sizeof(REAL) == 8 ? MS_F64 : MS_F32) && x->cs == 1 && d == wide) {  // copy whole vectors
        for (int64_t r = 0; r < n; r++, out += wide) {
            const REAL *row = (const REAL *)x->data + start + (first + r) * x->rs;
            for (int64_t j = 0; j < wide; j++) out[j] = row[j] * scale;
        }
        return;
    }
    for (int64_t r = 0; r < n; r++, out += wide) {
        const REAL *row = ROW_IN(x->dtype, x->data, start + (first + r) * x->rs, x->cs, d, out);
        if (row != out || scale != 1)
            for (int64_t j = 0; j < d; j++) out[j] = row[j] * scale;
        for (int64_t j = d; j < wide; j++) out[j] = 0;
    }
}

static MS_KERNEL void R(store_rows)(const attend *w, head_rows h, const REAL *from)
{
    const part *x = h.of;
    int64_t start = head_start(x, h.head);
    for (int64_t r = 0; r < h.n; r++, from += w->wide) {
        int64_t at = start + (h.first + r) * x->rs;
        REAL *row = ROW_AT(x->dtype, x->data, at, x->cs, (REAL *)from);
        if (row != from) memcpy(row, from, (size_t)w->d * sizeof *from);
        ROW_OUT(x->dtype, x->data, at, x->cs, w->d, row);
    }
}

// Applies the mask to n scores of query i, from key j0 on: adds its numbers or, if it is a bool mask, sets the scores
// of masked keys to -inf.
static MS_KERNEL void R(mask_row)(const attend *w, int64_t head, int64_t i, int64_t j0, int64_t n, REAL *s)
{
    const part *m = &w->mask;
    int64_t at = head_start(m, head) + i * m->rs + j0 * m->cs;
    if (m->dtype == MS_F32 && m->cs == 1)
        for (int64_t j = 0; j < n; j++) s[j] += (REAL)((const float *)m->data)[at + j];
    else if (m->dtype == MS_BOOL)
        for (int64_t j = 0; j < n; j++) s[j] = ((const uint8_t *)m->data)[at + j * m->cs] ? s[j] : -(REAL)INFINITY;
    else if (m->dtype == MS_F64)
        for (int64_t j = 0; j < n; j++) s[j] += (REAL)((const double *)m->data)[at + j * m->cs];
    else if (m->dtype == MS_F32)
        for (int64_t j = 0; j < n; j++) s[j] += (REAL)((const float *)m->data)[at + j * m->cs];
    else
        for (int64_t j = 0; j < n; j++) {
            float f;
            s[j] += (REAL)*ms__row_in(m->dtype, m->data, at + j * m->cs, 1, 1, &f);
        }
}

// keep[]: 0 for dropped probabilities, 1 / (1 - p) for the others.
static MS_KERNEL void R(keep_row)(const attend *w, int64_t head, int64_t i, int64_t j0, int64_t n, REAL *keep)
{
    uint32_t words[4 * MS_MASK_BLOCKS];
    uint64_t limit = ms__mask_limit(w->p),
             at = ((uint64_t)head * (uint64_t)w->tq + (uint64_t)i) * (uint64_t)w->tk + (uint64_t)j0;
    REAL scale = w->p < 1 ? (REAL)(1 / (1 - w->p)) : 0;
    for (int64_t j = 0; j < n;) {
        int64_t skip = (int64_t)(at & 3), some = 4 * MS_MASK_BLOCKS - skip < n - j ? 4 * MS_MASK_BLOCKS - skip : n - j;
        ms__mask_words(words, (skip + some + 3) / 4, w->seed, w->offset, at / 4);
        for (int64_t q = 0; q < some; q++) keep[j + q] = words[skip + q] >= limit ? scale : 0;
        j += some;
        at += (uint64_t)some;
    }
}

// Sets s[valid .. n) to value. n is a multiple of 16; the vector that contains s[valid] is filled element by element.
MS_INLINE void R(fill_tail)(REAL *s, int64_t valid, int64_t n, REAL value)
{
    int64_t j = valid / 16 * 16;
    if (j == n) return;
    for (int64_t l = 0; l < 16; l++) s[j + l] = j + l < valid ? s[j + l] : value;
    for (j += 16; j < n; j++) s[j] = value;
}

// Updates a row's running *max and *sum by the scores s[0 .. valid), which become exp(score - *max); s[valid .. n)
// becomes 0. Returns the factor by which the row's outputs so far must be multiplied.
static MS_KERNEL REAL R(soft_row)(REAL *s, int64_t valid, int64_t n, REAL *max, REAL *sum)
{
    int64_t used = (valid + 15) / 16 * 16;
    R(fill_tail)(s, valid, used, s[0]);  // pad with a value of the row, which cannot change the maximum
    REAL m = R(ms__row_max)(s, used), factor;
    m = m > *max ? m : *max;
    if (m == -(REAL)INFINITY) {  // all keys so far are masked
        for (int64_t j = 0; j < n; j++) s[j] = 0;
        return 1;
    }
    R(ms__row_exp)(s, s, m, used);
    R(fill_tail)(s, valid, n, 0);
    factor = *max == -(REAL)INFINITY ? 0 : EXP(*max - m);
    *sum = *sum * factor + R(ms__row_sum)(s, used);
    *max = m;
    return factor;
}

// Divides the outputs by the sums of their rows (a sum of 0: all keys are masked, the outputs are 0), and computes
// lse = max + log(sum).
static MS_KERNEL void R(finish_rows)(REAL *o, int64_t wide, int64_t rows, const REAL *max, const REAL *sum, REAL *lse)
{
    for (int64_t r = 0; r < rows; r++) lse[r] = max[r] + LOG(sum[r]);
    for (int64_t r = 0; r < rows; r++) {
        REAL scale = sum[r] > 0 || sum[r] != sum[r] ? 1 / sum[r] : 0;
        for (int64_t j = 0; j < wide; j++) o[r * wide + j] *= scale;
    }
}

// s = the tile's rows (a) times its keys (columns of bt). Each group of `step` rows stops at the last key that it may
// attend to.
static void R(scores)(const attend *w, tile t, const REAL *a, const REAL *bt, REAL *s)
{
    int64_t step = tile_step(w, t);
    for (int64_t r = 0; r < t.rows; r += step) {
        int64_t rows = t.rows - r < step ? t.rows - r : step;
        OPERANDS x = { a + r * w->wide, w->wide, 1, bt + t.j0, w->keys, s + r * CHUNK, CHUNK, NULL, false };
        R(ms__block)(rows, (seen(w, t.i0 + r + rows, t.j0, t.n) + 15) / 16 * 16, w->d, &x);
    }
}

// o = s times the tile's rows of b; with `add`, the product is added to o.
static void R(mix)(const attend *w, tile t, const REAL *s, const REAL *b, REAL *o, bool add)
{
    int64_t step = tile_step(w, t);
    for (int64_t r = 0; r < t.rows; r += step) {
        int64_t rows = t.rows - r < step ? t.rows - r : step;
        OPERANDS x = { s + r * CHUNK, CHUNK, 1, b + t.j0 * w->wide, w->wide, o + r * w->wide, w->wide, NULL, add };
        R(ms__block)(rows, w->wide, seen(w, t.i0 + r + rows, t.j0, t.n), &x);
    }
}

// Computes out = softmax(q k^T scale + mask) v and the logsumexp of every row.
static void R(attend_head)(const attend *w, int64_t head, REAL *room)
{
    int64_t d = w->d, wide = w->wide, keys = w->keys;
    REAL *kt = room, *v = kt + d * keys, *q = v + w->tk * wide, *o = q + ROWS * wide, *s = o + ROWS * wide,
         *keep = s + ROWS * CHUNK;
    R(load_rows)(w, v, (head_rows) { &w->k, head, 0, w->tk }, 1);
    R(ms__pack)(kt, keys, &(ms_matrix) { .data = v, .rs = 1, .cs = wide }, d, w->tk);
    R(load_rows)(w, v, (head_rows) { &w->v, head, 0, w->tk }, 1);
    for (int64_t i0 = 0; i0 < w->tq; i0 += ROWS) {
        int64_t rows = w->tq - i0 < ROWS ? w->tq - i0 : ROWS, end = w->causal && i0 + rows < w->tk ? i0 + rows : w->tk;
        REAL max[ROWS], sum[ROWS];
        for (int r = 0; r < ROWS; r++) max[r] = -(REAL)INFINITY, sum[r] = 0;
        R(load_rows)(w, q, (head_rows) { &w->q, head, i0, rows }, (REAL)w->scale);
        if (end == 0) memset(o, 0, (size_t)(rows * wide) * sizeof *o);
        for (int64_t j0 = 0; j0 < end; j0 += CHUNK) {
            int64_t n = end - j0 < CHUNK ? end - j0 : CHUNK, padded = (n + 15) / 16 * 16;
            const tile t = { i0, rows, j0, n };
            R(scores)(w, t, q, kt, s);
            for (int64_t r = 0; r < rows; r++) {
                REAL *row = s + r * CHUNK;
                int64_t i = i0 + r, valid = seen(w, i + 1, j0, n);
                if (w->mask.data) R(mask_row)(w, head, i, j0, valid, row);
                REAL factor = R(soft_row)(row, valid, padded, &max[r], &sum[r]);
                if (j0 > 0)
                    for (int64_t j = 0; j < wide; j++) o[r * wide + j] *= factor;
                if (w->p > 0) {
                    R(keep_row)(w, head, i, j0, valid, keep);
                    for (int64_t j = 0; j < valid; j++) row[j] *= keep[j];
                }
            }
            R(mix)(w, t, s, v, o, j0 > 0);
        }
        R(finish_rows)(o, wide, rows, max, sum, (REAL *)w->lse + head * w->tq + i0);
        R(store_rows)(w, (head_rows) { &w->o, head, i0, rows }, o);
    }
}

// One row of scores: s is S and ds is dP. Sets s = keep * P and ds = P * (keep * dP - delta), where P = exp(S - lse).
// keep is NULL without dropout; then up to 15 numbers beyond `valid` are overwritten, too.
static MS_KERNEL void R(grad_row)(REAL *s, REAL *ds, const REAL *keep, REAL lse, REAL delta, int64_t valid)
{
    int64_t used = (valid + 15) / 16 * 16;
    if (keep)
        for (int64_t j = 0; j < valid; j++) {
            REAL p = R(ms__soft_exp)(s[j] - lse);
            ds[j] = p * (keep[j] * ds[j] - delta);
            s[j] = p * keep[j];
        }
    else
        for (int64_t j = 0; j < used; j++) {
            REAL p = R(ms__soft_exp)(s[j] - lse);
            ds[j] = p * (ds[j] - delta);
            s[j] = p;
        }
}

// With g, the gradient of the output o, and without dropout: dv = P^T g, ds = P (g v^T - delta), dq = ds k scale, dk =
// ds^T q scale. delta: per row, the dot product of g and o minus the gradient of the logsumexp.
static void R(attend_head_backward)(const attend *w, int64_t head, REAL *room)
{
    int64_t d = w->d, wide = w->wide, keys = w->keys;
    REAL *kt = room, *vt = kt + d * keys, *k = vt + d * keys, *dk = k + w->tk * wide, *dv = dk + w->tk * wide;
    REAL *q = dv + w->tk * wide, *g = q + ROWS * wide, *o = g + ROWS * wide, *s = o + ROWS * wide,
         *ds = s + ROWS * CHUNK, *keep = ds + ROWS * CHUNK;
    const head_rows all_k = { &w->k, head, 0, w->tk }, all_v = { &w->v, head, 0, w->tk };
    R(load_rows)(w, k, all_v, 1);
    R(ms__pack)(vt, keys, &(ms_matrix) { .data = k, .rs = 1, .cs = wide }, d, w->tk);
    R(load_rows)(w, k, all_k, 1);
    R(ms__pack)(kt, keys, &(ms_matrix) { .data = k, .rs = 1, .cs = wide }, d, w->tk);
    memset(dk, 0, (size_t)(2 * w->tk * wide) * sizeof *dk);
    for (int64_t i0 = 0; i0 < w->tq; i0 += ROWS) {
        int64_t rows = w->tq - i0 < ROWS ? w->tq - i0 : ROWS, end = w->causal && i0 + rows < w->tk ? i0 + rows : w->tk;
        REAL delta[ROWS];
        R(load_rows)(w, o, (head_rows) { &w->o, head, i0, rows }, 1);
        R(load_rows)(w, g, (head_rows) { &w->g, head, i0, rows }, 1);
        for (int64_t r = 0; r < rows; r++) {
            delta[r] = R(ms__row_dot)(g + r * wide, o + r * wide, wide);
            if (w->g_lse) delta[r] -= ((const REAL *)w->g_lse)[head * w->tq + i0 + r];
        }
        R(load_rows)(w, q, (head_rows) { &w->q, head, i0, rows }, (REAL)w->scale);
        memset(o, 0, (size_t)(rows * wide) * sizeof *o);  // from here on, o holds dq
        for (int64_t j0 = 0; j0 < end; j0 += CHUNK) {
            int64_t n = end - j0 < CHUNK ? end - j0 : CHUNK, padded = (n + 15) / 16 * 16;
            const tile t = { i0, rows, j0, n };
            R(scores)(w, t, q, kt, s);
            R(scores)(w, t, g, vt, ds);
            for (int64_t r = 0; r < rows; r++) {
                REAL *row = s + r * CHUNK, *grad = ds + r * CHUNK;
                int64_t i = i0 + r, valid = seen(w, i + 1, j0, n);
                REAL lse = ((const REAL *)w->lse)[head * w->tq + i];
                if (w->mask.data) R(mask_row)(w, head, i, j0, valid, row);
                if (w->p > 0) R(keep_row)(w, head, i, j0, valid, keep);
                if (lse == -(REAL)INFINITY) valid = 0;  // all keys are masked
                R(grad_row)(row, grad, w->p > 0 ? keep : NULL, lse, delta[r], valid);
                R(fill_tail)(row, valid, padded, 0);
                R(fill_tail)(grad, valid, padded, 0);
                if (w->dmask) memcpy((REAL *)w->dmask + (head * w->tq + i) * w->tk + j0, grad, (size_t)n * sizeof *ds);
            }
            OPERANDS x = { s, 1, CHUNK, g, wide, dv + j0 * wide, wide, NULL, true };
            R(ms__block)(n, wide, rows, &x);
            x.a = ds, x.b = q, x.c = dk + j0 * wide;
            R(ms__block)(n, wide, rows, &x);
            R(mix)(w, t, ds, k, o, true);
        }
        if (w->dmask && end < w->tk)
            for (int64_t r = 0; r < rows; r++)
                memset((REAL *)w->dmask + (head * w->tq + i0 + r) * w->tk + end, 0, (size_t)(w->tk - end) * sizeof *ds);
        if (!w->dq.data) continue;
        for (int64_t j = 0; j < rows * wide; j++) o[j] *= (REAL)w->scale;
        R(store_rows)(w, (head_rows) { &w->dq, head, i0, rows }, o);
    }
    if (w->dk.data) R(store_rows)(w, (head_rows) { &w->dk, head, 0, w->tk }, dk);
    if (w->dv.data) R(store_rows)(w, (head_rows) { &w->dv, head, 0, w->tk }, dv);
}
#undef OPERANDS
