// SPDX-License-Identifier: MIT
// cuda/attention.cu -- scaled dot-product attention where flash.cu cannot compute it (ms__flash_fits: float32 and
// float64, masks with a gradient, heads above 128, misaligned views): matrix products and one pass over each row of
// scores. During a call it holds the scores of all heads (float32 or float64) and the probabilities (in the inputs'
// dtype). Forward saves the logsumexp; backward recomputes the scores. Masks, causality and dropout work as on the CPU:
// the same random numbers drop the same elements.
#include "cuda/flash.h"
#include "cuda/product.h"

struct scores {
    heads h;
    strided_part mask;  // data is NULL without a mask
    int s_type, p_type;
    dropped dropout;
};

// Score j of row i of a head, after the mask.
template <class T> __device__ inline T masked(const scores &q, int64_t head, int64_t i, int64_t j, T s)
{
    if (q.h.causal && j > i) return -(T)INFINITY;
    if (!q.mask.data) return s;
    int64_t at = i * q.mask.rs + j * q.mask.cs, rest = head;
    for (int d = q.h.n - 1; d >= 0; d--) {
        at += rest % q.h.shape[d] * q.mask.stride[d];
        rest /= q.h.shape[d];
    }
    return masked(q.mask, at, s);
}
// The dropout factor of a probability: 0 or 1 / (1 - p).
template <class T> __device__ inline T kept(const scores &q, int64_t head, int64_t i, int64_t j)
{
    if (q.dropout.p <= 0) return 1;
    uint64_t at = ((uint64_t)head * (uint64_t)q.h.tq + (uint64_t)i) * (uint64_t)q.h.tk + (uint64_t)j;
    return is_kept(q.dropout, at) ? (T)(1 / (1 - q.dropout.p)) : 0;
}

// Turns scores into probabilities (after dropout) and computes the logsumexp of each row. A row without allowed keys
// gets probabilities 0 and logsumexp -inf.
template <class T> __global__ void attend_kernel(scores q, const T *s, void *p, T *lse)
{
    __shared__ T shared[BLOCK];
    int64_t row = blockIdx.x, head = row / q.h.tq, i = row % q.h.tq, at = row * q.h.tk;
    T most = -(T)INFINITY, sum = 0;
    for (int64_t j = threadIdx.x; j < q.h.tk; j += BLOCK) {
        T v = masked<T>(q, head, i, j, s[at + j]);
        most = ((v > most) | (v != v)) ? v : most;
    }
    most = block_max(most, shared);
    bool none = most == -(T)INFINITY;
    for (int64_t j = threadIdx.x; j < q.h.tk; j += BLOCK)
        sum += none ? (T)0 : exp_of(masked<T>(q, head, i, j, s[at + j]) - most);
    sum = block_sum(sum, shared);
    T scale = sum > 0 || sum != sum ? 1 / sum : 0;
    for (int64_t j = threadIdx.x; j < q.h.tk; j += BLOCK) {
        T v = none ? (T)0 : exp_of(masked<T>(q, head, i, j, s[at + j]) - most) * scale;
        store<T>(q.p_type, p, at + j, v * kept<T>(q, head, i, j));
    }
    if (threadIdx.x == 0) lse[row] = none ? -(T)INFINITY : most + log_of(sum);
}

