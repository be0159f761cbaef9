// SPDX-License-Identifier: MIT
// cpu/product/recurrent_body.h -- passes over the steps of recurrent layers; recurrent.c includes it once per type.
#include "formulas/recurrent.h"

#define OPERANDS R(ms_operands)

// ---- panels ---------------------------------------------------------------------------------------

// Packs panel k: columns of the product, padded with zeros, and then the bias of each.
static void R(pack_panel)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const panels *p = arg;
    int64_t block = k / p->parts, part = k % p->parts, first = block * p->wide, n = panel_columns_of(p, block);
    REAL *to = (REAL *)p->data + k * panel_numbers(p), *bias = to + p->depth * p->wide;
    const REAL *from = (const REAL *)p->from + (part * p->columns + first) * p->cs;
    (void)end, (void)unused;
    R(ms__pack)(to, p->wide, &(ms_matrix) { .data = from, .rs = p->rs, .cs = p->cs }, p->depth, n);
    for (int64_t j = 0; j < p->wide; j++)
        bias[j] = j < n && p->bias ? ((const REAL *)p->bias)[part * p->columns + first + j] : 0;
}

// Adds a matrix to f: its rows from `row` on, and in each run the units from `unit` on. from: NULL adds nothing.
static void R(add_ahead)(ahead *f, const void *from, int64_t row, int64_t parts, int64_t apart, int64_t unit)
{
    if (!from) return;
    f->of[f->n].from = (const REAL *)from + row * parts * apart + unit;
    f->of[f->n].parts = parts;
    f->of[f->n++].apart = apart;
}

// Prefetches rows [first, last) of what is accessed after a product into the second-level cache. (The hardware
// prefetcher does not follow so many short runs.) GCC drops calls of a function that only prefetches, unless it is
// inlined.
MS_INLINE void R(fetch)(const ahead *f, int64_t first, int64_t last)
{
    for (int m = 0; m < f->n; m++) {
        const REAL *run = (const REAL *)f->of[m].from + first * f->of[m].parts * f->of[m].apart;
        for (int64_t k = (last - first) * f->of[m].parts; k > 0; k--, run += f->of[m].apart) {
            for (int64_t j = 0; j < f->columns; j += 64 / (int64_t)sizeof *run) __builtin_prefetch(run + j, 0, 2);
            __builtin_prefetch(run + f->columns - 1, 0, 2);
        }
    }
}

// The product of rows of a with a block of columns, and the bias: one matrix of MOST_ROWS x wide in `to` for each part.
// Before each piece, of up to 8 rows and one part, a share of the rows ahead is prefetched: all at once they would
// delay the product.
static void R(multiply)(const panels *p, int64_t block, int64_t rows, const REAL *a, REAL *to, const ahead *f)
{
    int64_t pieces = (rows + 7) / 8 * p->parts;
    for (int64_t k = 0; k < pieces; k++) {
        int64_t first = k / p->parts * 8, part = k % p->parts;
        const REAL *b = (const REAL *)p->data + (block * p->parts + part) * panel_numbers(p);
        OPERANDS o = {
            a + first * p->depth,   p->depth, 1, b, p->wide, to + (part * MOST_ROWS + first) * p->wide, p->wide,
            b + p->depth * p->wide, false
        };
        R(fetch)(f, f->rows * k / pieces, f->rows * (k + 1) / pieces);
        R(ms__block)(least(rows - first, 8), (panel_columns_of(p, block) + 15) / 16 * 16, p->depth, &o, NULL);
    }
}

// ---- forward --------------------------------------------------------------------------------------

// n units of one row. x, a: the units' sums for the first gate, from the products of the input and of the state with
// their weights; those of the next gate follow x_gate and a_gate elements later. q: where the gates are stored, q_gate
// elements apart. state, cell: before the step; h, c: after it.
typedef struct R(unit_row) {
    int64_t n, x_gate, a_gate, q_gate;
    const REAL *x, *a, *state, *cell;
    REAL *q, *h, *c;
} R(unit_row);

static MS_KERNEL void R(rnn_row)(const R(unit_row) * u, int relu)
{
    const REAL *restrict x = u->x, *restrict a = u->a;
    REAL *restrict h = u->h;
    if (relu)
#pragma omp simd
        for (int64_t j = 0; j < u->n; j++) h[j] = R(ms_rnn_step)(x[j] + a[j], 1);
    else
#pragma omp simd
        for (int64_t j = 0; j < u->n; j++) h[j] = R(ms_rnn_step)(x[j] + a[j], 0);
}

