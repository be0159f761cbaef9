// SPDX-License-Identifier: MIT
// cpu/product/attention.c -- softmax(q k^T) v without storing the T x T matrix (Dao et al. 2022), in tiles of 32
// queries by 512 keys. Forward saves one number per row (the logsumexp); backward recomputes the scores.
//
// One thread computes a whole head. It converts keys and values to float32 (or float64) once, and adds the gradients of
// keys and values in query order. Memory is therefore linear in T, and results do not depend on the number of threads.
// The output of a query without allowed keys is 0.
#include "cpu/product/product.h"
#include "rows/grad.h"
#include "cpu/rows/layers.h"
#include "cpu/elementwise/masks.h"
#include "cpu/rows/rows.h"

enum { ROWS = 32, CHUNK = 512 };

// A tensor [batch..., t, d] seen as heads. Strides: of rows, of columns, and of the batch dimensions (0 where
// broadcast).
typedef struct part {
    int dtype, n;
    void *data;
    int64_t rs, cs, shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
} part;

typedef struct attend {
    part q, k, v, mask, o, g, dq, dk, dv;
    void *lse, *dmask;
    const void *g_lse;
    int64_t heads, tq, tk, d, wide, keys;  // wide, keys: d and tk rounded up to multiples of 16
    bool causal;
    double p, scale;
    uint64_t seed, offset;
    char *room;
    size_t room_bytes;  // scratch memory per thread
} attend;

// Rows [first, first + n) of a head of a tensor.
typedef struct head_rows {
    const part *of;
    int64_t head, first, n;
} head_rows;

// A tile of scores: queries [i0, i0 + rows), keys [j0, j0 + n).
typedef struct tile {
    int64_t i0, rows, j0, n;
} tile;

// The number of keys in [j0, j0 + n) that at least one query before i may attend to.
static inline int64_t seen(const attend *w, int64_t i, int64_t j0, int64_t n)
{
    return !w->causal || i - j0 >= n ? n : i > j0 ? i - j0 : 0;
}
// The number of a tile's rows that are computed together: 8 if they may attend to different keys, otherwise all.
static inline int64_t tile_step(const attend *w, tile t) { return seen(w, t.i0 + 1, t.j0, t.n) < t.n ? 8 : t.rows; }

// The index of the first element of a head.
static int64_t head_start(const part *x, int64_t head)
{
    int64_t at = 0;
    for (int d = x->n - 1; d >= 0; d--) {
        at += head % x->shape[d] * x->stride[d];
        head /= x->shape[d];
    }
    return at;
}

// Describes t as heads. like: a tensor with the batch dimensions of the whole call.
static part part_of(const ms_tensor *t, const ms_tensor *like)
{
    part x = { .dtype = t->dtype,
               .n = like->ndim - 2,
               .data = ms__data(t),
               .rs = t->stride[t->ndim - 2],
               .cs = t->stride[t->ndim - 1] };
    if (t->shape[t->ndim - 2] == 1) x.rs = 0;  // a mask may broadcast along queries or keys
    if (t->shape[t->ndim - 1] == 1) x.cs = 0;
    for (int d = 0; d < x.n; d++) {
        int from = d + t->ndim - like->ndim;
        x.shape[d] = like->shape[d];
        x.stride[d] = from >= 0 && t->shape[from] > 1 ? t->stride[from] : 0;
    }
    return x;
}

#define BODY "cpu/product/attention_body.h"
#include "cpu/both_types.h"

static void forward_head(void *arg, int64_t head, int64_t end, int64_t unused)
{
    const attend *w = arg;
    char *room = w->room + w->room_bytes * (size_t)ms__thread_num();
    (void)end, (void)unused;
    if (w->q.dtype == MS_F64) attend_head_f64(w, head, (double *)room);
    else attend_head_f32(w, head, (float *)room);
}

static void backward_head(void *arg, int64_t head, int64_t end, int64_t unused)
{
    const attend *w = arg;
    char *room = w->room + w->room_bytes * (size_t)ms__thread_num();
    (void)end, (void)unused;
    if (w->q.dtype == MS_F64) attend_head_backward_f64(w, head, (double *)room);
    else attend_head_backward_f32(w, head, (float *)room);
}

