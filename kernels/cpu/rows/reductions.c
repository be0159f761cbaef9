// SPDX-License-Identifier: MIT
// cpu/rows/reductions.c -- CPU kernels of the reducing operators: most make one or two folds (reduce.c) and apply a
// formula to the results.
#include <math.h>

#include "cpu/cpu.h"
#include "cpu/rows/fold.h"
#include "rows/ops.h"

enum { FEW = 512 };

// The results of folds, one fold after the other; on the stack if there are at most FEW.
typedef struct {
    void *at;
    double few[FEW];
} results;
static ms_status results_new(results *r, const ms_fold_plan *p, int folds)
{
    int64_t n = folds * p->outputs;
    r->at = n <= FEW ? r->few : malloc((size_t)n * 8);
    return r->at ? MS_OK : ms__no_memory((size_t)n * 8, p->what, "%lld results", (long long)n);
}
static void results_free(results *r)
{
    if (r->at != r->few) free(r->at);
}

static void store_result(const ms_fold_plan *p, ms_tensor *out, const void *wide)
{
    ms__store(p->cls == MS_C_I64 ? MS_C_I64 : MS_C_F64, out->dtype, out->numel, ms__data(out),
              ms__dtype_size(out->dtype), wide);
}
static void plan_fold(ms_fold_plan *p, const ms_call *c, int first_dim)
{
    ms__fold_plan(p, c->op->name, c->in[0], ms__reduced_dims(c->in[0], c->n_i - first_dim, c->i + first_dim));
}

typedef enum { AS_IS, MEAN, ALL, ANY } finish;

static ms_status fold_simple(ms_call *c, int first_dim, ms_fold_kind kind, finish how)
{
    ms_fold_plan p;
    results r;
    plan_fold(&p, c, first_dim);
    MS_TRY(results_new(&r, &p, 1));
    ms_status st = ms__fold(&p, kind, NULL, 0, r.at);
    if (st == MS_OK) {
        double *w = r.at;
        int64_t *i = r.at;
        bool whole = p.cls == MS_C_I64;
        for (int64_t k = 0; how != AS_IS && k < p.outputs; k++) {
            double v = whole ? (double)i[k] : w[k];
            v = how == MEAN ? v / (double)p.length : how == ALL ? v == (double)p.length : v != 0;
            if (whole) i[k] = (int64_t)v;
            else w[k] = v;
        }
        store_result(&p, c->out[0], w);
    }
    results_free(&r);
    return st;
}
ms_status ms__cpu_sum(ms_call *c) { return fold_simple(c, 1, MS_FOLD_SUM, AS_IS); }
ms_status ms__cpu_mean(ms_call *c) { return fold_simple(c, 1, MS_FOLD_SUM, MEAN); }
ms_status ms__cpu_prod(ms_call *c) { return fold_simple(c, 1, MS_FOLD_PROD, AS_IS); }
ms_status ms__cpu_all(ms_call *c) { return fold_simple(c, 1, MS_FOLD_COUNT, ALL); }
ms_status ms__cpu_any(ms_call *c) { return fold_simple(c, 1, MS_FOLD_COUNT, ANY); }
ms_status ms__cpu_max_all(ms_call *c) { return fold_simple(c, 0, MS_FOLD_MAX, AS_IS); }
ms_status ms__cpu_min_all(ms_call *c) { return fold_simple(c, 0, MS_FOLD_MIN, AS_IS); }
ms_status ms__cpu_amax(ms_call *c) { return fold_simple(c, 1, MS_FOLD_MAX, AS_IS); }
ms_status ms__cpu_amin(ms_call *c) { return fold_simple(c, 1, MS_FOLD_MIN, AS_IS); }