// Gradients of the scores S. P = exp(S - lse) are the probabilities before dropout, keep their dropout factors, and
// dp = g v^T. Stores ds = P (keep dp - delta) and kept_p = P keep, both of dtype p_type. delta: per row, the dot
// product of g and o minus the gradient of the logsumexp. wide_ds: NULL, or gets ds without rounding.
template <class T> struct score_gradients {
    const T *s, *dp, *lse, *delta;
    void *kept_p, *ds;
    T *wide_ds;
};
template <class T> __global__ void attend_backward_kernel(scores q, score_gradients<T> g)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= q.h.count * q.h.tq * q.h.tk) return;
    int64_t row = i / q.h.tk, j = i % q.h.tk, head = row / q.h.tq;
    T l = g.lse[row], v = masked<T>(q, head, row % q.h.tq, j, g.s[i]);
    T p = l == -(T)INFINITY || v == -(T)INFINITY ? (T)0 : exp_of(v - l), keep = kept<T>(q, head, row % q.h.tq, j);
    T d = p == 0 ? (T)0 : p * (keep * g.dp[i] - g.delta[row]);
    store<T>(q.p_type, g.kept_p, i, p * keep);
    store<T>(q.p_type, g.ds, i, d);
    if (g.wide_ds) g.wide_ds[i] = d;
}

// delta of score_gradients, one thread per row. g_lse: NULL, or the gradient of the logsumexp.
template <class T> __global__ void delta_kernel(heads h, strided_part g, strided_part o, const T *g_lse, T *delta)
{
    int64_t row = GLOBAL_INDEX;
    if (row >= h.count * h.tq) return;
    int64_t head = row / h.tq, i = row % h.tq, a = i * g.rs, b = i * o.rs, rest = head;
    for (int d = h.n - 1; d >= 0; d--) {
        int64_t r = rest % h.shape[d];
        a += r * g.stride[d], b += r * o.stride[d];
        rest /= h.shape[d];
    }
    T sum = 0;
    for (int64_t j = 0; j < h.d; j++)
        sum += load<T>(g.dtype, g.data, a + j * g.cs) * load<T>(o.dtype, o.data, b + j * o.cs);
    delta[row] = g_lse ? sum - g_lse[row] : sum;
}
// Sums the gradients of the scores over the dimensions along which the mask was broadcast: one thread per element of
// the mask.
template <class T> __global__ void mask_grad_kernel(heads h, strided_part m, int64_t numel, const T *ds, void *out)
{
    int64_t e = GLOBAL_INDEX;
    if (e >= numel) return;
    double sum = 0;
    for (int64_t head = 0; head < h.count; head++) {
        int64_t base = 0, rest = head;
        for (int d = h.n - 1; d >= 0; d--) {
            base += rest % h.shape[d] * m.stride[d];
            rest /= h.shape[d];
        }
        if (e < base) continue;
        for (int64_t i = 0; i < (m.rs ? h.tq : 1); i++) {
            if (m.rs && (e - base) / m.rs != i) continue;
            int64_t j0 = e - base - (m.rs ? i * m.rs : 0);
            if (m.cs ? j0 < 0 || j0 >= h.tk : j0 != 0) continue;
            for (int64_t r = m.rs ? i : 0; r < (m.rs ? i + 1 : h.tq); r++)
                for (int64_t j = m.cs ? j0 : 0; j < (m.cs ? j0 + 1 : h.tk); j++)
                    sum += (double)ds[(head * h.tq + r) * h.tk + j];
        }
    }
    store<double>(m.dtype, out, e, sum);
}

// ---- launches ----

