// SPDX-License-Identifier: MIT
// cuda/reduce.cu -- operators that fold (fold.h): sums, means, products, all, any, extremes and their positions,
// variances, norms, logsumexp; column sums for the gradient of linear's bias; cumsum, and the gradient of prod.
#include "cuda/fold.h"
#include "cuda/product.h"

// ---- formulas on the results ----

// What is done with the result of a fold. number: the divisor of MEAN and STD; the number that ALL compares with; the p
// of INVERSE_POWER, which raises to 1 / p. more: per output, the number that PLUS_LOG adds to the logarithm.
enum { AS_IS, MEAN, ALL, ANY, ROOT, INVERSE_POWER, STD, FINITE_OR_0, PLUS_LOG };
struct ending {
    int how;
    double number = 0;
    const double *more = NULL;
};
// Where results are stored: n elements of a dtype on a device.
struct target {
    int index;
    int64_t n;
    int dtype;
    void *out;
};
template <class W> __global__ void finish_kernel(const W *wide, ending e, target t)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= t.n) return;
    W v = wide[k];
    switch (e.how) {
    case MEAN: v = (W)((double)v / e.number); break;
    case ALL: v = (double)v == e.number; break;
    case ANY: v = v != 0; break;
    case ROOT: v = (W)ms_sqrt_f64((double)v); break;
    case INVERSE_POWER: v = (W)ms_pow_f64((double)v, 1 / e.number); break;
    case STD: v = (W)ms_sqrt_f64((double)v / e.number); break;
    case FINITE_OR_0: v = (double)v - (double)v == 0 ? v : (W)0; break;
    case PLUS_LOG: v = (W)(e.more[k] + ms_log_f64((double)v)); break;
    }
    store<W>(t.dtype, t.out, k, v);
}
template <class W> static ms_status finish(const char *what, const W *wide, const ending &e, const target &t)
{
    return launch(what, t.index, finish_kernel<W>, up(t.n, BLOCK), BLOCK, wide, e, t);
}
static target tensor_of(const fold_plan &p, const ms_tensor *t)
{
    return { index_of(t), p.outputs, t->dtype, ms__data(t) };
}
static target doubles_of(const fold_plan &p, const ms_tensor *t, double *wide)
{
    return { index_of(t), p.outputs, MS_F64, wide };
}
static ms_status room_for(ms_call *c, ms_block **b, int64_t outputs, int each)
{
    return ms__alloc(b, ms__device(c->in[0]), (size_t)(outputs * each) * sizeof(double), c->op->name);
}
static fold_plan plan_of(const ms_call *c, int first_dim)
{
    return make_plan(c->in[0], ms__reduced_dims(c->in[0], c->n_i - first_dim, c->i + first_dim));
}

static ms_status simple(ms_call *c, int first_dim, int kind, int how, double number)
{
    fold_plan p = plan_of(c, first_dim);
    const char *what = c->op->name;
    ms_tensor *o = c->out[0];
    ms_block *b;
    if (p.outputs == 0) return MS_OK;
    if (how == MEAN || how == ALL) number = (double)p.length;
    MS_TRY(room_for(c, &b, p.outputs, 1));
    ms_status st;
    if (is_real(c->in[0])) {
        st = run_fold<double>(what, o, p, { kind }, (double *)b->data);
        if (st == MS_OK) st = finish<double>(what, (double *)b->data, { how, number }, tensor_of(p, o));
    } else {
        st = run_fold<int64_t>(what, o, p, { kind }, (int64_t *)b->data);
        if (st == MS_OK) st = finish<int64_t>(what, (int64_t *)b->data, { how, number }, tensor_of(p, o));
    }
    ms__free(b);
    return st;
}
static ms_status run_sum(ms_call *c) { return simple(c, 1, SUM, AS_IS, 0); }
static ms_status run_mean(ms_call *c) { return simple(c, 1, SUM, MEAN, 0); }
static ms_status run_prod(ms_call *c) { return simple(c, 1, PROD, AS_IS, 0); }
static ms_status run_all(ms_call *c) { return simple(c, 1, COUNT, ALL, 0); }
static ms_status run_any(ms_call *c) { return simple(c, 1, COUNT, ANY, 0); }
static ms_status run_max_all(ms_call *c) { return simple(c, 0, LARGEST, AS_IS, 0); }
static ms_status run_min_all(ms_call *c) { return simple(c, 0, SMALLEST, AS_IS, 0); }