// Two passes: the mean, then the squared deviations from it. Number: correction. Integers: keepdim, dims.
static ms_status fold_variance(ms_call *c, bool root)
{
    ms_fold_plan p;
    results r;
    plan_fold(&p, c, 1);
    MS_TRY(results_new(&r, &p, 2));
    double *m = r.at, *s = m + p.outputs, n = (double)p.length, divisor = n - (c->n_f > 0 ? c->f[0] : 1);
    ms_status st = ms__fold(&p, MS_FOLD_SUM, NULL, 0, m);
    for (int64_t k = 0; st == MS_OK && k < p.outputs; k++) m[k] /= n;
    if (st == MS_OK) st = ms__fold(&p, MS_FOLD_DEVIATION, m, 1, s);
    if (st == MS_OK) {
        for (int64_t k = 0; k < p.outputs; k++) {
            s[k] = s[k] / (divisor > 0 ? divisor : 0);  // 0 / 0 = NaN, as in PyTorch
            if (root) s[k] = sqrt(s[k]);
        }
        store_result(&p, c->out[0], s);
    }
    results_free(&r);
    return st;
}
ms_status ms__cpu_var(ms_call *c) { return fold_variance(c, false); }
ms_status ms__cpu_std(ms_call *c) { return fold_variance(c, true); }

// Number: p. Integers: keepdim, dims.
ms_status ms__cpu_norm(ms_call *c)
{
    double e = c->f[0];
    ms_fold_kind kind = e == 2                   ? MS_FOLD_SQUARE_SUM
                        : e == 1                 ? MS_FOLD_ABS_SUM
                        : e == 0                 ? MS_FOLD_COUNT
                        : e == (double)INFINITY  ? MS_FOLD_ABS_MAX
                        : e == -(double)INFINITY ? MS_FOLD_ABS_MIN
                                                 : MS_FOLD_POWER_SUM;
    ms_fold_plan p;
    results r;
    plan_fold(&p, c, 1);
    MS_TRY(results_new(&r, &p, 1));
    ms_status st = ms__fold(&p, kind, kind == MS_FOLD_POWER_SUM ? &e : NULL, 0, r.at);
    if (st == MS_OK) {
        double *w = r.at;
        for (int64_t k = 0; k < p.outputs; k++)
            w[k] = kind == MS_FOLD_SQUARE_SUM ? sqrt(w[k]) : kind == MS_FOLD_POWER_SUM ? pow(w[k], 1 / e) : w[k];
        store_result(&p, c->out[0], w);
    }
    results_free(&r);
    return st;
}

// log(sum(exp(x))) = m + log(sum(exp(x - m))), where m is the maximum, or 0 if the maximum is infinite.
ms_status ms__cpu_logsumexp(ms_call *c)
{
    ms_fold_plan p;
    results r;
    ms__fold_plan(&p, c->op->name, c->in[0], ms__reduced_dims(c->in[0], c->in[0]->ndim ? 1 : 0, c->i));
    MS_TRY(results_new(&r, &p, 2));
    double *m = r.at, *s = m + p.outputs;
    ms_status st = ms__fold(&p, MS_FOLD_MAX, NULL, 0, m);
    for (int64_t k = 0; st == MS_OK && k < p.outputs; k++)
        if (isinf(m[k])) m[k] = 0;
    if (st == MS_OK) st = ms__fold(&p, MS_FOLD_EXP_SUM, m, 1, s);
    if (st == MS_OK) {
        for (int64_t k = 0; k < p.outputs; k++) s[k] = m[k] + log(s[k]);
        store_result(&p, c->out[0], s);
    }
    results_free(&r);
    return st;
}

