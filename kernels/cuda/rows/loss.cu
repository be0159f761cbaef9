// SPDX-License-Identifier: MIT
// cuda/rows/loss.cu -- cross_entropy, linear_cross_entropy and their gradients. cross_entropy uses one block per row,
// or several where rows are few and long; sums over a row are in float32 (float64 for float64 tensors), sums over rows
// in float64, in a fixed order.
#include "cuda/product.h"
#include "cuda/segments.h"
#include "rows/layout.h"

// ---- cross_entropy ----

enum { NONE, MEAN, ALL };
// Logits x [rows, n], target classes ids [rows], class weights w [n] or NULL. ignore: the target of rows that do not
// count; smooth: label smoothing.
struct cross {
    int64_t rows, n, ignore;
    int x_type, id_type;
    double smooth;
    const void *x, *ids, *w;
    ms_complaint *complaint;
};
// The target class of a row; -1 if the row is ignored, or if the class does not exist (which `reports` records as an
// error: sums and losses do, gradients come after them).
static __device__ inline int64_t target_of(const cross &q, int64_t row, bool reports = true)
{
    int64_t t = load_position(q.id_type, q.ids, row);
    if (t == q.ignore) return -1;
    if (t < 0 || t >= q.n) {
        if (reports) complain(q.complaint, MS_COMPLAINT_CLASS, t, q.n);
        return -1;
    }
    return t;
}
// Each row is divided into segments, usually only one; a block computes a segment.
struct row_segments {
    int64_t count, length;  // length: elements of each but the last
};
static row_segments segments_of(const cross &q)
{
    int64_t size = ms__dtype_size(q.x_type);
    row_segments s = { filling_segments(q.rows * q.n * size, q.rows, q.n, 4096 / size), q.n };
    if (s.count > 1) s.length = up(up(q.n, s.count), WIDE) * WIDE;
    s.count = s.length ? up(q.n, s.length) : 1;
    return s;
}
struct row_segment {
    int64_t row, first, n;  // elements [first, first + n) of the row
};
static __device__ __forceinline__ row_segment row_segment_of(const cross &q, const row_segments &s)
{
    int64_t row = s.count == 1 ? blockIdx.x : blockIdx.x / s.count, first = (blockIdx.x - row * s.count) * s.length;
    return { row, first, q.n - first < s.length ? q.n - first : s.length };
}

