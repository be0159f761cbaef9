// SPDX-License-Identifier: MIT
// cuda/attention/attention.cu -- scaled dot-product attention where flash.cu cannot compute it (see ms__flash_fits),
// and the gradient of a mask: matrix products and one pass over each row of scores. During a call it holds the scores
// of all heads (float32 or float64) and the probabilities (in the inputs' dtype). Forward saves the logsumexp; backward
// recomputes the scores. Masks, spans, caps and dropout work as on the CPU: the same random numbers drop the same
// elements.
#include "cuda/attention/flash.h"
#include "cuda/product.h"

struct scores {
    heads h;
    strided_part mask;  // bool, or of the scores' dtype; data is NULL without a mask
    dropped dropout;
    double keep;  // factor of the probabilities that dropout keeps
};
static scores scores_for(const heads &h, const ms_tensor *mask, const rng &random)
{
    scores q = {};
    q.h = h;
    if (mask) q.mask = strided_part_of(mask, h);
    q.dropout = dropped_with(h.p, random);
    q.keep = keep_factor(h.p);
    return q;
}
// The dtype of scores and sums.
static int real_dtype(int dtype) { return dtype == MS_F64 ? MS_F64 : MS_F32; }

// A block's row of scores.
struct score_row {
    int64_t i, mask;  // its query; the offset of its first element in the mask
    uint64_t first;   // the position of its first element in [heads, queries, keys]
};
static __device__ inline score_row row_of(const scores &q)
{
    int64_t row = blockIdx.x, i = row % q.h.tq;
    return { i, offset_of(row / q.h.tq, q.h.n, q.h.shape, q.mask.stride) + i * q.mask.rs, (uint64_t)(row * q.h.tk) };
}
// Applies the cap, the mask and the span to the scores [j, j + WIDE) of a row.
template <class T> static __device__ inline void mask_pack(const scores &q, const score_row &r, int64_t j, T *v)
{
    const uint8_t *seen = (const uint8_t *)q.mask.data + r.mask;
    const T *added = (const T *)q.mask.data + r.mask;
    if (q.h.cap > 0) {
        UNROLL
        for (int e = 0; e < WIDE; e++)
            if (in_range(j + e, q.h.tk)) v[e] = capped(v[e], (T)q.h.cap);
    }
    if (q.mask.data && q.mask.dtype == MS_BOOL) {
        UNROLL
        for (int e = 0; e < WIDE; e++)
            if (in_range(j + e, q.h.tk)) v[e] = seen[(j + e) * q.mask.cs] ? v[e] : -(T)INFINITY;
    } else if (q.mask.data) {
        T m[WIDE];
        if (q.mask.cs == 1) read_pack(added, j, q.h.tk, (T)0, m);
        UNROLL
        for (int e = 0; e < WIDE; e++) v[e] += q.mask.cs == 1 ? m[e] : *added;
    }
    UNROLL
    for (int e = 0; e < WIDE; e++)
        v[e] = j + e > r.i + q.h.span.high || j + e < r.i + q.h.span.low ? -(T)INFINITY : v[e];
}
// Which of the probabilities [j, j + WIDE) of a row dropout keeps: a bit for each.
static __device__ inline uint32_t kept_pack(const scores &q, const score_row &r, int64_t j)
{
    if (q.dropout.p <= 0) return 0xff;
    uint32_t bits = 0;
    rng random = rng_now(q.dropout.random);
    ROLLED
    for (int e = 0; e < WIDE; e++)
        bits |= (uint32_t)is_weight_kept(q.dropout, random, r.first + (uint64_t)(j + e)) << e;
    return bits;
}

// Turns scores into probabilities (after dropout) and computes the logsumexp of each row. A row without allowed keys
// gets probabilities 0 and logsumexp -inf. A block computes one row.
template <class S> __global__ void attend_kernel(scores q, const real_of<S> *s, S *p, real_of<S> *lse)
{
    typedef real_of<S> T;
    __shared__ T shared[WARPS];
    score_row r = row_of(q);
    int64_t n = q.h.tk;
    s += r.first, p += r.first;
    int64_t first = first_pack(s) + (int64_t)threadIdx.x * WIDE;
    T most = -(T)INFINITY, sum = 0, v[WIDE];
    for (int64_t j = first; j < n; j += BLOCK * WIDE) {
        read_pack(s, j, n, -(T)INFINITY, v);
        mask_pack(q, r, j, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) most = larger(most, v[e]);
    }
    most = group_max(most, BLOCK, shared);
    T top = most == -(T)INFINITY ? 0 : most;
    for (int64_t j = first; j < n; j += BLOCK * WIDE) {
        read_pack(s, j, n, -(T)INFINITY, v);
        mask_pack(q, r, j, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) sum += exp_of(v[e] - top);
    }
    sum = group_sum(sum, BLOCK, shared);
    T scale = sum > 0 || sum != sum ? (T)q.keep / sum : 0;
    for (int64_t j = first; j < n; j += BLOCK * WIDE) {
        read_pack(s, j, n, -(T)INFINITY, v);
        mask_pack(q, r, j, v);
        uint32_t kept = kept_pack(q, r, j);
        UNROLL
        for (int e = 0; e < WIDE; e++) v[e] = kept >> e & 1 ? exp_of(v[e] - top) * scale : 0;
        write_pack(p, j, n, v);
    }
    if (threadIdx.x == 0) lse[blockIdx.x] = most == -(T)INFINITY ? most : most + log_of(sum);
}