// Stores the extremes in out[value], unless value is -1, and their positions in out[position].
static ms_status fold_extreme(ms_call *c, ms_fold_kind kind, unsigned dims, int value, int position)
{
    ms_fold_plan p;
    results r;
    ms__fold_plan(&p, c->op->name, c->in[0], dims);
    MS_TRY(results_new(&r, &p, 1));
    ms_status st = ms__fold(&p, kind, NULL, 0, r.at);
    if (st == MS_OK) {
        if (value >= 0) store_result(&p, c->out[value], r.at);
        ms__fold_find(&p, r.at, ms__data(c->out[position]));
    }
    results_free(&r);
    return st;
}
static unsigned reduced_dim(const ms_call *c)
{
    return ms__reduced_dims(c->in[0], c->n_i && c->in[0]->ndim ? 1 : 0, c->i);
}
ms_status ms__cpu_max(ms_call *c) { return fold_extreme(c, MS_FOLD_MAX, reduced_dim(c), 0, 1); }
ms_status ms__cpu_min(ms_call *c) { return fold_extreme(c, MS_FOLD_MIN, reduced_dim(c), 0, 1); }
ms_status ms__cpu_argmax(ms_call *c) { return fold_extreme(c, MS_FOLD_MAX, reduced_dim(c), -1, 0); }
ms_status ms__cpu_argmin(ms_call *c) { return fold_extreme(c, MS_FOLD_MIN, reduced_dim(c), -1, 0); }

// Inputs: g (expanded to x's shape), x. Integers: keepdim, dims. The gradient of an element is g times the product of
// the other elements: the product / x where no element is 0. If one element is 0, only its gradient is not 0; if more
// are 0, all gradients are 0.
ms_status ms__cpu_prod_backward(ms_call *c)
{
    const ms_tensor *x = c->in[1];
    ms_tensor *o = c->out[0];
    unsigned dims = ms__reduced_dims(x, c->n_i - 1, c->i + 1);
    int size = ms__dtype_size(x->dtype), order[MS_MAX_DIMS], n = 0, nk;
    int64_t outputs = 1, length = 1;
    for (int d = 0; d < x->ndim; d++)
        if (!(dims >> d & 1)) {
            order[n++] = d;
            outputs *= x->shape[d];
        }
    nk = n;
    for (int d = 0; d < x->ndim; d++)
        if (dims >> d & 1) {
            order[n++] = d;
            length *= x->shape[d];
        }
    for (int64_t m = 0; m < outputs; m++) {
        double others = 1;
        int zeros = 0;
        for (int pass = 0; pass < 2; pass++)
            for (int64_t r = 0; r < length; r++) {
                int64_t at[3] = { 0 }, rest = r;
                for (int k = n - 1; k >= 0; k--) {
                    if (k == nk - 1) rest = m;
                    int d = order[k];
                    int64_t i = rest % x->shape[d];
                    rest /= x->shape[d];
                    at[0] += i * x->stride[d];
                    at[1] += i * c->in[0]->stride[d];
                    at[2] += i * o->stride[d];
                }
                double v, g;
                ms__load(MS_C_F64, x->dtype, 1, &v, (const char *)ms__data(x) + at[0] * size, size);
                if (pass == 0) {
                    if (v == 0) zeros++;
                    else others *= v;
                    continue;
                }
                ms__load(MS_C_F64, x->dtype, 1, &g, (const char *)ms__data(c->in[0]) + at[1] * size, size);
                g *= zeros == 0 ? others / v : zeros == 1 && v == 0 ? others : 0;
                ms__store(MS_C_F64, o->dtype, 1, (char *)ms__data(o) + at[2] * size, size, &g);
            }
    }
    return MS_OK;
}

// ---- running sums ----

// Replaces the n numbers of x by their running sums. *total: before the call the sum of all earlier numbers, after it
// the sum that includes these.
static void scan_f64(int64_t n, double *total, double *x)
{
    double t = *total;
    for (int64_t k = 0; k < n; k++) x[k] = t += x[k];
    *total = t;
}
static void scan_i64(int64_t n, int64_t *total, int64_t *x)
{
    uint64_t t = (uint64_t)*total;
    for (int64_t k = 0; k < n; k++) x[k] = (int64_t)(t += (uint64_t)x[k]);
    *total = (int64_t)t;
}
typedef struct {
    const ms_tensor *x;
    ms_tensor *o;
    int d;
    bool back;      // from the end of the dimension
    int64_t group;  // lines per task
} scan_job;

