// SPDX-License-Identifier: MIT
// rows/assemble.c -- cat, stack, tile, pad, tril and triu, and their kernels. Those of the first four only copy between
// views and fill, so they run on every device; those of tril and triu are for the CPU.
#include "cpu/cpu.h"
#include "rows/grad.h"
#include "rows/layout.h"

static ms_status check_inputs(const ms_call *c)
{
    for (int k = 0; k < c->n_in; k++)
        if (!c->in[k]) return ms__call_fail(c, "tensor %d is missing", k + 1);
    return MS_OK;
}

// ---- cat: accepts an empty 1-d tensor beside tensors of any shape, as in PyTorch ----

static bool is_empty_list(int ndim, const int64_t *shape) { return ndim == 1 && shape[0] == 0; }

static ms_status check_cat(ms_call *c)
{
    MS_TRY(check_inputs(c));
    const ms_tensor *first = NULL;
    int d = 0, dtype = c->in[0]->dtype;
    int64_t shape[MS_MAX_DIMS], total = 0;
    for (int k = 0; k < c->n_in; k++) {
        const ms_tensor *t = c->in[k];
        if (k) dtype = ms__promote(dtype, t->dtype);
        if (is_empty_list(t->ndim, t->shape)) continue;
        if (t->ndim == 0) return ms__call_fail(c, "tensor %d is 0-dim, expected 1 dimension or more; use stack", k + 1);
        if (!first) {
            first = t;
            MS_TRY(ms__call_dim(c, c->i[0], t->ndim, &d));
        }
        bool fits = t->ndim == first->ndim;
        for (int j = 0; fits && j < t->ndim; j++) fits = j == d || t->shape[j] == first->shape[j];
        if (!fits)
            return ms__call_fail(c,
                                 "tensor %d is %s, but the first is %s: the number of dimensions, and all sizes except "
                                 "that of dimension %d, must be equal",
                                 k + 1, ms__shape_text(t->ndim, t->shape), ms__shape_text(first->ndim, first->shape),
                                 d + 1);
        total += t->shape[d];
    }
    if (!first) return ms__call_out(c, 0, dtype, ms__device(c->in[0]), 1, &total);
    memcpy(shape, first->shape, sizeof shape);
    shape[d] = total;
    return ms__call_out(c, 0, dtype, ms__device(first), first->ndim, shape);
}
static ms_status run_cat(ms_call *c)
{
    ms_tensor *o = c->out[0];
    int d = ms__dim_of(c->i[0], o->ndim);
    int64_t at = 0;
    for (int k = 0; k < c->n_in; k++) {
        const ms_tensor *t = c->in[k];
        if (is_empty_list(t->ndim, t->shape)) continue;
        ms_tensor *part = ms__part_of(o, d, at, t->shape[d]);
        ms_status st = ms__copy_data(part, t);
        ms__release(part);
        MS_TRY(st);
        at += t->shape[d];
    }
    return MS_OK;
}
static ms_status cat_grad(ms_backward_call *b)
{
    ms_tensor *g = b->gout[0];
    int d = ms__dim_of(b->i[0], g->ndim);
    int64_t at = 0;
    for (int k = 0; k < b->n_in; k++) {
        const ms_meta *m = &b->in_meta[k];
        bool none = is_empty_list(m->ndim, m->shape);
        int64_t len = none ? 0 : m->shape[d];
        if (b->need[k]) {
            if (none) MS_TRY(ms__zeros_of(&b->gin[k], m));
            else MS_TRY(ms__grad_to(&b->gin[k], ms__part_of(g, d, at, len), m));
        }
        at += len;
    }
    return MS_OK;
}

// ---- stack ----