// Stores a fold's parameter on the device.
__global__ void put_kernel(double *at, double v) { *at = v; }

static ms_status run_norm(ms_call *c)
{
    double e = c->f[0];
    int kind = e == 2           ? SQUARE_SUM
               : e == 1         ? ABS_SUM
               : e == 0         ? COUNT
               : e == INFINITY  ? ABS_LARGEST
               : e == -INFINITY ? ABS_SMALLEST
                                : POWER_SUM;
    fold_plan p = plan_of(c, 1);
    const char *what = c->op->name;
    ms_tensor *o = c->out[0];
    ms_block *b;
    if (p.outputs == 0) return MS_OK;
    MS_TRY(room_for(c, &b, p.outputs + 1, 1));
    double *wide = (double *)b->data, *power = wide + p.outputs;
    ms_status st = launch(c->op->name, index_of(o), put_kernel, 1, 1, power, e);
    if (st == MS_OK) st = run_fold<double>(what, o, p, { kind, kind == POWER_SUM ? power : NULL }, wide);
    if (st == MS_OK)
        st = finish<double>(what, wide,
                            { kind == SQUARE_SUM  ? ROOT
                              : kind == POWER_SUM ? INVERSE_POWER
                                                  : AS_IS,
                              e },
                            tensor_of(p, o));
    ms__free(b);
    return st;
}

// Computes the mean, then the squared deviations from it. The call's integers: keepdim, correction, dims.
static ms_status variance(ms_call *c, int how)
{
    fold_plan p = plan_of(c, 2);
    const char *what = c->op->name;
    ms_tensor *o = c->out[0];
    ms_block *b;
    if (p.outputs == 0) return MS_OK;
    double n = (double)p.length, divisor = n - (double)(c->n_i > 1 ? c->i[1] : 1);
    MS_TRY(room_for(c, &b, p.outputs, 2));
    double *mean = (double *)b->data, *sum = mean + p.outputs;
    ms_status st = run_fold<double>(what, o, p, { SUM }, mean);
    if (st == MS_OK) st = finish<double>(what, mean, { MEAN, n }, doubles_of(p, o, mean));
    if (st == MS_OK) st = run_fold<double>(what, o, p, { DEVIATION, mean, 1 }, sum);
    if (st == MS_OK) st = finish<double>(what, sum, { how, divisor > 0 ? divisor : 0 }, tensor_of(p, o));
    ms__free(b);
    return st;
}
static ms_status run_var(ms_call *c) { return variance(c, MEAN); }
static ms_status run_std(ms_call *c) { return variance(c, STD); }

static unsigned one_dim(const ms_call *c) { return ms__reduced_dims(c->in[0], c->n_i && c->in[0]->ndim ? 1 : 0, c->i); }

// m + log(sum(exp(x - m))), where m is the maximum, or 0 if the maximum is infinite.
static ms_status run_logsumexp(ms_call *c)
{
    fold_plan p = make_plan(c->in[0], one_dim(c));
    const char *what = c->op->name;
    ms_tensor *o = c->out[0];
    ms_block *b;
    if (p.outputs == 0) return MS_OK;
    MS_TRY(room_for(c, &b, p.outputs, 2));
    double *most = (double *)b->data, *sum = most + p.outputs;
    ms_status st = run_fold<double>(what, o, p, { LARGEST }, most);
    if (st == MS_OK) st = finish<double>(what, most, { FINITE_OR_0 }, doubles_of(p, o, most));
    if (st == MS_OK) st = run_fold<double>(what, o, p, { EXP_SUM, most, 1 }, sum);
    if (st == MS_OK) st = finish<double>(what, sum, { PLUS_LOG, 0, most }, tensor_of(p, o));
    ms__free(b);
    return st;
}

// ---- values and positions: the first element that equals the extreme ----

