// SPDX-License-Identifier: MIT
// cpu/attention/attention.c -- softmax(q k^T) v without storing the T x T matrix (Dao et al. 2022), in tiles of 64
// queries (float64: 32) by KEYS keys. Forward saves one number per row (the logsumexp); backward recomputes the scores.
//
// Forward, a task is a block of queries; if a head has at most FEW queries, as in decoding, it is FEW_KEYS keys for all
// heads that share them, and the results are then added in order. Backward, a task is a head of keys: it adds the
// gradients of keys and values in the order of the heads that share them and their queries. Memory is therefore linear
// in T, and results do not depend on the number of threads. The output of a query without allowed keys is 0.
#include "cpu/attention/few.h"
#include "cpu/product/product.h"
#include "rows/attention.h"
#include "rows/grad.h"
#include "cpu/rows/layers.h"
#include "cpu/elementwise/masks.h"
#include "cpu/rows/rows.h"

enum {
    KEYS = 64,       // keys of a tile
    FEW = 8,         // most queries of a head that are computed as rows instead of tiles
    FEW_ROWS = 64,   // most rows, of heads that share keys, that are computed together then
    FEW_KEYS = 512,  // keys of a task then
    PART = 64,       // of which so many are converted at a time,
    STEP = 16,       // and so many multiplied,
    AHEAD = 32,      // while those that follow so many later are fetched
};

// A tensor [batch..., t, d] seen as heads. Strides: of rows, of columns, and of the batch dimensions (0 where
// broadcast). share: heads of queries for each of its heads.
typedef struct part {
    int dtype, n;
    void *data;
    int64_t share, rs, cs, shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
} part;

typedef struct attend {
    part q, k, v, mask, o, g, dq, dk, dv;
    void *lse, *dmask;
    const void *g_lse;
    int64_t heads, tq, tk, d, wide;  // wide: d rounded up to a multiple of 16
    int64_t blocks;                  // of queries in a head
    // Few queries: heads that share keys and values; the keys that any query attends to, and their parts.
    int64_t group, key, key_end, chunks;
    ms_attention a;
    uint64_t seed, offset;
    char *room, *parts;
    size_t room_bytes;  // scratch memory per thread
} attend;

// Rows [first, first + n) of a head of a tensor.
typedef struct head_rows {
    const part *of;
    int64_t head, first, n;
} head_rows;

// A tile of scores: queries [i0, i0 + rows) of a head, keys [j0, j0 + n). lanes: columns that are computed.
typedef struct tile {
    int64_t head, i0, rows, lanes, j0, n;
} tile;

// Block `task` of queries.
static inline tile query_block_of(const attend *w, int64_t task, int64_t queries, int64_t lanes)
{
    tile t = { .head = task / w->blocks, .i0 = task % w->blocks * queries };
    t.rows = w->tq - t.i0 < queries ? w->tq - t.i0 : queries;
    t.lanes = (t.rows + lanes - 1) / lanes * lanes;
    return t;
}
// The end of the keys that a block of queries may attend to.
static inline int64_t last_key(const attend *w, tile t) { return ms_span_end(w->a.span, t.i0 + t.rows - 1, w->tk); }
// The number of a tile's keys that a query before column r may attend to.
static inline int64_t key_count(const attend *w, tile t, int64_t r)
{
    int64_t n = t.i0 + r + w->a.span.high - t.j0;
    return n >= t.n ? t.n : n > 0 ? n : 0;
}
// The first column whose query may attend to key j of the tile.
static inline int64_t first_query(const attend *w, tile t, int64_t j)
{
    int64_t first = t.j0 + j - w->a.span.high - t.i0;
    return first > 0 ? first : 0;
}
// Whether not all queries of a tile may attend to all of its keys.
static inline bool ragged(const attend *w, tile t) { return first_query(w, t, t.n - 1) > 0; }

// The index of the first element of a head.
static int64_t head_start(const part *x, int64_t head)
{
    int64_t at = 0;
    for (int d = x->n - 1; d >= 0; d--) {
        at += head % x->shape[d] / (d == x->n - 1 ? x->share : 1) * x->stride[d];
        head /= x->shape[d];
    }
    return at;
}