static ms_status check_stack(ms_call *c)
{
    MS_TRY(check_inputs(c));
    const ms_tensor *x = c->in[0];
    int d, dtype = x->dtype;
    if (x->ndim == MS_MAX_DIMS)
        return ms__call_fail(c, "%s already has %d dimensions, the most that a tensor can have", ms__tensor_text(x),
                             MS_MAX_DIMS);
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim + 1, &d));
    for (int k = 1; k < c->n_in; k++) {
        if (!ms__same_shape(x, c->in[k]))
            return ms__call_fail(c, "tensor %d is %s, but the first is %s: shapes must be equal", k + 1,
                                 ms__shape_text(c->in[k]->ndim, c->in[k]->shape), ms__shape_text(x->ndim, x->shape));
        dtype = ms__promote(dtype, c->in[k]->dtype);
    }
    int64_t shape[MS_MAX_DIMS];
    for (int k = 0, n = 0; k <= x->ndim; k++) shape[k] = k == d ? c->n_in : x->shape[n++];
    return ms__call_out(c, 0, dtype, ms__device(x), x->ndim + 1, shape);
}
static ms_status run_stack(ms_call *c)
{
    ms_tensor *o = c->out[0];
    for (int k = 0; k < c->n_in; k++) {
        ms_tensor *slice = ms__slice_of(o, ms__dim_of(c->i[0], o->ndim), k);
        ms_status st = ms__copy_data(slice, c->in[k]);
        ms__release(slice);
        MS_TRY(st);
    }
    return MS_OK;
}
static ms_status stack_grad(ms_backward_call *b)
{
    ms_tensor *g = b->gout[0];
    for (int k = 0; k < b->n_in; k++)
        if (b->need[k])
            MS_TRY(ms__grad_to(&b->gin[k], ms__slice_of(g, ms__dim_of(b->i[0], g->ndim), k), &b->in_meta[k]));
    return MS_OK;
}

// ---- tile. Integers: the repetitions of each dimension, the last integer for the last dimension ----

static ms_status check_tile(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int ndim = c->n_i > x->ndim ? c->n_i : x->ndim;
    if (ndim > MS_MAX_DIMS)
        return ms__call_fail(c, "the result would have %d dimensions; at most %d are supported", ndim, MS_MAX_DIMS);
    int64_t shape[MS_MAX_DIMS];
    for (int d = 0; d < ndim; d++) {
        int k = d - (ndim - c->n_i), j = d - (ndim - x->ndim);
        int64_t times = k >= 0 ? c->i[k] : 1;
        if (times < 0)
            return ms__call_fail(c, "the number of repetitions must not be negative, got %lld", (long long)times);
        if (__builtin_mul_overflow(times, j >= 0 ? x->shape[j] : 1, &shape[d]))
            return ms__call_fail(c, "%lld repetitions of dimension %d of %s are too many for a 64-bit size",
                                 (long long)times, j + 1, ms__tensor_text(x));
    }
    return ms__call_out(c, 0, x->dtype, ms__device(x), ndim, shape);
}
// Copies the input to the beginning of every dimension, then repeats the filled block along each dimension, the last
// one first.
static ms_status run_tile(ms_call *c)
{
    ms_tensor *o = c->out[0];
    const ms_tensor *x = c->in[0];
    if (o->numel == 0) return MS_OK;
    int lead = o->ndim - x->ndim;
    int64_t shape[MS_MAX_DIMS];
    for (int d = 0; d < o->ndim; d++) shape[d] = d < lead ? 1 : x->shape[d - lead];
    ms_tensor *block = ms__tensor_view(o, o->ndim, shape, o->stride, o->offset);
    ms_status st = ms__copy_data(block, x);
    for (int d = o->ndim - 1; d >= 0; d--) {
        for (int64_t at = shape[d]; at < o->shape[d]; at += shape[d]) {
            ms_tensor *next = ms__tensor_view(o, o->ndim, shape, o->stride, o->offset + at * o->stride[d]);
            if (st == MS_OK) st = ms__copy_data(next, block);
            ms__release(next);
        }
        shape[d] = o->shape[d];
        ms__release(block);
        block = ms__tensor_view(o, o->ndim, shape, o->stride, o->offset);
    }
    ms__release(block);
    return st;
}
// Sums one dimension after the other: the gradient, seen as [before, times, size, after], is summed over `times`.
static ms_status tile_grad(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0], *om = &b->out_meta[0];
    ms_tensor *g = ms__retain(b->gout[0]);
    int64_t before = 1, after = g->numel;
    for (int d = 0; d < om->ndim; d++) {
        int j = d - (om->ndim - m->ndim);
        int64_t size = j >= 0 ? m->shape[j] : 1, times = size ? om->shape[d] / size : 1;
        after = om->shape[d] ? after / om->shape[d] : 0;
        if (times != 1) {
            if (size == 0 || times == 0) {
                ms__release(g);
                return ms__zero_gradient(b);
            }
            ms_tensor *four, *sum;
            ms_status st = ms__reshape(&four, g, 4, (int64_t[]) { before, times, size, after });
            ms__release(g);
            MS_TRY(st);
            st = ms__run_op(&ms__op_sum, &(ms_op_args) { 1, &four, .n_i = 2, .i = (int64_t[]) { 0, 1 } }, 1, &sum);
            ms__release(four);
            MS_TRY(st);
            g = sum;
        }
        before *= size;
    }
    ms_status st = ms__reshape(&b->gin[0], g, m->ndim, m->shape);
    ms__release(g);
    return st;
}

