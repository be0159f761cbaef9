// SPDX-License-Identifier: MIT
// cuda/reduce.cu -- operators that fold (fold.h): sums, means, products, all, any, extremes and their positions,
// variances, norms, logsumexp; column sums for the gradient of linear's bias; cumsum, and the gradient of prod.
#include "cuda/fold.h"
#include "cuda/product.h"

static fold_plan fold_plan_of(const ms_call *c, int first_dim)
{
    return make_plan(c->in[0], ms__reduced_dims(c->in[0], c->n_i - first_dim, c->i + first_dim));
}
static ms_status room_for_segments(const ms_call *c, scratch *room, int64_t outputs)
{
    return room->alloc(c, ms__device(c->in[0]), outputs * (int64_t)sizeof(double));
}

static ms_status simple_call(ms_call *c, int first_dim, int kind, int how)
{
    fold_plan p = fold_plan_of(c, first_dim);
    ms_tensor *o = c->out[0];
    ending e = { how, (double)p.length };
    if (is_real(c->in[0])) return run_fold<double>(c->op->name, o, p, { kind }, e, tensor_of(o));
    return run_fold<int64_t>(c->op->name, o, p, { kind }, e, tensor_of(o));
}
static ms_status run_sum(ms_call *c) { return simple_call(c, 1, SUM, AS_IS); }
static ms_status run_mean(ms_call *c) { return simple_call(c, 1, SUM, MEAN); }
static ms_status run_prod(ms_call *c) { return simple_call(c, 1, PROD, AS_IS); }
static ms_status run_all(ms_call *c) { return simple_call(c, 1, COUNT, ALL); }
static ms_status run_any(ms_call *c) { return simple_call(c, 1, COUNT, ANY); }
static ms_status run_max_all(ms_call *c) { return simple_call(c, 0, LARGEST, AS_IS); }
static ms_status run_min_all(ms_call *c) { return simple_call(c, 0, SMALLEST, AS_IS); }
static ms_status run_amax(ms_call *c) { return simple_call(c, 1, LARGEST, AS_IS); }
static ms_status run_amin(ms_call *c) { return simple_call(c, 1, SMALLEST, AS_IS); }

static ms_status run_norm(ms_call *c)
{
    double e = c->f[0];
    int kind = e == 2           ? SQUARE_SUM
               : e == 1         ? ABS_SUM
               : e == 0         ? COUNT
               : e == INFINITY  ? ABS_LARGEST
               : e == -INFINITY ? ABS_SMALLEST
                                : POWER_SUM;
    ending how = { kind == SQUARE_SUM ? ROOT : kind == POWER_SUM ? INVERSE_POWER : AS_IS, e };
    return run_fold<double>(c->op->name, c->out[0], fold_plan_of(c, 1), { kind, NULL, e }, how, tensor_of(c->out[0]));
}

// Computes the mean, then the squared deviations from it. The call's number: correction; integers: keepdim, dims.
static ms_status variance_call(ms_call *c, int how)
{
    fold_plan p = fold_plan_of(c, 1);
    const char *what = c->op->name;
    ms_tensor *o = c->out[0];
    scratch room;
    if (p.outputs == 0) return MS_OK;
    double n = (double)p.length, divisor = n - (c->n_f > 0 ? c->f[0] : 1);
    MS_TRY(room_for_segments(c, &room, p.outputs));
    double *mean = (double *)room.data;
    MS_TRY(run_fold<double>(what, o, p, { SUM }, { MEAN, n }, doubles_of(mean)));
    return run_fold<double>(what, o, p, { DEVIATION, mean }, { how, divisor > 0 ? divisor : 0 }, tensor_of(o));
}
static ms_status run_var(ms_call *c) { return variance_call(c, MEAN); }
static ms_status run_std(ms_call *c) { return variance_call(c, STD); }

static unsigned call_dim(const ms_call *c)
{
    return ms__reduced_dims(c->in[0], c->n_i && c->in[0]->ndim ? 1 : 0, c->i);
}