// One operand of a product: a tensor of heads, or the contiguous scores [heads, rows, columns]. rs, cs, bs: strides of
// rows, columns and batch dimensions, in elements.
struct side {
    int type;
    void *data;
    int64_t rows, cols, rs, cs, bs[MS_MAX_DIMS];
};
static side of_tensor(const ms_tensor *t, const heads &h)
{
    side s = {};
    s.type = t->dtype;
    s.data = ms__data(t);
    s.rows = t->shape[h.n], s.cols = t->shape[h.n + 1];
    s.rs = t->stride[h.n], s.cs = t->stride[h.n + 1];
    for (int d = 0; d < h.n; d++) s.bs[d] = t->stride[d];
    return s;
}
static side of_scores(int type, void *data, const heads &h)
{
    side s = {};
    s.type = type;
    s.data = data;
    s.rows = h.tq, s.cols = h.tk;
    s.rs = h.tk, s.cs = 1;
    int64_t step = h.tq * h.tk;
    for (int d = h.n - 1; d >= 0; d--) {
        s.bs[d] = step;
        step *= h.shape[d];
    }
    return s;
}
static side turned(side s)
{
    side t = s;
    t.rows = s.cols, t.cols = s.rows;
    t.rs = s.cs, t.cs = s.rs;
    return t;
}
// out = alpha a b, for every head.
static ms_status multiply(const ms_call *call, const heads &h, const side &a, const side &b, const side &out,
                          double alpha)
{
    product p = {};
    p.what = call->op->name;
    p.a_type = a.type, p.b_type = b.type, p.c_type = out.type;
    p.m = out.rows, p.n = out.cols, p.k = a.cols;
    p.a = a.data, p.a_rs = a.rs, p.a_cs = a.cs;
    p.b = b.data, p.b_rs = b.rs, p.b_cs = b.cs;
    p.c = out.data, p.c_rs = out.rs, p.c_cs = out.cs;
    p.alpha = alpha;
    p.nb = h.n;
    for (int d = 0; d < h.n; d++)
        p.batch[d] = h.shape[d], p.a_bs[d] = a.bs[d], p.b_bs[d] = b.bs[d], p.c_bs[d] = out.bs[d];
    return ms__cuda_product(index_of(call->out[0]), &p);
}

template <class T> static ms_status forward(ms_call *c)
{
    ms_tensor *q = c->in[0], *k = c->in[1], *v = c->in[2], *mask = c->n_in > 3 ? c->in[3] : NULL, *o = c->out[0];
    scores w = {};
    w.h = heads_of(c, q, k);
    w.s_type = sizeof(T) == 8 ? MS_F64 : MS_F32;
    w.p_type = q->dtype;
    w.dropout = { w.h.p, c->saved_rng[0], c->saved_rng[1] };
    if (mask) w.mask = part_of(mask, w.h);
    int64_t rows = w.h.count * w.h.tq, n = rows * w.h.tk;
    if (rows == 0) return MS_OK;
    if (w.h.tk == 0) {
        MS_TRY(ms__cuda_fill_tensor(o, 0));
        return ms__cuda_fill_tensor(c->out[1], -INFINITY);
    }
    scratch s, other;
    void *p = NULL;
    MS_TRY(s.alloc(c, ms__device(q), n * (int64_t)sizeof(T)));
    if (w.p_type == w.s_type) p = s.data;
    else {
        MS_TRY(other.alloc(c, ms__device(q), n * ms__dtype_size(w.p_type)));
        p = other.data;
    }
    MS_TRY(multiply(c, w.h, of_tensor(q, w.h), turned(of_tensor(k, w.h)), of_scores(w.s_type, s.data, w.h), w.h.scale));
    MS_TRY(launch_blocks(c->op->name, index_of(q), attend_kernel<T>, rows, BLOCK, w, (const T *)s.data, p,
                         (T *)ms__data(c->out[1])));
    return multiply(c, w.h, of_scores(w.p_type, p, w.h), of_tensor(v, w.h), of_tensor(o, w.h), 1);
}
static ms_status run_attention(ms_call *c)
{
    heads h = heads_of(c, c->in[0], c->in[1]);
    if (h.count * h.tq * h.tk > 0 && ms__flash_fits(c->in, h)) return ms__flash_attention(c, h);
    return c->in[0]->dtype == MS_F64 ? forward<double>(c) : forward<float>(c);
}

