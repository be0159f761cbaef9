// SPDX-License-Identifier: MIT
// cuda/order/scan.cu -- scans along a dimension (formulas/scan.h). A block scans a line: in each round every thread
// combines EACH adjacent elements, the threads' states are scanned in shared memory, and the last one is carried into
// the next round. Lines that are short, or very many, get a thread each.
#include "cuda/blocks.h"

#define REAL double
#define R(x) x##_f64
#include "formulas/scan.h"
#undef REAL
#undef R
#define REAL int64_t
#define R(x) x##_i64
#define MS_SCAN_WHOLE
#include "formulas/scan.h"

static __device__ inline ms_scan_f64 scan_element(int kind, double p, double q, int64_t at)
{
    return ms_scan_element_f64(kind, p, q, at);
}
static __device__ inline ms_scan_i64 scan_element(int kind, int64_t p, int64_t q, int64_t at)
{
    return ms_scan_element_i64(kind, p, q, at);
}
static __device__ inline ms_scan_f64 join(int kind, ms_scan_f64 a, ms_scan_f64 b)
{
    return ms_scan_join_f64(kind, a, b);
}
static __device__ inline ms_scan_i64 join(int kind, ms_scan_i64 a, ms_scan_i64 b)
{
    return ms_scan_join_i64(kind, a, b);
}
static __device__ inline double result(int kind, ms_scan_f64 s, double r) { return ms_scan_result_f64(kind, s, r); }
static __device__ inline int64_t result(int kind, ms_scan_i64 s, int64_t r) { return ms_scan_result_i64(kind, s, r); }
template <class W> using state = std::conditional_t<std::is_same_v<W, double>, ms_scan_f64, ms_scan_i64>;

// One tensor's lines along the dimension, in elements. For element k of the scan, the element k + shift in the order of
// the scan is read, or the number `rest` if the line has no such element.
struct scan_lines {
    int dtype, shift;
    double rest;
    char *data;
    int64_t step, stride[MS_MAX_DIMS];
};
// The tensors of a scan: the operands p, q and r (formulas/scan.h), the result, and the positions of extremes.
enum { P, Q, READS, OUT, AT, TENSORS };
struct scan_job {
    int kind, ndim;
    bool back;
    int64_t n, lines, shape[MS_MAX_DIMS];
    scan_lines t[TENSORS];
};
template <class W> static __device__ inline W read(const scan_job &j, int which, int64_t base, int64_t k)
{
    const scan_lines &l = j.t[which];
    if (!l.data || (std::is_integral_v<W> && which != P)) return 0;  // gradients alone read more than P
    k += l.shift;
    if (k < 0 || k >= j.n) return (W)l.rest;
    return load<W>(l.dtype, l.data, base + (j.back ? j.n - 1 - k : k) * l.step);
}
template <class W> static __device__ inline void write(const scan_job &j, const int64_t *base, int64_t k, state<W> s)
{
    int64_t to = j.back ? j.n - 1 - k : k;
    W y = result(j.kind, s, read<W>(j, READS, base[READS], k));
    store<W>(j.t[OUT].dtype, j.t[OUT].data, base[OUT] + to * j.t[OUT].step, y);
    if (j.t[AT].data) ((int64_t *)j.t[AT].data)[base[AT] + to * j.t[AT].step] = s.at;
}
static __device__ inline void bases(const scan_job &j, int64_t line, int64_t *base)
{
    UNROLL
    for (int k = 0; k < TENSORS; k++) base[k] = j.ndim ? offset_of(line, j.ndim, j.shape, j.t[k].stride) : 0;
}