static MS_KERNEL void R(lstm_row)(const R(unit_row) * u)
{
    const int64_t xg = u->x_gate, ag = u->a_gate, qg = u->q_gate;
    const REAL *restrict x = u->x, *restrict a = u->a, *restrict cell = u->cell;
    REAL *restrict q = u->q, *restrict next = u->c, *restrict h = u->h;
#pragma omp simd
    for (int64_t j = 0; j < u->n; j++) {
        REAL i = x[j] + a[j], f = x[xg + j] + a[ag + j], g = x[2 * xg + j] + a[2 * ag + j];
        REAL o = x[3 * xg + j] + a[3 * ag + j], c = cell[j];
        h[j] = R(ms_lstm_step)(&i, &f, &g, &o, &c);
        next[j] = c;
        q[j] = i;
        q[qg + j] = f;
        q[2 * qg + j] = g;
        q[3 * qg + j] = o;
    }
}

static MS_KERNEL void R(gru_row)(const R(unit_row) * u)
{
    const int64_t xg = u->x_gate, ag = u->a_gate, qg = u->q_gate;
    const REAL *restrict x = u->x, *restrict a = u->a, *restrict state = u->state;
    REAL *restrict q = u->q, *restrict h = u->h;
#pragma omp simd
    for (int64_t j = 0; j < u->n; j++) {
        REAL r = x[j] + a[j], z = x[xg + j] + a[ag + j], n = x[2 * xg + j], hn = a[2 * ag + j];
        h[j] = R(ms_gru_step)(&r, &z, &n, hn, state[j]);
        q[j] = r;
        q[qg + j] = z;
        q[2 * qg + j] = n;
        q[3 * qg + j] = hn;
    }
}

// Where to store part p of a row's new state: in `before`, which has the states before each step, if the row has a next
// step; otherwise in `last`, the final states. wide: elements of a state.
static REAL *R(leave)(const pass *w, void *before, void *last, int64_t wide, part p)
{
    return (p.row < w->next.n ? (REAL *)before + (w->next.at + p.row) * wide : (REAL *)last + p.row * wide) + p.unit;
}

// Sets part p of the state before a row's first step. first: the initial states; NULL for zeros.
static void R(enter)(const pass *w, const void *first, void *before, int64_t wide, part p)
{
    REAL *to = (REAL *)before + (w->next.at + p.row) * wide + p.unit;
    if (first) memcpy(to, (const REAL *)first + p.row * wide + p.unit, (size_t)p.n * sizeof *to);
    else memset(to, 0, (size_t)p.n * sizeof *to);
}

// Computes the states of some units and some rows after a step; with a projection, the states that it projects.
static void R(forward_task)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const pass *w = arg;
    const panels *p = &w->panels;
    tile t = tile_of(w, p, k);
    REAL *room = t.room;
    (void)end, (void)unused;
    int64_t H = w->H, P = w->P, at = w->now.at, kept = ms__kept_of(w->kind),
            computed = least(t.last, w->now.n) - t.first;
    if (w->packed && computed > 0) {
        ahead f = { .rows = computed, .columns = t.n };
        R(add_ahead)(&f, w->x, at + t.first, w->gates, H, t.unit);
        R(add_ahead)(&f, w->q, at + t.first, kept, H, t.unit);
        R(multiply)(p, t.block, computed, (const REAL *)w->hs + (at + t.first) * P, room, &f);
    }
    for (int64_t r = t.first; r < t.last; r++) {
        const part here = { r, t.unit, t.n };
        if (r >= w->now.n) {
            if (w->kind == MS_LSTM) R(enter)(w, w->c0, w->cs, H, here);
            if (!w->project) R(enter)(w, w->h0, w->hs, P, here);
            continue;
        }
        R(unit_row) u = { .n = t.n, .x_gate = H, .a_gate = MOST_ROWS * p->wide, .q_gate = H };
        u.x = (const REAL *)w->x + (at + r) * w->gates * H + t.unit;
        u.a = room + (r - t.first) * p->wide;
        if (!w->packed) {
            u.a = (const REAL *)w->product + r * w->gates * H + t.unit;
            u.a_gate = H;
        }
        if (w->q) u.q = (REAL *)w->q + (at + r) * kept * H + t.unit;
        else {
            u.q = room + 4 * MOST_ROWS * p->wide;
            u.q_gate = p->wide;
        }
        u.h = w->project ? (REAL *)w->unprojected + r * H + t.unit : (REAL *)w->y + (at + r) * P + t.unit;
        if (w->kind == MS_LSTM) {
            u.cell = (const REAL *)w->cs + (at + r) * H + t.unit;
            u.c = R(leave)(w, w->cs, w->cn, H, here);
            R(lstm_row)(&u);
        } else if (w->kind == MS_GRU) {
            u.state = (const REAL *)w->hs + (at + r) * P + t.unit;
            R(gru_row)(&u);
        } else {
            R(rnn_row)(&u, w->relu);
            if (w->q) memcpy(u.q, u.h, (size_t)t.n * sizeof *u.h);
        }
        if (!w->project) memcpy(R(leave)(w, w->hs, w->hn, P, here), u.h, (size_t)t.n * sizeof *u.h);
    }
}

