// SPDX-License-Identifier: MIT
// cuda/loss.cu -- cross_entropy, mse_loss and their gradients. cross_entropy uses one block per row; sums in float32
// (float64 for doubles) in a fixed tree.
#include "cuda/blocks.h"
#include "rows/layout.h"

// ---- cross_entropy ----

enum { NONE, MEAN, ALL };
struct cross {
    int64_t rows, n, ignore;
    int x_type, id_type;
    double smooth;
    const void *x, *ids, *w;
    ms_complaint *complaint;
};
// The target class of a row; -1 if the row is ignored.
static __device__ inline int64_t target_of(const cross &q, int64_t row)
{
    int64_t t = load<int64_t>(q.id_type, q.ids, row);
    if (t == q.ignore) return -1;
    if (t < 0 || t >= q.n) {
        complain(q.complaint, MS_COMPLAINT_CLASS, t, q.n);
        return -1;
    }
    return t;
}
// loss = (1 - s) w[t] (lse - x[t]) + s / n sum over c of w[c] (lse - x[c])
// One pass: each thread keeps the largest logit that it has seen and the sum of exp(x - largest).
template <class S> __global__ void cross_kernel(cross q, void *lse_out, void *losses)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    __shared__ T shared[WARPS];
    int64_t row = blockIdx.x;
    const S *x = (const S *)q.x + row * q.n, *w = (const S *)q.w;
    T most = -(T)INFINITY, sum = 0, all = 0, weights = 0, smooth = (T)q.smooth, v[N], f[N];
    for (int e = 0; e < N; e++) f[e] = 1;
    for (int64_t j = first_pack(x) + threadIdx.x * N; j < q.n; j += BLOCK * N) {
        read_pack(x, j, q.n, -(T)INFINITY, v);
        T top = most;
        for (int e = 0; e < N; e++) top = larger(top, v[e]);
        T base = top == -(T)INFINITY ? 0 : top, add = 0;  // -inf only so far: exp(-inf) = 0
        for (int e = 0; e < N; e++) add += exp_of(v[e] - base);
        sum = sum * exp_of(most - base) + add;
        most = top;
        if (smooth != 0) {
            if (w) read_pack(w, j, q.n, (T)0, f);
            for (int e = 0; e < N; e++)
                if (j + e >= 0 && j + e < q.n) all += f[e] * v[e], weights += f[e];
        }
    }
    T top = group_max(most, BLOCK, shared);
    if (top == -(T)INFINITY) top = 0;  // a row of -inf only
    sum = group_sum(sum * exp_of(most - top), BLOCK, shared);
    if (smooth != 0) all = group_sum(all, BLOCK, shared), weights = group_sum(weights, BLOCK, shared);
    if (threadIdx.x != 0) return;
    T lse = top + log_of(sum), loss = 0;
    ((T *)lse_out)[row] = lse;
    int64_t t = target_of(q, row);
    if (t >= 0) {
        loss = (1 - smooth) * (w ? one_of(w + t) : 1) * (lse - one_of(x + t));
        if (smooth != 0) loss += smooth / (T)q.n * (weights * lse - all);
    }
    ((T *)losses)[row] = loss;
}
// totals[0]: the sum of the losses (if given). totals[1]: the sum of the weights of the rows that are not ignored. Runs
// as one block and adds in a fixed tree.
template <class T> __global__ void cross_total_kernel(cross q, const T *losses, double *totals)
{
    __shared__ double shared[BLOCK];
    double sum = 0, weight = 0;
    for (int64_t row = threadIdx.x; row < q.rows; row += BLOCK) {
        int64_t t = target_of(q, row);
        if (losses) sum += losses[row];
        if (t >= 0) weight += q.w ? load<double>(q.x_type, q.w, t) : 1;
    }
    sum = block_sum(sum, shared);
    weight = block_sum(weight, shared);
    if (threadIdx.x == 0) {
        totals[0] = sum;
        totals[1] = weight;
    }
}
template <class T>
__global__ void cross_finish_kernel(int reduction, int64_t rows, const T *losses, const double *totals, int dtype,
                                    void *out)
{
    int64_t k = GLOBAL_INDEX;
    if (reduction != NONE) {
        if (k == 0) store<double>(dtype, out, 0, reduction == MEAN ? totals[0] / totals[1] : totals[0]);
    } else if (k < rows) store<T>(dtype, out, k, losses[k]);
}
// dx[c] = scale (exp(x[c] - lse) ((1 - s) w[t] + s / n sum w) - s / n w[c] - (1 - s) w[t] [c = t]) + g_lse exp(x[c] -
// lse)
template <class S>
__global__ void cross_backward_kernel(cross q, int reduction, const void *g, const void *lse, const void *g_lse,
                                      const double *totals, void *dx)
{
    typedef real_of<S> T;
    constexpr int N = WIDE;
    __shared__ T shared[WARPS];
    int64_t row = blockIdx.x, t = target_of(q, row);
    const S *x = (const S *)q.x + row * q.n, *w = (const S *)q.w;
    T smooth = (T)q.smooth, part = smooth / (T)q.n, weights = (T)q.n, v[N], f[N];
    if (smooth != 0 && w) {
        weights = 0;
        for (int64_t j = threadIdx.x * N; j < q.n; j += BLOCK * N) {
            read_pack(w, j, q.n, (T)0, v);
            for (int e = 0; e < N; e++) weights += v[e];
        }
        weights = group_sum(weights, BLOCK, shared);
    }
    T scale = 0, shift = ((const T *)lse)[row];
    if (t >= 0)
        scale = reduction == NONE ? one_of((const S *)g + row)
                                  : (T)(load<double>(q.x_type, g, 0) / (reduction == MEAN ? totals[1] : 1));
    T own = (1 - smooth) * (w && t >= 0 ? one_of(w + t) : 1),
      all = scale * (own + part * weights) + (g_lse ? ((const T *)g_lse)[row] : 0);
    for (int e = 0; e < N; e++) f[e] = 1;
    for (int64_t j = first_pack(x) + threadIdx.x * N; j < q.n; j += BLOCK * N) {
        read_pack(x, j, q.n, (T)0, v);
        if (smooth != 0 && w) read_pack(w, j, q.n, (T)0, f);
        for (int e = 0; e < N; e++) {
            v[e] = all == 0 ? 0 : all * exp_of(v[e] - shift);
            if (smooth != 0) v[e] -= scale * part * f[e];
            if (j + e == t) v[e] -= scale * own;
        }
        write_pack((S *)dx + row * q.n, j, q.n, v);
    }
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
        return ms__call_fail(c, "the logits have no classes: %s", ms__shape_text(x->ndim, x->shape));
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
template <class T> static ms_status cross_forward(ms_call *c, const cross &q, int index, ms_block *room)
{
    const char *what = c->op->name;
    double *totals = (double *)room->data;
    T *losses = (T *)(totals + 2);
    ms_tensor *o = c->out[0];
    MS_TRY(launch_blocks(what, index, TYPED_KERNEL(q.x_type, cross_kernel), q.rows, BLOCK, q, ms__data(c->out[1]),
                         (void *)losses));
    if (c->i[0] != NONE)
        MS_TRY(launch_blocks(what, index, cross_total_kernel<T>, 1, BLOCK, q, (const T *)losses, totals));
    return launch(what, index, cross_finish_kernel<T>, c->i[0] == NONE ? up(q.rows, BLOCK) : 1, BLOCK, (int)c->i[0],
                  q.rows, (const T *)losses, (const double *)totals, (int)o->dtype, ms__data(o));
}
static ms_status run_cross_entropy(ms_call *c)
{
    cross q;
    cross_held h = {};
    ms_block *room = NULL;
    int device = ms__device(c->in[0]);
    ms_status st = cross_prepare(c, &q, &h, c->in[0], c->in[1], c->n_in > 2 ? c->in[2] : NULL);
    if (st == MS_OK) st = ms__alloc(&room, device, (size_t)(q.rows + 2) * sizeof(double), c->op->name);
    if (st == MS_OK)
        st = q.x_type == MS_F64 ? cross_forward<double>(c, q, ms__index(device), room)
                                : cross_forward<float>(c, q, ms__index(device), room);
    if (room) ms__free(room);
    cross_let_go(&h);
    return st;
}
// Inputs: gradient, logits, ids, weight?, logsumexp, its gradient?. Integers: reduction, ignore_index, mask. Number:
// label_smoothing.
static ms_status run_cross_entropy_backward(ms_call *c)
{
    cross q;
    cross_held h = {};
    ms_tensor *g = NULL, *g_lse = NULL, *lse = c->in[4];
    ms_block *room = NULL;
    int device = ms__device(c->in[1]), index = ms__index(device), reduction = (int)c->i[0];
    ms_status st = cross_prepare(c, &q, &h, c->in[1], c->in[2], c->in[3]);
    if (st == MS_OK) st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK && c->n_in > 5 && c->in[5]) st = ms__contiguous(&g_lse, c->in[5]);
    if (st == MS_OK) st = ms__alloc(&room, device, 2 * sizeof(double), c->op->name);
    double *totals = room ? (double *)room->data : NULL;
    void *dx = ms__data(c->out[0]);
    if (st == MS_OK && q.rows && reduction == MEAN)
        st = launch_blocks(c->op->name, index, cross_total_kernel<float>, 1, BLOCK, q, (const float *)NULL, totals);
    if (st == MS_OK)
        st = launch_blocks(c->op->name, index, TYPED_KERNEL(q.x_type, cross_backward_kernel), q.rows, BLOCK, q,
                           reduction, ms__data(g), ms__data(lse), data_of(g_lse), (const double *)totals, dx);
    if (room) ms__free(room);
    if (g_lse) ms__release(g_lse);
    if (g) ms__release(g);
    cross_let_go(&h);
    return st;
}