// ---- pad. Integers: the elements added before and after the last dimension, then the one before it, and so on ----

static ms_status check_pad(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int64_t shape[MS_MAX_DIMS];
    if (c->n_i % 2 || c->n_i > 2 * x->ndim)
        return ms__call_fail(c, "%d sizes for %d dimensions, expected at most two for each", c->n_i, x->ndim);
    MS_TRY(ms__check_value(c));
    memcpy(shape, x->shape, sizeof shape);
    for (int k = 0; k < c->n_i; k++) {
        int64_t *size = &shape[x->ndim - 1 - k / 2];
        if (c->i[k] < 0 || __builtin_add_overflow(*size, c->i[k], size))
            return ms__call_fail(c, "cannot add %lld elements to %s", (long long)c->i[k], ms__tensor_text(x));
    }
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim, shape);
}
// The part of t between the elements that pad adds.
static ms_tensor *inside(const ms_tensor *t, int n_i, const int64_t *sides)
{
    int64_t shape[MS_MAX_DIMS], offset = t->offset;
    memcpy(shape, t->shape, sizeof shape);
    for (int k = 0; k < n_i; k++) {
        int d = t->ndim - 1 - k / 2;
        shape[d] -= sides[k];
        if (k % 2 == 0) offset += sides[k] * t->stride[d];
    }
    return ms__tensor_view(t, t->ndim, shape, t->stride, offset);
}
static ms_status run_pad(ms_call *c)
{
    MS_TRY(ms__fill_data(c->out[0], c->f[0]));
    ms_tensor *part = inside(c->out[0], c->n_i, c->i);
    ms_status st = ms__copy_data(part, c->in[0]);
    ms__release(part);
    return st;
}
static ms_status pad_grad(ms_backward_call *b)
{
    return ms__grad_to(&b->gin[0], inside(b->gout[0], b->n_i, b->i), &b->in_meta[0]);
}

// ---- triangles. Integer: the last diagonal that tril keeps, the first that triu keeps ----