// m + log(sum(exp(x - m))), where m is the maximum, or 0 if the maximum is infinite or NaN.
static ms_status run_logsumexp(ms_call *c)
{
    fold_plan p = make_plan(c->in[0], call_dim(c));
    const char *what = c->op->name;
    ms_tensor *o = c->out[0];
    scratch room;
    if (p.outputs == 0) return MS_OK;
    MS_TRY(room_for_segments(c, &room, p.outputs));
    double *most = (double *)room.data;
    MS_TRY(run_fold<double>(what, o, p, { LARGEST }, { FINITE_OR_0 }, doubles_of(most)));
    return run_fold<double>(what, o, p, { EXP_SUM, most }, { PLUS_LOG, 0, most }, tensor_of(o));
}

// ---- values and positions: the first element that equals the extreme ----

// Finds in each segment the first position of the extreme of the segment's output, wide[m]; INT64_MAX if it has none.
// `width` threads per output and segment, a warp or a block.
template <class S> __global__ void dense_find_kernel(fold_plan p, int width, const double *wide, int64_t *parts)
{
    __shared__ int64_t shared[WARPS];
    int64_t i = (int64_t)blockIdx.x * (BLOCK / width) + threadIdx.x / width, m = i / p.segments, s = i % p.segments;
    if (m >= p.outputs) return;
    span part = segment_span(p, s);
    const S *row = (const S *)(p.data + offset_of(m, p.nk, p.kshape, p.kstride)) + part.from;
    int64_t n = part.to - part.from, found = INT64_MAX;
    double w = wide[m];
    for (int64_t j = first_pack(row) + (int64_t)(threadIdx.x % width) * WIDE; j < n; j += (int64_t)width * WIDE) {
        real_of<S> v[WIDE];
        read_pack(row, j, n, (real_of<S>)0, v);
        UNROLL
        for (int e = WIDE - 1; e >= 0; e--)
            if (in_range(j + e, n) && part.from + j + e < found && ((v[e] == w) | ((v[e] != v[e]) & (w != w))))
                found = part.from + j + e;
    }
    found = -group_max(-found, width, shared);
    if (threadIdx.x % width == 0) parts[s * p.outputs + m] = found;
}
// As dense_find_kernel, for tensors that are not dense (fold_plan), or whose columns are folded. width: threads per
// output and segment: 1 for columns, so that neighbouring threads read neighbouring elements, otherwise BLOCK.
template <class W> __global__ void find_kernel(fold_plan p, int width, const W *wide, int64_t *parts)
{
    __shared__ int64_t shared[WARPS];
    int64_t i = GLOBAL_INDEX / width, m = width > 1 ? i / p.segments : i % p.outputs,
            s = width > 1 ? i % p.segments : i / p.outputs, found = INT64_MAX;
    if (m >= p.outputs || s >= p.segments) return;
    span part = segment_span(p, s);
    const char *base = p.data + offset_of(m, p.nk, p.kshape, p.kstride);
    W w = wide[m];
    for (int64_t k = part.from + (int64_t)threadIdx.x % width; k < part.to && found == INT64_MAX; k += width) {
        W v = own_value<W>::load(p.dtype, base + offset_of(k, p.nr, p.rshape, p.rstride));
        if ((v == w) | ((v != v) & (w != w))) found = k;
    }
    if (width > 1) found = -group_max(-found, BLOCK, shared);
    if (threadIdx.x % width == 0) parts[s * p.outputs + m] = found;
}
// Finds the first position of each output's extreme, wide[m], in each of its segments.
template <class W> static ms_status find(const char *what, int index, const fold_plan &p, const W *wide, int64_t *parts)
{
    int64_t n = p.outputs * p.segments;
    if constexpr (std::is_same_v<W, double>)
        if (p.dense && !p.columns) {
            int width = row_width(n, p.segment);
            return launch_blocks(what, index, TYPED_KERNEL(p.dtype, dense_find_kernel), up(n, BLOCK / width), BLOCK, p,
                                 width, wide, parts);
        }
    int width = p.columns ? 1 : BLOCK;
    grid threads = width == 1 ? grid_of(n) : grid { n, BLOCK };
    return launch_blocks(what, index, find_kernel<W>, threads.blocks, threads.threads, p, width, wide, parts);
}
template <class W>
static ms_status extreme_typed(ms_call *c, const fold_plan &p, int kind, ms_tensor *values, ms_tensor *positions)
{
    const char *what = c->op->name;
    int index = index_of(c->in[0]);
    int64_t *out = (int64_t *)ms__data(positions);
    scratch room, parts;
    MS_TRY(room_for_segments(c, &room, p.outputs));
    W *wide = (W *)room.data;
    ending keep = { AS_IS, 0, NULL, wide };
    MS_TRY(run_fold<W>(what, c->in[0], p, { kind }, keep, values ? tensor_of(values) : target {}));
    if (p.segments == 1) return find<W>(what, index, p, wide, out);
    MS_TRY(parts.alloc(c, ms__device(c->in[0]), p.outputs * p.segments * (int64_t)sizeof(int64_t)));
    MS_TRY(find<W>(what, index, p, wide, (int64_t *)parts.data));
    return join_segments<int64_t>(what, index, p, SMALLEST, (const int64_t *)parts.data,
                                  { NULL, {}, tensor_of(positions) });
}
static ms_status extreme_call(ms_call *c, int kind, ms_tensor *values, ms_tensor *positions)
{
    fold_plan p = make_plan(c->in[0], call_dim(c));
    if (p.outputs == 0) return MS_OK;
    return is_real(c->in[0]) ? extreme_typed<double>(c, p, kind, values, positions)
                             : extreme_typed<int64_t>(c, p, kind, values, positions);
}
static ms_status run_max(ms_call *c) { return extreme_call(c, LARGEST, c->out[0], c->out[1]); }
static ms_status run_min(ms_call *c) { return extreme_call(c, SMALLEST, c->out[0], c->out[1]); }
static ms_status run_argmax(ms_call *c) { return extreme_call(c, LARGEST, NULL, c->out[0]); }
static ms_status run_argmin(ms_call *c) { return extreme_call(c, SMALLEST, NULL, c->out[0]); }

