// SPDX-License-Identifier: MIT
// cuda/rows.cu -- softmax, log_softmax, layer_norm, rms_norm, cross_entropy, mse_loss and their gradients: one block
// per row, sums in float32 (float64 for doubles) in a fixed tree.
#include "cuda/cuda.h"
#include "rows/layout.h"

// ---- softmax along any dimension ----

template <class T> __global__ void softmax_kernel(ms_rows r, int dtype, const void *x, void *y, bool log)
{
    __shared__ T shared[BLOCK];
    int64_t at = ms__row_start(&r, blockIdx.x);
    T most = -(T)INFINITY, sum = 0;
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) {
        T v = load<T>(dtype, x, at + j * r.stride);
        most = ((v > most) | (v != v)) ? v : most;
    }
    most = block_max(most, shared);
    if (most == -(T)INFINITY) most = 0;  // a row of -inf only gives 0 / 0, as in PyTorch
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) sum += exp_of(load<T>(dtype, x, at + j * r.stride) - most);
    sum = block_sum(sum, shared);
    T shift = most + log_of(sum), scale = 1 / sum;
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) {
        T v = load<T>(dtype, x, at + j * r.stride);
        store<T>(dtype, y, at + j * r.stride, log ? v - shift : exp_of(v - most) * scale);
    }
}
// softmax: dx = y (g - sum g y); log_softmax: dx = g - exp(y) sum g
template <class T>
__global__ void softmax_backward_kernel(ms_rows r, int dtype, const void *g, const void *y, void *dx, bool log)
{
    __shared__ T shared[BLOCK];
    int64_t at = ms__row_start(&r, blockIdx.x);
    T sum = 0;
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) {
        int64_t k = at + j * r.stride;
        sum += log ? load<T>(dtype, g, k) : load<T>(dtype, g, k) * load<T>(dtype, y, k);
    }
    sum = block_sum(sum, shared);
    for (int64_t j = threadIdx.x; j < r.n; j += BLOCK) {
        int64_t k = at + j * r.stride;
        T a = load<T>(dtype, g, k), b = load<T>(dtype, y, k);
        store<T>(dtype, dx, k, log ? a - exp_of(b) * sum : b * (a - sum));
    }
}
static ms_status softmax(ms_call *c, bool log, bool backward)
{
    ms_tensor *x = NULL, *g = NULL, *o = c->out[0];
    int d = (int)(c->i[0] < 0 ? c->i[0] + (o->ndim ? o->ndim : 1) : c->i[0]), index = index_of(o), dtype = o->dtype;
    ms_rows r = ms__rows_along(o, d);
    ms_status st = ms__contiguous(&x, c->in[backward ? 1 : 0]);
    if (st == MS_OK && backward) st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK && !backward)
        st = launch_blocks(c->op->name, index, REAL_KERNEL(dtype, softmax_kernel), r.rows, BLOCK, r, dtype, ms__data(x),
                           ms__data(o), log);
    else if (st == MS_OK)
        st = launch_blocks(c->op->name, index, REAL_KERNEL(dtype, softmax_backward_kernel), r.rows, BLOCK, r, dtype,
                           ms__data(g), ms__data(x), ms__data(o), log);
    if (g) ms__release(g);
    if (x) ms__release(x);
    return st;
}
static ms_status run_softmax(ms_call *c) { return softmax(c, false, false); }
static ms_status run_log_softmax(ms_call *c) { return softmax(c, true, false); }
static ms_status run_softmax_backward(ms_call *c) { return softmax(c, false, true); }
static ms_status run_log_softmax_backward(ms_call *c) { return softmax(c, true, true); }

// ---- layer_norm, rms_norm: h = (x - mean) rstd, y = h w + b ----

