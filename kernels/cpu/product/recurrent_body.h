// SPDX-License-Identifier: MIT
// cpu/product/recurrent_body.h -- passes over the steps of recurrent layers; recurrent.c includes it once per type.
#include "formulas/recurrent.h"

#define OPERANDS R(ms_operands)

// ---- panels ---------------------------------------------------------------------------------------

// Packs panel k: columns of the product, padded with zeros, and then the bias of each.
static void R(pack_panel)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const panels *p = arg;
    int64_t block = k / p->parts, part = k % p->parts, first = block * p->wide, n = columns_of(p, block);
    REAL *to = (REAL *)p->data + k * panel_numbers(p), *bias = to + p->depth * p->wide;
    const REAL *from = (const REAL *)p->from + (part * p->columns + first) * p->cs;
    (void)end, (void)unused;
    R(ms__pack)(to, p->wide, &(ms_matrix) { .data = from, .rs = p->rs, .cs = p->cs }, p->depth, n);
    for (int64_t j = 0; j < p->wide; j++)
        bias[j] = j < n && p->bias ? ((const REAL *)p->bias)[part * p->columns + first + j] : 0;
}

// The product of rows of a with a block of columns, and the bias: one matrix of MOST_ROWS x wide in `to` for each part.
static void R(multiply)(const panels *p, int64_t block, int64_t rows, const REAL *a, REAL *to)
{
    for (int64_t part = 0; part < p->parts; part++) {
        const REAL *b = (const REAL *)p->data + (block * p->parts + part) * panel_numbers(p);
        OPERANDS o = { a,    p->depth, 1, b, p->wide, to + part * MOST_ROWS * p->wide, p->wide, b + p->depth * p->wide,
                       false };
        R(ms__block)(rows, (columns_of(p, block) + 15) / 16 * 16, p->depth, &o);
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

// One task of a pass: some units of some rows. The task of a pass with a projection computes the states to project.
static void R(forward_task)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const pass *w = arg;
    const panels *p = &w->panels;
    int64_t block = k / w->chunks, first = k % w->chunks * w->chunk, last = first + w->chunk, unit = block * p->wide;
    int64_t n = columns_of(p, block), H = w->H, P = w->P, at = w->now.at;
    REAL *room = (REAL *)(w->room + w->room_bytes * (size_t)ms__thread_num());
    (void)end, (void)unused;
    if (last > most(w->now.n, w->next.n)) last = most(w->now.n, w->next.n);
    int64_t computed = last < w->now.n ? last : w->now.n;
    if (w->packed && first < computed)
        R(multiply)(p, block, computed - first, (const REAL *)w->hs + (at + first) * P, room);
    for (int64_t r = first; r < last; r++) {
        const part here = { r, unit, n };
        if (r >= w->now.n) {
            if (w->kind == MS_LSTM) R(enter)(w, w->c0, w->cs, H, here);
            if (!w->project) R(enter)(w, w->h0, w->hs, P, here);
            continue;
        }
        R(unit_row) u = { .n = n, .x_gate = H, .a_gate = MOST_ROWS * p->wide, .q_gate = H };
        u.x = (const REAL *)w->x + (at + r) * w->gates * H + unit;
        u.a = room + (r - first) * p->wide;
        if (!w->packed) {
            u.a = (const REAL *)w->product + r * w->gates * H + unit;
            u.a_gate = H;
        }
        if (w->q) u.q = (REAL *)w->q + (at + r) * ms__kept_of(w->kind) * H + unit;
        else {
            u.q = room + 4 * MOST_ROWS * p->wide;
            u.q_gate = p->wide;
        }
        u.h = w->project ? (REAL *)w->unprojected + r * H + unit : (REAL *)w->y + (at + r) * P + unit;
        if (w->kind == MS_LSTM) {
            u.cell = (const REAL *)w->cs + (at + r) * H + unit;
            u.c = R(leave)(w, w->cs, w->cn, H, here);
            R(lstm_row)(&u);
        } else if (w->kind == MS_GRU) {
            u.state = (const REAL *)w->hs + (at + r) * P + unit;
            R(gru_row)(&u);
        } else {
            R(rnn_row)(&u, w->relu);
            if (w->q) memcpy(u.q, u.h, (size_t)n * sizeof *u.h);
        }
        if (!w->project) memcpy(R(leave)(w, w->hs, w->hn, P, here), u.h, (size_t)n * sizeof *u.h);
    }
}

// Projects the states of a step.
static void R(project_task)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const pass *w = arg;
    const panels *p = &w->projection;
    int64_t block = k / w->chunks, first = k % w->chunks * w->chunk, last = first + w->chunk, unit = block * p->wide;
    int64_t n = columns_of(p, block), H = w->H, P = w->P;
    REAL *room = (REAL *)(w->room + w->room_bytes * (size_t)ms__thread_num());
    (void)end, (void)unused;
    if (last > most(w->now.n, w->next.n)) last = most(w->now.n, w->next.n);
    int64_t computed = last < w->now.n ? last : w->now.n;
    if (first < computed) R(multiply)(p, block, computed - first, (const REAL *)w->unprojected + first * H, room);
    for (int64_t r = first; r < last; r++) {
        const part here = { r, unit, n };
        if (r >= w->now.n) {
            R(enter)(w, w->h0, w->hs, P, here);
            continue;
        }
        const REAL *h = room + (r - first) * p->wide;
        memcpy((REAL *)w->y + (w->now.at + r) * P + unit, h, (size_t)n * sizeof *h);
        memcpy(R(leave)(w, w->hs, w->hn, P, here), h, (size_t)n * sizeof *h);
    }
}