// Prefetches rows into the second-level cache.
static inline void fetch(const attend *w, head_rows h, bool write)
{
    const part *x = h.of;
    int64_t size = ms__dtype_size(x->dtype);
    const char *row = (const char *)x->data + (head_start(x, h.head) + h.first * x->rs) * size;
    for (int64_t r = 0; r < h.n; r++, row += x->rs * size)
        for (int64_t j = 0; j < w->d * size; j += 64) {
            if (write) __builtin_prefetch(row + j, 1, 2);
            else __builtin_prefetch(row + j, 0, 2);
        }
}
// While keys [j, j + n) of a tile are multiplied: a share of the values, which come next, of the next tile's keys, and,
// during the first tile, of the output and of the next queries. The hardware's prefetcher follows too few of them.
static void fetch_ahead(const attend *w, tile t, int64_t j, int64_t n)
{
    int64_t at = t.j0 + j, end = last_key(w, t), q = t.i0 + t.rows + j;
    fetch(w, (head_rows) { &w->v, t.head, at, n }, false);
    if (at + KEYS < end)
        fetch(w, (head_rows) { &w->k, t.head, at + KEYS, end - at - KEYS < n ? end - at - KEYS : n }, false);
    if (t.j0 > ms_span_first(w->a.span, t.i0)) return;
    if (j < t.rows) fetch(w, (head_rows) { &w->o, t.head, t.i0 + j, t.rows - j < n ? t.rows - j : n }, true);
    if (q < w->tq) fetch(w, (head_rows) { &w->q, t.head, q, w->tq - q < n ? w->tq - q : n }, false);
}

// Where a row of a head lies, or would lie.
static const char *row_at(const part *x, int64_t head, int64_t row)
{
    return (const char *)x->data + (head_start(x, head) + row * x->rs) * ms__dtype_size(x->dtype);
}

// The product for rows [b, b + STEP) of f, as far as they exist. next: what is read AHEAD rows later.
static ms_few few_step(const ms_few *f, int64_t b, const char *next)
{
    ms_few part = *f;
    part.n = f->n - b < STEP ? f->n - b : STEP;
    part.x = (const char *)f->x + b * f->x_rs * ms__dtype_size(f->dtype);
    part.scores = (char *)f->scores + b * (f->dtype == MS_F64 ? 8 : 4);
    if (f->ahead) part.ahead = (int64_t)((uintptr_t)next - (uintptr_t)part.x);
    return part;
}