static void sizes(attend *w, const ms_call *c, const ms_tensor *q, const ms_tensor *k)
{
    int n = q->ndim;
    w->tq = q->shape[n - 2];
    w->tk = k->shape[n - 2];
    w->d = q->shape[n - 1];
    w->wide = (w->d + 15) / 16 * 16;
    w->keys = (w->tk + 15) / 16 * 16;
    w->heads = 1;
    for (int d = 0; d < n - 2; d++) w->heads *= q->shape[d];
    w->causal = c->n_i > 0 && c->i[0];
    w->p = c->n_f > 0 ? c->f[0] : 0;
    w->scale = c->n_f > 1 && c->f[1] != 0 ? c->f[1] : 1 / sqrt((double)(w->d ? w->d : 1));
}

static void run_heads(const attend *w, ms_range_fn fn)
{
    // Starting threads costs more than small problems gain.
    if (w->heads * w->tq * w->tk * w->d < 1 << 16)
        for (int64_t h = 0; h < w->heads; h++) fn((void *)w, h, h + 1, h);
    else ms__parallel_tasks(w->heads, fn, (void *)w);
}

ms_status ms__cpu_attention(ms_call *c)
{
    ms_tensor *q = c->in[0], *k = c->in[1], *v = c->in[2], *mask = c->n_in > 3 ? c->in[3] : NULL, *o = c->out[0];
    ms_block *room;
    attend w = { .seed = c->saved_rng[0], .offset = c->saved_rng[1] };
    sizes(&w, c, q, k);
    if (w.heads * w.tq == 0) return MS_OK;
    w.q = part_of(q, q);
    w.k = part_of(k, q);
    w.v = part_of(v, q);
    w.o = part_of(o, q);
    if (mask) w.mask = part_of(mask, q);
    w.lse = ms__data(c->out[1]);
    w.room_bytes = (size_t)(w.d * w.keys + w.tk * w.wide + 2 * ROWS * w.wide + ROWS * CHUNK + CHUNK) *
                   (w.q.dtype == MS_F64 ? 8 : 4);
    w.room_bytes = (w.room_bytes + 63) / 64 * 64;
    MS_TRY(ms__alloc_scratch(&room, w.room_bytes * (size_t)ms_num_threads(), "attention"));
    w.room = room->data;
    run_heads(&w, forward_head);
    ms__free(room);
    return MS_OK;
}

// Inputs: gradient, q, k, v, mask (optional), out, lse, and optionally the gradient of lse.
ms_status ms__cpu_attention_backward(ms_call *c)
{
    ms_tensor *q = c->in[1], *k = c->in[2], *v = c->in[3], *mask = c->in[4], *g_lse = NULL;
    ms_tensor *dq = ms__grad_out(c, 0), *dk = ms__grad_out(c, 1), *dv = ms__grad_out(c, 2), *dmask = ms__grad_out(c, 3);
    ms_block *room = NULL;
    attend w = { .seed = (uint64_t)c->i[c->n_i - 3], .offset = (uint64_t)c->i[c->n_i - 2] };
    ms_status st = MS_OK;
    sizes(&w, c, q, k);
    if (w.heads * w.tq == 0 || w.tk == 0) {
        for (int i = 0; i < c->n_out; i++)
            if (c->out[i]->numel) memset(c->out[i]->storage->data, 0, ms__nbytes(c->out[i]));
        return MS_OK;
    }
    w.g = part_of(c->in[0], q);
    w.q = part_of(q, q);
    w.k = part_of(k, q);
    w.v = part_of(v, q);
    w.o = part_of(c->in[5], q);
    if (mask) w.mask = part_of(mask, q);
    w.lse = ms__data(c->in[6]);
    if (dq) w.dq = part_of(dq, q);
    if (dk) w.dk = part_of(dk, q);
    if (dv) w.dv = part_of(dv, q);
    size_t size = w.q.dtype == MS_F64 ? 8 : 4;
    if (c->n_in > 7 && c->in[7]) {
        MS_TRY(ms__contiguous(&g_lse, c->in[7]));
        w.g_lse = ms__data(g_lse);
    }
    if (dmask) w.dmask = ms__data(dmask);
    w.room_bytes = (size_t)(2 * w.d * w.keys + 3 * w.tk * w.wide + 3 * ROWS * w.wide + 2 * ROWS * CHUNK + CHUNK) * size;
    w.room_bytes = (w.room_bytes + 63) / 64 * 64;
    if (st == MS_OK) st = ms__alloc_scratch(&room, w.room_bytes * (size_t)ms_num_threads(), "attention_backward");
    if (st == MS_OK) {
        w.room = room->data;
        run_heads(&w, backward_head);
    }
    if (room) ms__free(room);
    ms__release(g_lse);
    return st;
}
