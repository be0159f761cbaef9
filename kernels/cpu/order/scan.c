// SPDX-License-Identifier: MIT
// cpu/order/scan.c -- scans along a dimension on the CPU (formulas/scan.h): threads divide the lines, and a line is
// scanned in order, in double or int64_t, so a result of a smaller dtype is rounded to it once.
#include "cpu/cpu.h"
#include "cpu/order/order.h"
#include "formulas/math32.h"

#define REAL double
#define R(x) x##_f64
#include "formulas/scan.h"
#undef REAL
#undef R
#define REAL int64_t
#define R(x) x##_i64
#define MS_SCAN_WHOLE
#include "formulas/scan.h"

// A call of a scan. p, q, r: the operands (formulas/scan.h), NULL where the kind has none; o: the results; at: the
// positions of extremes, NULL unless the kind is MAX or MIN.
typedef struct {
    ms_scan_kind kind;
    int d;
    bool back;
    const ms_tensor *p, *q, *r;
    ms_tensor *o, *at;
    int64_t group;
} scan_job;

typedef union {
    double d[MS_CHUNK];
    int64_t i[MS_CHUNK];
} numbers;

// Line `number` of t, in the order of the scan.
static ms_line scan_line_of(const scan_job *j, const ms_tensor *t, int64_t number)
{
    ms_line l = ms__line_of(t, j->d, number);
    if (j->back) {
        l.data += (l.n - 1) * l.step;
        l.step = -l.step;
    }
    return l;
}
// How an operand is read: for element k of the scan, element k + shift of the line, or `rest` if the line has no such
// element.
typedef struct {
    int shift;
    double rest;
} reading;
// Loads an operand's values for elements [first, first + n) of the scan, as `how` says.
static void load_numbers(const ms_line *l, int64_t first, int64_t n, reading how, numbers *to)
{
    int64_t begin = first + how.shift, from = begin < 0 ? 0 : begin, end = begin + n < l->n ? begin + n : l->n;
    int cls = ms__is_float(l->dtype) ? MS_C_F64 : MS_C_I64;
    if (from > begin) to->d[0] = how.rest;
    if (end > from)
        ms__load(cls, l->dtype, end - from, (char *)to + (from - begin) * 8, l->data + from * l->step, l->step);
    if (end < begin + n) to->d[n - 1] = how.rest;
}

// Scans n elements from `first` on. q and r may be NULL.
#define SCAN_CHUNK(T, S)                                                                                           \
    typedef struct {                                                                                               \
        int64_t first, n;                                                                                          \
        const T *p, *q, *r;                                                                                        \
        T *out;                                                                                                    \
        int64_t *at;                                                                                               \
    } chunk_##S;                                                                                                   \
    static inline __attribute__((always_inline)) void scan_##S(ms_scan_kind kind, chunk_##S c, ms_scan_##S *state) \
    {                                                                                                              \
        ms_scan_##S s = *state;                                                                                    \
        for (int64_t k = 0; k < c.n; k++) {                                                                        \
            ms_scan_##S one = ms_scan_element_##S(kind, c.p[k], c.q ? c.q[k] : 0, c.first + k);                    \
            s = c.first + k ? ms_scan_join_##S(kind, s, one) : one;                                                \
            c.out[k] = ms_scan_result_##S(kind, s, c.r ? c.r[k] : 0);                                              \
            c.at[k] = s.at;                                                                                        \
        }                                                                                                          \
        *state = s;                                                                                                \
    }
SCAN_CHUNK(double, f64)
SCAN_CHUNK(int64_t, i64)

