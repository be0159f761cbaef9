// SPDX-License-Identifier: MIT
// cpu/index/index.c -- CPU kernels that read or write by position. All positions of a call are checked before the first
// is used. Threads divide the lines, which are independent (a line: all dimensions fixed but the indexed one); in
// index_select, which only copies, they may divide a line, too. Otherwise the elements of a line are processed in index
// order, so sums repeat bitwise.
#include "cpu/cpu.h"
#include "cpu/elementwise/loops.h"
#include "formulas/order.h"

static int64_t index_at(const ms_tensor *t, int64_t offset)
{
    const void *p = t->storage->data;
    return t->dtype == MS_I64 ? ((const int64_t *)p)[offset] : ((const int32_t *)p)[offset];
}

// Iterates over a shape in row-major order, for up to three tensors, each with its own strides. at: the offsets of the
// current element, in elements. iterator_start: leaves out dimension `skip`, unless it is -1, and begins at element
// `first`.
typedef struct {
    int ndim;
    int64_t shape[MS_MAX_DIMS], index[MS_MAX_DIMS], stride[3][MS_MAX_DIMS], at[3];
} iterator;
static void iterator_start(iterator *w, const ms_tensor *shape, int skip, int n, const ms_tensor *const *t,
                           int64_t first)
{
    w->ndim = 0;
    for (int k = 0; k < n; k++) w->at[k] = t[k]->offset;
    for (int d = 0; d < shape->ndim; d++) {
        if (d == skip) continue;
        w->shape[w->ndim] = shape->shape[d];
        for (int k = 0; k < n; k++) w->stride[k][w->ndim] = t[k]->stride[d];
        w->ndim++;
    }
    for (int d = w->ndim - 1; d >= 0; d--) {
        w->index[d] = first % w->shape[d];
        first /= w->shape[d];
        for (int k = 0; k < n; k++) w->at[k] += w->index[d] * w->stride[k][d];
    }
}
static void iterator_next(iterator *w, int n)
{
    for (int d = w->ndim - 1; d >= 0; d--) {
        for (int k = 0; k < n; k++) w->at[k] += w->stride[k][d];
        if (++w->index[d] < w->shape[d]) return;
        for (int k = 0; k < n; k++) w->at[k] -= w->shape[d] * w->stride[k][d];
        w->index[d] = 0;
    }
}

// Whether all of n adjacent positions are from 0 to limit - 1.
#define INSIDE(I)                                                          \
    static MS_KERNEL bool inside_##I(int64_t n, const I *p, int64_t limit) \
    {                                                                      \
        I low = 0, high = 0;                                               \
        for (int64_t k = 0; k < n; k++) low = p[k] < low ? p[k] : low;     \
        for (int64_t k = 0; k < n; k++) high = p[k] > high ? p[k] : high;  \
        return low >= 0 && (int64_t)high < limit;                          \
    }
INSIDE(int32_t)
INSIDE(int64_t)

static ms_status positions_inside(const ms_call *c, const ms_tensor *index, int64_t limit, int d)
{
    if (index->numel == 0) return MS_OK;
    if (ms__is_contiguous(index) && limit) {
        const void *p = ms__data(index);
        if (index->dtype == MS_I64 ? inside_int64_t(index->numel, p, limit) : inside_int32_t(index->numel, p, limit))
            return MS_OK;
    }
    ms_tensor once = *index;  // repeated positions (stride 0) are checked once
    for (int k = 0; k < once.ndim; k++)
        if (once.stride[k] == 0) {
            once.numel /= once.shape[k];
            once.shape[k] = 1;
        }
    iterator w;
    iterator_start(&w, &once, -1, 1, (const ms_tensor *[]) { &once }, 0);
    for (int64_t k = 0; k < once.numel; k++) {
        int64_t at = index_at(index, w.at[0]);
        if (limit == 0)
            return ms__call_fail(c, "position %lld is not inside dimension %d of %s, which has size 0", (long long)at,
                                 d + 1, ms__tensor_text(c->in[0]));
        if (at < 0 || at >= limit)
            return ms__call_fail(c, "position %lld is not inside dimension %d of %s (expected 0 to %lld)",
                                 (long long)at, d + 1, ms__tensor_text(c->in[0]), (long long)limit - 1);
        iterator_next(&w, 1);
    }
    return MS_OK;
}

