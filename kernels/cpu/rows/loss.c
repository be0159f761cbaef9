// SPDX-License-Identifier: MIT
// cpu/rows/loss.c -- mse_loss, and cross_entropy fused with its softmax: forward reads the logits once and saves one
// number per row (its logsumexp); backward writes the gradient in one pass. Sums over rows are computed in float64 over
// fixed blocks, so results do not depend on the number of threads.
#include "rows/grad.h"
#include "cpu/rows/layers.h"
#include "cpu/rows/rows.h"

enum { NONE, MEAN, SUM };
enum { PIECE = 512, BLOCK = 16384 };

typedef struct cross {
    int dtype;
    bool g_rows;  // g has one element per row; otherwise one in all
    int64_t n, ignore;
    double smooth, scale;
    const void *x, *w, *g, *g_lse;
    const int64_t *ids;
    void *lse, *losses, *out;
    char *room;
    size_t room_bytes;  // per thread
} cross;

typedef struct mse {
    int dtype;
    double scale, *sums;
    const void *a, *b, *g;
    void *out, *da, *db;
} mse;

static double one(int dtype, const void *p, int64_t k)
{
    float f;
    return dtype == MS_F64 ? ((const double *)p)[k] : *ms__row_in(dtype, p, k, 1, 1, &f);
}
#define ONE one

#define BODY "cpu/rows/loss_body.h"
#include "cpu/both_types.h"

#define BOTH(work, name) ((work).dtype == MS_F64 ? name##_f64 : name##_f32)

static void store_one(ms_tensor *t, double v)
{
    if (t->dtype == MS_F64) *(double *)ms__data(t) = v;
    else if (t->dtype == MS_F32) *(float *)ms__data(t) = (float)v;
    else ms__row_out(t->dtype, ms__data(t), 0, 1, 1, &(float) { (float)v });
}

// ---- cross_entropy --------------------------------------------------------------------------------

// Memory that forward and backward hold: contiguous inputs, checked ids, scratch.
typedef struct held {
    ms_tensor *x, *w, *ids;
    ms_block *wide, *room;
} held;

static void let_go(held *h)
{
    if (h->room) ms__free(h->room);
    if (h->wide) ms__free(h->wide);
    ms__release(h->ids);
    ms__release(h->w);
    ms__release(h->x);
}

static ms_status prepare(ms_call *c, held *h, cross *q, ms_tensor *x, ms_tensor *ids, ms_tensor *w)
{
    int64_t rows = ids->numel;
    size_t size = x->dtype == MS_F64 ? 8 : 4;
    memset(h, 0, sizeof *h);
    q->dtype = x->dtype;
    q->n = x->shape[x->ndim - 1];
    q->ignore = c->n_i > 1 ? c->i[1] : -100;
    q->smooth = c->n_f > 0 ? c->f[0] : 0;
    if (rows && q->n == 0) return ms__call_fail(c, "the logits have no classes: %s", ms__shape_text(x->ndim, x->shape));
    MS_TRY(ms__contiguous(&h->x, x));
    MS_TRY(ms__contiguous(&h->ids, ids));
    if (w) MS_TRY(ms__contiguous(&h->w, w));
    q->ids = ms__data(h->ids);
    if (ids->dtype == MS_I32) {
        MS_TRY(ms__alloc(&h->wide, MS_CPU, (size_t)rows * sizeof(int64_t), c->op->name));
        for (int64_t r = 0; r < rows; r++) ((int64_t *)h->wide->data)[r] = ((const int32_t *)ms__data(h->ids))[r];
        q->ids = h->wide->data;
    }
    for (int64_t r = 0; r < rows; r++)
        if (MS_UNLIKELY((q->ids[r] < 0 || q->ids[r] >= q->n) && q->ids[r] != q->ignore))
            return ms__call_fail(c, "id %lld (row %lld) is neither in 0 .. %lld nor ignore_index %lld",
                                 (long long)q->ids[r], (long long)r + 1, (long long)q->n - 1, (long long)q->ignore);
    q->x = ms__data(h->x);
    q->w = h->w ? ms__data(h->w) : NULL;
    q->room_bytes = (size_t)(3 * q->n) * size;
    MS_TRY(ms__alloc(&h->room, MS_CPU, q->room_bytes * (size_t)ms_num_threads() + (size_t)rows * size, c->op->name));
    q->room = h->room->data;
    q->losses = q->room + q->room_bytes * (size_t)ms_num_threads();
    return MS_OK;
}

// The divisor of the mean: the sum of the weights of the rows that are not ignored.
static double total_weight(const cross *q, int64_t rows)
{
    double total = 0;
    for (int64_t r = 0; r < rows; r++)
        if (q->ids[r] != q->ignore) total += q->w ? one(q->dtype, q->w, q->ids[r]) : 1;
    return total;
}