static ms_status check_triangle(ms_call *c)
{
    if (c->in[0]->ndim < 2) return ms__call_fail(c, "needs 2 dimensions or more, got %s", ms__tensor_text(c->in[0]));
    return ms__call_out_like(c, 0, c->in[0]);
}
static ms_status triangle(ms_call *c, bool lower)
{
    ms_tensor *o = c->out[0];
    ms__cpu_copy_tensor(o, c->in[0]);
    if (o->numel == 0) return MS_OK;
    int64_t rows = o->shape[o->ndim - 2], cols = o->shape[o->ndim - 1], k = c->n_i ? c->i[0] : 0,
            lines = o->numel / cols;
    size_t size = (size_t)ms__dtype_size(o->dtype);
    char *row = ms__data(o);
    for (int64_t n = 0; n < lines; n++, row += (size_t)cols * size) {
        int64_t edge = n % rows + k + (lower ? 1 : 0);  // first column that tril clears or triu keeps
        edge = edge < 0 ? 0 : edge > cols ? cols : edge;
        if (lower) memset(row + (size_t)edge * size, 0, (size_t)(cols - edge) * size);
        else memset(row, 0, (size_t)edge * size);
    }
    return MS_OK;
}
static ms_status run_tril(ms_call *c) { return triangle(c, true); }
static ms_status run_triu(ms_call *c) { return triangle(c, false); }
static ms_status triangle_grad(ms_backward_call *b)
{
    return ms__run_op(b->op, &(ms_op_args) { 1, b->gout, .n_i = b->n_i, .i = b->i }, 1, b->gin);
}

// The kernel on a GPU: the CPU's function if it consists of copies; NULL where the CUDA plugin has its own kernel.
#define BOTH_cat run_cat
#define BOTH_stack run_stack
#define BOTH_tile run_tile
#define BOTH_pad run_pad
#define BOTH_tril NULL
#define BOTH_triu NULL
#define ROW(NAME, FLAGS, MAX, CHECK, BACKWARD, TAKES, SAMPLES, DOC)                                          \
    const ms_op ms__op_##NAME = MS_ROW(#NAME, 1, MAX, .flags = MS_OP_DIFFERENTIABLE | FLAGS, .check = CHECK, \
                                       .run = { [MS_CPU] = run_##NAME, [MS_CUDA] = BOTH_##NAME },            \
                                       .backward = BACKWARD, .takes = TAKES, .samples = SAMPLES, .doc = DOC);
// clang-format off
ROW(cat,   0, MS_MAX_IN, check_cat,      cat_grad,      "dim", "[2,3] [4,3] i=0;[2,3] [2,1] [2,2] i=-1;[2,3,4] [2,0,4] [2,1,4] i=1;[5] i=0", "Concatenates tensors along a dimension.")
ROW(stack, 0, MS_MAX_IN, check_stack,    stack_grad,    "dim", "[2,3] [2,3] i=0;[2,3] [2,3] [2,3] i=-1;[] [] i=0", "Concatenates tensors along a new dimension.")
ROW(tile,  0, 1,         check_tile,     tile_grad,     "times...", "[2,3] i=2,3;[2,3] i=2;[3] i=2,2;[2,3] i=3,1,2", "t repeated along each dimension.")
ROW(pad,   0, 1,         check_pad,      pad_grad,      "sides...; value", "[2,3] i=1,2 f=0;[2,3,4] i=0,3,2,1 f=-1.5;[2,3] i=0,0,1,0 f=2;[2,0] i=1,1 f=3;[] f=1", "t with elements of one value before and after its last dimensions. sides...: how many before and after the last dimension, then the one before it, and so on")
ROW(tril,  MS_OP_METHOD, 1,         check_triangle, triangle_grad, "diagonal=0", "[4,4];[3,5] i=1;[2,4,3] i=-1", "The lower triangle of the last two dimensions; elements above it are 0. diagonal: the last one that is kept: 0 is the main one, 1 the one above it, -1 the one below")
ROW(triu,  MS_OP_METHOD, 1,         check_triangle, triangle_grad, "diagonal=0", "[4,4];[3,5] i=1;[2,4,3] i=-1", "The upper triangle of the last two dimensions; elements below it are 0. diagonal: the first one that is kept: 0 is the main one, 1 the one above it, -1 the one below")
// clang-format on

MS_OPERATORS = { &ms__op_cat, &ms__op_stack, &ms__op_tile, &ms__op_pad, &ms__op_tril, &ms__op_triu };
