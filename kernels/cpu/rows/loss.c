// SPDX-License-Identifier: MIT
// cpu/rows/loss.c -- mse_loss, cross_entropy, and linear_cross_entropy, which computes its logits in chunks of rows.
// cross_entropy is fused with its softmax: forward reads the logits from memory once and saves one number per row (its
// logsumexp); backward writes the gradient in one pass. The losses are summed in float64, in a fixed order, so results
// do not depend on the number of threads; mse_loss first sums PIECE squares at a time in float32 (float64 for float64
// tensors).
#include "rows/grad.h"
#include "rows/product.h"
#include "cpu/product/product.h"
#include "cpu/rows/layers.h"
#include "cpu/rows/rows.h"

enum { NONE, MEAN, SUM };
enum { PIECE = 512, BLOCK = 16384 };

typedef struct cross {
    int dtype, g_dtype;
    bool g_rows;        // g has one element per row; otherwise a single one
    int64_t n, ignore;  // number of classes; the target of rows that do not count
    double smooth;      // label smoothing
    double scale;       // in backward: the gradient of each row's loss; with g_rows, a factor of g's elements
    const void *x, *w, *g, *g_lse;
    const int64_t *ids;
    void *lse, *losses;  // one number per row
    void *out;           // in backward: the gradient of x
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

static void release_held(held *h)
{
    if (h->room) ms__free(h->room);
    if (h->wide) ms__free(h->wide);
    ms__release(h->ids);
    ms__release(h->w);
    ms__release(h->x);
}

// Checks the ids, and sets the fields of *q that forward and backward share; *h owns what they point to. x: the logits
// of all rows, or memory for a chunk's logits.
static ms_status prepare_loss(ms_call *c, held *h, cross *q, ms_tensor *x, ms_tensor *ids, ms_tensor *w)
{
    int64_t rows = ids->numel;
    size_t size = x->dtype == MS_F64 ? 8 : 4;
    memset(h, 0, sizeof *h);
    q->dtype = q->g_dtype = x->dtype;
    q->n = x->shape[x->ndim - 1];
    q->ignore = c->n_i > 1 ? c->i[1] : -100;
    q->smooth = c->n_f > 0 ? c->f[0] : 0;
    if (rows && q->n == 0)
        return ms__call_fail(c, "the logits have no classes: shape %s, expected a last dimension of at least 1",
                             ms__shape_text(x->ndim, x->shape));
    MS_TRY(ms__contiguous(&h->x, x));
    MS_TRY(ms__contiguous(&h->ids, ids));
    if (w) MS_TRY(ms__contiguous(&h->w, w));
    q->ids = ms__data(h->ids);
    if (ids->dtype == MS_I32) {
        MS_TRY(ms__alloc_scratch(&h->wide, (size_t)rows * sizeof(int64_t), c->op->name));
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
    MS_TRY(ms__alloc_scratch(&h->room, q->room_bytes * (size_t)ms_num_threads() + (size_t)rows * size, c->op->name));
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

// Writes the losses of all rows, or their sum divided by `divisor`, depending on the reduction.
static void put_losses(ms_call *c, const cross *q, int64_t rows, double divisor)
{
    ms_tensor *out = c->out[0];
    if (c->i[0] != NONE) {
        double sum = 0;
        for (int64_t r = 0; r < rows; r++)
            sum += q->dtype == MS_F64 ? ((double *)q->losses)[r] : ((float *)q->losses)[r];
        store_one(out, sum / divisor);
    } else if (out->dtype == MS_F64) memcpy(ms__data(out), q->losses, (size_t)rows * sizeof(double));
    else if (out->dtype == MS_F32) memcpy(ms__data(out), q->losses, (size_t)rows * sizeof(float));
    else ms__row_out(out->dtype, ms__data(out), 0, 1, rows, q->losses);
}

ms_status ms__cpu_cross_entropy(ms_call *c)
{
    held h;
    cross q = { 0 };
    int64_t rows = c->in[1]->numel;
    ms_status st = prepare_loss(c, &h, &q, c->in[0], c->in[1], c->n_in > 2 ? c->in[2] : NULL);
    if (st == MS_OK) {
        q.lse = ms__data(c->out[1]);
        if (rows) ms__parallel(rows * q.n, ms__rows_per_block(q.n) * q.n, BOTH(q, cross_rows), &q);
        put_losses(c, &q, rows, c->i[0] == MEAN ? total_weight(&q, rows) : 1);
    }
    release_held(&h);
    return st;
}

ms_status ms__cpu_cross_entropy_backward(ms_call *c)
{
    held h;
    cross q = { 0 };
    ms_tensor *g = NULL, *g_lse = NULL;
    int64_t rows = c->in[2]->numel;
    ms_status st = prepare_loss(c, &h, &q, c->in[1], c->in[2], c->in[3]);
    if (st == MS_OK) st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK && c->n_in > 5 && c->in[5]) st = ms__contiguous(&g_lse, c->in[5]);
    if (st == MS_OK && rows) {
        q.g_lse = g_lse ? ms__data(g_lse) : NULL;
        q.g_rows = c->i[0] == NONE;
        q.g = ms__data(g);
        q.g_dtype = g->dtype;
        q.scale = q.g_rows ? 1 : one(q.g_dtype, q.g, 0) / (c->i[0] == MEAN ? total_weight(&q, rows) : 1);
        q.lse = ms__data(c->in[4]);
        q.out = ms__data(c->out[0]);
        ms__parallel(rows * q.n, ms__rows_per_block(q.n) * q.n, BOTH(q, cross_rows_backward), &q);
    }
    ms__release(g_lse);
    ms__release(g);
    release_held(&h);
    return st;
}

// ---- linear_cross_entropy -------------------------------------------------------------------------

// A sum over chunks. float32 and float64: the part of the first chunk is written to the result, later ones to `part`,
// from which they are added. Half types: every part is written to `part` and added to `sum`, a float32 tensor, which is
// rounded to the result at the end. With a single chunk, its part is the result.
typedef struct chunk_sum {
    ms_tensor *result, *part, *sum;
} chunk_sum;

static ms_status sum_begin(chunk_sum *s, ms_tensor *result, bool several)
{
    s->result = result;
    if (!result || !several) return MS_OK;
    MS_TRY(ms__tensor_like(&s->part, result, "linear_cross_entropy"));
    if (result->dtype == MS_F32 || result->dtype == MS_F64) s->sum = ms__retain(result);
    else MS_TRY(ms__zeros(&s->sum, MS_F32, MS_CPU, result->ndim, result->shape));
    return MS_OK;
}
static ms_tensor *sum_part(const chunk_sum *s, int64_t first)
{
    return s->part && (first || s->sum != s->result) ? s->part : s->result;
}
static ms_status sum_add(const chunk_sum *s, const ms_tensor *part)
{
    ms_tensor *sum = NULL;
    if (part == s->result) return MS_OK;
    ms_status st = ms__op2(&sum, &ms__op_add_, s->sum, s->part);
    ms__release(sum);
    return st;
}
static ms_status sum_end(chunk_sum *s, ms_status st)
{
    if (st == MS_OK && s->sum && s->sum != s->result) st = ms__copy_data(s->result, s->sum);
    ms__release(s->sum);
    ms__release(s->part);
    return st;
}

typedef struct chunked {
    cross q;
    held h;
    ms_tensor *x, *w, *bias, *g, *logits, *gradient, *lse, *dx;
    chunk_sum dw, db;
} chunked;

// Computes rows [first, first + rows): logits, losses and, if asked for, gradients.
static ms_status loss_chunk(ms_call *c, chunked *k, int64_t first, int64_t rows)
{
    const char *what = c->op->name;
    ms_tensor *x = k->x, *w = k->w;
    int dtype = x->dtype;
    int64_t size = ms__dtype_size(dtype), n = w->shape[0], in = w->shape[1], grain = ms__rows_per_block(n) * n;
    cross q = k->q;
    const char *from = (const char *)ms__data(x) + first * in * size;
    ms_gemm p = ms__gemm_of(what, dtype, rows, n, in);
    p.a = from, p.a_rs = in, p.a_cs = 1;
    p.b = ms__data(w), p.b_rs = w->stride[1], p.b_cs = w->stride[0];
    p.bias = k->bias ? ms__data(k->bias) : NULL;
    p.c = ms__data(k->logits);
    MS_TRY(ms__gemm(&p));
    q.ids += first;
    q.losses = (char *)q.losses + first * (dtype == MS_F64 ? 8 : 4);
    ms__parallel(rows * n, grain, BOTH(q, cross_rows), &q);
    if (!k->gradient) return MS_OK;
    if (q.g_rows) q.g = (const char *)q.g + first * ms__dtype_size(q.g_dtype);
    q.out = ms__data(k->gradient);
    ms__parallel(rows * n, grain, BOTH(q, cross_rows_backward), &q);
    if (k->dx) {
        p = ms__gemm_of(what, dtype, rows, in, n);
        p.a = q.out, p.a_rs = n, p.a_cs = 1;
        p.b = ms__data(w), p.b_rs = w->stride[0], p.b_cs = w->stride[1];
        p.c = (char *)ms__data(k->dx) + first * in * size;
        MS_TRY(ms__gemm(&p));
    }
    if (k->dw.result) {
        ms_tensor *part = sum_part(&k->dw, first);
        p = ms__gemm_of(what, dtype, n, in, rows);
        p.a = q.out, p.a_rs = 1, p.a_cs = n;
        p.b = from, p.b_rs = in, p.b_cs = 1;
        p.c = ms__data(part);
        MS_TRY(ms__gemm(&p));
        MS_TRY(sum_add(&k->dw, part));
    }
    if (k->db.result) {
        ms_tensor *part = sum_part(&k->db, first);
        ms__column_sum(dtype, ms__data(part), q.out, rows, n, n);
        MS_TRY(sum_add(&k->db, part));
    }
    return MS_OK;
}

// in: x, w, ids, and optionally bias and class weights. g: the gradient of the loss; NULL in a forward, where it is 1
// and the loss is stored. grad: dx, dw, dbias; those that are not NULL are computed.
static ms_status chunks(ms_call *c, ms_tensor *const *in, int n_in, ms_tensor *g, ms_tensor *const *grad)
{
    chunked k = { .dx = grad[0] };
    int64_t rows = in[0]->shape[0], n = in[1]->shape[0], most = c->i[2] && c->i[2] < rows ? c->i[2] : rows;
    int dtype = in[0]->dtype;
    ms_status st = ms__tensor_new(&k.logits, dtype, MS_CPU, 2, (int64_t[]) { most, n }, c->op->name);
    if (st == MS_OK && (grad[0] || grad[1] || grad[2])) st = ms__tensor_like(&k.gradient, k.logits, c->op->name);
    if (st == MS_OK) st = prepare_loss(c, &k.h, &k.q, k.logits, in[2], n_in > 4 ? in[4] : NULL);
    if (st == MS_OK) st = ms__tensor_new(&k.lse, dtype == MS_F64 ? MS_F64 : MS_F32, MS_CPU, 1, &most, c->op->name);
    if (st == MS_OK) st = ms__contiguous(&k.x, in[0]);
    if (st == MS_OK && n_in > 3 && in[3]) st = ms__contiguous(&k.bias, in[3]);
    if (st == MS_OK && g) st = ms__contiguous(&k.g, g);
    if (st == MS_OK) st = sum_begin(&k.dw, grad[1], most < rows);
    if (st == MS_OK) st = sum_begin(&k.db, grad[2], most < rows);
    if (st == MS_OK) {
        double divisor = c->i[0] == MEAN ? total_weight(&k.q, rows) : 1;
        k.w = in[1];
        k.q.lse = ms__data(k.lse);
        k.q.g_rows = c->i[0] == NONE;
        if (k.g) k.q.g = ms__data(k.g), k.q.g_dtype = k.g->dtype;
        k.q.scale = k.q.g_rows ? 1 : (k.g ? one(k.g->dtype, k.q.g, 0) : 1) / divisor;
        for (int64_t first = 0; first < rows && st == MS_OK; first += most)
            st = loss_chunk(c, &k, first, rows - first < most ? rows - first : most);
        if (st == MS_OK && !g) put_losses(c, &k.q, rows, divisor);
    }
    for (int i = 1; i < 3 && st == MS_OK && rows == 0; i++)
        if (grad[i]) st = ms__zero(grad[i]);
    st = sum_end(&k.dw, st);
    st = sum_end(&k.db, st);
    ms__release(k.g);
    ms__release(k.bias);
    ms__release(k.x);
    ms__release(k.lse);
    release_held(&k.h);
    ms__release(k.gradient);
    ms__release(k.logits);
    return st;
}

ms_status ms__cpu_linear_cross_entropy(ms_call *c)
{
    static const int differentiable[] = { 0, 1, 3 };
    for (int k = 0; k < 3; k++)
        if (c->i[4] >> differentiable[k] & 1)
            MS_TRY(ms__tensor_like(&c->out[1 + k], c->in[differentiable[k]], c->op->name));
    return chunks(c, c->in, c->n_in, NULL, &c->out[1]);
}

// Inputs: gradient, then the inputs of the forward.
ms_status ms__cpu_linear_cross_entropy_backward(ms_call *c)
{
    ms_tensor *grad[] = { ms__grad_out(c, 0), ms__grad_out(c, 1), ms__grad_out(c, 3) };
    return chunks(c, c->in + 1, c->n_in - 1, c->in[0], grad);
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
        st = ms__alloc_scratch(&room, (size_t)blocks * sizeof(double), "mse_loss");
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
