// SPDX-License-Identifier: MIT
// cpu/rows/norm.c -- softmax, log_softmax, layer_norm, rms_norm on the CPU. A row is read several times, but from
// memory only once if it fits in the cache. Backward of the norms reads each row's mean and 1 / deviation, kept by
// forward; backward of softmax and log_softmax reads the output.
#include "cpu/rows/rows.h"
#include "rows/grad.h"
#include "cpu/rows/layers.h"

enum { STRIP = 64, STRIP_FROM = 16 };  // adjacent rows that are read together, if there are at least STRIP_FROM

typedef struct soft {
    int dtype;
    bool log;
    const void *x, *g;
    void *out;
    ms_rows r;
    int64_t cost;  // of a strip
    char *room;
    size_t room_bytes;  // per thread
} soft;

typedef struct norm {
    int dtype;
    bool rms;
    int64_t n;
    double eps;
    const void *x, *r, *w, *b, *g;  // r: the residual, which is added to x; NULL if there is none
    void *sum, *out, *stats;        // sum: gets x + r. stats: the mean and 1 / deviation of each row
    char *room, *sums;
    size_t room_bytes, sums_bytes;  // of `room` per thread, of `sums` per block
} norm;

#define BODY "cpu/rows/norm_body.h"
#include "cpu/both_types.h"

#define BOTH(work, name) ((work).dtype == MS_F64 ? name##_f64 : name##_f32)

enum { SMALL_ROOM = 16 << 10 };

// Allocates scratch memory: `each` bytes per thread, then `shared` bytes. Uses the caller's array `small` for up to
// SMALL_ROOM bytes.
static ms_status room_for_rows(ms_block **b, char **room, void *small, size_t each, size_t shared, const char *what)
{
    size_t bytes = each * (size_t)ms_num_threads() + shared;
    *b = NULL;
    *room = small;
    if (bytes <= SMALL_ROOM) return MS_OK;
    MS_TRY(ms__alloc_scratch(b, bytes, what));
    *room = (*b)->data;
    return MS_OK;
}

// ---- softmax --------------------------------------------------------------------------------------

static ms_status run_soft(ms_call *c, bool log, bool backward)
{
    char small[SMALL_ROOM] __attribute__((aligned(64)));
    ms_tensor *x = NULL, *g = NULL, *out = c->out[0];
    ms_block *block = NULL;
    soft w = { .dtype = out->dtype, .log = log };
    int d = (int)(c->i[0] < 0 ? c->i[0] + (out->ndim ? out->ndim : 1) : c->i[0]);
    ms_status st = ms__contiguous(&x, c->in[backward ? 1 : 0]);
    if (st == MS_OK && backward) st = ms__contiguous(&g, c->in[0]);
    w.r = ms__rows_along(out, d);
    w.room_bytes = (size_t)(3 * (w.r.stride < STRIP_FROM ? w.r.n : STRIP)) * (w.dtype == MS_F64 ? 8 : 4);
    if (st == MS_OK) st = room_for_rows(&block, &w.room, small, w.room_bytes, 0, c->op->name);
    if (st == MS_OK && w.r.rows) {
        w.x = ms__data(x);
        w.g = g ? ms__data(g) : NULL;
        w.out = ms__data(out);
        if (w.r.stride < STRIP_FROM)
            ms__parallel(w.r.rows * w.r.n, ms__rows_per_block(w.r.n) * w.r.n,
                         backward ? BOTH(w, softmax_backward) : BOTH(w, softmax), &w);
        else {
            int64_t strips = w.r.rows / w.r.stride * ((w.r.stride + STRIP - 1) / STRIP);
            w.cost = w.r.n * (w.r.stride < STRIP ? w.r.stride : STRIP);
            ms__parallel(strips * w.cost, (w.cost < 8192 ? 8192 / w.cost : 1) * w.cost,
                         backward ? BOTH(w, softmax_backward_strips) : BOTH(w, softmax_strips), &w);
        }
    }
    if (block) ms__free(block);
    ms__release(g);
    ms__release(x);
    return st;
}

ms_status ms__cpu_softmax(ms_call *c) { return run_soft(c, false, false); }
ms_status ms__cpu_log_softmax(ms_call *c) { return run_soft(c, true, false); }
ms_status ms__cpu_softmax_backward(ms_call *c) { return run_soft(c, false, true); }
ms_status ms__cpu_log_softmax_backward(ms_call *c) { return run_soft(c, true, true); }

// ---- layer_norm, rms_norm -------------------------------------------------------------------------