// Moves n elements of type T by positions of type I: o[k] = x[position k], or, if `scatter` is set, o[position k] =
// x[k]; adds them if `add` is set, too. Neighbours are so, sx and si apart.
typedef struct {
    int64_t n, so, sx, si;
    bool scatter, add;
    const void *at;
} moves;
#define MOVES(T, I)                                                          \
    static MS_KERNEL void moves_##T##_##I(const moves *m, T *o, const T *x)  \
    {                                                                        \
        int64_t n = m->n, so = m->so, sx = m->sx, si = m->si;                \
        const I *at = m->at;                                                 \
        if (m->add)                                                          \
            for (int64_t k = 0; k < n; k++) o[at[k * si] * so] += x[k * sx]; \
        else if (m->scatter)                                                 \
            for (int64_t k = 0; k < n; k++) o[at[k * si] * so] = x[k * sx];  \
        else if (so == 1 && sx == 1 && si == 1)                              \
            for (int64_t k = 0; k < n; k++) o[k] = x[at[k]];                 \
        else                                                                 \
            for (int64_t k = 0; k < n; k++) o[k * so] = x[at[k * si] * sx];  \
    }
#define MOVES_OF(T)   \
    MOVES(T, int32_t) \
    MOVES(T, int64_t)
MOVES_OF(uint8_t)
MOVES_OF(uint16_t)
MOVES_OF(uint32_t)
MOVES_OF(uint64_t)
MOVES_OF(float)
MOVES_OF(double)
// index: the tensor of the positions. The dtype must not be a half type if m->add is set.
static void move_all(const moves *m, const ms_tensor *index, int dtype, void *o, const void *x)
{
#define RUN(T) (index->dtype == MS_I64 ? moves_##T##_int64_t(m, o, x) : moves_##T##_int32_t(m, o, x))
    if (m->add && dtype == MS_F32) RUN(float);
    else if (m->add && dtype == MS_F64) RUN(double);
    else switch (ms__dtype_size(dtype)) {
        case 1: RUN(uint8_t); break;
        case 2: RUN(uint16_t); break;
        case 4: RUN(uint32_t); break;
        default: RUN(uint64_t); break;
        }
#undef RUN
}
static const void *position_at(const ms_tensor *index, int64_t offset)
{
    return (const char *)index->storage->data + offset * ms__dtype_size(index->dtype);
}

// ---- index_select, index_add_ ----

typedef struct {
    // count: positions; inner: elements of a slice; from, to: the indexed dimension's sizes in source and destination.
    int64_t count, inner, from, to;
    const ms_tensor *index;
    const char *src;
    char *dst;
    int dtype, size;
} slices;

static void select_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const slices *s = arg;
    size_t bytes = (size_t)(s->inner * s->size);
    int64_t stride = s->index->ndim ? s->index->stride[0] : 0;
    if (s->inner == 1) {
        for (int64_t k = first; k < last;) {
            int64_t outer = k / s->count, j = k % s->count, n = s->count - j < last - k ? s->count - j : last - k;
            moves m = { n, 1, 1, stride, .at = position_at(s->index, s->index->offset + j * stride) };
            move_all(&m, s->index, s->dtype, s->dst + k * s->size, s->src + outer * s->from * s->size);
            k += n;
        }
        return;
    }
    for (int64_t k = first / s->inner; k < last / s->inner; k++) {
        int64_t outer = k / s->count, j = k % s->count, at = index_at(s->index, s->index->offset + j * stride);
        memcpy(s->dst + (size_t)k * bytes, s->src + (size_t)(outer * s->from + at) * bytes, bytes);
    }
}
static slices slices_of(const ms_tensor *whole, const ms_tensor *index, int d)
{
    slices s = {
        .count = index->numel, .inner = 1, .index = index, .dtype = whole->dtype, .size = ms__dtype_size(whole->dtype)
    };
    for (int k = d + 1; k < whole->ndim; k++) s.inner *= whole->shape[k];
    return s;
}
ms_status ms__cpu_index_select(ms_call *c)
{
    ms_tensor *o = c->out[0], *x = c->in[0], *whole;
    int d = (int)(c->i[0] < 0 ? c->i[0] + x->ndim : c->i[0]);
    MS_TRY(positions_inside(c, c->in[1], x->shape[d], d));
    if (o->numel == 0) return MS_OK;
    MS_TRY(ms__contiguous(&whole, x));
    slices s = slices_of(x, c->in[1], d);
    s.from = x->shape[d];
    s.src = ms__data(whole);
    s.dst = ms__data(o);
    ms__parallel(o->numel, (1 + 16384 / s.inner) * s.inner, select_range, &s);
    ms__release(whole);
    return MS_OK;
}