// Describes t as heads. like: a tensor with the batch dimensions of the whole call, of which the last is `share` times
// that of t.
static part share_of(const ms_tensor *t, const ms_tensor *like, int64_t share)
{
    part x = { .dtype = t->dtype,
               .n = like->ndim - 2,
               .share = share,
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

#define BODY "cpu/attention/attention_body.h"
#include "cpu/both_types.h"

// A function that runs a task of type REAL in this thread's scratch memory.
#define TASK(name, fn)                                                     \
    static void name(void *arg, int64_t task, int64_t end, int64_t unused) \
    {                                                                      \
        const attend *w = arg;                                             \
        char *room = w->room + w->room_bytes * (size_t)ms__thread_num();   \
        (void)end, (void)unused;                                           \
        if (w->q.dtype == MS_F64) fn##_f64(w, task, (double *)room);       \
        else fn##_f32(w, task, (float *)room);                             \
    }
TASK(forward_task, attend_block)
TASK(few_task, attend_few)
TASK(parts_task, add_parts)
TASK(backward_task, attend_head_backward)

// n_i: the number of the forward's integers.
static void attention_sizes(attend *w, const ms_call *c, int n_i, const ms_tensor *q, const ms_tensor *k)
{
    int n = q->ndim;
    w->a = ms__attention_of(c, n_i, q, k);
    w->tq = q->shape[n - 2];
    w->tk = k->shape[n - 2];
    w->d = q->shape[n - 1];
    w->wide = (w->d + 15) / 16 * 16;
    w->heads = 1;
    for (int d = 0; d < n - 2; d++) w->heads *= q->shape[d];
    int64_t queries = q->dtype == MS_F64 ? queries_f64() : queries_f32();
    w->blocks = (w->tq + queries - 1) / queries;
}

// Allocates `numbers` float32 or float64 numbers for each thread, and runs n tasks.
static ms_status run_attention_tasks(attend *w, int64_t n, int64_t numbers, const char *what, ms_range_fn fn)
{
    ms_block *room;
    w->room_bytes = ((size_t)numbers * (w->q.dtype == MS_F64 ? 8 : 4) + 63) / 64 * 64;
    // Starting threads costs more than small problems gain.
    bool alone = w->heads * w->tq * w->tk * w->d < 1 << 16;
    MS_TRY(ms__alloc_scratch(&room, w->room_bytes * (size_t)(alone ? 1 : ms_num_threads()), what));
    w->room = room->data;
    if (alone)
        for (int64_t k = 0; k < n; k++) fn(w, k, k + 1, k);
    else ms__parallel_tasks(n, fn, w);
    ms__free(room);
    return MS_OK;
}

// The number of heads in a row that are computed together if they have few queries: those that share keys and values,
// which may also be expanded along the last batch dimension, or so many of them that divide all.
static int64_t computed_together(const attend *w)
{
    int d = w->k.n - 1;
    int64_t n = w->k.share, parts = 1;
    if (n == 1 && d >= 0 && w->k.stride[d] == 0 && w->v.stride[d] == 0) n = w->k.shape[d];
    while (n % parts || n / parts * w->tq > FEW_ROWS) parts++;
    return n / parts;
}

static ms_status few_queries(attend *w)
{
    bool wide = w->q.dtype == MS_F64;
    ms_block *parts;
    w->group = computed_together(w);
    w->chunks = (w->key_end - w->key + FEW_KEYS - 1) / FEW_KEYS;
    int64_t groups = w->heads / w->group, numbers = w->heads * w->tq * w->chunks * (w->wide + 2);
    MS_TRY(ms__alloc_scratch(&parts, (size_t)numbers * (wide ? 8 : 4), "attention"));
    w->parts = parts->data;
    ms_status st =
        run_attention_tasks(w, groups * w->chunks, wide ? few_room_f64(w) : few_room_f32(w), "attention", few_task);
    if (st == MS_OK) st = run_attention_tasks(w, groups, 0, "attention", parts_task);
    ms__free(parts);
    return st;
}

ms_status ms__cpu_attention(ms_call *c)
{
    ms_tensor *q = c->in[0], *k = c->in[1], *v = c->in[2], *mask = c->n_in > 3 ? c->in[3] : NULL, *o = c->out[0];
    attend w = { .seed = c->saved_rng[0], .offset = c->saved_rng[1] };
    attention_sizes(&w, c, c->n_i, q, k);
    if (w.heads * w.tq == 0) return MS_OK;
    w.q = share_of(q, q, 1);
    w.k = share_of(k, q, w.a.share);
    w.v = share_of(v, q, w.a.share);
    w.o = share_of(o, q, 1);
    if (mask) w.mask = share_of(mask, q, 1);
    w.lse = ms__data(c->out[1]);
    w.key = ms_span_first(w.a.span, 0);
    w.key_end = ms_span_end(w.a.span, w.tq - 1, w.tk);
    if (w.tq <= FEW && w.key < w.key_end) return few_queries(&w);
    int64_t numbers = w.q.dtype == MS_F64 ? forward_room_f64(&w) : forward_room_f32(&w);
    return run_attention_tasks(&w, w.heads * w.blocks, numbers, "attention", forward_task);
}

// Inputs: gradient, q, k, v, mask (optional), out, lse, and optionally the gradient of lse.
ms_status ms__cpu_attention_backward(ms_call *c)
{
    ms_tensor *q = c->in[1], *k = c->in[2], *v = c->in[3], *mask = c->in[4], *g_lse = NULL;
    ms_tensor *dq = ms__grad_out(c, 0), *dk = ms__grad_out(c, 1), *dv = ms__grad_out(c, 2), *dmask = ms__grad_out(c, 3);
    attend w = { .seed = (uint64_t)c->i[c->n_i - 3], .offset = (uint64_t)c->i[c->n_i - 2] };
    attention_sizes(&w, c, c->n_i - 3, q, k);
    if (w.heads * w.tq == 0 || w.tk == 0) {
        for (int i = 0; i < c->n_out; i++)
            if (c->out[i]->numel) memset(c->out[i]->storage->data, 0, ms__nbytes(c->out[i]));
        return MS_OK;
    }
    w.g = share_of(c->in[0], q, 1);
    w.q = share_of(q, q, 1);
    w.k = share_of(k, q, w.a.share);
    w.v = share_of(v, q, w.a.share);
    w.o = share_of(c->in[5], q, 1);
    if (mask) w.mask = share_of(mask, q, 1);
    w.lse = ms__data(c->in[6]);
    if (dq) w.dq = share_of(dq, q, 1);
    if (dk) w.dk = share_of(dk, q, w.a.share);
    if (dv) w.dv = share_of(dv, q, w.a.share);
    if (c->n_in > 7 && c->in[7]) {
        MS_TRY(ms__contiguous(&g_lse, c->in[7]));
        w.g_lse = ms__data(g_lse);
    }
    if (dmask) w.dmask = ms__data(dmask);
    int64_t numbers = w.q.dtype == MS_F64 ? backward_room_f64(&w) : backward_room_f32(&w);
    ms_status st = run_attention_tasks(&w, w.heads / w.a.share, numbers, "attention_backward", backward_task);
    ms__release(g_lse);
    return st;
}