// ---- mse_loss ----

struct mse_pair {
    int64_t n;
    int dtype;
    const void *a, *b;
};
template <class T> static __device__ inline T difference(const mse_pair &q, int64_t k)
{
    return load<T>(q.dtype, q.a, k) - load<T>(q.dtype, q.b, k);
}
template <class T> __global__ void mse_kernel(mse_pair q, void *out)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= q.n) return;
    T d = difference<T>(q, k);
    store<T>(q.dtype, out, k, d * d);
}
// Sums blocks of 16 K elements in double.
enum { PIECE = 16384 };
template <class T> __global__ void mse_parts_kernel(mse_pair q, double *parts)
{
    __shared__ double shared[BLOCK];
    int64_t first = (int64_t)blockIdx.x * PIECE, last = first + PIECE < q.n ? first + PIECE : q.n;
    double sum = 0;
    for (int64_t k = first + threadIdx.x; k < last; k += BLOCK) {
        T d = difference<T>(q, k);
        sum += (double)(d * d);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
__global__ void mse_join_kernel(int64_t parts, const double *part, double divisor, int dtype, void *out)
{
    double sum = 0;
    for (int64_t k = 0; k < parts; k++) sum += part[k];
    store<double>(dtype, out, 0, sum / divisor);
}
// da = 2 scale g (a - b), db = -da
template <class T>
__global__ void mse_backward_kernel(mse_pair q, bool each, double divisor, const void *g, void *da, void *db)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= q.n) return;
    T scale = each ? (T)2 * load<T>(q.dtype, g, k) : (T)(2 * (load<double>(q.dtype, g, 0) / divisor));
    T d = scale * difference<T>(q, k);
    if (da) store<T>(q.dtype, da, k, d);
    if (db) store<T>(q.dtype, db, k, -d);
}
static ms_status run_mse_loss(ms_call *c)
{
    held_inputs h;
    scratch sums;
    ms_tensor *o = c->out[0];
    int64_t n = c->in[0]->numel, parts = up(n, PIECE);
    int dtype = o->dtype, index = index_of(o);
    const char *what = c->op->name;
    MS_TRY(h.hold(c));
    mse_pair q = { n, dtype, ms__data(h.in[0]), ms__data(h.in[1]) };
    if (c->i[0] == NONE)
        return launch(what, index, REAL_KERNEL(dtype, mse_kernel), up(n, BLOCK), BLOCK, q, ms__data(o));
    MS_TRY(sums.alloc(c, ms__device(o), (parts + 1) * (int64_t)sizeof(double)));
    MS_TRY(launch_blocks(what, index, REAL_KERNEL(dtype, mse_parts_kernel), parts, BLOCK, q, (double *)sums.data));
    return launch(what, index, mse_join_kernel, 1, 1, parts, (const double *)sums.data,
                  c->i[0] == MEAN ? (double)n : 1.0, dtype, ms__data(o));
}
static ms_status run_mse_loss_backward(ms_call *c)
{
    held_inputs h;
    MS_TRY(h.hold(c));
    mse_pair q = { h.in[1]->numel, h.in[1]->dtype, ms__data(h.in[1]), ms__data(h.in[2]) };
    return launch(c->op->name, index_of(h.in[1]), REAL_KERNEL(q.dtype, mse_backward_kernel), up(q.n, BLOCK), BLOCK, q,
                  c->i[0] == NONE, c->i[0] == MEAN ? (double)q.n : 1.0, ms__data(h.in[0]), data_of(ms__grad_out(c, 0)),
                  data_of(ms__grad_out(c, 1)));
}

extern const ms_cuda_kernel ms__cuda_loss[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_loss[] = { ROW(cross_entropy) ROW(cross_entropy_backward) ROW(mse_loss)
                                             ROW(mse_loss_backward) { NULL, NULL } };