ms_status ms__cpu_cross_entropy(ms_call *c)
{
    held h;
    cross q = { 0 };
    int64_t rows = c->in[1]->numel;
    ms_status st = prepare(c, &h, &q, c->in[0], c->in[1], c->n_in > 2 ? c->in[2] : NULL);
    if (st == MS_OK) {
        q.lse = ms__data(c->out[1]);
        if (rows) ms__parallel(rows * q.n, ms__rows_per_block(q.n) * q.n, BOTH(q, cross_rows), &q);
        if (c->i[0] == NONE) {
            if (q.dtype == MS_F64) memcpy(ms__data(c->out[0]), q.losses, (size_t)rows * sizeof(double));
            else if (q.dtype == MS_F32) memcpy(ms__data(c->out[0]), q.losses, (size_t)rows * sizeof(float));
            else ms__row_out(q.dtype, ms__data(c->out[0]), 0, 1, rows, q.losses);
        } else {
            double sum = 0;
            for (int64_t r = 0; r < rows; r++)
                sum += q.dtype == MS_F64 ? ((double *)q.losses)[r] : ((float *)q.losses)[r];
            store_one(c->out[0], c->i[0] == MEAN ? sum / total_weight(&q, rows) : sum);
        }
    }
    let_go(&h);
    return st;
}

ms_status ms__cpu_cross_entropy_backward(ms_call *c)
{
    held h;
    cross q = { 0 };
    ms_tensor *g = NULL, *g_lse = NULL;
    int64_t rows = c->in[2]->numel;
    ms_status st = prepare(c, &h, &q, c->in[1], c->in[2], c->in[3]);
    if (st == MS_OK) st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK && c->n_in > 5 && c->in[5]) st = ms__contiguous(&g_lse, c->in[5]);
    if (st == MS_OK && rows) {
        q.g_lse = g_lse ? ms__data(g_lse) : NULL;
        q.g_rows = c->i[0] == NONE;
        q.g = ms__data(g);
        q.scale = q.g_rows ? 1 : one(q.dtype, q.g, 0) / (c->i[0] == MEAN ? total_weight(&q, rows) : 1);
        q.lse = ms__data(c->in[4]);
        q.out = ms__data(c->out[0]);
        ms__parallel(rows * q.n, ms__rows_per_block(q.n) * q.n, BOTH(q, cross_rows_backward), &q);
    }
    ms__release(g_lse);
    ms__release(g);
    let_go(&h);
    return st;
}

// ---- mse_loss -------------------------------------------------------------------------------------

ms_status ms__cpu_mse_loss(ms_call *c)
{
    double small[64];
    ms_tensor *a = NULL, *b = NULL, *out = c->out[0];
    ms_block *room = NULL;
    int64_t n = c->in[0]->numel, blocks = (n + BLOCK - 1) / BLOCK;
    mse q = { .dtype = out->dtype };
    ms_status st = ms__contiguous(&a, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&b, c->in[1]);
    if (st == MS_OK && blocks > MS_COUNT(small))
        st = ms__alloc(&room, MS_CPU, (size_t)blocks * sizeof(double), "mse_loss");
    if (st == MS_OK) {
        q.a = ms__data(a);
        q.b = ms__data(b);
        q.out = ms__data(out);
        if (c->i[0] != NONE) q.sums = room ? room->data : small;
        ms__parallel(n, BLOCK, BOTH(q, squares), &q);
        if (c->i[0] != NONE) {
            double sum = 0;
            for (int64_t k = 0; k < blocks; k++) sum += q.sums[k];
            store_one(out, c->i[0] == MEAN ? sum / (double)n : sum);
        }
    }
    if (room) ms__free(room);
    ms__release(b);
    ms__release(a);
    return st;
}

ms_status ms__cpu_mse_loss_backward(ms_call *c)
{
    ms_tensor *g = NULL, *a = NULL, *b = NULL, *da = ms__grad_out(c, 0), *db = ms__grad_out(c, 1);
    int64_t n = c->in[1]->numel;
    mse q = { .dtype = c->in[1]->dtype, .scale = 1 };
    ms_status st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&a, c->in[1]);
    if (st == MS_OK) st = ms__contiguous(&b, c->in[2]);
    if (st == MS_OK && n) {
        q.a = ms__data(a);
        q.b = ms__data(b);
        if (c->i[0] == NONE) q.g = ms__data(g);
        else q.scale = one(q.dtype, ms__data(g), 0) / (c->i[0] == MEAN ? (double)n : 1);
        q.da = da ? ms__data(da) : NULL;
        q.db = db ? ms__data(db) : NULL;
        ms__parallel(n, BLOCK, BOTH(q, squares_backward), &q);
    }
    ms__release(b);
    ms__release(a);
    ms__release(g);
    return st;
}
