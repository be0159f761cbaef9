// SPDX-License-Identifier: MIT
// cpu/spatial/resample_body.h -- the passes of a resampling in one type: REAL, R(name).

// What the rows of the result sum. taps > 0: each row r sums `taps` rows, of which number k is entry k * rows + r. Else
// row r sums entries start[r] to start[r + 1] - 1. An entry is a row of the input and its weight. With one tap, rows
// run to run_end - 1 of the result have successive rows of the input: padding's have most.
typedef struct {
    int64_t taps, rows, *start, run, run_end;
    int32_t *at;
    REAL *weight;
} R(table);

typedef struct {
    const ms_resample_pass *p;  // the passes
    int n;
    int64_t planes;
    R(table) t[3];
    const REAL *x;
    REAL *y;
    char *room;  // for each thread: a plane between two passes, twice
    size_t room_bytes;
} R(job);

// The sum of the products of `taps` weights and elements, of which number k is W(k) and X(k).
#define TAPS1(W, X) W(0) * X(0)
#define TAPS2(W, X) W(0) * X(0) + W(1) * X(1)
#define TAPS4(W, X) W(0) * X(0) + W(1) * X(1) + W(2) * X(2) + W(3) * X(3)

// Computes row r of the result, of n elements.
MS_INLINE void R(row)(const R(table) * t, int64_t r, int64_t n, const REAL *restrict x, REAL *restrict y)
{
    if (t->taps) {
        const REAL *rows[4], *w = t->weight + r;
        REAL weight[4];
        for (int k = 0; k < t->taps; k++) rows[k] = x + t->at[k * t->rows + r] * n, weight[k] = w[k * t->rows];
#define W(k) weight[k]
#define X(k) rows[k][i]
        if (t->taps == 1)
            for (int64_t i = 0; i < n; i++) y[i] = TAPS1(W, X);
        else if (t->taps == 2)
            for (int64_t i = 0; i < n; i++) y[i] = TAPS2(W, X);
        else
            for (int64_t i = 0; i < n; i++) y[i] = TAPS4(W, X);
#undef W
#undef X
        return;
    }
    int64_t k = t->start[r], end = t->start[r + 1];
    for (int64_t i = 0; i < n; i++) y[i] = k < end ? t->weight[k] * x[t->at[k] * n + i] : 0;
    for (k++; k < end; k++)
        for (int64_t i = 0; i < n; i++) y[i] += t->weight[k] * x[t->at[k] * n + i];
}
// Computes all rows of a matrix whose rows have one element.
MS_INLINE void R(column)(const R(table) * t, const REAL *restrict x, REAL *restrict y)
{
    int64_t n = t->rows;
    const REAL *restrict weight = t->weight;
    const int32_t *restrict at = t->at;
#define W(k) weight[(k)*n + r]
#define X(k) x[at[(k)*n + r]]
    if (t->taps == 1) {
        const REAL *restrict next = x + at[t->run], *restrict by = weight + t->run;
        REAL *restrict to = y + t->run;
        for (int64_t r = 0; r < t->run; r++) y[r] = TAPS1(W, X);
        for (int64_t r = 0; r < t->run_end - t->run; r++) to[r] = by[r] * next[r];
        for (int64_t r = t->run_end; r < n; r++) y[r] = TAPS1(W, X);
    } else if (t->taps == 2)
        for (int64_t r = 0; r < n; r++) y[r] = TAPS2(W, X);
    else if (t->taps == 4)
        for (int64_t r = 0; r < n; r++) y[r] = TAPS4(W, X);
#undef W
#undef X
    for (int64_t r = 0; !t->taps && r < n; r++) {
        int64_t k = t->start[r], end = t->start[r + 1];
        REAL sum = k < end ? weight[k] * x[at[k]] : 0;
        for (k++; k < end; k++) sum += weight[k] * x[at[k]];
        y[r] = sum;
    }
}
#undef TAPS1
#undef TAPS2
#undef TAPS4

// Computes elements [first, last) of the result of a pass: whole rows, or whole matrices if rows have one element.
static MS_KERNEL void R(part)(const R(job) * j, int pass, const REAL *x, REAL *y, int64_t first, int64_t last)
{
    const ms_resample_pass *p = &j->p[pass];
    const R(table) *t = &j->t[pass];
    int64_t n = p->inner, m;
    if (n == 1)
        for (m = first / p->to; m < last / p->to; m++) R(column)(t, x + m * p->from, y + m * p->to);
    else
        for (int64_t row = first / n; row < last / n; row++) {
            m = row / p->to;
            R(row)(t, row - m * p->to, n, x + m * p->from * n, y + row * n);
        }
}
static void R(one_pass)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const R(job) *j = arg;
    (void)block;
    R(part)(j, 0, j->x, j->y, first, last);
}
// The last two passes at once, if each of their elements copies one: both weights are 1. Columns of the rows that the
// first of the two would copy.
static MS_KERNEL void R(copy_rows)(const R(job) * j, const REAL *x, REAL *y, int64_t rows)
{
    const ms_resample_pass *p = &j->p[j->n - 2], *last = p + 1;
    for (int64_t row = 0; row < rows; row++) {
        int64_t m = row / p->to, at = j->t[j->n - 2].at[row - m * p->to];
        R(column)(&j->t[j->n - 1], x + (m * p->from + at) * last->from, y + row * last->to);
    }
}
// All passes of whole planes: elements [first, last) of the result.
static void R(all_passes)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const R(job) *j = arg;
    const ms_resample_pass *p = j->p, *end = p + j->n - 1;
    int64_t in = pass_numel(p, p->from) / j->planes, out = pass_numel(end, end->to) / j->planes;
    char *room = j->room + j->room_bytes * (size_t)ms__thread_num();
    (void)block;
    for (int64_t plane = first / out; plane < last / out; plane++) {
        const REAL *from = j->x + plane * in;
        for (int k = 0; k < j->n; k++) {
            bool rows = k == j->n - 2 && end->inner == 1 && p[k].inner == end->from;
            if (rows && j->t[k].taps == 1 && j->t[k + 1].taps == 1) {
                R(copy_rows)(j, from, j->y + plane * out, out / end->to);
                break;
            }
            REAL *to = k == j->n - 1 ? j->y + plane * out : (REAL *)(room + (size_t)(k % 2) * (j->room_bytes / 2));
            R(part)(j, k, from, to, 0, pass_numel(&p[k], p[k].to) / j->planes);
            from = to;
        }
    }
}