// Finds the first position in each segment of its output's extreme, wide[m]; INT64_MAX if the segment does not have it.
// `width` threads per output and segment, a warp or a block.
template <class S> __global__ void dense_find_kernel(fold_plan p, int width, const double *wide, int64_t *parts)
{
    __shared__ int64_t shared[WARPS];
    int64_t i = (int64_t)blockIdx.x * (BLOCK / width) + threadIdx.x / width, m = i / p.segments, s = i % p.segments;
    if (m >= p.outputs) return;
    span part = span_of(p, s);
    const S *row = (const S *)(p.data + offset_of(m, p.nk, p.kshape, p.kstride)) + part.from;
    int64_t n = part.to - part.from, found = INT64_MAX;
    double w = wide[m];
    for (int64_t j = first_pack(row) + (int64_t)(threadIdx.x % width) * WIDE; j < n; j += (int64_t)width * WIDE) {
        real_of<S> v[WIDE];
        read_pack(row, j, n, (real_of<S>)0, v);
        UNROLL
        for (int e = WIDE - 1; e >= 0; e--)
            if (j + e >= 0 && j + e < n && part.from + j + e < found && ((v[e] == w) | ((v[e] != v[e]) & (w != w))))
                found = part.from + j + e;
    }
    found = -group_max(-found, width, shared);
    if (threadIdx.x % width == 0) parts[s * p.outputs + m] = found;
}
// The same search for tensors that are not dense (fold_plan), or whose columns are folded. width: threads per output
// and segment: 1 for columns, so that neighbouring threads read neighbouring elements, otherwise BLOCK.
template <class W> __global__ void find_kernel(fold_plan p, int width, const W *wide, int64_t *parts)
{
    __shared__ int64_t shared[WARPS];
    int64_t i = GLOBAL_INDEX / width, m = width > 1 ? i / p.segments : i % p.outputs,
            s = width > 1 ? i % p.segments : i / p.outputs, found = INT64_MAX;
    if (m >= p.outputs || s >= p.segments) return;
    span part = span_of(p, s);
    const char *base = p.data + offset_of(m, p.nk, p.kshape, p.kstride);
    W w = wide[m];
    for (int64_t k = part.from + (int64_t)threadIdx.x % width; k < part.to && found == INT64_MAX; k += width) {
        W v = value<W>::load(p.dtype, base + offset_of(k, p.nr, p.rshape, p.rstride));
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
static ms_status extreme_typed(ms_call *c, const fold_plan &p, int kind, ms_tensor *values, ms_tensor *positions,
                               void *room)
{
    const char *what = c->op->name;
    int index = index_of(c->in[0]);
    W *wide = (W *)room;
    int64_t *out = (int64_t *)ms__data(positions);
    scratch parts;
    MS_TRY(run_fold<W>(what, c->in[0], p, { kind }, wide));
    if (values) MS_TRY(finish<W>(what, wide, { AS_IS }, tensor_of(p, values)));
    if (p.segments == 1) return find<W>(what, index, p, wide, out);
    MS_TRY(parts.alloc(c, ms__device(c->in[0]), p.outputs * p.segments * (int64_t)sizeof(int64_t)));
    MS_TRY(find<W>(what, index, p, wide, (int64_t *)parts.data));
    return join_segments<int64_t>(what, index, p, SMALLEST, (const int64_t *)parts.data, out);
}
static ms_status extreme(ms_call *c, int kind, ms_tensor *values, ms_tensor *positions)
{
    fold_plan p = make_plan(c->in[0], one_dim(c));
    ms_block *b;
    if (p.outputs == 0) return MS_OK;
    MS_TRY(room_for(c, &b, p.outputs, 1));
    ms_status st = is_real(c->in[0]) ? extreme_typed<double>(c, p, kind, values, positions, b->data)
                                     : extreme_typed<int64_t>(c, p, kind, values, positions, b->data);
    ms__free(b);
    return st;
}
static ms_status run_max(ms_call *c) { return extreme(c, LARGEST, c->out[0], c->out[1]); }
static ms_status run_min(ms_call *c) { return extreme(c, SMALLEST, c->out[0], c->out[1]); }
static ms_status run_argmax(ms_call *c) { return extreme(c, LARGEST, NULL, c->out[0]); }
static ms_status run_argmin(ms_call *c) { return extreme(c, SMALLEST, NULL, c->out[0]); }

// ---- cumsum: scans along lines of one dimension ----

// The lines of x along a dimension: `count` lines of `length` elements. shape has the other dimensions; a and b are
// their strides in x and in o, in bytes.
struct lines {
    int ndim;
    int64_t count, length, shape[MS_MAX_DIMS], a[MS_MAX_DIMS], b[MS_MAX_DIMS];
};
static lines lines_of(const ms_tensor *x, const ms_tensor *o, int d)
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
// A scan of lines of adjacent elements, each divided into segments, one block of threads per segment; `back`: from the
// line's end. totals: the sum of each segment, line by line.
struct scan_parts {
    int64_t segments, segment;  // segment: elements of each but the last
    bool back;
    double *totals;
};
template <class S> __global__ void scan_totals_kernel(lines l, line_data from, scan_parts p)
{
    __shared__ double shared[WARPS];
    int64_t line = blockIdx.x / p.segments, first = blockIdx.x % p.segments * p.segment;
    int64_t last = first + p.segment < l.length ? first + p.segment : l.length;
    const S *x = (const S *)(from.data + offset_of(line, l.ndim, l.shape, l.a));
    double sum = 0;
    for (int64_t k = first + threadIdx.x * WIDE; k < last; k += BLOCK * WIDE) {
        real_of<S> v[WIDE];
        read_pack(x, p.back ? l.length - WIDE - k : k, l.length, (real_of<S>)0, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) sum += (double)v[e];
    }
    sum = group_sum(sum, BLOCK, shared);
    if (threadIdx.x == 0) p.totals[blockIdx.x] = sum;
}
// In each round every thread sums WIDE elements, the block scans these sums, and its total is carried into the next
// round. The totals of earlier segments are carried into the first.
template <class S> __global__ void dense_scan_kernel(lines l, line_data from, line_data to, scan_parts p)
{
    __shared__ double shared[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t line = blockIdx.x / p.segments, s = blockIdx.x % p.segments, first = s * p.segment;
    int64_t last = first + p.segment < l.length ? first + p.segment : l.length;
    const S *x = (const S *)(from.data + offset_of(line, l.ndim, l.shape, l.a));
    S *o = (S *)(to.data + offset_of(line, l.ndim, l.shape, l.b));
    bool back = p.back;
    double carry = 0;
    for (int64_t k = threadIdx.x; k < s; k += BLOCK) carry += p.totals[line * p.segments + k];
    if (p.segments > 1) carry = group_sum(carry, BLOCK, shared);
    for (int64_t begin = first; begin < last; begin += BLOCK * WIDE) {
        int64_t k = begin + threadIdx.x * WIDE, at = back ? l.length - WIDE - k : k;
        real_of<S> v[WIDE];
        double sum = 0, upto[WIDE];
        if (k < last) read_pack(x, at, l.length, (real_of<S>)0, v);
        else UNROLL
        for (int e = 0; e < WIDE; e++) v[e] = 0;
        UNROLL
        for (int e = 0; e < WIDE; e++) upto[e] = sum += (double)(back ? v[WIDE - 1 - e] : v[e]);
        for (int step = 1; step < 32; step *= 2) {
            double left = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += left;
        }
        double before = __shfl_up_sync(0xffffffffu, sum, 1);
        if (lane == 0) before = 0;
        if (lane == 31) shared[warp] = sum;
        __syncthreads();
        for (int w = 0; w < WARPS; w++) {
            if (w == warp) before += carry;
            carry += shared[w];
        }
        __syncthreads();
        UNROLL
        for (int e = 0; e < WIDE; e++) v[e] = (real_of<S>)(before + upto[back ? WIDE - 1 - e : e]);
        if (k < last) write_pack(o, at, l.length, v);
    }
}
static __device__ inline double add(double a, double b) { return a + b; }
static __device__ inline int64_t add(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
// The same scan with one thread per line: for integers, and where the dtypes differ or a line's elements are not
// adjacent.
template <class W> __global__ void scan_kernel(lines l, line_data from, line_data to, bool back)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= l.count) return;
    const char *x = from.data + offset_of(i, l.ndim, l.shape, l.a);
    char *o = to.data + offset_of(i, l.ndim, l.shape, l.b);
    W total = 0;
    for (int64_t j = 0; j < l.length; j++) {
        int64_t k = back ? l.length - 1 - j : j;
        total = add(total, value<W>::load(from.dtype, x + k * from.step));
        value<W>::store(to.dtype, o + k * to.step, total);
    }
}
static ms_status run_cumsum(ms_call *c)
{
    ms_tensor *x = c->in[0], *o = c->out[0];
    int d = x->ndim ? (int)(c->i[0] < 0 ? c->i[0] + x->ndim : c->i[0]) : 0;
    held_inputs h;
    // Copied, so that a line's elements are adjacent: then a whole block of threads scans a line, otherwise one thread.
    if (x->ndim && d == x->ndim - 1 && x->stride[d] != 1 && x->dtype <= MS_BF16) {
        MS_TRY(h.hold(c, 1));
        x = h.in[0];
    }
    lines l = lines_of(x, o, d);
    line_data from = line_data_of(x, d), to = line_data_of(o, d);
    bool back = c->n_i > 1 && c->i[1], real = x->dtype <= MS_BF16;
    int size = ms__dtype_size(x->dtype);
    if (real && from.dtype == to.dtype && from.step == size && to.step == size && l.length > 0) {
        scratch totals;
        scan_parts p = { filling_segments(2 * l.count * l.length * size, l.count, l.length, 2048 / size), 0, back,
                         NULL };
        p.segment = up(up(l.length, p.segments), WIDE) * WIDE;
        p.segments = up(l.length, p.segment);
        if (p.segments > 1) {
            MS_TRY(totals.alloc(c, ms__device(x), l.count * p.segments * (int64_t)sizeof(double)));
            p.totals = (double *)totals.data;
            MS_TRY(launch_blocks(c->op->name, index_of(x), TYPED_KERNEL(x->dtype, scan_totals_kernel),
                                 l.count * p.segments, BLOCK, l, from, p));
        }
        return launch_blocks(c->op->name, index_of(x), TYPED_KERNEL(x->dtype, dense_scan_kernel), l.count * p.segments,
                             BLOCK, l, from, to, p);
    }
    return launch(c->op->name, index_of(x), real ? scan_kernel<double> : scan_kernel<int64_t>, up(l.count, BLOCK),
                  BLOCK, l, from, to, back);
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
static void add_dim(prod_job *p, int64_t size, int64_t x, int64_t g, int64_t m)
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
    MS_TRY(run_fold<double>(what, x, f, { PROD_NOT_0 }, others));
    MS_TRY(run_fold<double>(what, x, f, { COUNT }, filled));
    prod_job p = {};
    p.n = x->numel, p.length = f.length, p.others = others, p.filled = filled, p.packed = ms__is_contiguous(x);
    int64_t step[MS_MAX_DIMS] = {}, all = 1;
    for (int d = x->ndim - 1; d >= 0; d--)
        if (!(dims >> d & 1)) step[d] = all, all *= x->shape[d];
    for (int d = 0; d < x->ndim; d++) add_dim(&p, x->shape[d], x->stride[d], g->stride[d], step[d]);
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
    ms_block *b;
    const char *what = "linear_backward";
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
    MS_TRY(ms__alloc(&b, ms__device(g), (size_t)out->numel * sizeof(double), what));
    ms_status st = run_fold<double>(what, g, p, { SUM }, (double *)b->data);
    if (st == MS_OK) st = finish<double>(what, (double *)b->data, { AS_IS }, tensor_of(p, out));
    ms__free(b);
    return st;
}

extern const ms_cuda_kernel ms__cuda_reduce[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_reduce[] = { ROW(sum) ROW(mean) ROW(prod) ROW(all) ROW(any) ROW(var) ROW(std) ROW(norm)
                                               ROW(max_all) ROW(min_all) ROW(max) ROW(min) ROW(argmax) ROW(argmin)
                                                   ROW(logsumexp) ROW(cumsum) ROW(prod_backward) { NULL, NULL } };