// ---- backward -------------------------------------------------------------------------------------

// n units of one row. q: the gates, q_gate elements apart. dx, da: where the gradients of the sums over the input and
// over the state are stored, d_gate elements apart; only GRU's differ. carried: the gradient of the cell (LSTM), or the
// part of the state's gradient that passes through no product (GRU).
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

// The gradients of the sums of n units of row r of the next step, from the gradient of its state.
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

// One task of a pass: the gradient of some elements of the state, and without a projection the units' gradients.
static void R(backward_task)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const pass *w = arg;
    const panels *p = &w->panels;
    int64_t block = k / w->chunks, first = k % w->chunks * w->chunk, last = first + w->chunk, unit = block * p->wide;
    int64_t n = columns_of(p, block), H = w->H, P = w->P;
    REAL *room = (REAL *)(w->room + w->room_bytes * (size_t)ms__thread_num());
    (void)end, (void)unused;
    if (last > most(w->now.n, w->next.n)) last = most(w->now.n, w->next.n);
    int64_t computed = last < w->now.n ? last : w->now.n;
    if (first < computed)
        R(multiply)(p, block, computed - first, (const REAL *)w->g.da + (w->now.at + first) * w->gates * H, room);
    for (int64_t r = first; r < last; r++) {
        REAL *dh = room + (r - first) * p->wide;
        if (r >= w->now.n) {
            const REAL *of_last = w->g.dh;
            for (int64_t j = 0; j < n; j++) dh[j] = of_last ? of_last[r * P + unit + j] : 0;
        } else if (w->kind == MS_GRU) {
            const REAL *direct = (const REAL *)w->g.carried + r * H + unit;
            for (int64_t j = 0; j < n; j++) dh[j] += direct[j];
        }
        if (r >= w->next.n) {
            if (w->g.dh0) memcpy((REAL *)w->g.dh0 + r * P + unit, dh, (size_t)n * sizeof *dh);
            continue;
        }
        const REAL *dy = w->g.dy ? (const REAL *)w->g.dy + (w->next.at + r) * P + unit : NULL;
        for (int64_t j = 0; dy && j < n; j++) dh[j] += dy[j];
        if (w->project) memcpy((REAL *)w->g.dprojected + (w->next.at + r) * P + unit, dh, (size_t)n * sizeof *dh);
        else R(unit_back)(w, r, unit, n, dh, room + MOST_ROWS * p->wide);
    }
}

// The gradients of the units of the next step, through the projection.
static void R(unproject_task)(void *arg, int64_t k, int64_t end, int64_t unused)
{
    const pass *w = arg;
    const panels *p = &w->projection;
    int64_t block = k / w->chunks, first = k % w->chunks * w->chunk, last = first + w->chunk, unit = block * p->wide;
    REAL *room = (REAL *)(w->room + w->room_bytes * (size_t)ms__thread_num());
    (void)end, (void)unused;
    if (last > w->next.n) last = w->next.n;
    if (first >= last) return;
    R(multiply)(p, block, last - first, (const REAL *)w->g.dprojected + (w->next.at + first) * w->P, room);
    for (int64_t r = first; r < last; r++)
        R(unit_back)(w, r, unit, columns_of(p, block), room + (r - first) * p->wide, room + MOST_ROWS * p->wide);
}
#undef OPERANDS