// loss = (1 - s) w[t] (lse - x[t]) + s / n sum over c of w[c] (lse - x[c])
// (s: label smoothing, t: target.) row_sums describes a part of a row. most: the largest logit; sum: the sum of
// exp(x - most); all: the sum of w x; weights: the sum of w.
template <class T> struct row_sums {
    T most, sum, all, weights;
};
// One pass: each thread keeps the largest logit that it has seen.
template <class S>
static __device__ __forceinline__ row_sums<real_of<S>> row_part(const cross &q, const row_segment &my,
                                                                real_of<S> *shared)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    const S *x = (const S *)q.x + my.row * q.n + my.first, *w = q.w ? (const S *)q.w + my.first : NULL;
    T most = -(T)INFINITY, sum = 0, all = 0, weights = 0, smooth = (T)q.smooth, v[N], f[N];
    for (int e = 0; e < N; e++) f[e] = 1;
    for (int64_t j = first_pack(x) + threadIdx.x * N; j < my.n; j += BLOCK * N) {
        read_pack(x, j, my.n, -(T)INFINITY, v);
        T top = most;
        for (int e = 0; e < N; e++) top = larger(top, v[e]);
        T base = top == -(T)INFINITY ? 0 : top, add = 0;  // if all logits so far are -inf: exp(-inf) = 0
        for (int e = 0; e < N; e++) add += exp_of(v[e] - base);
        sum = sum * exp_of(most - base) + add;
        most = top;
        if (smooth != 0) {
            if (w) read_pack(w, j, my.n, (T)0, f);
            for (int e = 0; e < N; e++)
                if (in_range(j + e, my.n)) all += f[e] * v[e], weights += f[e];
        }
    }
    T top = group_max(most, BLOCK, shared), base = top == -(T)INFINITY ? 0 : top;  // 0 if all logits are -inf
    sum = group_sum(sum * exp_of(most - base), BLOCK, shared);
    if (smooth != 0) all = group_sum(all, BLOCK, shared), weights = group_sum(weights, BLOCK, shared);
    return { top, sum, all, weights };
}
// Returns the row's logsumexp. stores: whether this thread stores the row's loss; *loss is set only then.
template <class S>
static __device__ __forceinline__ real_of<S> row_loss(const cross &q, int64_t row, const row_sums<real_of<S>> &a,
                                                      bool stores, real_of<S> *loss)
{
    typedef real_of<S> T;
    const S *x = (const S *)q.x + row * q.n, *w = (const S *)q.w;
    T smooth = (T)q.smooth, lse = (a.most == -(T)INFINITY ? 0 : a.most) + log_of(a.sum);
    if (!stores) return lse;
    int64_t t = target_of(q, row);
    *loss = 0;
    if (t >= 0) {
        *loss = (1 - smooth) * (w ? one_of(w + t) : 1) * (lse - one_of(x + t));
        if (smooth != 0) *loss += smooth / (T)q.n * (a.weights * lse - a.all);
    }
    return lse;
}
template <class S> __global__ void cross_kernel(cross q, void *lse_out, void *losses)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    row_sums<T> a = row_part<S>(q, { (int64_t)blockIdx.x, 0, q.n }, shared);
    T loss = 0, lse = row_loss<S>(q, blockIdx.x, a, threadIdx.x == 0, &loss);
    if (threadIdx.x != 0) return;
    ((T *)lse_out)[blockIdx.x] = lse;
    ((T *)losses)[blockIdx.x] = loss;
}
// Where rows have several segments: stores each segment's sums, which a second launch combines.
template <class S> __global__ void cross_segments_kernel(cross q, row_segments s, row_sums<real_of<S>> *parts)
{
    __shared__ real_of<S> shared[WARPS];
    row_sums<real_of<S>> a = row_part<S>(q, row_segment_of(q, s), shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = a;
}
// Combines the segments of a row to its logsumexp and its loss; a warp per row. losses: NULL if they are not needed.
template <class S>
__global__ void cross_rows_kernel(cross q, row_segments s, const row_sums<real_of<S>> *parts, void *lse_out,
                                  void *losses)
{
    typedef real_of<S> T;
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= q.rows) return;
    parts += row * s.count;
    row_sums<T> a = { -(T)INFINITY, 0, 0, 0 };
    ROLLED
    for (int64_t k = lane; k < s.count; k += 32) a.most = larger(a.most, parts[k].most);
    a.most = warp_max(a.most);
    T base = a.most == -(T)INFINITY ? 0 : a.most;
    ROLLED
    for (int64_t k = lane; k < s.count; k += 32) {
        a.sum += parts[k].sum * exp_of(parts[k].most - base);
        a.all += parts[k].all, a.weights += parts[k].weights;
    }
    a.sum = warp_sum(a.sum), a.all = warp_sum(a.all), a.weights = warp_sum(a.weights);
    T loss = 0, lse = row_loss<S>(q, row, a, lane == 0, &loss);
    if (lane != 0) return;
    ((T *)lse_out)[row] = lse;
    if (losses) ((T *)losses)[row] = loss;
}
struct target {
    int dtype;
    void *data;
};
// The dtype of logits, weights and result where losses are computed as T.
template <class T> static __device__ inline int known(int dtype) { return std::is_same_v<T, double> ? MS_F64 : dtype; }
// totals[0]: the sum of the losses (0 if losses is NULL). totals[1]: the sum of the weights of the rows that are not
// ignored. out, if it has data: the loss of all rows. Added in a fixed order. A single block stores these results; of
// several blocks, each stores the two sums of its rows from parts[2 * block] on.
template <class T>
__global__ void cross_total_kernel(cross q, const T *losses, double *totals, double *parts, bool mean, target out)
{
    __shared__ double shared[BLOCK];
    int64_t each = (q.rows + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each, last = first + each;
    double sum = 0, weight = 0;
    if (last > q.rows) last = q.rows;
    ROLLED
    for (int64_t row = first + threadIdx.x; row < last; row += BLOCK) {
        int64_t t = target_of(q, row);
        if (losses) sum += losses[row];
        if (t >= 0) weight += q.w ? (double)load<T>(known<T>(q.x_type), q.w, t) : 1;
    }
    sum = block_sum(sum, shared);
    weight = block_sum(weight, shared);
    if (threadIdx.x != 0) return;
    if (gridDim.x > 1) {
        parts[2 * blockIdx.x] = sum, parts[2 * blockIdx.x + 1] = weight;
        return;
    }
    totals[0] = sum, totals[1] = weight;
    if (out.data) store<T>(known<T>(out.dtype), out.data, 0, (T)(mean ? sum / weight : sum));
}
// Adds up the sums that several blocks of cross_total_kernel have stored, and stores the results. Runs as one block.
__global__ void cross_join_kernel(int n, const double *parts, double *totals, bool mean, target out)
{
    __shared__ double shared[BLOCK];
    double sum = 0, weight = 0;
    ROLLED
    for (int k = threadIdx.x; k < n; k += BLOCK) sum += parts[2 * k], weight += parts[2 * k + 1];
    sum = block_sum(sum, shared);
    weight = block_sum(weight, shared);
    if (threadIdx.x != 0) return;
    totals[0] = sum, totals[1] = weight;
    if (out.data) store<double>(out.dtype, out.data, 0, mean ? sum / weight : sum);
}
// Stores the loss of each row, in the dtype of the result.
template <class T> __global__ void cross_finish_kernel(int64_t rows, const T *losses, target out)
{
    int64_t k = GLOBAL_INDEX;
    if (k < rows) store<T>(known<T>(out.dtype), out.data, k, losses[k]);
}
// scale: the gradient of the row's loss; lse: its logsumexp; more: the gradient of lse.
template <class T> struct row_factors {
    T scale, lse, more;
};
// dx[c] = scale (exp(x[c] - lse) ((1 - s) w[t] + s / n sum w) - s / n w[c] - (1 - s) w[t] [c = t]) + more exp(x[c] -
// lse), where [c = t] is 1 if c = t, else 0. s: label smoothing, t: target class. dx may be x.
template <class S>
static __device__ __forceinline__ void row_gradient(const cross &q, const row_segment &my, row_factors<real_of<S>> k,
                                                    real_of<S> *shared, void *dx)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    int64_t t = target_of(q, my.row, false), begin = my.row * q.n + my.first;
    const S *x = (const S *)q.x + begin, *w = (const S *)q.w;
    T smooth = (T)q.smooth, part = smooth / (T)q.n, weights = (T)q.n, scale = t < 0 ? 0 : k.scale, v[N], f[N];
    if (smooth != 0 && w) {
        weights = 0;
        for (int64_t j = threadIdx.x * N; j < q.n; j += BLOCK * N) {
            read_pack(w, j, q.n, (T)0, v);
            for (int e = 0; e < N; e++) weights += v[e];
        }
        weights = group_sum(weights, BLOCK, shared);
    }
    T own = (1 - smooth) * (w && t >= 0 ? one_of(w + t) : 1), all = scale * (own + part * weights) + k.more;
    for (int e = 0; e < N; e++) f[e] = 1;
    for (int64_t j = first_pack(x) + threadIdx.x * N; j < my.n; j += BLOCK * N) {
        read_pack(x, j, my.n, (T)0, v);
        if (smooth != 0 && w) read_pack(w + my.first, j, my.n, (T)0, f);
        for (int e = 0; e < N; e++) {
            v[e] = all == 0 ? 0 : all * exp_of(v[e] - k.lse);
            if (smooth != 0) v[e] -= scale * part * f[e];
            if (my.first + j + e == t) v[e] -= scale * own;
        }
        write_pack((S *)dx + begin, j, my.n, v);
    }
}
// The gradient of the loss: one for each row, or one for all, which for a mean is divided by the weight of all rows.
struct loss_gradient {
    int dtype, reduction;
    const void *g;  // NULL if the gradient is 1
    const double *totals;
};
template <class T> static __device__ inline T scale_of(const loss_gradient &l, int64_t row)
{
    if (l.reduction == NONE) return load<T>(l.dtype, l.g, row);
    return (T)((l.g ? load<double>(l.dtype, l.g, 0) : 1) / (l.reduction == MEAN ? l.totals[1] : 1));
}
// The logsumexp of each row; g: its gradient, or NULL if it has none.
struct row_lse {
    const void *lse, *g;
};
template <class S> __global__ void cross_backward_kernel(cross q, row_segments s, loss_gradient l, row_lse r, void *dx)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    row_segment my = row_segment_of(q, s);
    row_factors<T> k = { scale_of<T>(l, my.row), ((const T *)r.lse)[my.row], r.g ? ((const T *)r.g)[my.row] : 0 };
    row_gradient<S>(q, my, k, shared, dx);
}
// Stores the losses of a chunk of rows, unless losses is NULL; if `gradient`, overwrites the logits with their
// gradient.
template <class S>
__global__ void __launch_bounds__(BLOCK, sizeof(S) == 8 ? 1 : 5)
    cross_chunk_kernel(cross q, loss_gradient l, bool gradient, void *losses)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    row_segment my = { (int64_t)blockIdx.x, 0, q.n };
    T loss = 0, lse = row_loss<S>(q, my.row, row_part<S>(q, my, shared), threadIdx.x == 0, &loss);
    if (threadIdx.x == 0 && losses) ((T *)losses)[my.row] = loss;
    if (!gradient) return;
    __syncthreads();  // waits until thread 0 has read the target's logit, which is overwritten next
    row_gradient<S>(q, my, { scale_of<T>(l, my.row), lse, 0 }, shared, (void *)q.x);
}