static void scan_lines_range(void *arg, int64_t begin, int64_t end, int64_t task)
{
    (void)begin;
    (void)end;
    const scan_job *j = arg;
    bool whole = !ms__is_float(j->p->dtype), product = j->kind == MS_SCAN_PROD_BACK;
    int cls = whole ? MS_C_I64 : MS_C_F64;
    int64_t lines = ms__lines_of(j->p, j->d), last = (task + 1) * j->group < lines ? (task + 1) * j->group : lines;
    numbers p, q, r, out;
    int64_t at[MS_CHUNK];
    for (int64_t line = task * j->group; line < last; line++) {
        ms_line lp = scan_line_of(j, j->p, line), lo = scan_line_of(j, j->o, line), lq = lp, lr = lp, la = lp;
        if (j->q) lq = scan_line_of(j, j->q, line);
        if (j->r) lr = scan_line_of(j, j->r, line);
        if (j->at) la = scan_line_of(j, j->at, line);
        ms_scan_f64 s = { 0 };
        ms_scan_i64 t = { 0 };
        for (int64_t k = 0; k < lp.n; k += MS_CHUNK) {
            int64_t n = lp.n - k < MS_CHUNK ? lp.n - k : MS_CHUNK;
            load_numbers(&lp, k, n, (reading) { product ? -1 : 0, 0 }, &p);
            if (j->q) load_numbers(&lq, k, n, (reading) { 0, 0 }, &q);
            if (j->r) load_numbers(&lr, k, n, (reading) { product ? 1 : 0, 1 }, &r);
            chunk_f64 real = { k, n, p.d, j->q ? q.d : NULL, j->r ? r.d : NULL, out.d, at };
            chunk_i64 integers = { k, n, p.i, j->q ? q.i : NULL, j->r ? r.i : NULL, out.i, at };
#define CASE(KIND)                               \
    case KIND:                                   \
        if (whole) scan_i64(KIND, integers, &t); \
        else scan_f64(KIND, real, &s);           \
        break;
            switch (j->kind) {
                CASE(MS_SCAN_PROD)
                CASE(MS_SCAN_MAX)
                CASE(MS_SCAN_MIN)
                CASE(MS_SCAN_LOG)
                CASE(MS_SCAN_PROD_BACK)
                CASE(MS_SCAN_LOG_BACK)
            }
            ms__store(cls, lo.dtype, n, lo.data + k * lo.step, lo.step, &out);
            if (j->at) ms__store(MS_C_I64, MS_I64, n, la.data + k * la.step, la.step, at);
        }
    }
}

static ms_status scan_all_lines(ms_call *c, scan_job j)
{
    if (j.o->numel == 0) return MS_OK;
    j.d = j.p->ndim ? (int)(c->i[0] < 0 ? c->i[0] + j.p->ndim : c->i[0]) : 0;
    int64_t n = j.p->ndim ? j.p->shape[j.d] : 1, lines = ms__lines_of(j.p, j.d);
    j.group = n < 16384 ? (16384 + n - 1) / n : 1;
    int64_t weight = j.group * n;
    ms__parallel((lines + j.group - 1) / j.group * weight, weight, scan_lines_range, &j);
    return MS_OK;
}
ms_status ms__cpu_cumprod(ms_call *c)
{
    return scan_all_lines(c, (scan_job) { MS_SCAN_PROD, .p = c->in[0], .o = c->out[0] });
}
ms_status ms__cpu_cummax(ms_call *c)
{
    return scan_all_lines(c, (scan_job) { MS_SCAN_MAX, .p = c->in[0], .o = c->out[0], .at = c->out[1] });
}
ms_status ms__cpu_cummin(ms_call *c)
{
    return scan_all_lines(c, (scan_job) { MS_SCAN_MIN, .p = c->in[0], .o = c->out[0], .at = c->out[1] });
}
ms_status ms__cpu_logcumsumexp(ms_call *c)
{
    return scan_all_lines(c, (scan_job) { MS_SCAN_LOG, .p = c->in[0], .o = c->out[0] });
}
// Inputs: gradient, input, result.
ms_status ms__cpu_cumprod_backward(ms_call *c)
{
    return scan_all_lines(c, (scan_job) { MS_SCAN_PROD_BACK, .back = true, .p = c->in[1], .q = c->in[0], .r = c->in[2],
                                          .o = c->out[0] });
}
ms_status ms__cpu_logcumsumexp_backward(ms_call *c)
{
    return scan_all_lines(c, (scan_job) { MS_SCAN_LOG_BACK, .back = true, .p = c->in[2], .q = c->in[0], .r = c->in[1],
                                          .o = c->out[0] });
}
