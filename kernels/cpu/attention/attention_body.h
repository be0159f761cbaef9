// SPDX-License-Identifier: MIT
// cpu/attention/attention_body.h -- attention over blocks of queries and keys; attention.c includes it once per
// accumulation type.
//
// A tile of scores has one row for each key and one column for each query: s[key][QUERIES + 16]. All that softmax does
// is then a loop over adjacent columns, without sums across a vector, and the tiles of S^T = K Q^T, dP^T = V dO^T,
// dV = P^T dO, dK = dS^T Q, O = P V and dQ = dS K need no other transposed operand than Q and dO. The columns beyond
// the last query, up to a multiple of LANES, hold numbers that nothing reads.

#define OPERANDS R(ms_operands)
// LANES columns are computed together, QUERIES columns make a tile. WIDTH: from a row of a tile to the next; not a
// power of two, or they would share sets of the cache.
enum { R(LANES) = 64 / sizeof(REAL), R(QUERIES) = 4 * R(LANES), R(WIDTH) = 5 * R(LANES) };
#define LANES R(LANES)
#define QUERIES R(QUERIES)
#define WIDTH R(WIDTH)

static int64_t R(queries)(void) { return QUERIES; }

// Loads rows of a head as [n][wide], multiplied by scale; columns from d on become 0.
static MS_KERNEL void R(load_rows)(const attend *w, REAL *out, head_rows h, REAL scale)
{
    const part *x = h.of;
    int64_t start = head_start(x, h.head), first = h.first, n = h.n, d = w->d, wide = w->wide;
    for (int64_t r = 0; r < n; r++, out += wide) {
        const REAL *row = ROW_IN(x->dtype, x->data, start + (first + r) * x->rs, x->cs, d, out);
        if (row != out || scale != 1)
            for (int64_t j = 0; j < d; j++) out[j] = row[j] * scale;
        for (int64_t j = d; j < wide; j++) out[j] = 0;
    }
}

// Where rows of a head lie in a tensor, or NULL if they are not dense or of another type: they are loaded and stored.
static REAL *R(rows_in)(const attend *w, head_rows h)
{
    const part *x = h.of;
    if (!x->data || x->dtype != (sizeof(REAL) == 8 ? MS_F64 : MS_F32) || x->cs != 1 || x->rs != w->wide ||
        w->d != w->wide)
        return NULL;
    return (REAL *)x->data + head_start(x, h.head) + h.first * x->rs;
}

// As load_rows with scale 1, unless the rows can be read in place.
static const REAL *R(rows_of)(const attend *w, REAL *room, head_rows h)
{
    const REAL *rows = R(rows_in)(w, h);
    if (!rows) R(load_rows)(w, room, h, 1);
    return rows ? rows : room;
}

// Rows of 0 to be added to: those of a tensor, or room for them, to be stored by store_rows.
static REAL *R(rows_to)(const attend *w, REAL *room, head_rows h)
{
    REAL *rows = R(rows_in)(w, h);
    if (!rows) rows = room;
    memset(rows, 0, (size_t)(h.n * w->wide) * sizeof *rows);
    return rows;
}

static MS_KERNEL void R(store_rows)(const attend *w, head_rows h, const REAL *from)
{
    const part *x = h.of;
    if (from == R(rows_in)(w, h)) return;
    int64_t start = head_start(x, h.head);
    for (int64_t r = 0; r < h.n; r++, from += w->wide) {
        int64_t at = start + (h.first + r) * x->rs;
        REAL *row = ROW_AT(x->dtype, x->data, at, x->cs, (REAL *)from);
        if (row != from) memcpy(row, from, (size_t)w->d * sizeof *from);
        ROW_OUT(x->dtype, x->data, at, x->cs, w->d, row);
    }
}