// Gradients of the scores S. P = exp(S - lse) are the probabilities before dropout, keep their dropout factors, and
// dp = g v^T. Stores ds = P (keep dp - delta), times the slope of the cap, and kept_p = P keep. delta: per row, the dot
// product of g and o minus the gradient of the logsumexp. wide_ds: NULL, or gets ds before the cap and without
// rounding.
template <class S> struct score_gradients {
    const real_of<S> *s, *dp, *lse, *delta;
    S *kept_p, *ds;
    real_of<S> *wide_ds;
};
template <class S> __global__ void attend_backward_kernel(scores q, score_gradients<S> g)
{
    typedef real_of<S> T;
    score_row r = row_of(q);
    T lse = g.lse[blockIdx.x], delta = g.delta[blockIdx.x], v[WIDE], w[WIDE], slope[WIDE];
    const T *s = g.s + r.first, *dp = g.dp + r.first;
    for (int64_t j = first_pack(s) + (int64_t)threadIdx.x * WIDE; j < q.h.tk; j += BLOCK * WIDE) {
        read_two(s, dp, j, q.h.tk, v, w);
        UNROLL
        for (int e = 0; e < WIDE; e++) slope[e] = q.h.cap > 0 ? cap_slope(capped(v[e], (T)q.h.cap), (T)q.h.cap) : (T)1;
        mask_pack(q, r, j, v);
        uint32_t kept = kept_pack(q, r, j);
        UNROLL
        for (int e = 0; e < WIDE; e++) {
            T p = lse == -(T)INFINITY || v[e] == -(T)INFINITY ? (T)0 : exp_of(v[e] - lse);
            T keep = kept >> e & 1 ? (T)q.keep : (T)0;
            v[e] = p * keep;
            w[e] = p == 0 ? (T)0 : p * (keep * w[e] - delta);
        }
        write_pack(g.kept_p + r.first, j, q.h.tk, v);
        if (g.wide_ds) write_pack(g.wide_ds + r.first, j, q.h.tk, w);
        UNROLL
        for (int e = 0; e < WIDE; e++) w[e] *= slope[e];
        write_pack(g.ds + r.first, j, q.h.tk, w);
    }
}

// delta of score_gradients, one warp per row. g_lse: NULL, or the gradient of the logsumexp.
template <class S>
__global__ void delta_kernel(heads h, strided_part g, strided_part o, const real_of<S> *g_lse, real_of<S> *delta)
{
    typedef real_of<S> T;
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= h.count * h.tq) return;
    int64_t i = row % h.tq, rest = row / h.tq;
    const S *a = (const S *)g.data + i * g.rs, *b = (const S *)o.data + i * o.rs;
    ROLLED
    for (int d = h.n - 1; d >= 0; rest /= h.shape[d--]) {
        a += rest % h.shape[d] * g.stride[d];
        b += rest % h.shape[d] * o.stride[d];
    }
    T sum = 0, v[WIDE], w[WIDE];
    if (g.cs == 1 && o.cs == 1) {
        for (int64_t j = first_pack(a) + lane * WIDE; j < h.d; j += 32 * WIDE) {
            read_two(a, b, j, h.d, v, w);
            UNROLL
            for (int e = 0; e < WIDE; e++) sum += v[e] * w[e];
        }
    } else {
        for (int64_t j = lane; j < h.d; j += 32) sum += one_of(a + j * g.cs) * one_of(b + j * o.cs);
    }
    sum = warp_sum(sum);
    if (lane == 0) delta[row] = g_lse ? sum - g_lse[row] : sum;
}

// ---- launches ----

