// SPDX-License-Identifier: MIT
// cpu/spatial/resample_body.h -- a pass of a resampling in one type: REAL, R(name).

// Row r of the result is the sum of rows at[start[r]] to at[start[r + 1] - 1] of the input, with their weights.
typedef struct {
    int64_t *start, *at;
    REAL *weight;
} R(table);

typedef struct {
    const ms_resample_pass *p;
    R(table) t;
    const REAL *x;
    REAL *y;
} R(job);

// y = w x if `first` is set, otherwise y += w x.
MS_INLINE void R(weighted)(int64_t n, REAL *restrict y, const REAL *restrict x, REAL w, bool first)
{
    if (first)
        for (int64_t i = 0; i < n; i++) y[i] = w * x[i];
    else
        for (int64_t i = 0; i < n; i++) y[i] += w * x[i];
}
// Computes row r of the result, of `inner` elements.
static MS_KERNEL void R(row)(const R(table) * t, int64_t r, int64_t inner, const REAL *x, REAL *y)
{
    for (int64_t k = t->start[r]; k < t->start[r + 1]; k++)
        R(weighted)(inner, y, x + t->at[k] * inner, t->weight[k], k == t->start[r]);
    for (int64_t i = 0; t->start[r] == t->start[r + 1] && i < inner; i++) y[i] = 0;
}
// Computes all rows of a matrix whose rows have one element.
static MS_KERNEL void R(column)(const R(table) * t, int64_t rows, const REAL *restrict x, REAL *restrict y)
{
    for (int64_t r = 0; r < rows; r++) {
        int64_t k = t->start[r], end = t->start[r + 1];
        REAL sum = k < end ? t->weight[k] * x[t->at[k]] : 0;
        for (k++; k < end; k++) sum += t->weight[k] * x[t->at[k]];
        y[r] = sum;
    }
}
static void R(rows_range)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const R(job) *j = arg;
    const ms_resample_pass *p = j->p;
    (void)block;
    if (p->inner == 1) {
        for (int64_t m = first / p->to; m < last / p->to; m++)
            R(column)(&j->t, p->to, j->x + m * p->from, j->y + m * p->to);
        return;
    }
    for (int64_t row = first / p->inner; row < last / p->inner; row++) {
        int64_t m = row / p->to;
        R(row)(&j->t, row - m * p->to, p->inner, j->x + m * p->from * p->inner, j->y + row * p->inner);
    }
}

// Fills the table of the forward or, if `back`, the transposed one.
static void R(fill)(const ms_resample_axis *a, R(table) t, bool back)
{
    int64_t n = 0;
    for (int64_t o = 0; o < a->out && !back; o++) {
        R(ms_taps) s = R(ms_taps_of)(a, o);
        t.start[o] = n;
        for (int64_t k = 0; k < s.count; k++, n++) {
            t.at[n] = R(ms_tap_at)(a, s, k);
            t.weight[n] = R(ms_tap_weight)(a, s, k);
        }
        t.start[o + 1] = n;
    }
    if (!back) return;
    // Counts the outputs that read each input element, then lists these outputs in order.
    for (int64_t i = 0; i <= a->in; i++) t.start[i] = 0;
    for (int64_t o = 0; o < a->out; o++) {
        R(ms_taps) s = R(ms_taps_of)(a, o);
        for (int64_t k = 0; k < s.count; k++) t.start[R(ms_tap_at)(a, s, k)]++;
    }
    for (int64_t i = 0; i <= a->in; i++) {
        int64_t count = t.start[i];
        t.start[i] = n;
        n += count;
    }
    for (int64_t o = 0; o < a->out; o++) {
        R(ms_taps) s = R(ms_taps_of)(a, o);
        for (int64_t k = 0; k < s.count; k++) {
            int64_t to = t.start[R(ms_tap_at)(a, s, k)]++;
            t.at[to] = o;
            t.weight[to] = R(ms_tap_weight)(a, s, k);
        }
    }
    for (int64_t i = a->in; i > 0; i--) t.start[i] = t.start[i - 1];
    t.start[0] = 0;
}

static ms_status R(pass)(ms_call *c, const ms_resample_pass *p, bool back, const void *x, void *y)
{
    const ms_resample_axis *a = &p->axis;
    int64_t entries = 0;
    ms_block *room;
    for (int64_t o = 0; o < a->out; o++) entries += R(ms_taps_of)(a, o).count;
    size_t bytes = (size_t)(p->to + 1 + entries) * sizeof(int64_t) + (size_t)entries * sizeof(REAL);
    MS_TRY(ms__alloc_scratch(&room, bytes, c->op->name));
    int64_t *start = room->data;
    R(job) j = { p, { start, start + p->to + 1, (REAL *)(start + p->to + 1 + entries) }, x, y };
    R(fill)(a, j.t, back);
    // Tasks are whole rows, or whole matrices if rows have one element.
    int64_t task = p->inner == 1 ? p->to : p->inner, n = p->outer * p->to * p->inner;
    ms__parallel(n, (task < 4096 ? 4096 / task : 1) * task, R(rows_range), &j);
    ms__free(room);
    return MS_OK;
}