// Scans n <= 512 lines that are adjacent along the last dimension, an element of each after the other. x, o: where the
// scan of the first begins.
static void scan_lines(const scan_job *j, const char *x, char *o, int64_t n)
{
    int cls = ms__is_float(j->x->dtype) ? MS_C_F64 : MS_C_I64, last = j->x->ndim - 1, way = j->back ? -1 : 1;
    int64_t in_size = ms__dtype_size(j->x->dtype), out_size = ms__dtype_size(j->o->dtype);
    union {
        double d[512];
        uint64_t i[512];
    } sum = { { 0 } }, next;
    for (int64_t k = 0; k < j->x->shape[j->d]; k++) {
        ms__load(cls, j->x->dtype, n, &next, x, j->x->stride[last] * in_size);
        for (int64_t l = 0; l < n; l++) {
            if (cls == MS_C_F64) sum.d[l] += next.d[l];
            else sum.i[l] += next.i[l];
        }
        ms__store(cls, j->o->dtype, n, o, j->o->stride[last] * out_size, &sum);
        x += way * j->x->stride[j->d] * in_size;
        o += way * j->o->stride[j->d] * out_size;
    }
}

static void extreme_range(void *arg, int64_t begin, int64_t end, int64_t task)
{
    (void)begin;
    (void)end;
    const scan_job *j = arg;
    const ms_tensor *x = j->x;
    int64_t length = x->shape[j->d], lines = x->numel / length;
    int in_size = ms__dtype_size(x->dtype), out_size = ms__dtype_size(j->o->dtype);
    bool whole = !ms__is_float(x->dtype);
    int cls = whole ? MS_C_I64 : MS_C_F64;
    int64_t last = (task + 1) * j->group < lines ? (task + 1) * j->group : lines;
    for (int64_t line = task * j->group; line < last; line++) {
        int64_t rest = line, a = 0, b = 0;
        for (int d = x->ndim - 1; d >= 0; d--) {
            if (d == j->d) continue;
            a += rest % x->shape[d] * x->stride[d];
            b += rest % x->shape[d] * j->o->stride[d];
            rest /= x->shape[d];
        }
        int64_t sa = x->stride[j->d], sb = j->o->stride[j->d];
        if (j->back) {
            a += (length - 1) * sa;
            b += (length - 1) * sb;
            sa = -sa;
            sb = -sb;
        }
        if (j->d < x->ndim - 1) {
            int64_t run = x->shape[x->ndim - 1], n = run - line % run < last - line ? run - line % run : last - line;
            n = n < 512 ? n : 512;
            scan_lines(j, (const char *)ms__data(x) + a * in_size, (char *)ms__data(j->o) + b * out_size, n);
            line += n - 1;
            continue;
        }
        union {
            double d[512];
            int64_t i[512];
        } buffer;
        double total = 0;
        int64_t count = 0;
        for (int64_t k = 0; k < length; k += 512) {
            int64_t n = length - k < 512 ? length - k : 512;
            ms__load(cls, x->dtype, n, &buffer, (const char *)ms__data(x) + (a + k * sa) * in_size, sa * in_size);
            if (whole) scan_i64(n, &count, buffer.i);
            else scan_f64(n, &total, buffer.d);
            ms__store(cls, j->o->dtype, n, (char *)ms__data(j->o) + (b + k * sb) * out_size, sb * out_size, &buffer);
        }
    }
}
// Integers: dimension, whether to sum from its end. Accumulates in double or int64_t.
ms_status ms__cpu_cumsum(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    if (x->numel == 0) return MS_OK;
    if (x->ndim == 0) {
        ms__cpu_copy_tensor(c->out[0], x);
        return MS_OK;
    }
    int d = (int)(c->i[0] < 0 ? c->i[0] + x->ndim : c->i[0]);
    scan_job j = { x, c->out[0], d, c->n_i > 1 && c->i[1], 1 };
    int64_t length = x->shape[d], lines = x->numel / length;
    if (length < 16384) j.group = (16384 + length - 1) / length;
    if (d < x->ndim - 1 && j.group < 128) j.group = 128;  // lines that are scanned together
    int64_t weight = j.group * length;
    ms__parallel((lines + j.group - 1) / j.group * weight, weight, extreme_range, &j);
    return MS_OK;
}