template <class T>
__device__ inline void measure(int64_t n, int dtype, const void *x, int64_t at, T eps, bool rms, T *shared, T *mean,
                               T *rstd)
{
    T sum = 0, spread = 0;
    if (!rms) {
        for (int64_t j = threadIdx.x; j < n; j += BLOCK) sum += load<T>(dtype, x, at + j);
        sum = block_sum(sum, shared);
    }
    *mean = rms ? (T)0 : sum / (T)n;
    for (int64_t j = threadIdx.x; j < n; j += BLOCK) {
        T d = load<T>(dtype, x, at + j) - *mean;
        spread += d * d;
    }
    spread = block_sum(spread, shared);
    *rstd = 1 / sqrt_of(spread / (T)n + eps);
}
template <class T>
__global__ void norm_kernel(int64_t n, int dtype, const void *x, const void *w, const void *b, void *y, double eps,
                            bool rms)
{
    __shared__ T shared[BLOCK];
    int64_t at = (int64_t)blockIdx.x * n;
    T mean, rstd;
    measure<T>(n, dtype, x, at, (T)eps, rms, shared, &mean, &rstd);
    for (int64_t j = threadIdx.x; j < n; j += BLOCK) {
        T h = (load<T>(dtype, x, at + j) - mean) * rstd;
        if (w) h *= load<T>(dtype, w, j);
        if (b) h += load<T>(dtype, b, j);
        store<T>(dtype, y, at + j, h);
    }
}
// dx = rstd (q - mean(q) - h mean(q h)), q = g w. Stores mean and rstd of every row in stats.
template <class T>
__global__ void norm_backward_kernel(int64_t n, int dtype, const void *g, const void *x, const void *w, void *dx,
                                     double eps, bool rms, T *stats)
{
    __shared__ T shared[BLOCK];
    int64_t at = (int64_t)blockIdx.x * n;
    T mean, rstd, mq = 0, mh = 0;
    measure<T>(n, dtype, x, at, (T)eps, rms, shared, &mean, &rstd);
    if (stats && threadIdx.x == 0) {
        stats[2 * blockIdx.x] = mean;
        stats[2 * blockIdx.x + 1] = rstd;
    }
    if (!dx) return;
    for (int64_t j = threadIdx.x; j < n; j += BLOCK) {
        T q = load<T>(dtype, g, at + j) * (w ? load<T>(dtype, w, j) : 1), h = (load<T>(dtype, x, at + j) - mean) * rstd;
        mq += q;
        mh += q * h;
    }
    mq = rms ? (T)0 : block_sum(mq, shared) / (T)n;
    mh = block_sum(mh, shared) / (T)n;
    for (int64_t j = threadIdx.x; j < n; j += BLOCK) {
        T q = load<T>(dtype, g, at + j) * (w ? load<T>(dtype, w, j) : 1), h = (load<T>(dtype, x, at + j) - mean) * rstd;
        store<T>(dtype, dx, at + j, rstd * (q - mq - h * mh));
    }
}
// Column sums of g h and of g over ROWS rows each; norm_join_kernel adds these partial sums in order.
enum { ROWS = 64 };
template <class T>
__global__ void norm_parts_kernel(int64_t rows, int64_t n, int dtype, const void *g, const void *x, const T *stats,
                                  T *parts)
{
    int64_t i = GLOBAL_INDEX, j = i % n, part = i / n, first = part * ROWS;
    if (first >= rows) return;
    int64_t last = first + ROWS < rows ? first + ROWS : rows;
    T dw = 0, db = 0;
    for (int64_t r = first; r < last; r++) {
        T v = load<T>(dtype, g, r * n + j);
        dw += v * ((load<T>(dtype, x, r * n + j) - stats[2 * r]) * stats[2 * r + 1]);
        db += v;
    }
    parts[2 * part * n + j] = dw;
    parts[(2 * part + 1) * n + j] = db;
}
template <class T>
__global__ void norm_join_kernel(int64_t count, int64_t n, int dtype, const T *parts, void *dw, void *db)
{
    int64_t j = GLOBAL_INDEX;
    if (j >= n) return;
    T a = 0, b = 0;
    for (int64_t k = 0; k < count; k++) {
        a += parts[2 * k * n + j];
        b += parts[(2 * k + 1) * n + j];
    }
    if (dw) store<T>(dtype, dw, j, a);
    if (db) store<T>(dtype, db, j, b);
}

