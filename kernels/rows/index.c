// SPDX-License-Identifier: MIT
// rows/index.c -- operators that read or write by position: index_select, index_add_ (its gradient), gather, scatter_,
// scatter_add_, scatter_reduce. Positions are int64 or int32 tensors, count from 0 and are never negative.
#include "cpu/cpu.h"
#include "formulas/order.h"
#include "rows/grad.h"

static ms_status check_index_positions(const ms_call *c)
{
    if (c->in[1]->dtype != MS_I64 && c->in[1]->dtype != MS_I32)
        return ms__call_fail(c, "positions must be int64 or int32, got %s", ms__tensor_text(c->in[1]));
    return MS_OK;
}

static ms_status check_index_select(ms_call *c)
{
    const ms_tensor *x = c->in[0], *index = c->in[1];
    int d;
    MS_TRY(check_index_positions(c));
    if (index->ndim > 1) return ms__call_fail(c, "positions must be 1-d, got %s", ms__tensor_text(index));
    if (x->ndim == 0) return ms__call_fail(c, "a 0-dim tensor has no dimension to select from");
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    shape[d] = index->numel;
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim, shape);
}
static ms_status check_index_add_(ms_call *c)
{
    const ms_tensor *x = c->in[0], *index = c->in[1], *src = c->in[2];
    int d;
    MS_TRY(check_index_positions(c));
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    bool fits = src->ndim == x->ndim && src->dtype == x->dtype && src->shape[d] == index->numel && ms__is_contiguous(x);
    for (int k = 0; fits && k < x->ndim; k++) fits = k == d || src->shape[k] == x->shape[k];
    if (!fits)
        return ms__call_fail(c,
                             "the source must have size %lld in dimension %d and otherwise the shape and the dtype of "
                             "the tensor, which must be contiguous; source %s, tensor %s",
                             (long long)index->numel, d + 1, ms__tensor_text(src), ms__tensor_text(x));
    ms__call_inplace(c, 0, 0);
    return MS_OK;
}

// Checks that the positions have as many dimensions as t, and no larger size except along d. d is -1 for the source,
// which has no exception.
static ms_status within(const ms_call *c, const ms_tensor *t, int d)
{
    const ms_tensor *index = c->in[1];
    bool fits = t->ndim == index->ndim;
    for (int k = 0; fits && k < t->ndim; k++) fits = k == d || index->shape[k] <= t->shape[k];
    if (fits) return MS_OK;
    const char *shape = ms__shape_text(index->ndim, index->shape), *text = ms__tensor_text(t);
    if (d < 0)
        return ms__call_fail(c,
                             "positions of shape %s do not fit the source %s: expected as many dimensions, and no "
                             "larger size",
                             shape, text);
    return ms__call_fail(c,
                         "positions of shape %s do not fit the tensor %s: expected as many dimensions, and no "
                         "larger size except in dimension %d",
                         shape, text, d + 1);
}
static ms_status check_gather(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    MS_TRY(check_index_positions(c));
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    MS_TRY(within(c, x, d));
    return ms__call_out(c, 0, x->dtype, ms__device(x), c->in[1]->ndim, c->in[1]->shape);
}
static ms_status check_scatter_(ms_call *c)
{
    const ms_tensor *x = c->in[0], *src = c->in[2];
    int d;
    MS_TRY(check_index_positions(c));
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    MS_TRY(within(c, x, d));
    MS_TRY(within(c, src, -1));
    if (src->dtype != x->dtype)
        return ms__call_fail(c, "source and tensor must have the same dtype, got %s and %s", ms__tensor_text(src),
                             ms__tensor_text(x));
    return ms__write_in_place(c);
}
static ms_status check_scatter_add_(ms_call *c) { return check_scatter_(c); }