static void R(project_task)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const pass *w = arg;
    const panels *p = &w->projection;
    tile t = tile_of(w, p, k);
    REAL *room = t.room;
    (void)end, (void)unused;
    int64_t H = w->H, P = w->P, computed = least(t.last, w->now.n) - t.first;
    if (computed > 0)
        R(multiply)(p, t.block, computed, (const REAL *)w->unprojected + t.first * H, room, &(ahead) { 0 });
    for (int64_t r = t.first; r < t.last; r++) {
        const part here = { r, t.unit, t.n };
        if (r >= w->now.n) {
            R(enter)(w, w->h0, w->hs, P, here);
            continue;
        }
        const REAL *h = room + (r - t.first) * p->wide;
        memcpy((REAL *)w->y + (w->now.at + r) * P + t.unit, h, (size_t)t.n * sizeof *h);
        memcpy(R(leave)(w, w->hs, w->hn, P, here), h, (size_t)t.n * sizeof *h);
    }
}

// ---- backward -------------------------------------------------------------------------------------

// n units of one row. q: the gates, q_gate elements apart. dx, da: where the gradients of the sums over the input and
// over the state are stored, d_gate elements apart; only GRU's differ. carried: the gradient of the cell (LSTM), or the
// part of the state's gradient that passes through no product (GRU). h: gets the state after the step (LSTM).
typedef struct R(back_row) {
    int64_t n, q_gate, d_gate;
    const REAL *q, *state, *cell, *dh;
    REAL *dx, *da, *carried, *h;
} R(back_row);

static MS_KERNEL void R(rnn_back_row)(const R(back_row) * u, int relu)
{
    const REAL *restrict h = u->q, *restrict dh = u->dh;
    REAL *restrict dx = u->dx;
#pragma omp simd
    for (int64_t j = 0; j < u->n; j++) dx[j] = R(ms_rnn_back)(h[j], relu, dh[j]);
}

static MS_KERNEL void R(lstm_back_row)(const R(back_row) * u)
{
    const int64_t qg = u->q_gate, dg = u->d_gate;
    const REAL *restrict q = u->q, *restrict cell = u->cell, *restrict dh = u->dh;
    REAL *restrict dx = u->dx, *restrict dc = u->carried, *restrict h = u->h;
#pragma omp simd
    for (int64_t j = 0; j < u->n; j++) {
        REAL i = q[j], f = q[qg + j], g = q[2 * qg + j], o = q[3 * qg + j], d = dc[j], c = cell[j];
        h[j] = R(ms_lstm_back)(&o, f * c + i * g, dh[j], &d);
        R(ms_lstm_cell_back)(&i, &f, &g, c, &d);
        dc[j] = d;
        dx[j] = i;
        dx[dg + j] = f;
        dx[2 * dg + j] = g;
        dx[3 * dg + j] = o;
    }
}

static MS_KERNEL void R(gru_back_row)(const R(back_row) * u)
{
    const int64_t qg = u->q_gate, dg = u->d_gate;
    const REAL *restrict q = u->q, *restrict state = u->state, *restrict dh = u->dh;
    REAL *restrict dx = u->dx, *restrict da = u->da, *restrict direct = u->carried;
#pragma omp simd
    for (int64_t j = 0; j < u->n; j++) {
        REAL r = q[j], z = q[qg + j], n = q[2 * qg + j], hn = q[3 * qg + j];
        direct[j] = R(ms_gru_back)(&r, &z, &n, &hn, state[j], dh[j]);
        da[j] = dx[j] = r;
        da[dg + j] = dx[dg + j] = z;
        dx[2 * dg + j] = n;
        da[2 * dg + j] = hn;
    }
}