// One operand of a product: a tensor of heads, or the contiguous scores [heads, rows, columns]. rs, cs, bs: strides of
// rows, columns and batch dimensions, in elements. shared: it has one head for h.share heads of queries.
struct side {
    int type;
    bool shared;
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
    s.shared = h.share > 1 && t->shape[h.n - 1] < h.shape[h.n - 1];
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
// The heads of queries that share keys, one after another, as one head. Tensors must be contiguous.
static side joined_heads(side s, const heads &h)
{
    if (h.share == 1) return s;
    s.shared = true;
    s.rows *= h.share;
    s.bs[h.n - 1] *= h.share;
    return s;
}
static side turned(side s)
{
    side t = s;
    t.rows = s.cols, t.cols = s.rows;
    t.rs = s.cs, t.cs = s.rs;
    return t;
}
// out = alpha a b, for every head; if all operands are shared, for every head of keys.
static ms_status multiply_heads(const ms_call *call, const heads &h, const side &a, const side &b, const side &out,
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
    if (h.share > 1) {  // the last batch dimension becomes two: heads of keys, and the heads that share each
        int d = h.n - 1;
        p.batch[d] /= h.share;
        if (a.shared && b.shared && out.shared) return ms__cuda_product(index_of(call->out[0]), &p);
        p.batch[p.nb++] = h.share;
        p.a_bs[d + 1] = a.shared ? 0 : a.bs[d], p.a_bs[d] *= a.shared ? 1 : h.share;
        p.b_bs[d + 1] = b.shared ? 0 : b.bs[d], p.b_bs[d] *= b.shared ? 1 : h.share;
        p.c_bs[d + 1] = out.bs[d], p.c_bs[d] *= h.share;
    }
    return ms__cuda_product(index_of(call->out[0]), &p);
}

// *out: the mask as the kernels read it. A bool mask is passed as it is. Any other mask must have the scores' dtype and
// adjacent keys or only one; otherwise it is copied, and broadcast dimensions other than the keys get size 1 in the
// copy. The caller releases *out.
static ms_status attention_mask_of(ms_call *c, ms_tensor *mask, int dtype, ms_tensor **out)
{
    int64_t shape[MS_MAX_DIMS];
    int n = mask ? mask->ndim : 0;
    *out = mask ? ms__retain(mask) : NULL;
    if (!mask || mask->dtype == MS_BOOL) return MS_OK;
    if (mask->dtype == dtype && (mask->shape[n - 1] == 1 || mask->stride[n - 1] == 1)) return MS_OK;
    for (int d = 0; d < n; d++) shape[d] = mask->stride[d] == 0 && d < n - 1 ? 1 : mask->shape[d];
    ms_tensor *part = ms__tensor_view(mask, n, shape, mask->stride, mask->offset);
    ms__release(*out);
    *out = NULL;
    ms_status st = ms__tensor_new(out, dtype, ms__device(mask), n, shape, c->op->name);
    if (st == MS_OK) st = ms__cuda_copy_tensor(*out, part);
    ms__release(part);
    return st;
}
template <class S> static ms_status forward(ms_call *c)
{
    typedef real_of<S> T;
    ms_tensor *q = c->in[0], *k = c->in[1], *v = c->in[2], *mask = c->n_in > 3 ? c->in[3] : NULL, *o = c->out[0];
    heads h = heads_of(c, c->n_i, q, k);
    int64_t rows = h.count * h.tq, n = rows * h.tk;
    if (rows == 0) return MS_OK;
    if (h.tk == 0) {
        MS_TRY(ms__cuda_fill_tensor(o, 0));
        return ms__cuda_fill_tensor(c->out[1], -INFINITY);
    }
    held_inputs held;
    scratch s, other;
    MS_TRY(attention_mask_of(c, mask, real_dtype(q->dtype), &held.in[0]));
    scores w = scores_for(h, held.in[0], rng_of(c));
    MS_TRY(s.alloc(c, ms__device(q), n * (int64_t)sizeof(T)));
    if (sizeof(S) != sizeof(T)) MS_TRY(other.alloc(c, ms__device(q), n * (int64_t)sizeof(S)));
    void *p = sizeof(S) != sizeof(T) ? other.data : s.data;
    side score = of_scores(real_dtype(q->dtype), s.data, h);
    MS_TRY(multiply_heads(c, h, of_tensor(q, h), turned(of_tensor(k, h)), score, h.scale));
    MS_TRY(launch_blocks(c->op->name, index_of(q), attend_kernel<S>, rows, BLOCK, w, (const T *)s.data, (S *)p,
                         (T *)ms__data(c->out[1])));
    return multiply_heads(c, h, of_scores(q->dtype, p, h), of_tensor(v, h), of_tensor(o, h), 1);
}
static ms_status run_attention(ms_call *c)
{
    heads h = heads_of(c, c->n_i, c->in[0], c->in[1]);
    if (h.count * h.tq * h.tk > 0 && ms__flash_fits(c->in, h)) return ms__flash_attention(c, h);
    return TYPED_KERNEL(c->in[0]->dtype, forward)(c);
}

// Inputs: gradient, q, k, v, mask (may be NULL), out, lse, and optionally the gradient of lse.
template <class S> static ms_status backward(ms_call *c)
{
    typedef real_of<S> T;
    ms_tensor *g = c->in[0], *q = c->in[1], *k = c->in[2], *v = c->in[3], *o = c->in[5];
    ms_tensor *dq = ms__grad_out(c, 0), *dk = ms__grad_out(c, 1), *dv = ms__grad_out(c, 2), *wide = ms__grad_out(c, 3);
    const char *what = c->op->name;
    int index = index_of(q), device = ms__device(q), real = real_dtype(q->dtype);
    heads h = heads_of(c, c->n_i - 3, q, k);
    int64_t rows = h.count * h.tq, n = rows * h.tk;
    if (n == 0) {
        for (int i = 0; i < c->n_out; i++) MS_TRY(ms__cuda_fill_tensor(c->out[i], 0));
        return MS_OK;
    }
    held_inputs held;
    scratch s, dp, p, ds, delta;
    MS_TRY(attention_mask_of(c, c->in[4], real, &held.in[0]));
    scores w = scores_for(h, held.in[0], rng_of_seeded(c));
    MS_TRY(s.alloc(c, device, n * (int64_t)sizeof(T)));
    MS_TRY(dp.alloc(c, device, n * (int64_t)sizeof(T)));
    MS_TRY(p.alloc(c, device, n * (int64_t)sizeof(S)));
    MS_TRY(ds.alloc(c, device, n * (int64_t)sizeof(S)));
    MS_TRY(delta.alloc(c, device, rows * (int64_t)sizeof(T)));
    if (c->n_in > 7 && c->in[7]) MS_TRY(ms__contiguous(&held.in[7], c->in[7]));
    MS_TRY(launch_blocks(what, index, delta_kernel<S>, up(rows, WARPS), BLOCK, h, strided_part_of(g, h),
                         strided_part_of(o, h), (const T *)data_of(held.in[7]), (T *)delta.data));
    MS_TRY(multiply_heads(c, h, of_tensor(q, h), turned(of_tensor(k, h)), of_scores(real, s.data, h), h.scale));
    MS_TRY(multiply_heads(c, h, of_tensor(g, h), turned(of_tensor(v, h)), of_scores(real, dp.data, h), 1));
    score_gradients<S> to = { (T *)s.data, (T *)dp.data, (T *)ms__data(c->in[6]),          (T *)delta.data,
                              (S *)p.data, (S *)ds.data, wide ? (T *)ms__data(wide) : NULL };
    MS_TRY(launch_blocks(what, index, attend_backward_kernel<S>, rows, BLOCK, w, to));
    side kept = of_scores(q->dtype, p.data, h), grad = of_scores(q->dtype, ds.data, h);
    if (dq) MS_TRY(multiply_heads(c, h, grad, of_tensor(k, h), of_tensor(dq, h), h.scale));
    if (h.share > 1) {
        MS_TRY(ms__contiguous(&held.in[1], g));
        MS_TRY(ms__contiguous(&held.in[2], q));
        g = held.in[1], q = held.in[2];
    }
    kept = turned(joined_heads(kept, h)), grad = turned(joined_heads(grad, h));
    if (dv) MS_TRY(multiply_heads(c, h, kept, joined_heads(of_tensor(g, h), h), of_tensor(dv, h), 1));
    return dk ? multiply_heads(c, h, grad, joined_heads(of_tensor(q, h), h), of_tensor(dk, h), h.scale) : MS_OK;
}
static ms_status run_attention_backward(ms_call *c)
{
    heads h = heads_of(c, c->n_i - 3, c->in[1], c->in[2]);
    // A gradient through the cap needs the scores before a mask was added to them.
    bool added = c->in[4] && c->in[4]->dtype != MS_BOOL;
    if (h.count * h.tq * h.tk > 0 && !ms__grad_out(c, 3) && !(h.cap > 0 && added) && ms__flash_aligned(c->in[5], h) &&
        ms__flash_fits(c->in + 1, h))
        return ms__flash_backward(c, h);
    return TYPED_KERNEL(c->in[1]->dtype, backward)(c);
}

extern const ms_cuda_kernel ms__cuda_attention[];
const ms_cuda_kernel ms__cuda_attention[] = { { "attention", run_attention },
                                              { "attention_backward", run_attention_backward },
                                              { NULL, NULL } };