struct cross_held {
    ms_tensor *x, *ids, *w;
};
static ms_status cross_prepare(ms_call *c, cross *q, cross_held *h, ms_tensor *x, ms_tensor *ids, ms_tensor *w)
{
    memset(q, 0, sizeof *q);
    q->rows = ids->numel;
    q->n = x->shape[x->ndim - 1];
    q->ignore = c->n_i > 1 ? c->i[1] : -100;
    q->smooth = c->n_f > 0 ? c->f[0] : 0;
    q->x_type = x->dtype;
    q->id_type = ids->dtype;
    if (q->rows && q->n == 0)
        return ms__call_fail(c, "the logits have no classes: shape %s, expected a last dimension of at least 1",
                             ms__shape_text(x->ndim, x->shape));
    MS_TRY(ms__contiguous(&h->x, x));
    MS_TRY(ms__contiguous(&h->ids, ids));
    if (w) MS_TRY(ms__contiguous(&h->w, w));
    q->x = ms__data(h->x);
    q->ids = ms__data(h->ids);
    q->w = data_of(h->w);
    MS_TRY(ms__cuda_use(index_of(x)));
    q->complaint = ms__complaints(index_of(x));
    return MS_OK;
}
static void cross_let_go(cross_held *h)
{
    if (h->w) ms__release(h->w);
    if (h->ids) ms__release(h->ids);
    if (h->x) ms__release(h->x);
}
// The number of blocks that compute the totals of `rows` rows. ROWS_JOINED: the most rows, or sums of blocks, that one
// block adds up. ROWS_EACH: the rows of a block, where they are many. Both are small in the emulator (LARGE).
#ifdef MS_EMULATED
enum { ROWS_JOINED = 2 * BLOCK, ROWS_EACH = 2 };
#else
enum { ROWS_JOINED = 64 * BLOCK, ROWS_EACH = 2 * BLOCK };
#endif
static int64_t total_parts(int64_t rows)
{
    int64_t n = up(rows, rows * 12 < LARGE ? ROWS_JOINED / 2 : ROWS_EACH);  // 12: bytes of an id and a loss
    return rows <= ROWS_JOINED ? 1 : n < ROWS_JOINED ? n : (int64_t)ROWS_JOINED;
}
// Memory of a call: two totals, then the losses of the rows.
static ms_status loss_room(const ms_call *c, ms_block **room, int64_t rows)
{
    return ms__alloc(room, ms__device(c->in[0]), (size_t)(2 + rows) * sizeof(double), c->op->name);
}
// Stores the totals in room, and the loss of all rows in out, if it has data. losses: NULL to sum only the weights.
template <class T>
static ms_status add_totals(const ms_call *c, const cross &q, int index, ms_block *room, const T *losses,
                            const target &out)
{
    int64_t n = total_parts(q.rows);
    bool mean = c->i[0] == MEAN;
    double *totals = (double *)room->data;
    scratch room_of_parts;
    if (n > 1) MS_TRY(room_of_parts.alloc(c, MS_CUDA | index << 8, 2 * n * (int64_t)sizeof(double)));
    double *parts = (double *)room_of_parts.data;
    MS_TRY(launch_blocks(c->op->name, index, cross_total_kernel<T>, n, BLOCK, q, losses, totals, parts, mean, out));
    if (n == 1) return MS_OK;
    return launch_blocks(c->op->name, index, cross_join_kernel, 1, BLOCK, (int)n, (const double *)parts, totals, mean,
                         out);
}
// Stores the result: the losses of the rows, their sum or their mean.
template <class T> static ms_status put_losses(ms_call *c, const cross &q, int index, ms_block *room)
{
    const T *losses = (const T *)((double *)room->data + 2);
    target out = { c->out[0]->dtype, ms__data(c->out[0]) };
    if (c->i[0] == NONE)
        return launch(c->op->name, index, cross_finish_kernel<T>, up(q.rows, BLOCK), BLOCK, q.rows, losses, out);
    return add_totals<T>(c, q, index, room, losses, out);
}
// Computes lse and, unless `losses` is NULL, the losses of all rows.
template <class S> static ms_status cross_rows(const ms_call *c, const cross &q, int index, void *lse, void *losses)
{
    const char *what = c->op->name;
    row_segments s = segments_of(q);
    if (s.count == 1) return launch_blocks(what, index, cross_kernel<S>, q.rows, BLOCK, q, lse, losses);
    typedef row_sums<real_of<S>> sums;
    scratch parts;
    MS_TRY(parts.alloc(c, MS_CUDA | index << 8, q.rows * s.count * (int64_t)sizeof(sums)));
    MS_TRY(launch_blocks(what, index, cross_segments_kernel<S>, q.rows * s.count, BLOCK, q, s, (sums *)parts.data));
    return launch_blocks(what, index, cross_rows_kernel<S>, up(q.rows, WARPS), BLOCK, q, s, (const sums *)parts.data,
                         lse, losses);
}
static ms_status cross_rows_of(const ms_call *c, const cross &q, int index, void *lse, void *losses)
{
#define ROWS(S, T) return cross_rows<S>(c, q, index, lse, losses)
    WITH_FLOAT_TYPE(q.x_type, ROWS)
#undef ROWS
}
template <class T> static ms_status cross_forward(ms_call *c, const cross &q, int index, ms_block *room)
{
    MS_TRY(cross_rows_of(c, q, index, ms__data(c->out[1]), (double *)room->data + 2));
    return put_losses<T>(c, q, index, room);
}
static ms_status cross_backward(const ms_call *c, const cross &q, int index, const loss_gradient &l, const row_lse &r,
                                void *dx)
{
    row_segments s = segments_of(q);
    return launch_blocks(c->op->name, index, TYPED_KERNEL(q.x_type, cross_backward_kernel), q.rows * s.count, BLOCK, q,
                         s, l, r, dx);
}
// Stores the divisor of a mean, the sum of the weights of the rows that are not ignored, as the second total in room.
static ms_status cross_weight(ms_call *c, const cross &q, int index, ms_block *room)
{
    if (q.x_type == MS_F64) return add_totals<double>(c, q, index, room, NULL, {});
    return add_totals<float>(c, q, index, room, NULL, {});
}
static ms_status run_cross_entropy(ms_call *c)
{
    cross q;
    cross_held h = {};
    ms_block *room = NULL;
    int device = ms__device(c->in[0]);
    ms_status st = cross_prepare(c, &q, &h, c->in[0], c->in[1], c->n_in > 2 ? c->in[2] : NULL);
    if (st == MS_OK) st = loss_room(c, &room, q.rows);
    if (st == MS_OK)
        st = q.x_type == MS_F64 ? cross_forward<double>(c, q, ms__index(device), room)
                                : cross_forward<float>(c, q, ms__index(device), room);
    if (room) ms__free(room);
    cross_let_go(&h);
    return st;
}
// Inputs: gradient, logits, ids, weight (optional), logsumexp, and optionally its gradient. Integers: reduction,
// ignore_index, the mask (rows/grad.h). Number: label_smoothing.
static ms_status run_cross_entropy_backward(ms_call *c)
{
    cross q;
    cross_held h = {};
    ms_tensor *g = NULL, *g_lse = NULL, *lse = c->in[4];
    ms_block *room = NULL;
    int index = index_of(c->in[1]), reduction = (int)c->i[0];
    ms_status st = cross_prepare(c, &q, &h, c->in[1], c->in[2], c->in[3]);
    if (st == MS_OK) st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK && c->n_in > 5 && c->in[5]) st = ms__contiguous(&g_lse, c->in[5]);
    if (st == MS_OK) st = loss_room(c, &room, q.rows);
    if (st == MS_OK && q.rows && reduction == MEAN) st = cross_weight(c, q, index, room);
    if (st == MS_OK)
        st = cross_backward(c, q, index, { g->dtype, reduction, ms__data(g), (const double *)room->data },
                            { ms__data(lse), data_of(g_lse) }, ms__data(c->out[0]));
    if (room) ms__free(room);
    if (g_lse) ms__release(g_lse);
    if (g) ms__release(g);
    cross_let_go(&h);
    return st;
}