// ---- cumsum: scans along lines of one dimension ----

// The lines of x along a dimension: `count` lines of `length` elements. shape has the other dimensions; a and b are
// their strides in x and in o, in bytes.
struct lines {
    int ndim;
    int64_t count, length, shape[MS_MAX_DIMS], a[MS_MAX_DIMS], b[MS_MAX_DIMS];
};
static lines reduced_lines_of(const ms_tensor *x, const ms_tensor *o, int d)
{
    lines l = {};
    l.length = x->ndim ? x->shape[d] : 1;
    l.count = l.length ? x->numel / l.length : 0;
    for (int k = 0; k < x->ndim; k++) {
        if (k == d) continue;
        l.shape[l.ndim] = x->shape[k];
        l.a[l.ndim] = x->stride[k] * ms__dtype_size(x->dtype);
        l.b[l.ndim++] = o->stride[k] * ms__dtype_size(o->dtype);
    }
    return l;
}
// A tensor that is read or written line by line. step: the bytes from an element of a line to the next.
struct line_data {
    int dtype;
    char *data;
    int64_t step;
};
static line_data line_data_of(const ms_tensor *t, int d)
{
    return { t->dtype, (char *)ms__data(t), t->ndim ? t->stride[d] * ms__dtype_size(t->dtype) : 0 };
}
// Stores a scan's result: of integers int64, of floating-point numbers their dtype.
template <class W> static __device__ inline void store_scanned(int dtype, void *p, W v)
{
    if constexpr (std::is_same_v<W, double>) own_value<double>::store(dtype, p, v);
    else *(W *)p = v;
}
// How a scan loads and stores WIDE elements of a line of n elements, from element `at` on; those outside of the line
// read as 0. dense_elements: adjacent elements of type S; any_elements: elements of any dtype and step, as W.
template <class S> struct dense_elements {
    typedef double total;
    typedef real_of<S> element;
    static __device__ __forceinline__ void load(const line_data &, const char *line, int64_t at, int64_t n, element *v)
    {
        read_pack((const S *)line, at, n, (element)0, v);
    }
    static __device__ __forceinline__ void store(const line_data &, char *line, int64_t at, int64_t n, const element *v)
    {
        write_pack((S *)line, at, n, v);
    }
};
template <class W> struct any_elements {
    typedef std::conditional_t<std::is_same_v<W, double>, double, uint64_t> total;  // integers wrap around
    typedef total element;
    static __device__ inline void load(const line_data &d, const char *line, int64_t at, int64_t n, element *v)
    {
        for (int e = 0; e < WIDE; e++)
            v[e] = in_range(at + e, n) ? (element)own_value<W>::load(d.dtype, line + (at + e) * d.step) : 0;
    }
    static __device__ inline void store(const line_data &d, char *line, int64_t at, int64_t n, const element *v)
    {
        for (int e = 0; e < WIDE; e++)
            if (in_range(at + e, n)) store_scanned<W>(d.dtype, line + (at + e) * d.step, (W)v[e]);
    }
};
// A scan of lines that are divided into segments, one block of threads per segment; `back`: from the line's end.
// totals: the sum of each segment, line by line.
struct scan_parts {
    int64_t segments, segment;  // segment: elements of each but the last
    bool back;
    void *totals;
};
template <class E> __global__ void scan_totals_kernel(lines l, line_data from, scan_parts p)
{
    typedef typename E::total T;
    __shared__ T shared[WARPS];
    int64_t line = blockIdx.x / p.segments, first = blockIdx.x % p.segments * p.segment;
    int64_t last = first + p.segment < l.length ? first + p.segment : l.length;
    const char *x = from.data + offset_of(line, l.ndim, l.shape, l.a);
    T sum = 0;
    ROLLED
    for (int64_t k = first + threadIdx.x * WIDE; k < last; k += BLOCK * WIDE) {
        typename E::element v[WIDE];
        E::load(from, x, p.back ? l.length - WIDE - k : k, l.length, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) sum += (T)v[e];
    }
    sum = group_sum(sum, BLOCK, shared);
    if (threadIdx.x == 0) ((T *)p.totals)[blockIdx.x] = sum;
}
// In each round every thread sums WIDE elements, the block scans these sums, and its total is carried into the next
// round. The totals of earlier segments are carried into the first round.
template <class E> __global__ void scan_kernel(lines l, line_data from, line_data to, scan_parts p)
{
    typedef typename E::total T;
    __shared__ T shared[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t line = blockIdx.x / p.segments, s = blockIdx.x % p.segments, first = s * p.segment;
    int64_t last = first + p.segment < l.length ? first + p.segment : l.length;
    const char *x = from.data + offset_of(line, l.ndim, l.shape, l.a);
    char *o = to.data + offset_of(line, l.ndim, l.shape, l.b);
    bool back = p.back;
    T carry = 0;
    for (int64_t k = threadIdx.x; k < s; k += BLOCK) carry += ((const T *)p.totals)[line * p.segments + k];
    if (p.segments > 1) carry = group_sum(carry, BLOCK, shared);
    for (int64_t begin = first; begin < last; begin += BLOCK * WIDE) {
        int64_t k = begin + threadIdx.x * WIDE, at = back ? l.length - WIDE - k : k;
        typename E::element v[WIDE];
        T sum = 0, upto[WIDE];
        if (k < last) E::load(from, x, at, l.length, v);
        else UNROLL
        for (int e = 0; e < WIDE; e++) v[e] = 0;
        UNROLL
        for (int e = 0; e < WIDE; e++) upto[e] = sum += (T)(back ? v[WIDE - 1 - e] : v[e]);
        for (int step = 1; step < 32; step *= 2) {
            T left = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += left;
        }
        T before = __shfl_up_sync(0xffffffffu, sum, 1);
        if (lane == 0) before = 0;
        if (lane == 31) shared[warp] = sum;
        __syncthreads();
        for (int w = 0; w < WARPS; w++) {
            if (w == warp) before += carry;
            carry += shared[w];
        }
        __syncthreads();
        UNROLL
        for (int e = 0; e < WIDE; e++) v[e] = (typename E::element)(before + upto[back ? WIDE - 1 - e : e]);
        if (k < last) E::store(to, o, at, l.length, v);
    }
}
static __device__ inline double add_wrapping(double a, double b) { return a + b; }
static __device__ inline int64_t add_wrapping(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
// A scan with one thread per line: for lines that are short or many, and not dense elements of a floating-point type.
template <class W> __global__ void scan_lines_kernel(lines l, line_data from, line_data to, bool back)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= l.count) return;
    const char *x = from.data + offset_of(i, l.ndim, l.shape, l.a);
    char *o = to.data + offset_of(i, l.ndim, l.shape, l.b);
    W total = 0;
    for (int64_t j = 0; j < l.length; j++) {
        int64_t k = back ? l.length - 1 - j : j;
        total = add_wrapping(total, own_value<W>::load(from.dtype, x + k * from.step));
        store_scanned<W>(to.dtype, o + k * to.step, total);
    }
}
template <class E>
static ms_status scan_blocks(const ms_call *c, const lines &l, const line_data &from, const line_data &to, bool back)
{
    scratch totals;
    int64_t size = ms__dtype_size(from.dtype);
    scan_parts p = { filling_segments(2 * l.count * l.length * size, l.count, l.length, 2048 / size), 0, back, NULL };
    p.segment = up(up(l.length, p.segments), WIDE) * WIDE;
    p.segments = up(l.length, p.segment);
    int index = index_of(c->in[0]);
    if (p.segments > 1) {
        MS_TRY(totals.alloc(c, ms__device(c->in[0]), l.count * p.segments * (int64_t)sizeof(double)));
        p.totals = totals.data;
        MS_TRY(launch_blocks(c->op->name, index, scan_totals_kernel<E>, l.count * p.segments, BLOCK, l, from, p));
    }
    return launch_blocks(c->op->name, index, scan_kernel<E>, l.count * p.segments, BLOCK, l, from, to, p);
}
static ms_status run_cumsum(ms_call *c)
{
    ms_tensor *x = c->in[0], *o = c->out[0];
    int d = x->ndim ? (int)(c->i[0] < 0 ? c->i[0] + x->ndim : c->i[0]) : 0;
    held_inputs h;
    // Adjacent elements are read 16 bytes at a time, which is worth a contiguous copy.
    if (x->ndim && d == x->ndim - 1 && x->stride[d] != 1 && x->dtype <= MS_BF16) {
        MS_TRY(h.hold(c, 1));
        x = h.in[0];
    }
    lines l = reduced_lines_of(x, o, d);
    line_data from = line_data_of(x, d), to = line_data_of(o, d);
    bool back = c->n_i > 1 && c->i[1], real = x->dtype <= MS_BF16;
    int size = ms__dtype_size(x->dtype);
    if (l.length == 0 || l.count == 0) return MS_OK;
    if (real && from.dtype == to.dtype && from.step == size && to.step == size) {
#define SCAN(S, T) return scan_blocks<dense_elements<S>>(c, l, from, to, back)
        WITH_FLOAT_TYPE(x->dtype, SCAN)
#undef SCAN
    }
    if (l.length <= 64 || l.count >= ENOUGH * 64)
        return launch(c->op->name, index_of(x), real ? scan_lines_kernel<double> : scan_lines_kernel<int64_t>,
                      up(l.count, BLOCK), BLOCK, l, from, to, back);
    if (real) return scan_blocks<any_elements<double>>(c, l, from, to, back);
    return scan_blocks<any_elements<int64_t>>(c, l, from, to, back);
}