template <class W> __global__ void scan_lines_kernel(scan_job j)
{
    int64_t line = GLOBAL_INDEX, base[TENSORS];
    if (line >= j.lines) return;
    bases(j, line, base);
    state<W> s = {};
    for (int64_t k = 0; k < j.n; k++) {
        state<W> one = scan_element(j.kind, read<W>(j, P, base[P], k), read<W>(j, Q, base[Q], k), k);
        s = k ? join(j.kind, s, one) : one;
        write<W>(j, base, k, s);
    }
}
template <class W> __global__ void scan_block_kernel(scan_job j)
{
    constexpr int EACH = 4, ROUND_OF = BLOCK * EACH;
    __shared__ state<W> shared[BLOCK];
    int t = threadIdx.x;
    int64_t base[TENSORS];
    bases(j, blockIdx.x, base);
    state<W> carry = {};
    for (int64_t begin = 0; begin < j.n; begin += ROUND_OF) {
        int64_t first = begin + t * EACH;
        state<W> mine[EACH], sum = {};
        UNROLL
        for (int e = 0; e < EACH; e++) {
            if (first + e >= j.n) continue;
            mine[e] =
                scan_element(j.kind, read<W>(j, P, base[P], first + e), read<W>(j, Q, base[Q], first + e), first + e);
            sum = e ? join(j.kind, sum, mine[e]) : mine[e];
        }
        shared[t] = sum;
        __syncthreads();
        // Threads without elements are the last ones, so a thread only joins states of threads that have some.
        for (int step = 1; step < BLOCK; step *= 2) {
            bool has = t >= step && first < j.n;
            state<W> left = shared[has ? t - step : t];
            __syncthreads();
            if (has) shared[t] = join(j.kind, left, shared[t]);
            __syncthreads();
        }
        state<W> before = begin ? carry : state<W>();
        if (t > 0 && first < j.n) before = begin ? join(j.kind, carry, shared[t - 1]) : shared[t - 1];
        UNROLL
        for (int e = 0; e < EACH; e++) {
            if (first + e >= j.n) continue;
            before = first + e > 0 ? join(j.kind, before, mine[e]) : mine[e];
            write<W>(j, base, first + e, before);
        }
        int64_t left = j.n - begin < ROUND_OF ? j.n - begin : ROUND_OF;
        state<W> all = shared[(left - 1) / EACH];
        carry = begin ? join(j.kind, carry, all) : all;
        __syncthreads();
    }
}

static scan_lines scan_lines_of(const ms_tensor *t, int d, int shift, double rest)
{
    scan_lines l = {};
    if (!t) return l;
    l.dtype = t->dtype, l.shift = shift, l.rest = rest, l.data = (char *)ms__data(t);
    l.step = t->ndim ? t->stride[d] : 1;
    for (int k = 0, n = 0; k < t->ndim; k++)
        if (k != d) l.stride[n++] = t->stride[k];
    return l;
}
struct scan_tensors {
    const ms_tensor *p, *q, *r;
};
static ms_status scan_call(ms_call *c, int kind, const scan_tensors &x, const ms_tensor *at)
{
    const ms_tensor *o = c->out[0];
    scan_job j = {};
    int d = o->ndim ? (int)(c->i[0] < 0 ? c->i[0] + o->ndim : c->i[0]) : 0, index = index_of(o);
    bool product = kind == MS_SCAN_PROD_BACK, real = x.p->dtype <= MS_BF16;
    if (o->numel == 0) return MS_OK;
    j.kind = kind, j.back = kind >= MS_SCAN_PROD_BACK, j.n = o->ndim ? o->shape[d] : 1, j.lines = o->numel / j.n;
    for (int k = 0; k < o->ndim; k++)
        if (k != d) j.shape[j.ndim++] = o->shape[k];
    j.t[P] = scan_lines_of(x.p, d, product ? -1 : 0, 0);
    j.t[Q] = scan_lines_of(x.q, d, 0, 0);
    j.t[READS] = scan_lines_of(x.r, d, product ? 1 : 0, 1);
    j.t[OUT] = scan_lines_of(o, d, 0, 0);
    j.t[AT] = scan_lines_of(at, d, 0, 0);
    if (j.n <= 64 || j.lines >= 16384) {
        grid g = grid_of(j.lines);
        return launch(c->op->name, index, real ? scan_lines_kernel<double> : scan_lines_kernel<int64_t>, g.blocks,
                      g.threads, j);
    }
    return launch_blocks(c->op->name, index, real ? scan_block_kernel<double> : scan_block_kernel<int64_t>, j.lines,
                         BLOCK, j);
}
static ms_status run_cumprod(ms_call *c) { return scan_call(c, MS_SCAN_PROD, { c->in[0], NULL, NULL }, NULL); }
static ms_status run_cummax(ms_call *c) { return scan_call(c, MS_SCAN_MAX, { c->in[0], NULL, NULL }, c->out[1]); }
static ms_status run_cummin(ms_call *c) { return scan_call(c, MS_SCAN_MIN, { c->in[0], NULL, NULL }, c->out[1]); }
static ms_status run_logcumsumexp(ms_call *c) { return scan_call(c, MS_SCAN_LOG, { c->in[0], NULL, NULL }, NULL); }
static ms_status run_cumprod_backward(ms_call *c)
{
    return scan_call(c, MS_SCAN_PROD_BACK, { c->in[1], c->in[0], c->in[2] }, NULL);
}
static ms_status run_logcumsumexp_backward(ms_call *c)
{
    return scan_call(c, MS_SCAN_LOG_BACK, { c->in[2], c->in[0], c->in[1] }, NULL);
}

extern const ms_cuda_kernel ms__cuda_scan[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_scan[] = { ROW(cumprod) ROW(cumprod_backward) ROW(cummax) ROW(cummin) ROW(logcumsumexp)
                                             ROW(logcumsumexp_backward) { NULL, NULL } };