// ---- linear_cross_entropy: chunks of rows (rows/layers/loss.c) ----

struct chunked {
    ms_tensor *x, *w, *bias, *g;                // g: the loss's gradient; NULL in a forward, where it is 1
    ms_tensor *logits, *dx, *dw_sum, *db_sums;  // db_sums: a row for each chunk
    cross q;
    cross_held held;
    loss_gradient l;
    ms_block *room;
    int mask;  // which gradients are needed: 1 dx, 2 dw, 8 the gradient of the bias
};
static ms_status new_matrix(ms_call *c, ms_tensor **out, int dtype, int64_t rows, int64_t cols)
{
    int64_t shape[] = { rows, cols };
    return ms__tensor_new(out, dtype, ms__device(c->in[0]), 2, shape, c->op->name);
}
// Computes chunk number `at`: rows [first, first + rows).
static ms_status cuda_loss_chunk(ms_call *c, const chunked &k, int64_t at, int64_t first, int64_t rows)
{
    const char *what = c->op->name;
    int dtype = k.x->dtype, size = ms__dtype_size(dtype), index = index_of(k.x);
    int64_t n = k.w->shape[0], in = k.w->shape[1];
    const char *from = (const char *)ms__data(k.x) + first * in * size;
    product p = product_of(what, dtype, rows, n, in);
    p.a = from, p.a_rs = in, p.a_cs = 1;
    p.b = ms__data(k.w), p.b_rs = k.w->stride[1], p.b_cs = k.w->stride[0];
    p.bias = data_of(k.bias);
    p.c = ms__data(k.logits);
    MS_TRY(ms__cuda_product(index, &p));
    cross q = k.q;
    loss_gradient l = k.l;
    q.ids = (const char *)q.ids + first * ms__dtype_size(q.id_type);
    if (l.reduction == NONE && l.g) l.g = (const char *)l.g + first * ms__dtype_size(l.dtype);
    char *losses = (char *)((double *)k.room->data + 2) + first * (dtype == MS_F64 ? 8 : 4);
    q.rows = rows;
    if (segments_of(q).count > 1) {
        scratch lse;
        MS_TRY(lse.alloc(c, ms__device(k.x), rows * (int64_t)sizeof(double)));
        MS_TRY(cross_rows_of(c, q, index, lse.data, k.g ? NULL : losses));
        if (k.mask) MS_TRY(cross_backward(c, q, index, l, { lse.data, NULL }, ms__data(k.logits)));
    } else
        MS_TRY(launch_blocks(what, index, TYPED_KERNEL(dtype, cross_chunk_kernel), rows, BLOCK, q, l, k.mask != 0,
                             k.g ? NULL : (void *)losses));
    if (k.dx) {
        p = product_of(what, dtype, rows, in, n);
        p.a = ms__data(k.logits), p.a_rs = n, p.a_cs = 1;
        p.b = ms__data(k.w), p.b_rs = k.w->stride[0], p.b_cs = k.w->stride[1];
        p.c = (char *)ms__data(k.dx) + first * in * size;
        MS_TRY(ms__cuda_product(index, &p));
    }
    if (k.dw_sum) {
        p = product_of(what, dtype, n, in, rows);
        p.a = ms__data(k.logits), p.a_rs = 1, p.a_cs = n;
        p.b = from, p.b_rs = in, p.b_cs = 1;
        p.c = ms__data(k.dw_sum);
        p.c_type = k.dw_sum->dtype;
        p.add = at > 0;
        MS_TRY(ms__cuda_product(index, &p));
    }
    if (!k.db_sums) return MS_OK;
    ms_tensor *sums = ms__tensor_view(k.db_sums, 1, &n, &k.db_sums->stride[1], at * n);
    ms_status st = ms__cuda_column_sum(k.logits, rows, n, sums);
    ms__release(sums);
    return st;
}
// Allocates what all chunks use. With more than one chunk, half types add up the weight's gradient in float32, in
// memory of its own, and round it at the end. most: rows per chunk.
static ms_status chunks_begin(ms_call *c, ms_tensor *const *in, chunked *k, int64_t most, ms_tensor **grad)
{
    int64_t rows = in[0]->shape[0], n = in[1]->shape[0];
    int dtype = in[0]->dtype, sums = dtype == MS_F64 ? MS_F64 : MS_F32;
    MS_TRY(ms__contiguous(&k->x, in[0]));
    if (in[3]) MS_TRY(ms__contiguous(&k->bias, in[3]));
    MS_TRY(new_matrix(c, &k->logits, dtype, most, n));
    MS_TRY(cross_prepare(c, &k->q, &k->held, k->logits, in[2], in[4]));
    MS_TRY(loss_room(c, &k->room, rows));
    k->l = { k->g ? k->g->dtype : dtype, (int)c->i[0], data_of(k->g), (const double *)k->room->data };
    if (k->mask & 1 && !grad[0]) MS_TRY(ms__tensor_like(&grad[0], in[0], c->op->name));
    k->dx = grad[0];
    if (k->mask & 8) MS_TRY(new_matrix(c, &k->db_sums, sums, up(rows, most), n));
    if (k->mask & 2 && sums != dtype && most < rows) return new_matrix(c, &k->dw_sum, sums, n, in[1]->shape[1]);
    if (k->mask & 2 && !grad[1]) MS_TRY(ms__tensor_like(&grad[1], in[1], c->op->name));
    if (grad[1]) k->dw_sum = ms__retain(grad[1]);
    return MS_OK;
}
static ms_status chunks_end(ms_call *c, ms_tensor *const *in, chunked *k, ms_tensor **grad)
{
    int64_t rows = in[0]->shape[0], n = in[1]->shape[0];
    ms__release(k->logits);  // before the gradients are allocated
    k->logits = NULL;
    if (k->mask & 2 && !grad[1]) MS_TRY(ms__tensor_like(&grad[1], in[1], c->op->name));
    if (grad[1] && rows == 0) MS_TRY(ms__cuda_fill_tensor(grad[1], 0));
    else if (grad[1] && k->dw_sum->storage != grad[1]->storage) MS_TRY(ms__cuda_copy_tensor(grad[1], k->dw_sum));
    if (k->mask & 8 && !grad[2]) MS_TRY(ms__tensor_like(&grad[2], in[3], c->op->name));
    if (grad[2]) MS_TRY(ms__cuda_column_sum(k->db_sums, k->db_sums->shape[0], n, grad[2]));
    if (k->g) return MS_OK;
    return in[0]->dtype == MS_F64 ? put_losses<double>(c, k->q, index_of(in[0]), k->room)
                                  : put_losses<float>(c, k->q, index_of(in[0]), k->room);
}
// in: x, w, ids, bias or NULL, class weights or NULL. g: the gradient of the loss; NULL in a forward, whose result is
// stored. grad: dx, dw, dbias; those that are NULL and needed (the mask) are allocated here.
static ms_status linear_chunks(ms_call *c, ms_tensor *const *in, ms_tensor *g, ms_tensor **grad)
{
    chunked k = {};
    int64_t rows = in[0]->shape[0], most = c->i[2] && c->i[2] < rows ? c->i[2] : rows ? rows : 1;
    k.w = in[1];
    k.mask = (int)c->i[c->n_i - 1];
    ms_status st = g ? ms__contiguous(&k.g, g) : MS_OK;
    if (st == MS_OK) st = chunks_begin(c, in, &k, most, grad);
    if (st == MS_OK && k.mask && rows && c->i[0] == MEAN) st = cross_weight(c, k.q, index_of(k.x), k.room);
    for (int64_t at = 0; at * most < rows && st == MS_OK; at++)
        st = cuda_loss_chunk(c, k, at, at * most, rows - at * most < most ? rows - at * most : most);
    if (st == MS_OK) st = chunks_end(c, in, &k, grad);
    if (k.room) ms__free(k.room);
    ms_tensor *held[] = { k.dw_sum, k.db_sums, k.logits, k.g, k.bias, k.x };
    cross_let_go(&k.held);
    for (ms_tensor *t : held) ms__release(t);
    return st;
}
static ms_status run_linear_cross_entropy(ms_call *c)
{
    ms_tensor *in[] = { c->in[0], c->in[1], c->in[2], c->n_in > 3 ? c->in[3] : NULL, c->n_in > 4 ? c->in[4] : NULL };
    return linear_chunks(c, in, NULL, &c->out[1]);
}
// Inputs: gradient, then the inputs of the forward. Outputs: those of dx, dw, db that the mask selects.
static ms_status run_linear_cross_entropy_backward(ms_call *c)
{
    ms_tensor *grad[] = { ms__grad_out(c, 0), ms__grad_out(c, 1), ms__grad_out(c, 3) };
    return linear_chunks(c, c->in + 1, c->in[0], grad);
}

extern const ms_cuda_kernel ms__cuda_loss[];
#define ROW(name) { #name, run_##name },
// clang-format off
const ms_cuda_kernel ms__cuda_loss[] = {
    ROW(cross_entropy) ROW(cross_entropy_backward) ROW(linear_cross_entropy) ROW(linear_cross_entropy_backward) { NULL, NULL }
};
// clang-format on