enum { STRIP = 512 };
// Adds n adjacent elements (at most STRIP) of `from` to `to`.
static void add_strip(int dtype, int64_t n, char *to, const char *from)
{
    int cls = dtype == MS_BOOL ? MS_C_I64 : ms__class_of(dtype), size = ms__dtype_size(dtype);
    union {
        float f[STRIP];
        double d[STRIP];
        int64_t i[STRIP];
    } a, b;
    ms__load(cls, dtype, n, &a, to, size);
    ms__load(cls, dtype, n, &b, from, size);
    for (int64_t k = 0; k < n; k++) {
        if (cls == MS_C_F32) a.f[k] += b.f[k];
        else if (cls == MS_C_F64) a.d[k] += b.d[k];
        else a.i[k] = (int64_t)((uint64_t)a.i[k] + (uint64_t)b.i[k]);
    }
    ms__store(cls, dtype, n, to, size, &a);
}
// Adds one strip of every slice, in the order of the index. No other task writes these elements.
static void add_range(void *arg, int64_t first, int64_t last, int64_t task)
{
    (void)first;
    (void)last;
    const slices *s = arg;
    int64_t strips = (s->inner + STRIP - 1) / STRIP, outer = task / strips, c0 = task % strips * STRIP;
    int64_t n = s->inner - c0 < STRIP ? s->inner - c0 : STRIP, stride = s->index->ndim ? s->index->stride[0] : 0;
    for (int64_t j = 0; j < s->count; j++) {
        int64_t at = index_at(s->index, s->index->offset + j * stride);
        add_strip(s->dtype, n, s->dst + ((outer * s->to + at) * s->inner + c0) * s->size,
                  s->src + ((outer * s->count + j) * s->inner + c0) * s->size);
    }
}
// Inputs: dst (contiguous), index, src. dst[…, index[j], …] += src[…, j, …]
ms_status ms__cpu_index_add(ms_call *c)
{
    ms_tensor *o = c->out[0], *src;
    int d = (int)(c->i[0] < 0 ? c->i[0] + o->ndim : c->i[0]);
    MS_TRY(positions_inside(c, c->in[1], o->shape[d], d));
    if (c->in[2]->numel == 0) return MS_OK;
    MS_TRY(ms__contiguous(&src, c->in[2]));
    slices s = slices_of(o, c->in[1], d);
    s.to = o->shape[d];
    s.src = ms__data(src);
    s.dst = ms__data(o);
    int64_t strips = (s.inner + STRIP - 1) / STRIP, weight = s.count * (s.inner < STRIP ? s.inner : STRIP),
            outer = o->numel / (s.to * s.inner);
    ms__parallel(outer * strips * weight, weight, add_range, &s);
    ms__release(src);
    return MS_OK;
}

// ---- gather, scatter_, scatter_add_, scatter_reduce ----

typedef enum { GATHER, SCATTER, ADD, PROD, MAX, MIN } line_kind;  // PROD, MAX, MIN: in the order of MS_REDUCE_*
typedef struct {
    line_kind kind;
    const ms_tensor *index, *a;  // gather: a is read at positions; scatter: a is the source
    ms_tensor *o;
    int d;
    int64_t length, lines, group;
    int64_t inner;  // number of adjacent lines with the same positions
} lines_job;