// Fills the table of the forward or, if `back`, the transposed one. taps: of each output, if all have as many.
static void R(fill)(const ms_resample_axis *a, R(table) t, bool back)
{
    int64_t n = 0;
    for (int64_t o = 0; o < a->out && !back; o++) {
        R(ms_taps) s = R(ms_taps_of)(a, o);
        if (!t.taps) t.start[o] = n;
        for (int64_t k = 0; k < s.count; k++, n++) {
            int64_t entry = t.taps ? k * t.rows + o : n;
            t.at[entry] = (int32_t)R(ms_tap_at)(a, s, k);
            t.weight[entry] = R(ms_tap_weight)(a, s, k);
        }
        if (!t.taps) t.start[o + 1] = n;
    }
    if (!back) return;
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
            t.at[to] = (int32_t)o;
            t.weight[to] = R(ms_tap_weight)(a, s, k);
        }
    }
    for (int64_t i = a->in; i > 0; i--) t.start[i] = t.start[i - 1];
    t.start[0] = 0;
}

// Makes the table of a pass in *room.
static ms_status R(make_table)(ms_call *c, R(table) * t, const ms_resample_pass *p, bool back, ms_block **room)
{
    const ms_resample_axis *a = &p->axis;
    int64_t entries = 0, most = 0;
    for (int64_t o = 0; o < a->out; o++) {
        int64_t count = R(ms_taps_of)(a, o).count;
        entries += count;
        if (count > most) most = count;
    }
    MS_TRY(ms__alloc_scratch(room, (size_t)(p->to + 1) * sizeof(int64_t) + (size_t)entries * (sizeof(REAL) + 4),
                             c->op->name));
    int64_t *start = (*room)->data;
    REAL *weight = (REAL *)(start + p->to + 1);
    *t = (R(table)) { .taps = !back && most <= 4 && most != 3 && entries == most * a->out ? most : 0,
                      .rows = p->to,
                      .start = start,
                      .at = (int32_t *)(weight + entries),
                      .weight = weight };
    R(fill)(a, *t, back);
    for (int64_t r = 0, first = 0; t->taps == 1 && r < t->rows; r++) {
        if (r > 0 && t->at[r] != t->at[r - 1] + 1) first = r;
        if (r + 1 - first > t->run_end - t->run) t->run = first, t->run_end = r + 1;
    }
    return MS_OK;
}

// If the planes between two passes are small, all passes of a plane follow each other, so that they read from the
// cache.
static ms_status R(passes)(ms_call *c, const ms_resample_pass *p, int n, bool back, const void *x, void *y)
{
    R(job) j = { .p = p, .n = n, .planes = p[0].outer, .x = x, .y = y };
    ms_block *table[3] = { NULL }, *room = NULL, *made = NULL;
    ms_status st = MS_OK;
    for (int k = 0; k < n && !st; k++) {
        if (p[k].outer < j.planes) j.planes = p[k].outer;
        st = R(make_table)(c, &j.t[k], &p[k], back, &table[k]);
    }
    int64_t between = 0, out = pass_numel(&p[n - 1], p[n - 1].to);
    for (int k = 0; k < n - 1; k++) {
        int64_t size = pass_numel(&p[k], p[k].to) / j.planes;
        if (size > between) between = size;
    }
    if (between <= IN_CACHE) {
        j.room_bytes = 2 * ((size_t)between * sizeof(REAL) + 63) / 64 * 64;
        if (!st && between) st = ms__alloc_scratch(&room, j.room_bytes * (size_t)ms_num_threads(), c->op->name);
        if (between) j.room = room ? room->data : NULL;
        out /= j.planes;
        if (!st) ms__parallel(out * j.planes, (out < 4096 ? 4096 / out : 1) * out, R(all_passes), &j);
    } else
        for (int k = 0; k < n && !st; k++) {
            ms_block *next = NULL;
            int64_t task = p[k].inner == 1 ? p[k].to : p[k].inner, size = pass_numel(&p[k], p[k].to);
            R(job)
            one = { .p = &p[k], .n = 1, .planes = j.planes, .t = { j.t[k] }, .x = made ? made->data : x, .y = y };
            if (k < n - 1) st = ms__alloc_scratch(&next, (size_t)size * sizeof(REAL), c->op->name);
            if (next) one.y = next->data;
            if (!st) ms__parallel(size, (task < 4096 ? 4096 / task : 1) * task, R(one_pass), &one);
            if (made) ms__free(made);
            made = next;
        }
    if (made) ms__free(made);
    if (room) ms__free(room);
    for (int k = 0; k < n; k++)
        if (table[k]) ms__free(table[k]);
    return st;
}