// Integers: the dimension, the kind of reduction (MS_REDUCE_* of formulas/order.h).
static ms_status check_scatter_reduce(ms_call *c)
{
    const ms_tensor *x = c->in[0], *index = c->in[1], *src = c->in[2];
    int d;
    if (c->i[1] < MS_REDUCE_PROD || c->i[1] > MS_REDUCE_MIN)
        return ms__call_fail(c, "a dimension is missing, or the kind of the reduction is missing or unknown");
    if (!ms__same_shape(index, src))
        return ms__call_fail(c, "the source must have the shape of the positions, %s, got %s",
                             ms__shape_text(index->ndim, index->shape), ms__tensor_text(src));
    MS_TRY(check_index_positions(c));
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    MS_TRY(within(c, x, d));
    if (src->dtype != x->dtype)
        return ms__call_fail(c, "source and tensor must have the same dtype, got %s and %s", ms__tensor_text(src),
                             ms__tensor_text(x));
    return ms__call_out_like(c, 0, x);
}

#define ROW(NAME, N, KERNEL, BACKWARD, FLAGS, TAKES, SAMPLES, DOC)                                       \
    const ms_op ms__op_##NAME = MS_ROW(#NAME, N, N, .flags = MS_OP_DIFFERENTIABLE | FLAGS, .save_in = 2, \
                                       .check = check_##NAME, .run = { [MS_CPU] = ms__cpu_##KERNEL },    \
                                       .backward = BACKWARD, .takes = TAKES, .samples = SAMPLES, .doc = DOC);
static const ms_op index_add_row = MS_ROW("index_add_", 3, 3, .flags = MS_OP_INPLACE, .check = check_index_add_,
                                          .run = { [MS_CPU] = ms__cpu_index_add });
extern const ms_op ms__op_gather, ms__op_scatter_, ms__op_scatter_add_;

// The gradient of the input: zeros, into which `row` adds the gradient of the output at the positions.
static ms_status into_zeros(ms_backward_call *b, const ms_op *row)
{
    ms_tensor *zeros;
    MS_TRY(ms__zeros_of(&zeros, &b->in_meta[0]));
    ms_status st =
        ms__run_op(row, &(ms_op_args) { 3, (ms_tensor *[]) { zeros, b->in[1], b->gout[0] }, .n_i = 1, .i = b->i }, 1,
                   b->gin);
    ms__release(zeros);
    return st;
}
static ms_status index_select_grad(ms_backward_call *b) { return into_zeros(b, &index_add_row); }
static ms_status gather_grad(ms_backward_call *b) { return into_zeros(b, &ms__op_scatter_add_); }

// The gradient of the source: the result's gradient at the positions; 0 for elements beyond the positions' shape.
static ms_status source_grad(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[2];
    ms_tensor *g;
    MS_TRY(ms__run_op(&ms__op_gather,
                      &(ms_op_args) { 2, (ms_tensor *[]) { b->gout[0], b->in[1] }, .n_i = 1, .i = b->i }, 1, &g));
    if (memcmp(g->shape, m->shape, (size_t)m->ndim * sizeof *m->shape) == 0) {
        b->gin[2] = g;
        return MS_OK;
    }
    ms_tensor *whole = NULL, *part;
    ms_status st = ms__zeros_of(&whole, m);
    if (!st) {
        part = ms__tensor_view(whole, g->ndim, g->shape, whole->stride, 0);
        st = ms__copy(part, g);
        ms__release(part);
    }
    ms__release(g);
    if (st) ms__release(whole);
    else b->gin[2] = whole;
    return st;
}
static ms_status scatter_grad(ms_backward_call *b)
{
    if (b->need[2]) MS_TRY(source_grad(b));
    if (!b->need[0]) return MS_OK;
    ms_tensor *g, *zero = NULL;  // overwritten elements have no gradient
    const ms_tensor *index = b->in[1];
    MS_TRY(ms__op1(&g, &ms__op_clone, b->gout[0]));
    ms_status st = ms__zeros(&zero, g->dtype, ms__device(g), index->ndim, index->shape);
    if (!st)
        st = ms__run_op(&ms__op_scatter_,
                        &(ms_op_args) { 3, (ms_tensor *[]) { g, b->in[1], zero }, .n_i = 1, .i = b->i }, 1, &b->gin[0]);
    ms__release(zero);
    ms__release(g);
    return st;
}
static ms_status scatter_add_grad(ms_backward_call *b)
{
    if (b->need[0]) b->gin[0] = ms__retain(b->gout[0]);
    return b->need[2] ? source_grad(b) : MS_OK;
}