// ---- the gradient of prod ----

// Inputs: g (expanded to x's shape), x. The gradient of an element is g times the product of the other elements: the
// product / x where no element is 0. If one element is 0, only its gradient is not 0; if more are 0, all gradients are
// 0. For each output, two folds give the product of the elements that are not 0, and their number.
struct prod_job {
    int ndim;
    int64_t n, length, shape[MS_MAX_DIMS], x[MS_MAX_DIMS], g[MS_MAX_DIMS],
        m[MS_MAX_DIMS];  // x, g, m: strides in x, in g and in the outputs
    const double *others, *filled;
    bool packed;  // x is contiguous
};
static void add_prod_dim(prod_job *p, int64_t size, int64_t x, int64_t g, int64_t m)
{
    int d = p->ndim - 1;
    if (size == 1) return;
    if (d >= 0 && p->x[d] == x * size && p->g[d] == g * size && p->m[d] == m * size) p->shape[d] *= size;
    else p->shape[d = p->ndim++] = size;
    p->x[d] = x, p->g[d] = g, p->m[d] = m;
}
template <class S>
__global__ void __launch_bounds__(BLOCK, sizeof(S) == 2 ? 5 : 4)
    prod_backward_kernel(prod_job p, const S *x, const S *g, S *o)
{
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= p.n) return;
    real_of<S> v[WIDE];
    if (p.packed) read_pack(x, i, p.n, (real_of<S>)1, v);
    else UNROLL
    for (int e = 0; e < WIDE; e++) v[e] = i + e < p.n ? one_of(x + offset_of(i + e, p.ndim, p.shape, p.x)) : 1;
    UNROLL
    for (int e = 0; e < WIDE; e++) {
        if (i + e >= p.n) continue;
        int64_t m = offset_of(i + e, p.ndim, p.shape, p.m);
        double others = p.others[m], zeros = (double)p.length - p.filled[m];
        double f = zeros == 0 ? others / (double)v[e] : zeros == 1 && v[e] == 0 ? others : 0;
        v[e] = (real_of<S>)((double)one_of(g + offset_of(i + e, p.ndim, p.shape, p.g)) * f);
    }
    write_pack(o, i, p.n, v);
}
static ms_status run_prod_backward(ms_call *c)
{
    const ms_tensor *g = c->in[0], *x = c->in[1];
    const char *what = c->op->name;
    unsigned dims = ms__reduced_dims(x, c->n_i - 1, c->i + 1);
    fold_plan f = make_plan(x, dims);
    scratch room;
    if (x->numel == 0) return MS_OK;
    MS_TRY(room.alloc(c, ms__device(x), 2 * f.outputs * (int64_t)sizeof(double)));
    double *others = (double *)room.data, *filled = others + f.outputs;
    MS_TRY(run_fold<double>(what, x, f, { PROD_NOT_0 }, {}, doubles_of(others)));
    MS_TRY(run_fold<double>(what, x, f, { COUNT }, {}, doubles_of(filled)));
    prod_job p = {};
    p.n = x->numel, p.length = f.length, p.others = others, p.filled = filled, p.packed = ms__is_contiguous(x);
    int64_t step[MS_MAX_DIMS] = {}, all = 1;
    for (int d = x->ndim - 1; d >= 0; d--)
        if (!(dims >> d & 1)) step[d] = all, all *= x->shape[d];
    for (int d = 0; d < x->ndim; d++) add_prod_dim(&p, x->shape[d], x->stride[d], g->stride[d], step[d]);
    if (p.ndim == 0) p.shape[p.ndim++] = 1;
    grid n = grid_of(up(p.n, WIDE));
#define PROD(S, T)                                                                                      \
    return launch(what, index_of(x), prod_backward_kernel<S>, n.blocks, n.threads, p, (S *)ms__data(x), \
                  (S *)ms__data(g), (S *)ms__data(c->out[0]))
    WITH_FLOAT_TYPE(x->dtype, PROD)
#undef PROD
}

ms_status ms__cuda_column_sum(const ms_tensor *g, int64_t rows, int64_t rs, ms_tensor *out)
{
    fold_plan p = {};
    if (out->numel == 0) return MS_OK;
    p.data = (const char *)ms__data(g);
    p.dtype = g->dtype;
    p.nk = p.nr = 1;
    p.kshape[0] = p.outputs = out->numel;
    p.kstride[0] = ms__dtype_size(g->dtype);
    p.rshape[0] = p.length = rows;
    p.rstride[0] = rs * ms__dtype_size(g->dtype);
    p.columns = true;
    finish_plan(&p);
    return run_fold<double>("linear_backward", g, p, { SUM }, {}, tensor_of(out));
}

extern const ms_cuda_kernel ms__cuda_reduce[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_reduce[] = { ROW(sum) ROW(mean) ROW(prod) ROW(all) ROW(any) ROW(var) ROW(std) ROW(norm)
                                               ROW(max_all) ROW(min_all) ROW(amax) ROW(amin) ROW(max) ROW(min)
                                                   ROW(argmax) ROW(argmin) ROW(logsumexp) ROW(cumsum)
                                                       ROW(prod_backward) { NULL, NULL } };