// Computes the gradients of the gates' sums for n units of row r of the next step, from dh, their states' gradient.
static void R(unit_back)(const pass *w, int64_t r, int64_t unit, int64_t n, const REAL *dh, REAL *unused)
{
    int64_t H = w->H, P = w->P, row = w->next.at + r;
    REAL *carried = (REAL *)w->g.carried + r * H + unit;
    if (r >= w->now.n) {
        const REAL *dc = w->g.dc;
        for (int64_t j = 0; w->kind == MS_LSTM && j < n; j++) carried[j] = dc ? dc[r * H + unit + j] : 0;
    }
    R(back_row) u = { .n = n, .q_gate = H, .d_gate = H, .dh = dh, .carried = carried };
    u.dx = (REAL *)w->g.dx + row * w->gates * H + unit;
    u.da = (REAL *)w->g.da + row * w->gates * H + unit;
    u.q = (const REAL *)w->q + row * ms__kept_of(w->kind) * H + unit;
    if (w->kind == MS_LSTM) {
        u.cell = (const REAL *)w->cs + row * H + unit;
        u.h = w->unprojected ? (REAL *)w->unprojected + row * H + unit : unused;
        R(lstm_back_row)(&u);
    } else if (w->kind == MS_GRU) {
        u.state = (const REAL *)w->hs + row * P + unit;
        R(gru_back_row)(&u);
    } else R(rnn_back_row)(&u, w->relu);
}

static MS_KERNEL void R(add_row)(int64_t n, REAL *restrict to, const REAL *restrict from)
{
    for (int64_t j = 0; j < n; j++) to[j] += from[j];
}

// Computes the gradient of some elements of the states before some rows of a step, and without a projection the units'
// gradients. Rows whose state is h_0 need a product only if its gradient is asked for.
static void R(backward_task)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const pass *w = arg;
    const panels *p = &w->panels;
    tile t = tile_of(w, p, k);
    REAL *room = t.room;
    (void)end, (void)unused;
    int64_t H = w->H, P = w->P, next = w->next.at, kept = ms__kept_of(w->kind);
    if (!w->g.dh0) t.last = least(t.last, w->next.n);
    int64_t computed = least(t.last, w->now.n) - t.first;
    if (computed > 0) {
        ahead f = { .rows = most(least(t.last, w->next.n) - t.first, 0), .columns = t.n };
        R(add_ahead)(&f, w->g.dy, next + t.first, 1, P, t.unit);
        if (!w->project) {
            R(add_ahead)(&f, w->q, next + t.first, kept, H, t.unit);
            R(add_ahead)(&f, w->g.dx, next + t.first, w->gates, H, t.unit);
            R(add_ahead)(&f, w->cs, next + t.first, 1, H, t.unit);
        }
        R(multiply)(p, t.block, computed, (const REAL *)w->g.da + (w->now.at + t.first) * w->gates * H, room, &f);
    }
    for (int64_t r = t.first; r < t.last; r++) {
        REAL *dh = room + (r - t.first) * p->wide;
        if (r >= w->now.n) {
            const REAL *of_last = w->g.dh;
            for (int64_t j = 0; j < t.n; j++) dh[j] = of_last ? of_last[r * P + t.unit + j] : 0;
        } else if (w->kind == MS_GRU) R(add_row)(t.n, dh, (const REAL *)w->g.carried + r * H + t.unit);
        if (r >= w->next.n) {
            memcpy((REAL *)w->g.dh0 + r * P + t.unit, dh, (size_t)t.n * sizeof *dh);
            continue;
        }
        if (w->g.dy) R(add_row)(t.n, dh, (const REAL *)w->g.dy + (next + r) * P + t.unit);
        if (w->project) memcpy((REAL *)w->g.dprojected + (next + r) * P + t.unit, dh, (size_t)t.n * sizeof *dh);
        else R(unit_back)(w, r, t.unit, t.n, dh, room + MOST_ROWS * p->wide);
    }
}

// Computes the gradients of the units of the next step from those of its projected states.
static void R(unproject_task)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const pass *w = arg;
    const panels *p = &w->projection;
    tile t = tile_of(w, p, k);
    REAL *room = t.room;
    (void)end, (void)unused;
    t.last = least(t.last, w->next.n);
    if (t.first >= t.last) return;
    const REAL *d = (const REAL *)w->g.dprojected + (w->next.at + t.first) * w->P;
    R(multiply)(p, t.block, t.last - t.first, d, room, &(ahead) { 0 });
    for (int64_t r = t.first; r < t.last; r++)
        R(unit_back)(w, r, t.unit, t.n, room + (r - t.first) * p->wide, room + MOST_ROWS * p->wide);
}
#undef OPERANDS