// Inputs: gradient, q, k, v, mask?, out, lse, gradient of lse?
template <class T> static ms_status backward(ms_call *c)
{
    ms_tensor *g = c->in[0], *q = c->in[1], *k = c->in[2], *v = c->in[3], *mask = c->in[4], *o = c->in[5],
              *lse = c->in[6];
    ms_tensor *dq = ms__grad_out(c, 0), *dk = ms__grad_out(c, 1), *dv = ms__grad_out(c, 2), *dmask = ms__grad_out(c, 3);
    const char *what = c->op->name;
    int index = index_of(q), device = ms__device(q);
    scores w = {};
    w.h = heads_of(c, q, k);
    w.s_type = sizeof(T) == 8 ? MS_F64 : MS_F32;
    w.p_type = q->dtype;
    w.dropout = { w.h.p, (uint64_t)c->i[c->n_i - 3], (uint64_t)c->i[c->n_i - 2] };
    if (mask) w.mask = part_of(mask, w.h);
    int64_t rows = w.h.count * w.h.tq, n = rows * w.h.tk;
    if (n == 0) {
        for (int i = 0; i < c->n_out; i++) MS_TRY(ms__cuda_fill_tensor(c->out[i], 0));
        return MS_OK;
    }
    held_inputs held;
    scratch s, dp, p, ds, delta, wide;
    int64_t size = (int64_t)sizeof(T), half = ms__dtype_size(w.p_type);
    MS_TRY(s.alloc(c, device, n * size));
    MS_TRY(dp.alloc(c, device, n * size));
    MS_TRY(p.alloc(c, device, n * half));
    MS_TRY(ds.alloc(c, device, n * half));
    MS_TRY(delta.alloc(c, device, rows * size));
    if (dmask) MS_TRY(wide.alloc(c, device, n * size));
    if (c->n_in > 7 && c->in[7]) MS_TRY(ms__contiguous(&held.in[7], c->in[7]));
    MS_TRY(launch(what, index, delta_kernel<T>, up(rows, BLOCK), BLOCK, w.h, part_of(g, w.h), part_of(o, w.h),
                  (const T *)data_of(held.in[7]), (T *)delta.data));
    MS_TRY(multiply(c, w.h, of_tensor(q, w.h), turned(of_tensor(k, w.h)), of_scores(w.s_type, s.data, w.h), w.h.scale));
    MS_TRY(multiply(c, w.h, of_tensor(g, w.h), turned(of_tensor(v, w.h)), of_scores(w.s_type, dp.data, w.h), 1));
    score_gradients<T> to = { (T *)s.data, (T *)dp.data, (T *)ms__data(lse), (T *)delta.data,
                              p.data,      ds.data,      (T *)wide.data };
    MS_TRY(launch(what, index, attend_backward_kernel<T>, up(n, BLOCK), BLOCK, w, to));
    side kept = of_scores(w.p_type, p.data, w.h), grad = of_scores(w.p_type, ds.data, w.h);
    if (dv) MS_TRY(multiply(c, w.h, turned(kept), of_tensor(g, w.h), of_tensor(dv, w.h), 1));
    if (dq) MS_TRY(multiply(c, w.h, grad, of_tensor(k, w.h), of_tensor(dq, w.h), w.h.scale));
    if (dk) MS_TRY(multiply(c, w.h, turned(grad), of_tensor(q, w.h), of_tensor(dk, w.h), w.h.scale));
    if (!dmask) return MS_OK;
    return launch(what, index, mask_grad_kernel<T>, up(dmask->numel, BLOCK), BLOCK, w.h, part_of(dmask, w.h),
                  dmask->numel, (const T *)wide.data, ms__data(dmask));
}
static ms_status run_attention_backward(ms_call *c)
{
    heads h = heads_of(c, c->in[1], c->in[2]);
    if (h.count * h.tq * h.tk > 0 && !ms__grad_out(c, 3) && ms__flash_aligned(c->in[5], h) &&
        ms__flash_fits(c->in + 1, h))
        return ms__flash_backward(c, h);
    return c->in[1]->dtype == MS_F64 ? backward<double>(c) : backward<float>(c);
}

extern const ms_cuda_kernel ms__cuda_attention[];
const ms_cuda_kernel ms__cuda_attention[] = { { "attention", run_attention },
                                              { "attention_backward", run_attention_backward },
                                              { NULL, NULL } };