// residual: the index of the residual among the inputs; 0 if there is none.
static ms_status normalise_rows(ms_call *c, bool rms, int residual)
{
    char small[SMALL_ROOM] __attribute__((aligned(64)));
    ms_tensor *in[4] = { NULL }, *out = c->out[0], *stats = c->out[residual + 1];
    ms_block *block = NULL;
    norm p = { .dtype = out->dtype, .rms = rms, .eps = c->f[0] };
    ms_status st = MS_OK;
    p.n = ms__row_length(c->in[0], (int)c->i[0]);
    for (int k = 0; k < c->n_in && st == MS_OK; k++)
        if (c->in[k]) st = ms__contiguous(&in[k], c->in[k]);
    p.room_bytes = (size_t)((residual ? 5 : 3) * p.n) * (p.dtype == MS_F64 ? 8 : 4);
    if (st == MS_OK) st = room_for_rows(&block, &p.room, small, p.room_bytes, 0, c->op->name);
    if (st == MS_OK && out->numel) {
        const ms_tensor *w = in[residual + 1], *b = in[residual + 2];
        p.x = ms__data(in[0]);
        if (residual) p.r = ms__data(in[residual]), p.sum = ms__data(c->out[1]);
        p.w = w ? ms__data(w) : NULL;
        p.b = b ? ms__data(b) : NULL;
        p.stats = stats ? ms__data(stats) : NULL;
        p.out = ms__data(out);
        ms__parallel(out->numel, ms__rows_per_block(p.n) * p.n, BOTH(p, norm), &p);
    }
    if (block) ms__free(block);
    for (int k = 0; k < 4; k++) ms__release(in[k]);
    return st;
}

ms_status ms__cpu_layer_norm(ms_call *c) { return normalise_rows(c, false, 0); }
ms_status ms__cpu_rms_norm(ms_call *c) { return normalise_rows(c, true, 0); }
ms_status ms__cpu_add_layer_norm(ms_call *c) { return normalise_rows(c, false, 1); }
ms_status ms__cpu_add_rms_norm(ms_call *c) { return normalise_rows(c, true, 1); }

// Adds the partial sums of all blocks in order and stores them in out. at: where they begin in a block's sums, 0 (dw)
// or n (db).
static void add_norm_parts(const norm *p, int64_t blocks, int64_t at, ms_tensor *out)
{
    if (!out) return;
    double *wide = (double *)p->sums;
    float *narrow = (float *)p->sums;
    if (p->dtype == MS_F64) {
        for (int64_t b = 1; b < blocks; b++)
            for (int64_t j = 0; j < p->n; j++) wide[at + j] += wide[2 * b * p->n + at + j];
        memcpy(ms__data(out), wide + at, (size_t)p->n * sizeof *wide);
        return;
    }
    for (int64_t b = 1; b < blocks; b++)
        for (int64_t j = 0; j < p->n; j++) narrow[at + j] += narrow[2 * b * p->n + at + j];
    if (p->dtype == MS_F32) memcpy(ms__data(out), narrow + at, (size_t)p->n * sizeof *narrow);
    else ms__row_out(p->dtype, ms__data(out), 0, 1, p->n, narrow + at);
}

// Inputs: gradient, x, w (optional), stats. Outputs: those of dx, dw, db that the mask (rows/grad.h) selects.
static ms_status normalise_backward(ms_call *c, bool rms)
{
    char small[SMALL_ROOM] __attribute__((aligned(64)));
    ms_tensor *g = NULL, *x = NULL, *w = NULL, *dx = ms__grad_out(c, 0), *dw = ms__grad_out(c, 1),
              *db = ms__grad_out(c, 2);
    ms_block *block = NULL;
    norm p = { .dtype = c->in[0]->dtype, .rms = rms, .eps = c->f[0] };
    size_t size = p.dtype == MS_F64 ? 8 : 4;
    ms_status st = ms__contiguous(&g, c->in[0]);
    p.n = ms__row_length(c->in[1], (int)c->i[0]);
    if (st == MS_OK) st = ms__contiguous(&x, c->in[1]);
    if (st == MS_OK && c->n_in > 2 && c->in[2]) st = ms__contiguous(&w, c->in[2]);
    if (st != MS_OK) goto out;

    // At most 64 blocks: each adds 2 n partial sums to the memory traffic.
    int64_t some = p.n ? (x->numel / p.n + 63) / 64 : 0, few = ms__rows_per_block(p.n);
    int64_t step = (some > few ? some : few) * p.n, blocks = step ? (x->numel + step - 1) / step : 0;
    p.room_bytes = (size_t)(4 * p.n) * size;
    p.sums_bytes = (size_t)(2 * p.n) * size;
    if (!x->numel) {
        if (dw) memset(ms__data(dw), 0, ms__nbytes(dw));
        if (db) memset(ms__data(db), 0, ms__nbytes(db));
        goto out;
    }
    bool sums = dw || db;
    st = room_for_rows(&block, &p.room, small, p.room_bytes, sums ? (size_t)blocks * p.sums_bytes : 0, c->op->name);
    if (st != MS_OK) goto out;
    if (sums) p.sums = p.room + p.room_bytes * (size_t)ms_num_threads();
    p.x = ms__data(x);
    p.g = ms__data(g);
    p.w = w ? ms__data(w) : NULL;
    p.stats = ms__data(c->in[3]);
    p.out = dx ? ms__data(dx) : NULL;
    ms__parallel(x->numel, step, BOTH(p, norm_backward), &p);
    add_norm_parts(&p, blocks, 0, dw);
    add_norm_parts(&p, blocks, p.n, db);
out:
    if (block) ms__free(block);
    ms__release(w);
    ms__release(x);
    ms__release(g);
    return st;
}

ms_status ms__cpu_layer_norm_backward(ms_call *c) { return normalise_backward(c, false); }
ms_status ms__cpu_rms_norm_backward(ms_call *c) { return normalise_backward(c, true); }