static ms_status norm(ms_call *c, bool rms)
{
    ms_tensor *in[3] = { NULL, NULL, NULL }, *o = c->out[0];
    int64_t n = ms__row_length(c->in[0], rms ? 1 : (int)c->i[0]);
    int dtype = o->dtype, index = index_of(o);
    ms_status st = MS_OK;
    for (int k = 0; k < c->n_in && st == MS_OK; k++)
        if (c->in[k]) st = ms__contiguous(&in[k], c->in[k]);
    int64_t rows = n ? o->numel / n : 0;
    if (st == MS_OK)
        st = launch_blocks(c->op->name, index, REAL_KERNEL(dtype, norm_kernel), rows, BLOCK, n, dtype, data_of(in[0]),
                           data_of(in[1]), data_of(in[2]), ms__data(o), c->f[0], rms);
    for (int k = 0; k < 3; k++)
        if (in[k]) ms__release(in[k]);
    return st;
}
static ms_status run_layer_norm(ms_call *c) { return norm(c, false); }
static ms_status run_rms_norm(ms_call *c) { return norm(c, true); }

template <class T>
static ms_status norm_backward_typed(ms_call *c, bool rms, int64_t n, ms_tensor *g, ms_tensor *x, ms_tensor *w)
{
    ms_tensor *dx = ms__grad_out(c, 0), *dw = ms__grad_out(c, 1), *db = ms__grad_out(c, 2);
    int64_t rows = n ? x->numel / n : 0, parts = up(rows, ROWS);
    int dtype = x->dtype, index = index_of(x);
    bool sums = dw || db;
    ms_block *room = NULL;
    if (rows == 0) {
        if (dw) MS_TRY(ms__cuda_fill_tensor(dw, 0));
        return db ? ms__cuda_fill_tensor(db, 0) : MS_OK;
    }
    if (sums) MS_TRY(ms__alloc(&room, ms__device(x), (size_t)(2 * rows + 2 * parts * n) * sizeof(T), c->op->name));
    T *stats = room ? (T *)room->data : NULL, *at = stats + 2 * rows;
    ms_status st = launch_blocks(c->op->name, index, norm_backward_kernel<T>, rows, BLOCK, n, dtype, ms__data(g),
                                 ms__data(x), data_of(w), data_of(dx), c->f[0], rms, stats);
    if (st == MS_OK && sums)
        st = launch(c->op->name, index, norm_parts_kernel<T>, up(parts * n, BLOCK), BLOCK, rows, n, dtype, ms__data(g),
                    ms__data(x), (const T *)stats, at);
    if (st == MS_OK && sums)
        st = launch(c->op->name, index, norm_join_kernel<T>, up(n, BLOCK), BLOCK, parts, n, dtype, (const T *)at,
                    data_of(dw), data_of(db));
    if (room) ms__free(room);
    return st;
}
// Inputs: gradient, x, w?. Outputs, those that the mask needs: dx, dw, db.
static ms_status norm_backward(ms_call *c, bool rms)
{
    ms_tensor *g = NULL, *x = NULL, *w = NULL;
    int64_t n = ms__row_length(c->in[1], rms ? 1 : (int)c->i[0]);
    ms_status st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&x, c->in[1]);
    if (st == MS_OK && c->n_in > 2 && c->in[2]) st = ms__contiguous(&w, c->in[2]);
    if (st == MS_OK)
        st = x->dtype == MS_F64 ? norm_backward_typed<double>(c, rms, n, g, x, w)
                                : norm_backward_typed<float>(c, rms, n, g, x, w);
    if (w) ms__release(w);
    if (x) ms__release(x);
    if (g) ms__release(g);
    return st;
}
static ms_status run_layer_norm_backward(ms_call *c) { return norm_backward(c, false); }
static ms_status run_rms_norm_backward(ms_call *c) { return norm_backward(c, true); }

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
template <class T> __global__ void cross_kernel(cross q, T *lse_out, T *losses)
{
    __shared__ T shared[BLOCK];
    int64_t row = blockIdx.x, at = row * q.n;
    T most = -(T)INFINITY, sum = 0, all = 0, weights = 0, smooth = (T)q.smooth;
    for (int64_t j = threadIdx.x; j < q.n; j += BLOCK) {
        T v = load<T>(q.x_type, q.x, at + j);
        most = ((v > most) | (v != v)) ? v : most;
    }
    most = block_max(most, shared);
    if (most == -(T)INFINITY) most = 0;
    for (int64_t j = threadIdx.x; j < q.n; j += BLOCK) {
        T v = load<T>(q.x_type, q.x, at + j), w = q.w ? load<T>(q.x_type, q.w, j) : 1;
        sum += exp_of(v - most);
        if (smooth != 0) all += w * v, weights += w;
    }
    sum = block_sum(sum, shared);
    if (smooth != 0) all = block_sum(all, shared), weights = block_sum(weights, shared);
    if (threadIdx.x != 0) return;
    T lse = most + log_of(sum), loss = 0;
    lse_out[row] = lse;
    int64_t t = target_of(q, row);
    if (t >= 0) {
        loss = (1 - smooth) * (q.w ? load<T>(q.x_type, q.w, t) : 1) * (lse - load<T>(q.x_type, q.x, at + t));
        if (smooth != 0) loss += smooth / (T)q.n * (weights * lse - all);
    }
    losses[row] = loss;
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
template <class T>
__global__ void cross_backward_kernel(cross q, int reduction, const void *g, const T *lse, const T *g_lse,
                                      const double *totals, void *dx)
{
    __shared__ T shared[BLOCK];
    int64_t row = blockIdx.x, at = row * q.n, t = target_of(q, row);
    T smooth = (T)q.smooth, part = smooth / (T)q.n, weights = (T)q.n;
    if (smooth != 0 && q.w) {
        weights = 0;
        for (int64_t j = threadIdx.x; j < q.n; j += BLOCK) weights += load<T>(q.x_type, q.w, j);
        weights = block_sum(weights, shared);
    }
    T scale = 0, shift = lse[row];
    if (t >= 0)
        scale = reduction == NONE ? load<T>(q.x_type, g, row)
                                  : (T)(load<double>(q.x_type, g, 0) / (reduction == MEAN ? totals[1] : 1));
    T own = (1 - smooth) * (q.w && t >= 0 ? load<T>(q.x_type, q.w, t) : 1),
      all = scale * (own + part * weights) + (g_lse ? g_lse[row] : 0);
    for (int64_t j = threadIdx.x; j < q.n; j += BLOCK) {
        T v = all == 0 ? 0 : all * exp_of(load<T>(q.x_type, q.x, at + j) - shift);
        if (smooth != 0) v -= scale * part * (q.w ? load<T>(q.x_type, q.w, j) : 1);
        if (j == t) v -= scale * own;
        store<T>(q.x_type, dx, at + j, v);
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
    MS_TRY(launch_blocks(what, index, cross_kernel<T>, q.rows, BLOCK, q, (T *)ms__data(c->out[1]), losses));
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
        st = q.x_type == MS_F64 ? launch_blocks(c->op->name, index, cross_backward_kernel<double>, q.rows, BLOCK, q,
                                                reduction, (const void *)ms__data(g), (const double *)ms__data(lse),
                                                (const double *)data_of(g_lse), (const double *)totals, dx)
                                : launch_blocks(c->op->name, index, cross_backward_kernel<float>, q.rows, BLOCK, q,
                                                reduction, (const void *)ms__data(g), (const float *)ms__data(lse),
                                                (const float *)data_of(g_lse), (const double *)totals, dx);
    if (room) ms__free(room);
    if (g_lse) ms__release(g_lse);
    if (g) ms__release(g);
    cross_let_go(&h);
    return st;
}

// ---- mse_loss ----

template <class T> __global__ void mse_kernel(int64_t n, int dtype, const void *a, const void *b, void *out)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= n) return;
    T d = load<T>(dtype, a, k) - load<T>(dtype, b, k);
    store<T>(dtype, out, k, d * d);
}
// Sums blocks of 16 K elements in double.
enum { PIECE = 16384 };
template <class T> __global__ void mse_parts_kernel(int64_t n, int dtype, const void *a, const void *b, double *parts)
{
    __shared__ double shared[BLOCK];
    int64_t first = (int64_t)blockIdx.x * PIECE, last = first + PIECE < n ? first + PIECE : n;
    double sum = 0;
    for (int64_t k = first + threadIdx.x; k < last; k += BLOCK) {
        T d = load<T>(dtype, a, k) - load<T>(dtype, b, k);
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
__global__ void mse_backward_kernel(int64_t n, int dtype, bool each, double divisor, const void *g, const void *a,
                                    const void *b, void *da, void *db)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= n) return;
    T scale = each ? (T)2 * load<T>(dtype, g, k) : (T)(2 * (load<double>(dtype, g, 0) / divisor));
    T d = scale * (load<T>(dtype, a, k) - load<T>(dtype, b, k));
    if (da) store<T>(dtype, da, k, d);
    if (db) store<T>(dtype, db, k, -d);
}
static ms_status run_mse_loss(ms_call *c)
{
    ms_tensor *a = NULL, *b = NULL, *o = c->out[0];
    ms_block *room = NULL;
    int64_t n = c->in[0]->numel, parts = up(n, PIECE);
    int dtype = o->dtype, index = index_of(o);
    const char *what = c->op->name;
    ms_status st = ms__contiguous(&a, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&b, c->in[1]);
    if (st == MS_OK && c->i[0] == NONE)
        st = launch(what, index, REAL_KERNEL(dtype, mse_kernel), up(n, BLOCK), BLOCK, n, dtype, ms__data(a),
                    ms__data(b), ms__data(o));
    else if (st == MS_OK) {
        st = ms__alloc(&room, ms__device(o), (size_t)(parts + 1) * sizeof(double), what);
        double *sums = room ? (double *)room->data : NULL;
        if (st == MS_OK)
            st = launch_blocks(what, index, REAL_KERNEL(dtype, mse_parts_kernel), parts, BLOCK, n, dtype, ms__data(a),
                               ms__data(b), sums);
        if (st == MS_OK)
            st = launch(what, index, mse_join_kernel, 1, 1, parts, (const double *)sums,
                        c->i[0] == MEAN ? (double)n : 1.0, dtype, ms__data(o));
        if (room) ms__free(room);
    }
    if (b) ms__release(b);
    if (a) ms__release(a);
    return st;
}
static ms_status run_mse_loss_backward(ms_call *c)
{
    ms_tensor *g = NULL, *a = NULL, *b = NULL, *da = ms__grad_out(c, 0), *db = ms__grad_out(c, 1);
    int64_t n = c->in[1]->numel;
    int dtype = c->in[1]->dtype, index = index_of(c->in[1]);
    bool each = c->i[0] == NONE;
    double divisor = c->i[0] == MEAN ? (double)n : 1;
    ms_status st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&a, c->in[1]);
    if (st == MS_OK) st = ms__contiguous(&b, c->in[2]);
    if (st == MS_OK)
        st = launch(c->op->name, index, REAL_KERNEL(dtype, mse_backward_kernel), up(n, BLOCK), BLOCK, n, dtype, each,
                    divisor, ms__data(g), ms__data(a), ms__data(b), data_of(da), data_of(db));
    if (b) ms__release(b);
    if (a) ms__release(a);
    if (g) ms__release(g);
    return st;
}

extern const ms_cuda_kernel ms__cuda_rows[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_rows[] = { ROW(softmax) ROW(softmax_backward) ROW(log_softmax) ROW(log_softmax_backward)
                                             ROW(layer_norm) ROW(layer_norm_backward) ROW(rms_norm)
                                                 ROW(rms_norm_backward) ROW(cross_entropy) ROW(cross_entropy_backward)
                                                     ROW(mse_loss) ROW(mse_loss_backward) { NULL, NULL } };