// Transposes a square of 8 x 8 floats in registers.
typedef REAL R(oct) __attribute__((vector_size(8 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
MS_INLINE void R(turn_8)(REAL *out, int64_t out_rs, const REAL *in, int64_t in_rs)
{
    R(oct) x[8], y[8];
#pragma GCC unroll 8
    for (int l = 0; l < 8; l++) x[l] = *(const R(oct) *)(in + l * in_rs);
#pragma GCC unroll 4
    for (int l = 0; l < 8; l += 2) {
        y[l] = __builtin_shufflevector(x[l], x[l + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        y[l + 1] = __builtin_shufflevector(x[l], x[l + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 4
    for (int l = 0; l < 4; l++) {
        int a = l / 2 * 4 + l % 2;
        x[l] = __builtin_shufflevector(y[a], y[a + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        x[l + 4] = __builtin_shufflevector(y[a], y[a + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    // x[l], l = 0..3: columns 0, 2 (and 4, 6) of rows 0-3 (l < 2) or 4-7; x[l + 4]: columns 1, 3 (5, 7)
#pragma GCC unroll 2
    for (int l = 0; l < 2; l++) {
        *(R(oct) *)(out + (2 * l) * out_rs) = __builtin_shufflevector(x[l], x[l + 2], 0, 1, 2, 3, 8, 9, 10, 11);
        *(R(oct) *)(out + (2 * l + 1) * out_rs) = __builtin_shufflevector(x[l + 4], x[l + 6], 0, 1, 2, 3, 8, 9, 10, 11);
        *(R(oct) *)(out + (2 * l + 4) * out_rs) = __builtin_shufflevector(x[l], x[l + 2], 4, 5, 6, 7, 12, 13, 14, 15);
        *(R(oct) *)(out + (2 * l + 5) * out_rs) =
            __builtin_shufflevector(x[l + 4], x[l + 6], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
// out[c][r] = in[r][c] for r < rows, c < cols.
static MS_KERNEL void R(turn)(REAL *out, int64_t out_rs, const REAL *in, int64_t in_rs, int64_t rows, int64_t cols)
{
    int64_t r = 0;
    for (; sizeof(REAL) == 4 && r + 8 <= rows; r += 8) {
        int64_t c = 0;
        for (; c + 8 <= cols; c += 8) R(turn_8)(out + c * out_rs + r, out_rs, in + r * in_rs + c, in_rs);
        for (; c < cols; c++)
            for (int64_t l = r; l < r + 8; l++) out[c * out_rs + l] = in[l * in_rs + c];
    }
    for (; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) out[c * out_rs + r] = in[r * in_rs + c];
}

// Loads n elements of row i of a head's mask, whose elements begin at `start`, from key j0 on: numbers to add to the
// scores. A bool mask gives 0 for keys that are allowed, -inf for others.
static MS_KERNEL void R(mask_row)(const part *m, int64_t start, int64_t i, int64_t j0, int64_t n, REAL *out)
{
    int64_t at = start + i * m->rs + j0 * m->cs;
    if (m->dtype == MS_BOOL && m->cs == 1)
        for (int64_t j = 0; j < n; j++) out[j] = ((const uint8_t *)m->data)[at + j] ? 0 : -(REAL)INFINITY;
    else if (m->dtype == MS_BOOL)
        for (int64_t j = 0; j < n; j++) out[j] = ((const uint8_t *)m->data)[at + j * m->cs] ? 0 : -(REAL)INFINITY;
    else if (m->dtype == MS_F64)
        for (int64_t j = 0; j < n; j++) out[j] = (REAL)((const double *)m->data)[at + j * m->cs];
    else
        for (int64_t j = 0; j < n; j += 64) {
            float t[64];
            int64_t some = n - j < 64 ? n - j : 64;
            const float *row = ms__row_in(m->dtype, m->data, at + j * m->cs, m->cs, some, t);
            for (int64_t l = 0; l < some; l++) out[j + l] = (REAL)row[l];
        }
}

// A score whose mask is -inf is -inf, whatever it was.
MS_INLINE REAL R(masked)(REAL s, REAL mask) { return mask == -(REAL)INFINITY ? mask : s + mask; }

// mask[key][query]: the mask of a tile. Returns whether any of it is not -inf. room: for LANES rows of the mask.
static MS_KERNEL bool R(mask_tile)(const attend *w, tile t, REAL *mask, REAL *room)
{
    const part *m = &w->mask;
    bool in_place = m->dtype == (sizeof(REAL) == 8 ? MS_F64 : MS_F32) && m->cs == 1;
    int64_t start = head_start(m, t.head);
    if (t.rows < t.lanes) memset(mask, 0, (size_t)(t.n * WIDTH) * sizeof *mask);
    if (m->rs == 0) {  // the same for all queries
        R(mask_row)(m, start, 0, t.j0, t.n, room);
        for (int64_t k = 0; k < t.n; k++)
            for (int64_t r = 0; r < t.lanes; r++) mask[k * WIDTH + r] = room[k];
    } else if (in_place) R(turn)(mask, WIDTH, (const REAL *)m->data + start + t.i0 * m->rs + t.j0, m->rs, t.rows, t.n);
    else
        for (int64_t r = 0; r < t.rows; r += LANES) {
            int64_t n = t.rows - r < LANES ? t.rows - r : LANES;
            for (int64_t q = 0; q < n; q++) R(mask_row)(m, start, t.i0 + r + q, t.j0, t.n, room + q * KEYS);
            R(turn)(mask + r, WIDTH, room, KEYS, n, t.n);
        }
    if (mask[0] != -(REAL)INFINITY || mask[(t.n - 1) * WIDTH + t.rows - 1] != -(REAL)INFINITY) return true;
    for (int64_t k = 0; k < t.n; k++)
        for (int64_t r = 0; r < t.rows; r++)
            if (mask[k * WIDTH + r] != -(REAL)INFINITY) return true;
    return false;
}

// keep[]: 0 for dropped probabilities, 1 / (1 - p) for the others.
static MS_KERNEL void R(keep_row)(const attend *w, int64_t head, int64_t i, int64_t j0, int64_t n, REAL *keep)
{
    uint32_t words[4 * MS_MASK_BLOCKS];
    uint64_t limit = ms__mask_limit(w->a.p),
             at = ((uint64_t)head * (uint64_t)w->tq + (uint64_t)i) * (uint64_t)w->tk + (uint64_t)j0;
    REAL scale = w->a.p < 1 ? (REAL)(1 / (1 - w->a.p)) : 0;
    for (int64_t j = 0; j < n;) {
        int64_t skip = (int64_t)(at & 3), some = 4 * MS_MASK_BLOCKS - skip < n - j ? 4 * MS_MASK_BLOCKS - skip : n - j;
        ms__mask_words(words, (skip + some + 3) / 4, w->seed, w->offset, at / 4);
        for (int64_t q = 0; q < some; q++) keep[j + q] = words[skip + q] >= limit ? scale : 0;
        j += some;
        at += (uint64_t)some;
    }
}
// The factors of a tile: keep[key][query].
static MS_KERNEL void R(keep_tile)(const attend *w, tile t, REAL *keep)
{
    REAL row[KEYS];
    for (int64_t r = 0; r < t.rows; r++) {
        R(keep_row)(w, t.head, t.i0 + r, t.j0, t.n, row);
        for (int64_t k = 0; k < t.n; k++) keep[k * WIDTH + r] = row[k];
    }
}

// s = k q^T. k: rows of t.n keys; qt[d][WIDTH]: the queries as columns. ahead: fetches what comes next.
static void R(scores)(const attend *w, tile t, const REAL *k, const REAL *qt, REAL *s, bool ahead)
{
    int64_t step = ahead || ragged(w, t) ? 12 : t.n;
    for (int64_t j = 0; j < t.n; j += step) {
        int64_t n = t.n - j < step ? t.n - j : step, first = first_query(w, t, j) / LANES * LANES;
        OPERANDS x = { k + j * w->wide, w->wide, 1, qt + first, WIDTH, s + j * WIDTH + first, WIDTH, NULL, false };
        R(ms__block)(n, t.lanes - first, w->d, &x, NULL);
        if (ahead) fetch_ahead(w, t, j, n);
    }
}

// o = factor o + s^T b: the sum over keys for each query. b: rows of t.n keys. factor: NULL (1), or one for each query.
static void R(over_keys)(const attend *w, tile t, const REAL *s, const REAL *b, REAL *o, const REAL *factor)
{
    int64_t step = ragged(w, t) ? LANES : t.rows;
    for (int64_t r = 0; r < t.rows; r += step) {
        int64_t rows = t.rows - r < step ? t.rows - r : step;
        OPERANDS x = { s + r, 1, WIDTH, b, w->wide, o + r * w->wide, w->wide, NULL, true };
        R(ms__block)(rows, w->wide, key_count(w, t, r + rows), &x, factor ? factor + r : NULL);
    }
}

// o += s b: the sum over queries for each key. b: rows of queries.
static void R(over_queries)(const attend *w, tile t, const REAL *s, const REAL *b, REAL *o)
{
    int64_t step = ragged(w, t) ? 12 : t.n;
    for (int64_t j = 0; j < t.n; j += step) {
        int64_t n = t.n - j < step ? t.n - j : step, first = first_query(w, t, j) / LANES * LANES;
        OPERANDS x = {
            s + j * WIDTH + first, WIDTH, 1, b + first * w->wide, w->wide, o + j * w->wide, w->wide, NULL, true
        };
        R(ms__block)(n, w->wide, t.rows - first, &x, NULL);
    }
}

// Caps n rows of scores, columns [r, r + LANES). slope: NULL, or where to store the cap's slopes.
MS_INLINE void R(cap)(const attend *w, int64_t r, int64_t n, REAL *s, REAL *slope)
{
    REAL cap = (REAL)w->a.cap;
    for (int64_t k = 0; k < n; k++)
        for (int64_t l = r; l < r + LANES; l++) {
            REAL c = s[k * WIDTH + l] = R(ms_capped)(s[k * WIDTH + l], cap);
            if (slope) slope[k * WIDTH + l] = R(ms_cap_slope)(c, cap);
        }
}

// Sets the scores of keys that a query may not attend to to -inf, and adds the mask, which may be NULL. Columns
// [r, r + LANES).
MS_INLINE void R(hide)(const attend *w, tile t, int64_t r, int64_t n, const REAL *mask, REAL *s)
{
    if (mask)
        for (int64_t k = 0; k < n; k++)
            for (int64_t l = r; l < r + LANES; l++) s[k * WIDTH + l] = R(masked)(s[k * WIDTH + l], mask[k * WIDTH + l]);
    // The distance from query i0 + r to key j0 is -k0. The first loop begins with the first key that is too late for a
    // query, the second ends with the last one that is too early.
    int64_t k0 = t.i0 + r - t.j0, k = k0 + w->a.span.high + 1, early = k0 + w->a.span.low + LANES - 1;
    for (k = k < 0 ? 0 : k; k < n; k++)
        for (int64_t l = 0; l < LANES; l++)
            s[k * WIDTH + r + l] = l < k - k0 - w->a.span.high ? -(REAL)INFINITY : s[k * WIDTH + r + l];
    for (k = 0; k < early && k < n; k++)
        for (int64_t l = 0; l < LANES; l++)
            s[k * WIDTH + r + l] = l > k - k0 - w->a.span.low ? -(REAL)INFINITY : s[k * WIDTH + r + l];
}

// Calls DO(k, l, a) for n rows k, a multiple of 4, and LANES columns l; a: the accumulators of `rows` rows, which
// shorten the chains of dependent operations.
#define EACH_ROW(rows, DO)                \
    for (int64_t k = 0; k < n; k += rows) \
        for (int q = 0; q < rows; q++) MS_LANES(LANES, l) DO(k + q, l, q * LANES + l)

// The largest score of each query so far, the sum of exp(score - max), and by what its outputs so far must be
// multiplied.
typedef struct R(softmax) {
    REAL max[QUERIES], sum[QUERIES], factor[QUERIES];
} R(softmax);

// Updates *f by a tile of scores, which become exp(score - max).
static MS_KERNEL void R(soften)(const attend *w, tile t, const REAL *mask, REAL *s, R(softmax) * f)
{
    for (int64_t r = 0; r < t.lanes; r += LANES) {
        int64_t n = key_count(w, t, r + LANES);
        REAL a[4 * LANES], m[LANES], *x = s + r;
        if (w->a.cap > 0) R(cap)(w, r, n, s, NULL);
        R(hide)(w, t, r, n, mask, s);
        for (; n % 4; n++)
            for (int l = 0; l < LANES; l++) x[n * WIDTH + l] = -(REAL)INFINITY;
        for (int l = 0; l < 4 * LANES; l++) a[l] = -(REAL)INFINITY;
#define DO(k, l, i) a[i] = x[(k)*WIDTH + l] > a[i] ? x[(k)*WIDTH + l] : a[i];
        EACH_ROW(4, DO)
#undef DO
        for (int l = 0; l < 2 * LANES; l++) a[l] = a[l + 2 * LANES] > a[l] ? a[l + 2 * LANES] : a[l];
        for (int l = 0; l < LANES; l++) a[l] = a[l + LANES] > a[l] ? a[l + LANES] : a[l];
        for (int l = 0; l < LANES; l++) {
            REAL top = a[l] > f->max[r + l] ? a[l] : f->max[r + l];
            m[l] = top == -(REAL)INFINITY ? 0 : top;  // all keys so far are masked: their exponentials are 0
            f->factor[r + l] = R(ms__soft_exp)(f->max[r + l] - m[l]);
            f->max[r + l] = top;
        }
        for (int l = 0; l < 2 * LANES; l++) a[l] = 0;
#define DO(k, l, i) a[i] += x[(k)*WIDTH + l] = R(ms__soft_exp)(x[(k)*WIDTH + l] - m[l]);
        EACH_ROW(2, DO)
#undef DO
        for (int l = 0; l < LANES; l++) f->sum[r + l] = f->sum[r + l] * f->factor[r + l] + (a[l] + a[l + LANES]);
    }
}
#undef EACH_ROW

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

static MS_KERNEL void R(multiply)(REAL *s, const REAL *by, int64_t n)
{
    for (int64_t j = 0; j < n; j++) s[j] *= by[j];
}

// Loads rows of a head as columns, out[d][WIDTH], and 0 in columns up to t.lanes. Returns them as rows, in room or in
// place.
static const REAL *R(load_columns)(const attend *w, tile t, REAL *out, const part *x, REAL scale, REAL *room)
{
    head_rows h = { x, t.head, t.i0, t.rows };
    const REAL *rows = scale == 1 ? R(rows_of)(w, room, h) : room;
    if (scale != 1) R(load_rows)(w, room, h, scale);
    if (t.rows < t.lanes) memset(out, 0, (size_t)(w->d * WIDTH) * sizeof *out);
    R(turn)(out, WIDTH, rows, w->wide, t.rows, w->d);
    return rows;
}

// The part [j0, j0 + KEYS) of the keys of a block of queries.
static tile R(next_tile)(tile t, int64_t j0, int64_t end)
{
    t.j0 = j0;
    t.n = end - j0 < KEYS ? end - j0 : KEYS;
    return t;
}

static int64_t R(forward_room)(const attend *w)
{
    return w->d * WIDTH + QUERIES * w->wide + KEYS * w->wide + (w->mask.data || w->a.p > 0 ? 2 : 1) * KEYS * WIDTH;
}

// Computes out = softmax(q k^T scale + mask) v and the logsumexp of a block of queries.
static void R(attend_block)(const attend *w, int64_t task, REAL *room)
{
    tile t = query_block_of(w, task, QUERIES, LANES);
    REAL *qt = room, *o = qt + w->d * WIDTH, *rows = o + QUERIES * w->wide, *s = rows + KEYS * w->wide,
         *other = s + KEYS * WIDTH;
    R(softmax) f = { .sum = { 0 } };
    int64_t end = last_key(w, t);
    for (int r = 0; r < QUERIES; r++) f.max[r] = -(REAL)INFINITY;
    R(load_columns)(w, t, qt, &w->q, (REAL)w->a.scale, o);
    o = R(rows_to)(w, o, (head_rows) { &w->o, t.head, t.i0, t.rows });
    for (int64_t first = ms_span_first(w->a.span, t.i0), j0 = first; j0 < end; j0 += KEYS) {
        t = R(next_tile)(t, j0, end);
        if (w->mask.data && !R(mask_tile)(w, t, other, rows)) continue;
        R(scores)
        (w, t, R(rows_of)(w, rows, (head_rows) { &w->k, t.head, j0, t.n }), qt, s,
         j0 == first || t.i0 == 0 || j0 + 2 * KEYS >= end);
        R(soften)(w, t, w->mask.data ? other : NULL, s, &f);
        if (w->a.p > 0) {
            R(keep_tile)(w, t, other);
            R(multiply)(s, other, t.n * WIDTH);
        }
        R(over_keys)(w, t, s, R(rows_of)(w, rows, (head_rows) { &w->v, t.head, j0, t.n }), o, f.factor);
    }
    R(finish_rows)(o, w->wide, t.rows, f.max, f.sum, (REAL *)w->lse + t.head * w->tq + t.i0);
    R(store_rows)(w, (head_rows) { &w->o, t.head, t.i0, t.rows }, o);
}

// What backward knows of a block of queries, and its tiles. mask, keep and slope (of the cap) may be NULL.
typedef struct R(grads) {
    REAL lse[QUERIES], delta[QUERIES], *s, *ds, *mask, *keep, *slope;
} R(grads);

// s: scores, becomes P = exp(s - lse), times keep; ds: dP, becomes dS = P * (keep * dP - delta).
static MS_KERNEL void R(grad_tile)(const attend *w, tile t, const R(grads) * f)
{
    const REAL *keep = f->keep, *lse = f->lse, *delta = f->delta;
    REAL *s = f->s, *ds = f->ds;
    for (int64_t r = 0; r < t.lanes; r += LANES) {
        int64_t n = key_count(w, t, r + LANES);
        if (f->slope) R(cap)(w, r, n, s, f->slope);
        R(hide)(w, t, r, n, f->mask, s);
        for (int64_t k = 0; k < n; k++)
            if (keep)
                for (int64_t l = r; l < r + LANES; l++) {
                    REAL p = R(ms__soft_exp)(s[k * WIDTH + l] - lse[l]);
                    ds[k * WIDTH + l] = p * (keep[k * WIDTH + l] * ds[k * WIDTH + l] - delta[l]);
                    s[k * WIDTH + l] = p * keep[k * WIDTH + l];
                }
            else
                for (int64_t l = r; l < r + LANES; l++) {
                    REAL p = R(ms__soft_exp)(s[k * WIDTH + l] - lse[l]);
                    ds[k * WIDTH + l] = p * (ds[k * WIDTH + l] - delta[l]);
                    s[k * WIDTH + l] = p;
                }
        for (int64_t k = n; k < t.n; k++)
            for (int64_t l = r; l < r + LANES; l++) s[k * WIDTH + l] = ds[k * WIDTH + l] = 0;
    }
}

// From the gradients of capped scores to those of scores.
static MS_KERNEL void R(uncap)(const attend *w, tile t, const R(grads) * f)
{
    for (int64_t r = 0; r < t.lanes; r += LANES)
        for (int64_t k = 0, n = key_count(w, t, r + LANES); k < n; k++)
            for (int64_t l = r; l < r + LANES; l++) f->ds[k * WIDTH + l] *= f->slope[k * WIDTH + l];
}

static int64_t R(backward_room)(const attend *w)
{
    return 2 * w->tk * w->wide + 2 * w->d * WIDTH + 3 * QUERIES * w->wide + 2 * KEYS * w->wide +
           (2 + (w->mask.data != NULL) + (w->a.p > 0) + (w->a.cap > 0)) * KEYS * WIDTH;
}

// The gradients of one head of keys, and of the heads that share it. With g, the gradient of the output o, and without
// dropout: dv = P^T g, ds = P (g v^T - delta), dq = ds k scale, dk = ds^T q scale. delta: per row, the dot product of g
// and o minus the gradient of the logsumexp.
static void R(attend_head_backward)(const attend *w, int64_t task, REAL *room)
{
    int64_t wide = w->wide, first = task * w->k.share, blocks = w->k.share * w->blocks;
    REAL *dk = room, *dv = dk + w->tk * wide, *qt = dv + w->tk * wide, *gt = qt + w->d * WIDTH, *q = gt + w->d * WIDTH,
         *g_room = q + QUERIES * wide, *o_room = g_room + QUERIES * wide, *k_room = o_room + QUERIES * wide,
         *v_room = k_room + KEYS * wide, *tiles = v_room + KEYS * wide;
    R(grads) f = { .s = tiles, .ds = tiles + KEYS * WIDTH };
    REAL *free = f.ds + KEYS * WIDTH;
    if (w->mask.data) f.mask = free, free += KEYS * WIDTH;
    if (w->a.p > 0) f.keep = free, free += KEYS * WIDTH;
    if (w->a.cap > 0) f.slope = free;
    dk = R(rows_to)(w, dk, (head_rows) { &w->dk, first, 0, w->tk });
    dv = R(rows_to)(w, dv, (head_rows) { &w->dv, first, 0, w->tk });
    for (int64_t b = 0; b < blocks; b++) {
        tile t = query_block_of(w, first * w->blocks + b, QUERIES, LANES);
        int64_t head = t.head, end = last_key(w, t);
        const REAL *o = R(rows_of)(w, o_room, (head_rows) { &w->o, head, t.i0, t.rows }),
                   *g = R(load_columns)(w, t, gt, &w->g, 1, g_room);
        R(load_columns)(w, t, qt, &w->q, (REAL)w->a.scale, q);
        for (int64_t r = 0; r < QUERIES; r++) f.delta[r] = 0, f.lse[r] = INFINITY;  // P = 0
        for (int64_t r = 0; r < t.rows; r++) {
            int64_t at = head * w->tq + t.i0 + r;
            f.delta[r] = R(ms__row_dot)(g + r * wide, o + r * wide, wide);
            if (w->g_lse) f.delta[r] -= ((const REAL *)w->g_lse)[at];
            if (((const REAL *)w->lse)[at] != -(REAL)INFINITY) f.lse[r] = ((const REAL *)w->lse)[at];
        }
        REAL *dq = R(rows_to)(w, o_room, (head_rows) { &w->dq, head, t.i0, t.rows });
        REAL *dmask = w->dmask ? (REAL *)w->dmask + (head * w->tq + t.i0) * w->tk : NULL;
        if (dmask) memset(dmask, 0, (size_t)(t.rows * w->tk) * sizeof *dmask);
        for (int64_t j0 = ms_span_first(w->a.span, t.i0); j0 < end; j0 += KEYS) {
            t = R(next_tile)(t, j0, end);
            if (f.mask && !R(mask_tile)(w, t, f.mask, k_room)) continue;
            const REAL *k = R(rows_of)(w, k_room, (head_rows) { &w->k, head, j0, t.n }),
                       *v = R(rows_of)(w, v_room, (head_rows) { &w->v, head, j0, t.n });
            R(scores)(w, t, k, qt, f.s, false);
            R(scores)(w, t, v, gt, f.ds, false);
            if (f.keep) R(keep_tile)(w, t, f.keep);
            R(grad_tile)(w, t, &f);
            if (dmask) R(turn)(dmask + j0, w->tk, f.ds, WIDTH, t.n, t.rows);
            if (f.slope) R(uncap)(w, t, &f);
            R(over_queries)(w, t, f.s, g, dv + j0 * wide);
            R(over_queries)(w, t, f.ds, q, dk + j0 * wide);
            R(over_keys)(w, t, f.ds, k, dq, NULL);
        }
        if (!w->dq.data) continue;
        for (int64_t j = 0; j < t.rows * wide; j++) dq[j] *= (REAL)w->a.scale;
        R(store_rows)(w, (head_rows) { &w->dq, head, t.i0, t.rows }, dq);
    }
    if (w->dk.data) R(store_rows)(w, (head_rows) { &w->dk, first, 0, w->tk }, dk);
    if (w->dv.data) R(store_rows)(w, (head_rows) { &w->dv, first, 0, w->tk }, dv);
}

// ---- few queries ------------------------------------------------------------------------------------

// The rows of a few heads that share keys and values, over FEW_KEYS keys: as rows, because most columns of a tile would
// be empty. k and v are read once, in parts that stay in the first-level cache.

// s[0 .. valid) becomes exp(s - *max), where *max is its maximum; s[valid .. n) becomes 0.
static MS_KERNEL void R(soft_row)(REAL *s, int64_t valid, int64_t n, REAL *max, REAL *sum)
{
    *max = R(ms__row_max)(s, valid);
    *sum = 0;
    bool is_nan = false;
    if (*max == -(REAL)INFINITY)
        for (int64_t k = 0; k < valid; k++) is_nan |= s[k] != s[k];
    if (is_nan) *max = 0;                    // the maximum leaves NaN out, the sum does not
    if (*max == -(REAL)INFINITY) valid = 0;  // all keys are masked
    else *sum = R(ms__row_exp)(s, s, *max, valid);
    for (int64_t j = valid; j < n; j++) s[j] = 0;
}

static MS_KERNEL void R(cap_row)(REAL *s, int64_t n, REAL cap)
{
    for (int64_t j = 0; j < n; j++) s[j] = R(ms_capped)(s[j], cap);
}

// The product of all rows of a task with at most PART rows of a head, which are read in place if possible.
static ms_few R(few_rows)(const attend *w, head_rows h, REAL *room)
{
    const part *x = h.of;
    ms_few f = { .dtype = x->dtype, .m = w->group * w->tq, .n = h.n, .d = w->wide, .x_rs = x->rs };
    f.scores_rs = FEW_KEYS;
    if (x->cs == 1 && w->d == w->wide && ms__few_reads(x->dtype)) {
        f.x = row_at(x, h.head, h.first);
        f.ahead = 1;
        return f;
    }
    R(load_rows)(w, room, h, 1);
    f.dtype = sizeof(REAL) == 8 ? MS_F64 : MS_F32;
    f.x = room;
    f.x_rs = w->wide;
    return f;
}
static int64_t R(few_room)(const attend *w)
{
    int64_t rows = w->group * w->tq;
    return (rows + PART) * w->wide + (rows + 1) * FEW_KEYS;
}

// A task's result in w->parts: for each row its maximum, its sum, and its outputs, which are not divided by the sum.
static void R(attend_few)(const attend *w, int64_t task, REAL *room)
{
    int64_t wide = w->wide, heads = task / w->chunks * w->group, j0 = w->key + task % w->chunks * FEW_KEYS;
    int64_t n = w->key_end - j0 < FEW_KEYS ? w->key_end - j0 : FEW_KEYS, rows = w->group * w->tq;
    REAL *q = room, *part = q + rows * wide, *s = part + PART * wide, *row = s + rows * FEW_KEYS;
    REAL *max = (REAL *)w->parts + task * rows * (wide + 2), *sum = max + rows, *o = sum + rows;
    const char *keys = row_at(&w->k, heads, j0), *values = row_at(&w->v, heads, j0);
    int64_t size = ms__dtype_size(w->k.dtype), k_step = w->k.rs * size, v_step = w->v.rs * size;
    for (int64_t h = 0; h < w->group; h++)
        R(load_rows)(w, q + h * w->tq * wide, (head_rows) { &w->q, heads + h, 0, w->tq }, (REAL)w->a.scale);
    for (int64_t j = 0; j < n; j += PART) {
        int64_t some = n - j < PART ? n - j : PART;
        ms_few k = R(few_rows)(w, (head_rows) { &w->k, heads, j0 + j, some }, part);
        k.rows = q, k.scores = s + j;
        for (int64_t b = 0; b < some; b += STEP) {
            int64_t at = j + b + AHEAD;  // values follow the last key
            ms_few f = few_step(&k, b, at < n ? keys + at * k_step : values + (at - n) * v_step);
            R(ms__few_scores)(&f);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = heads + r / w->tq, i = r % w->tq, valid = ms_span_end(w->a.span, i, j0 + n) - j0;
        int64_t early = ms_span_first(w->a.span, i) - j0;  // so many keys are before those of the query
        if (valid < 0) valid = 0;
        if (w->a.cap > 0) R(cap_row)(s + r * FEW_KEYS, valid, (REAL)w->a.cap);
        if (w->mask.data) {
            R(mask_row)(&w->mask, head_start(&w->mask, head), i, j0, valid, row);
            for (int64_t j = 0; j < valid; j++) s[r * FEW_KEYS + j] = R(masked)(s[r * FEW_KEYS + j], row[j]);
        }
        for (int64_t j = 0; j < early && j < valid; j++) s[r * FEW_KEYS + j] = -(REAL)INFINITY;
        R(soft_row)(s + r * FEW_KEYS, valid, n, &max[r], &sum[r]);
        if (w->a.p > 0) {
            R(keep_row)(w, head, i, j0, valid, row);
            R(multiply)(s + r * FEW_KEYS, row, valid);
        }
    }
    memset(o, 0, (size_t)(rows * wide) * sizeof *o);
    for (int64_t j = 0; j < n; j += PART) {
        int64_t some = n - j < PART ? n - j : PART;
        ms_few v = R(few_rows)(w, (head_rows) { &w->v, heads, j0 + j, some }, part);
        v.rows = o, v.scores = s + j;
        for (int64_t b = 0; b < some; b += STEP) {
            int64_t at = j + b + AHEAD;  // the keys of the next task follow the last value
            ms_few f = few_step(&v, b, at < n ? values + at * v_step : keys + at * k_step);
            R(ms__few_sums)(&f);
        }
    }
}

// Adds the results of all parts of the keys, in order, for the heads of one group.
static MS_KERNEL void R(add_parts)(const attend *w, int64_t group, REAL *unused)
{
    (void)unused;
    int64_t rows = w->group * w->tq, wide = w->wide, size = rows * (wide + 2);
    REAL *first = (REAL *)w->parts + group * w->chunks * size, *o = first + 2 * rows;
    for (int64_t r = 0; r < rows; r++) {
        REAL max = first[r], sum = first[rows + r], m;
        for (int64_t c = 1; c < w->chunks; c++) max = first[c * size + r] > max ? first[c * size + r] : max;
        m = max == -(REAL)INFINITY ? 0 : max;
        for (int64_t c = 0; c < w->chunks; c++) {
            const REAL *part = first + c * size;
            REAL factor = R(ms__soft_exp)(part[r] - m);
            sum = c ? sum + part[rows + r] * factor : part[rows + r] * factor;
            for (int64_t j = 0; j < wide; j++) {
                REAL x = part[2 * rows + r * wide + j] * factor;
                o[r * wide + j] = c ? o[r * wide + j] + x : x;
            }
        }
        first[r] = max;
        first[rows + r] = sum;
    }
    R(finish_rows)(o, wide, rows, first, first + rows, (REAL *)w->lse + group * rows);
    for (int64_t h = 0; h < w->group; h++)
        R(store_rows)(w, (head_rows) { &w->o, group * w->group + h, 0, w->tq }, o + h * w->tq * wide);
}
#undef OPERANDS
#undef LANES
#undef QUERIES
#undef WIDTH