static void reduce_one(line_kind kind, int dtype, char *to, const char *from)
{
    bool whole = !ms__is_float(dtype);
    union {
        double d;
        int64_t i;
    } a, b;
    int cls = whole ? MS_C_I64 : MS_C_F64;
    ms__load(cls, dtype, 1, &a, to, 8);
    ms__load(cls, dtype, 1, &b, from, 8);
    if (whole) a.i = ms_reduce_i64(kind - PROD, a.i, b.i);
    else a.d = ms_reduce_f64(kind - PROD, a.d, b.d);
    ms__store(cls, dtype, 1, to, 8, &a);
}
static void gather_lines(void *arg, int64_t first, int64_t last, int64_t task)
{
    (void)first;
    (void)last;
    const lines_job *j = arg;
    int64_t begin = task * j->group, end = begin + j->group < j->lines ? begin + j->group : j->lines;
    int dtype = j->o->dtype, size = ms__dtype_size(dtype);
    bool whole = dtype != MS_BF16 && dtype != MS_F16 && dtype != MS_BOOL;  // sums need no conversion
    const char *from = j->a->storage->data;
    char *to = j->o->storage->data;
    iterator w;
    iterator_start(&w, j->index, j->d, 3, (const ms_tensor *[]) { j->index, j->a, j->o }, begin);
    int64_t si = j->index->ndim ? j->index->stride[j->d] : 0, sa = j->a->ndim ? j->a->stride[j->d] : 0,
            so = j->o->ndim ? j->o->stride[j->d] : 0;
    for (int64_t line = begin; line < end; line++) {
        char *o = to + w.at[2] * size;
        const char *x = from + w.at[1] * size;
        if (j->kind < ADD || (j->kind == ADD && whole)) {
            moves m = { j->length, so, sa, si, j->kind != GATHER, j->kind == ADD, position_at(j->index, w.at[0]) };
            move_all(&m, j->index, dtype, o, x);
        } else
            for (int64_t k = 0; k < j->length; k++) {
                int64_t at = index_at(j->index, w.at[0] + k * si);
                if (j->kind == ADD) add_strip(dtype, 1, o + at * so * size, x + k * sa * size);
                else reduce_one(j->kind, dtype, o + at * so * size, x + k * sa * size);
            }
        iterator_next(&w, 3);
    }
}
// The number of adjacent elements that share a position, because the index tensor is expanded along all dimensions
// after d; they are moved or added together. 1 if it is not so expanded, or if a or o is not contiguous along these.
static int64_t inner_of(const lines_job *j)
{
    int64_t n = 1;
    for (int k = j->index->ndim - 1; k > j->d; k--) {
        int64_t size = j->index->shape[k];
        if (size == 1) continue;
        if (j->index->stride[k] != 0 || j->a->stride[k] != n || j->o->stride[k] != n) return 1;
        n *= size;
    }
    return n;
}
// Moves or adds one strip of adjacent lines that have the same positions.
static void strips_range(void *arg, int64_t first, int64_t last, int64_t task)
{
    (void)first;
    (void)last;
    const lines_job *j = arg;
    int64_t strips = (j->inner + STRIP - 1) / STRIP, c0 = task % strips * STRIP;
    int64_t n = j->inner - c0 < STRIP ? j->inner - c0 : STRIP;
    int size = ms__dtype_size(j->o->dtype), d = j->d;
    ms_tensor once = *j->index;
    for (int k = d + 1; k < once.ndim; k++) once.shape[k] = 1;
    iterator w;
    iterator_start(&w, &once, d, 3, (const ms_tensor *[]) { j->index, j->a, j->o }, task / strips);
    const char *from = (const char *)j->a->storage->data + (w.at[1] + c0) * size;
    char *to = (char *)j->o->storage->data + (w.at[2] + c0) * size;
    for (int64_t k = 0; k < j->length; k++) {
        int64_t at = index_at(j->index, w.at[0] + k * j->index->stride[d]);
        int64_t y = j->kind == GATHER ? k : at, x = j->kind == GATHER ? at : k;
        char *p = to + y * j->o->stride[d] * size;
        const char *q = from + x * j->a->stride[d] * size;
        if (j->kind == ADD) add_strip(j->o->dtype, n, p, q);
        else memcpy(p, q, (size_t)(n * size));
    }
}
static ms_status lines(ms_call *c, line_kind kind, const ms_tensor *a, int64_t limit)
{
    const ms_tensor *index = c->in[1];
    int d = index->ndim ? (int)(c->i[0] < 0 ? c->i[0] + index->ndim : c->i[0]) : 0;
    MS_TRY(positions_inside(c, index, limit, d));
    if (index->numel == 0) return MS_OK;
    lines_job j = { .kind = kind,
                    .index = index,
                    .a = a,
                    .o = c->out[0],
                    .d = d,
                    .length = index->ndim ? index->shape[d] : 1,
                    .group = 1 };
    j.lines = index->numel / j.length;
    j.inner = kind <= ADD ? inner_of(&j) : 1;
    if (j.inner > 1) {
        int64_t strips = (j.inner + STRIP - 1) / STRIP, weight = j.length * (j.inner < STRIP ? j.inner : STRIP);
        ms__parallel(j.lines / j.inner * strips * weight, weight, strips_range, &j);
        return MS_OK;
    }
    if (j.length < 4096) j.group = (4096 + j.length - 1) / j.length;
    int64_t weight = j.group * j.length;
    ms__parallel((j.lines + j.group - 1) / j.group * weight, weight, gather_lines, &j);
    return MS_OK;
}
static int64_t limit_of(const ms_tensor *t, const ms_call *c)
{
    return t->ndim ? t->shape[c->i[0] < 0 ? c->i[0] + t->ndim : c->i[0]] : 1;
}
ms_status ms__cpu_gather(ms_call *c) { return lines(c, GATHER, c->in[0], limit_of(c->in[0], c)); }
ms_status ms__cpu_scatter(ms_call *c) { return lines(c, SCATTER, c->in[2], limit_of(c->out[0], c)); }
ms_status ms__cpu_scatter_add(ms_call *c) { return lines(c, ADD, c->in[2], limit_of(c->out[0], c)); }
// Integers: the dimension, the kind of reduction (MS_REDUCE_* of formulas/order.h).
ms_status ms__cpu_scatter_reduce(ms_call *c)
{
    ms__cpu_copy_tensor(c->out[0], c->in[0]);
    return lines(c, (line_kind)(PROD + c->i[1]), c->in[2], limit_of(c->out[0], c));
}
