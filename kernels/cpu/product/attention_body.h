// SPDX-License-Identifier: MIT
// cpu/product/attention_body.h -- attention over one head; attention.c includes it once per accumulation type.

// Loads rows [first, first + n) of a head of x as [n][wide], multiplied by scale; columns from d on become 0.
static MS_KERNEL void R(load_rows)(REAL *out, const part *x, int64_t head, int64_t first, int64_t n, int64_t d,
                                   int64_t wide, REAL scale)
{
    int64_t start = head_start(x, head);
    if (x->dtype == (sizeof(REAL) == 8 ? MS_F64 : MS_F32) && x->cs == 1 && d == wide) {  // copy whole vectors
        for (int64_t r = 0; r < n; r++, out += wide) {
            const REAL *row = (const REAL *)x->data + start + (first + r) * x->rs;
            for (int64_t j = 0; j < wide; j += 16) *(R(ms_lanes) *)(out + j) = *(const R(ms_lanes) *)(row + j) * scale;
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

static MS_KERNEL void R(store_rows)(const part *x, int64_t head, int64_t first, int64_t n, int64_t d, const REAL *from,
                                    int64_t wide)
{
    int64_t start = head_start(x, head);
    for (int64_t r = 0; r < n; r++, from += wide) {
        int64_t at = start + (first + r) * x->rs;
        REAL *row = ROW_AT(x->dtype, x->data, at, x->cs, (REAL *)from);
        if (row != from) memcpy(row, from, (size_t)d * sizeof *from);
        ROW_OUT(x->dtype, x->data, at, x->cs, d, row);
    }
}

// Adds the mask to n scores of query i, from key j0 on. Scores of masked keys become -inf.
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

// Turns the scores s[0 .. valid) of a row into probabilities relative to the row's running maximum and sum; s[valid ..
// n) becomes 0. Returns the factor by which the previous sum and outputs must be multiplied.
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

// Divides the outputs by the sums of their rows and computes lse = max + log(sum).
static MS_KERNEL void R(finish_rows)(REAL *o, int64_t wide, int64_t rows, const REAL *max, const REAL *sum, REAL *lse)
{
    for (int64_t r = 0; r < rows; r++) lse[r] = max[r] + LOG(sum[r]);
    for (int64_t r = 0; r < rows; r++) {
        REAL scale = sum[r] > 0 || sum[r] != sum[r] ? 1 / sum[r] : 0;
        for (int64_t j = 0; j < wide; j++) o[r * wide + j] *= scale;
    }
}

// The number of keys in [j0, j0 + n) that at least one query before i may attend to. Causal blocks are processed 8 rows
// at a time.
static inline int64_t R(seen)(const attend *w, int64_t i, int64_t j0, int64_t n)
{
    return !w->causal || i - j0 >= n ? n : i > j0 ? i - j0 : 0;
}

// s = rows of a times columns of bt from j0 on. Each group of 8 rows stops at the last key that it may attend to.
static void R(scores)(const attend *w, const REAL *a, const REAL *bt, int64_t i0, int64_t j0, int64_t rows, int64_t n,
                      REAL *s)
{
    int64_t step = w->causal && i0 + 1 - j0 < n ? 8 : rows;
    for (int64_t r = 0; r < rows; r += step) {
        int64_t some = rows - r < step ? rows - r : step, columns = (R(seen)(w, i0 + r + some, j0, n) + 15) / 16 * 16;
        R(ms__block)(some, columns, w->d, a + r * w->wide, w->wide, 1, bt + j0, w->keys, s + r * CHUNK, CHUNK, false);
    }
}

// o = s times the rows of b from j0 on; or o += that product.
static void R(mix)(const attend *w, const REAL *s, const REAL *b, int64_t i0, int64_t j0, int64_t rows, int64_t n,
                   REAL *o, bool add)
{
    int64_t step = w->causal && i0 + 1 - j0 < n ? 8 : rows;
    for (int64_t r = 0; r < rows; r += step) {
        int64_t some = rows - r < step ? rows - r : step, keys = R(seen)(w, i0 + r + some, j0, n);
        R(ms__block)
        (some, w->wide, keys, s + r * CHUNK, CHUNK, 1, b + j0 * w->wide, w->wide, o + r * w->wide, w->wide, add);
    }
}

// Computes out = softmax(q k^T scale + mask) v and the logsumexp of every row.
static void R(attend_head)(const attend *w, int64_t head, REAL *room)
{
    int64_t d = w->d, wide = w->wide, keys = w->keys;
    REAL *kt = room, *v = kt + d * keys, *q = v + w->tk * wide, *o = q + ROWS * wide, *s = o + ROWS * wide,
         *keep = s + ROWS * CHUNK;
    R(load_rows)(v, &w->k, head, 0, w->tk, d, wide, 1);
    R(ms__pack)(kt, keys, v, 1, wide, d, w->tk);
    R(load_rows)(v, &w->v, head, 0, w->tk, d, wide, 1);
    for (int64_t i0 = 0; i0 < w->tq; i0 += ROWS) {
        int64_t rows = w->tq - i0 < ROWS ? w->tq - i0 : ROWS, end = w->causal && i0 + rows < w->tk ? i0 + rows : w->tk;
        REAL max[ROWS], sum[ROWS];
        for (int r = 0; r < ROWS; r++) max[r] = -(REAL)INFINITY, sum[r] = 0;
        R(load_rows)(q, &w->q, head, i0, rows, d, wide, (REAL)w->scale);
        if (end == 0) memset(o, 0, (size_t)(rows * wide) * sizeof *o);
        for (int64_t j0 = 0; j0 < end; j0 += CHUNK) {
            int64_t n = end - j0 < CHUNK ? end - j0 : CHUNK, padded = (n + 15) / 16 * 16;
            R(scores)(w, q, kt, i0, j0, rows, n, s);
            for (int64_t r = 0; r < rows; r++) {
                REAL *row = s + r * CHUNK;
                int64_t i = i0 + r, valid = w->causal && i + 1 - j0 < n ? (i + 1 > j0 ? i + 1 - j0 : 0) : n;
                if (w->mask.data) R(mask_row)(w, head, i, j0, valid, row);
                REAL factor = R(soft_row)(row, valid, padded, &max[r], &sum[r]);
                if (j0 > 0)
                    for (int64_t j = 0; j < wide; j++) o[r * wide + j] *= factor;
                if (w->p > 0) {
                    R(keep_row)(w, head, i, j0, valid, keep);
                    for (int64_t j = 0; j < valid; j++) row[j] *= keep[j];
                }
            }
            R(mix)(w, s, v, i0, j0, rows, n, o, j0 > 0);
        }
        R(finish_rows)(o, wide, rows, max, sum, (REAL *)w->lse + head * w->tq + i0);
        R(store_rows)(&w->o, head, i0, rows, d, o, wide);
    }
}

// P = exp(S - lse) in s; ds = P (keep dP - delta), then s = keep P. n is a multiple of 16.
static MS_KERNEL void R(grad_row)(REAL *s, REAL *ds, const REAL *keep, REAL lse, REAL delta, int64_t valid, int64_t n)
{
    if (lse == -(REAL)INFINITY) valid = 0;  // all keys are masked
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
    R(fill_tail)(s, valid, n, 0);
    R(fill_tail)(ds, valid, n, 0);
}

// dv = P^T do, ds = P (do v^T - delta), dq = ds k scale, dk = ds^T q scale. delta = do . o minus the gradient of the
// logsumexp.
static void R(attend_head_backward)(const attend *w, int64_t head, REAL *room)
{
    int64_t d = w->d, wide = w->wide, keys = w->keys;
    REAL *kt = room, *vt = kt + d * keys, *k = vt + d * keys, *dk = k + w->tk * wide, *dv = dk + w->tk * wide;
    REAL *q = dv + w->tk * wide, *g = q + ROWS * wide, *o = g + ROWS * wide, *s = o + ROWS * wide,
         *ds = s + ROWS * CHUNK, *keep = ds + ROWS * CHUNK;
    R(load_rows)(k, &w->v, head, 0, w->tk, d, wide, 1);
    R(ms__pack)(vt, keys, k, 1, wide, d, w->tk);
    R(load_rows)(k, &w->k, head, 0, w->tk, d, wide, 1);
    R(ms__pack)(kt, keys, k, 1, wide, d, w->tk);
    memset(dk, 0, (size_t)(2 * w->tk * wide) * sizeof *dk);
    for (int64_t i0 = 0; i0 < w->tq; i0 += ROWS) {
        int64_t rows = w->tq - i0 < ROWS ? w->tq - i0 : ROWS, end = w->causal && i0 + rows < w->tk ? i0 + rows : w->tk;
        REAL delta[ROWS];
        R(load_rows)(o, &w->o, head, i0, rows, d, wide, 1);
        R(load_rows)(g, &w->g, head, i0, rows, d, wide, 1);
        for (int64_t r = 0; r < rows; r++) {
            delta[r] = R(ms__row_dot)(g + r * wide, o + r * wide, wide);
            if (w->g_lse) delta[r] -= ((const REAL *)w->g_lse)[head * w->tq + i0 + r];
        }
        R(load_rows)(q, &w->q, head, i0, rows, d, wide, (REAL)w->scale);
        memset(o, 0, (size_t)(rows * wide) * sizeof *o);  // from here on, o holds dq
        for (int64_t j0 = 0; j0 < end; j0 += CHUNK) {
            int64_t n = end - j0 < CHUNK ? end - j0 : CHUNK, padded = (n + 15) / 16 * 16;
            R(scores)(w, q, kt, i0, j0, rows, n, s);
            R(scores)(w, g, vt, i0, j0, rows, n, ds);
            for (int64_t r = 0; r < rows; r++) {
                int64_t i = i0 + r, valid = w->causal && i + 1 - j0 < n ? (i + 1 > j0 ? i + 1 - j0 : 0) : n;
                if (w->mask.data) R(mask_row)(w, head, i, j0, valid, s + r * CHUNK);
                if (w->p > 0) R(keep_row)(w, head, i, j0, valid, keep);
                R(grad_row)
                (s + r * CHUNK, ds + r * CHUNK, w->p > 0 ? keep : NULL, ((const REAL *)w->lse)[head * w->tq + i],
                 delta[r], valid, padded);
                if (w->dmask)
                    memcpy((REAL *)w->dmask + (head * w->tq + i) * w->tk + j0, ds + r * CHUNK, (size_t)n * sizeof *ds);
            }
            R(ms__block)(n, wide, rows, s, 1, CHUNK, g, wide, dv + j0 * wide, wide, true);
            R(ms__block)(n, wide, rows, ds, 1, CHUNK, q, wide, dk + j0 * wide, wide, true);
            R(mix)(w, ds, k, i0, j0, rows, n, o, true);
        }
        if (w->dmask && end < w->tk)
            for (int64_t r = 0; r < rows; r++)
                memset((REAL *)w->dmask + (head * w->tq + i0 + r) * w->tk + end, 0, (size_t)(w->tk - end) * sizeof *ds);
        if (!w->dq.data) continue;
        for (int64_t j = 0; j < rows * wide; j++) o[j] *= (REAL)w->scale;
        R(store_rows)(&w->dq, head, i0, rows, d, o, wide);
    }
    if (w->dk.data) R(store_rows)(&w->dk, head, 0, w->tk, d, dk, wide);
    if (w->dv.data) R(store_rows)(&w->dv, head, 0, w->tk, d, dv, wide);
}