// ---- the gradient of scatter_reduce ----

// Operators that run one after another; once one has failed, the others are skipped. Their results are released at the
// end.
typedef struct {
    ms_tensor *made[24];
    int n;
    ms_status st;
} steps;
static ms_tensor *step(steps *s, const char *op, ms_op_args a)
{
    ms_tensor *out = NULL;
    if (s->st) return NULL;
    s->st = ms__run_op(ms__op_by_name(op), &a, 1, &out);
    if (!s->st) s->made[s->n++] = out;
    return out;
}
static ms_tensor *with(steps *s, const char *op, ms_tensor *a, ms_tensor *b)
{
    return step(s, op, (ms_op_args) { .n_in = b ? 2 : 1, .in = (ms_tensor *[]) { a, b } });
}
static ms_tensor *is_zero(steps *s, ms_tensor *t)
{
    return step(s, "eq_scalar", (ms_op_args) { 1, &t, .n_f = 1, .f = (double[]) { 0 } });
}
static ms_tensor *ones_where(steps *s, ms_tensor *t, ms_tensor *truth)
{
    return step(s, "masked_fill", (ms_op_args) { 2, (ms_tensor *[]) { t, truth }, .n_f = 1, .f = (double[]) { 1 } });
}
static ms_tensor *number(steps *s, ms_tensor *truth, const ms_tensor *like)
{
    return step(s, "cast", (ms_op_args) { 1, &truth, .n_i = 1, .i = (int64_t[]) { like->dtype } });
}
// At the positions of the call: at_positions reads t, added adds src to a copy of t, reduced reduces src into a copy.
static ms_tensor *at_positions(steps *s, const ms_backward_call *b, ms_tensor *t)
{
    return step(s, "gather", (ms_op_args) { 2, (ms_tensor *[]) { t, b->in[1] }, .n_i = 1, .i = b->i });
}
static ms_tensor *added(steps *s, const ms_backward_call *b, ms_tensor *t, ms_tensor *src)
{
    ms_tensor *copy = with(s, "clone", t, NULL);
    return step(s, "scatter_add_", (ms_op_args) { 3, (ms_tensor *[]) { copy, b->in[1], src }, .n_i = 1, .i = b->i });
}
static ms_tensor *reduced(steps *s, const ms_backward_call *b, ms_tensor *t, ms_tensor *src)
{
    return step(s, "scatter_reduce", (ms_op_args) { 3, (ms_tensor *[]) { t, b->in[1], src }, .n_i = 2, .i = b->i });
}

// The elements that are equal to the extreme one share its gradient.
static void extreme_grads(steps *s, ms_backward_call *b, ms_tensor **gx, ms_tensor **gsrc)
{
    ms_tensor *x = b->in[0], *src = b->in[2], *y = b->out[0];
    ms_tensor *mine = number(s, with(s, "eq", x, y), x);
    ms_tensor *theirs = number(s, with(s, "eq", src, at_positions(s, b, y)), x);
    ms_tensor *share = with(s, "div", b->gout[0], added(s, b, mine, theirs));
    *gx = with(s, "mul", share, mine);
    *gsrc = with(s, "mul", at_positions(s, b, share), theirs);
}
// The gradient of a factor is the gradient of the product times the product of the other factors: that is the whole
// product divided by the factor, unless the factor is 0.
static void product_grads(steps *s, ms_backward_call *b, ms_tensor **gx, ms_tensor **gsrc)
{
    ms_tensor *x = b->in[0], *src = b->in[2], *g = b->gout[0];
    ms_tensor *filled = ones_where(s, x, is_zero(s, x));
    *gx = with(s, "div", with(s, "mul", g, reduced(s, b, filled, src)), filled);
    ms_tensor *zero = is_zero(s, src), *none = with(s, "sub", x, x);
    ms_tensor *zeros = at_positions(s, b, added(s, b, none, number(s, zero, x)));
    ms_tensor *one = step(s, "eq_scalar", (ms_op_args) { 1, &zeros, .n_f = 1, .f = (double[]) { 1 } });
    ms_tensor *alone = with(s, "logical_and", zero, one);
    ms_tensor *others = reduced(s, b, x, ones_where(s, src, alone));
    ms_tensor *by_others = at_positions(s, b, with(s, "mul", g, others));
    ms_tensor *by_product = with(s, "div", at_positions(s, b, with(s, "mul", g, b->out[0])), ones_where(s, src, zero));
    *gsrc = step(s, "where", (ms_op_args) { .n_in = 3, .in = (ms_tensor *[]) { alone, by_others, by_product } });
}
static ms_status scatter_reduce_grad(ms_backward_call *b)
{
    steps s = { .n = 0 };
    ms_tensor *gx = NULL, *gsrc = NULL;
    (b->i[1] == MS_REDUCE_PROD ? product_grads : extreme_grads)(&s, b, &gx, &gsrc);
    if (!s.st && b->need[0]) b->gin[0] = ms__retain(gx);
    if (!s.st && b->need[2]) b->gin[2] = ms__retain(gsrc);
    while (s.n) ms__release(s.made[--s.n]);
    return s.st;
}
static const ms_op scatter_reduce_row = MS_ROW(
    "scatter_reduce", 3, 3, .takes = "dim, kind",
    .doc = "t combined with the source at these positions along a dimension. kind: 0 product, 1 largest, 2 smallest.",
    .flags = MS_OP_DIFFERENTIABLE, .save_in = 7, .save_out = 1, .check = check_scatter_reduce,
    .run = { [MS_CPU] = ms__cpu_scatter_reduce }, .backward = scatter_reduce_grad,
    .samples = "[5,4] [3,4]i5 [3,4] i=0,0;[5,4] [3,4]i5 [3,4] i=0,1;[2,3,4] [2,3,2]i4 [2,3,2] i=-1,2;"
               "[2,3] [2,7]i3 [2,7] i=1,0;[2,3] [2,7]i3 [2,7] i=1,1");

// clang-format off
ROW(index_select, 2, index_select, index_select_grad, 0,             "dim", "[5,4] [3]i5 i=0;[2,3,4] [5]i4 i=-1;[2,3,4] [2]i3 i=1", "The slices of a dimension at these positions.")
ROW(gather,       2, gather,       gather_grad,       MS_OP_METHOD,             "index | dim", "[5,4] [3,4]i5 i=0;[2,3,4] [2,3,6]i4 i=-1;[5] [3]i5 i=0", "Gathers along a dimension: `out[i][j] = t[i][index[i][j]]` for d = 2. Errors: an id outside of 0 to size - 1. index: int64, of as many dimensions as t, ids from 0")
ROW(scatter_,     3, scatter,      scatter_grad,      MS_OP_INPLACE, "dim", "[6] [1]i6 [1] i=0;[5,4] [1,4]i5 [1,4] i=0;[5,4] [1,3]i5 [2,4] i=0", "Writes the source to these positions along a dimension.")
ROW(scatter_add_, 3, scatter_add,  scatter_add_grad,  MS_OP_INPLACE | MS_OP_METHOD, "index, source | dim", "[5,4] [3,4]i5 [3,4] i=0;[2,3,4] [2,3,2]i4 [2,3,3] i=-1", "Adds source along a dimension at the positions in index, also if a position occurs several times. Errors: an id outside of 0 to size - 1. index: int64, of as many dimensions as t, ids from 0; source: at least of index's shape, of t's dtype")
// clang-format on

MS_OPERATORS = { &ms__op_index_select, &ms__op_gather, &ms__op_scatter_, &ms__op_scatter_add_, &scatter_reduce_row };
