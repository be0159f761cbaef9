// SPDX-License-Identifier: MIT
// rows/product.c -- matmul and linear: shapes, batches and gradients around ms__gemm.
//
// Transposed and otherwise strided inputs are passed on with their strides. A batch is copied only if its rows cannot
// be traversed with one stride and one large product replaces many.
#include "cpu/product/product.h"
#include "rows/grad.h"
#include "rows/layout.h"
#include "rows/product.h"

static ms_status check_types(ms_call *c)
{
    for (int k = 0; k < c->n_in; k++)
        if (c->in[k] && c->in[k]->dtype != c->in[0]->dtype)
            return ms__call_fail(c, "all arguments must have the same dtype, got %s and, as argument %d, %s",
                                 ms__tensor_text(c->in[0]), k + 1, ms__tensor_text(c->in[k]));
    int dtype = c->in[0]->dtype;
    if (dtype == MS_BOOL || (c->n_in > 2 && c->in[2] && !ms__is_float(dtype)))
        return ms__call_fail(c, "products of %s%s are not supported; cast the arguments first", ms__dtype_name(dtype),
                             dtype == MS_BOOL ? "" : " with a bias");
    return MS_OK;
}

// ---- linear ---------------------------------------------------------------------------------------

static ms_status linear_check(ms_call *c)
{
    const ms_tensor *x = c->in[0], *w = c->in[1], *bias = c->n_in > 2 ? c->in[2] : NULL;
    MS_TRY(check_types(c));
    if (w->ndim != 2) return ms__call_fail(c, "the weight must be [out, in], got %s", ms__tensor_text(w));
    if (x->ndim < 1 || x->shape[x->ndim - 1] != w->shape[1])
        return ms__call_fail(c, "the input's last dimension must be the weight's %lld column%s: input %s, weight %s",
                             (long long)w->shape[1], w->shape[1] == 1 ? "" : "s", ms__shape_text(x->ndim, x->shape),
                             ms__shape_text(2, w->shape));
    if (bias && (bias->ndim != 1 || bias->shape[0] != w->shape[0]))
        return ms__call_fail(c, "the bias must be [%lld], got %s", (long long)w->shape[0],
                             ms__shape_text(bias->ndim, bias->shape));
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = w->shape[0];
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim, shape);
}

#define PRODUCT ms_gemm
#define PRODUCT_OF ms__gemm_of
#define MULTIPLY(y, p) ms__gemm(p)
#define MULTIPLY_PARTS(y, p, n) ms__gemm_parts(p, n)
#define MULTIPLY_AND_ADD_ROWS(y, p, out, summed) ms__gemm(p)
#define ADD_ROWS ms__sum_rows
#define ACCUMULATE(p, on) ((void)(on))  // only kernels of GPUs get a gradient to add to
#include "rows/linear_body.h"

// A product of a captured step, and the function that computes it.
typedef struct {
    ms_gemm_fn run;
    ms_gemm p;
} prepared_product;

static ms_status repeat_product(void *args)
{
    const prepared_product *w = args;
    return w->run(&w->p);
}

static bool prepare_linear(ms_call *c, ms_prepared *out)
{
    const ms_tensor *x = c->in[0], *bias = c->n_in > 2 ? c->in[2] : NULL;
    int64_t rows, rs;
    _Static_assert(sizeof(prepared_product) <= MS_PREPARED, "a product must fit");
    if (c->out[0]->numel == 0 || x->numel == 0 || (bias && !ms__is_contiguous(bias)) || !ms__join_rows(x, &rows, &rs))
        return false;
    prepared_product *w = (prepared_product *)out->args;
    w->p = linear_product(c, x, bias, rows, rs);
    w->run = ms__gemm_fn(&w->p);
    out->run = repeat_product;
    out->bytes = sizeof *w;
    return true;
}

// The gradients of linear in a captured step; those that are not needed are NULL.
typedef struct {
    ms_gemm_fn dx, dw;
    void *db;
    int64_t rows, outs, rs;  // of g; outs: its columns
    ms_gemm dx_of, dw_of;
} prepared_gradients;

static ms_status repeat_gradients(void *args)
{
    const prepared_gradients *w = args;
    if (w->dx) MS_TRY(w->dx(&w->dx_of));
    if (w->dw) MS_TRY(w->dw(&w->dw_of));
    if (w->db) ms__column_sum(w->dw_of.dtype, w->db, w->dw_of.a, w->rows, w->outs, w->rs);
    return MS_OK;
}

static bool prepare_linear_backward(ms_call *c, ms_prepared *out)
{
    const ms_tensor *g = c->in[0], *x = c->in[1], *db = ms__grad_out(c, 2);
    int64_t rows, rs, x_rs;
    _Static_assert(sizeof(prepared_gradients) <= MS_PREPARED, "the gradients of linear must fit");
    if (g->numel == 0 || x->numel == 0 || !ms__join_rows(g, &rows, &rs) || !ms__join_rows(x, &rows, &x_rs) ||
        (db && g->stride[g->ndim - 1] != 1) || !ms__grad_out(c, 1))
        return false;
    prepared_gradients *w = (prepared_gradients *)out->args;
    *w = (prepared_gradients) { .db = db ? ms__data(db) : NULL, .rows = rows, .outs = c->in[2]->shape[0], .rs = rs };
    w->dw_of = dw_product(c, g, rs, x, x_rs, rows);
    w->dw = ms__gemm_fn(&w->dw_of);
    if (ms__grad_out(c, 0)) {
        w->dx_of = dx_product(c, g, rows, rs);
        w->dx = ms__gemm_fn(&w->dx_of);
    }
    out->run = repeat_gradients;
    out->bytes = sizeof *w;
    return true;
}

// run_linear_backward in rows/linear_body.h describes the inputs and outputs.
static ms_status linear_backward_check(ms_call *c)
{
    const ms_tensor *g = c->in[0], *x = c->in[1], *w = c->in[2];
    int64_t mask = c->i[c->n_i - 1];
    int k = 0;
    if (mask & 1) MS_TRY(ms__call_out_like(c, k++, x));
    if (c->n_in > 3) ms__call_inplace(c, k++, 3);
    else if (mask & 2) MS_TRY(ms__call_out_like(c, k++, w));
    if (mask & 4) MS_TRY(ms__call_out(c, k++, g->dtype, ms__device(g), 1, &g->shape[g->ndim - 1]));
    return MS_OK;
}

const ms_op ms__op_linear_backward =
    MS_ROW("linear_backward", 3, 4, .check = linear_backward_check, .run = { [MS_CPU] = run_linear_backward },
           .prepare = prepare_linear_backward);

// On a GPU the product is added to the gradient that w already has, if any: this saves a launch and two passes over dw.
static ms_status linear_grad(ms_backward_call *b)
{
    ms_tensor *so_far = b->need[1] && ms__is_cuda(b->in_meta[1].device) ? b->so_far(b, 1) : NULL;
    ms_tensor *in[] = { b->gout[0], b->in[0], b->in[1], so_far };
    return ms__grad_op(b, &ms__op_linear_backward, so_far ? 4 : 3, in, false);
}

const ms_op ms__op_linear =
    MS_ROW("linear", 2, 3, .takes = "weight, bias? |", .doc = "x w^T + b.", .flags = MS_OP_LOW, .save_in = 3,
           .check = linear_check, .run = { [MS_CPU] = run_linear }, .backward = linear_grad, .prepare = prepare_linear,
           .samples =
               "[3,4] [5,4] [5]; [2,3,4] [5,4] [5]; [2,3,4] [5,4]; [4] [2,4] [2]; [20,19] [33,19] [33]; [1,7] [3,7]; "
               "[0,4] [5,4] [5]; [3,0] [2,0] [2]; [70,33] [65,33] [65]");

// ---- linear_parts: several layers on one input, x [w1; w2; ...]^T + [b1; b2; ...] ----------------------------------

_Static_assert((int)MS_LINEAR_PARTS == (int)MS_GEMM_PARTS, "linear_parts is one call of ms__gemm_parts");

static ms_status linear_parts_check(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int64_t n = c->n_i ? c->i[0] : 0, total = 0, shape[MS_MAX_DIMS];
    if (n < 1 || n > MS_LINEAR_PARTS || c->n_in < 1 + n || c->n_in > 1 + 2 * n)
        return ms__call_fail(c, "%lld weights, expected 1 to %d, and at most as many biases", (long long)n,
                             MS_LINEAR_PARTS);
    MS_TRY(check_types(c));
    for (int k = 1; k < c->n_in; k++) {
        const ms_tensor *t = c->in[k], *w = k > n ? c->in[k - n] : t;
        if (!w || (k > n && !t)) {
            if (!w) return ms__call_fail(c, "weight %d is missing", k);
            continue;
        }
        if (k > n ? t->dtype != x->dtype || t->ndim != 1 || t->shape[0] != w->shape[0]
                  : w->ndim != 2 || x->ndim < 1 || w->shape[1] != x->shape[x->ndim - 1])
            return ms__call_fail(c, "argument %d does not fit the input %s, got %s", k + 1,
                                 ms__shape_text(x->ndim, x->shape), ms__tensor_text(t));
        if (k <= n) total += w->shape[0];
    }
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = total;
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim, shape);
}
// Each part has the gradients of linear; those of x are added.
static ms_status linear_parts_backward(ms_backward_call *b)
{
    int n = (int)b->i[0];
    int64_t at = 0;
    for (int k = 0; k < n && b->gout[0]; k++) {
        int64_t outs = b->in_meta[1 + k].shape[0];
        int bias = 1 + n + k < b->n_in && b->need[1 + n + k];
        ms_tensor *out[3] = { NULL }, *g = ms__part_of(b->gout[0], b->gout[0]->ndim - 1, at, outs);
        int64_t mask = b->need[0] | b->need[1 + k] << 1 | bias << 2;
        ms_tensor *in[] = { g, b->in[0], b->in[1 + k] };
        at += outs;
        ms_status st = ms__run_op(&ms__op_linear_backward, &(ms_op_args) { 3, in, 1, &mask, 0, NULL },
                                  __builtin_popcountll((uint64_t)mask), out);
        ms__release(g);
        MS_TRY(st);
        int o = b->need[0];
        if (b->need[1 + k]) b->gin[1 + k] = out[o++];
        if (bias) b->gin[1 + n + k] = out[o];
        if (!b->need[0]) continue;
        if (b->gin[0]) {
            ms_tensor *sum = NULL;
            st = ms__op2(&sum, &ms__op_add, b->gin[0], out[0]);
            ms__release(out[0]);
            ms__release(b->gin[0]);
            out[0] = sum;
        }
        b->gin[0] = out[0];
        MS_TRY(st);
    }
    return MS_OK;
}
static const ms_op op_linear_parts =
    MS_ROW("linear_parts", 2, 1 + 2 * MS_LINEAR_PARTS, .takes = "weights",
           .doc = "Several linear layers on one input, side by side: the weights, their number, follow x, and the "
                  "biases follow them.",
           .flags = MS_OP_LOW, .save_in = (2 << MS_LINEAR_PARTS) - 1, .check = linear_parts_check,
           .run = { [MS_CPU] = run_linear_parts }, .backward = linear_parts_backward,
           .samples = "[3,4] [5,4] [2,4] [5] [2] i=2; [2,3,4] [5,4] [2,4] [3,4] i=3; [4] [2,4] [3,4] - [3] i=2; "
                      "[20,19] [33,19] [70,19] i=2; [0,4] [5,4] [5] i=1; [1,70] [70,70] [33,70] [65,70] i=3");

// ---- matmul ---------------------------------------------------------------------------------------

static ms_status matmul_check(ms_call *c)
{
    ms_tensor *a = c->in[0], *b = c->in[1];
    int n = 0;
    int64_t out[MS_MAX_DIMS];
    MS_TRY(check_types(c));
    if (a->ndim == 0 || b->ndim == 0)
        return ms__call_fail(c, "arguments need at least one dimension, got %s and %s", ms__tensor_text(a),
                             ms__tensor_text(b));
    ms_operand oa = ms__operand(a, true), ob = ms__operand(b, false);
    const int64_t *sa = oa.shape, *sb = ob.shape;
    int na = oa.ndim, nb = ob.ndim, nd = na > nb ? na : nb;
    if (sa[na - 1] != sb[nb - 2])
        return ms__call_fail(c, "inner dimensions differ: %s has %lld column%s, %s has %lld row%s",
                             ms__shape_text(a->ndim, a->shape), (long long)sa[na - 1], sa[na - 1] == 1 ? "" : "s",
                             ms__shape_text(b->ndim, b->shape), (long long)sb[nb - 2], sb[nb - 2] == 1 ? "" : "s");
    for (int d = 0; d < nd - 2; d++) {
        int64_t x = d - nd + na >= 0 ? sa[d - nd + na] : 1, y = d - nd + nb >= 0 ? sb[d - nd + nb] : 1;
        if (x != y && x != 1 && y != 1)
            return ms__call_fail(c, "batch dimensions of %s and %s do not broadcast", ms__shape_text(a->ndim, a->shape),
                                 ms__shape_text(b->ndim, b->shape));
        out[n++] = x == 1 ? y : x;
    }
    if (a->ndim > 1) out[n++] = sa[na - 2];
    if (b->ndim > 1) out[n++] = sb[nb - 1];
    return ms__call_out(c, 0, a->dtype, ms__device(a), n, out);
}

static ms_status matmul_cpu(ms_call *c)
{
    ms_tensor *a = c->in[0], *b = c->in[1], *y = c->out[0];
    ms_operand left = ms__operand(a, true), right = ms__operand(b, false);
    const int64_t *sa = left.shape, *sb = right.shape, *ta = left.stride, *tb = right.stride;
    int64_t at[MS_MAX_DIMS] = { 0 };
    size_t size = (size_t)ms__dtype_size(a->dtype);
    int na = left.ndim, nb = right.ndim, nd = (na > nb ? na : nb) - 2, oa = nd - (na - 2), ob = nd - (nb - 2);
    ms_gemm g = ms__gemm_of("matmul", a->dtype, sa[na - 2], sb[nb - 1], sa[na - 1]);
    g.a = ms__data(a), g.a_rs = ta[na - 2], g.a_cs = ta[na - 1];
    g.b = ms__data(b), g.b_rs = tb[nb - 2], g.b_cs = tb[nb - 1];
    g.c = ms__data(y);
    if (y->numel == 0) return MS_OK;
    if (nb == 2 && na > 2) {  // one matrix on the right: all rows of the batch form one matrix
        ms_tensor *rows;
        MS_TRY(ms__as_rows(&rows, a, &g.m, &g.a_rs));
        g.a = ms__data(rows);
        g.a_cs = rows->stride[na - 1];
        ms_status st = ms__gemm(&g);
        ms__release(rows);
        return st;
    }
    int64_t batch = 1, step = g.m * g.n;
    const char *pa = g.a, *pb = g.b;
    for (int d = 0; d < nd; d++) {
        int64_t x = d >= oa ? sa[d - oa] : 1, z = d >= ob ? sb[d - ob] : 1;
        batch *= x == 1 ? z : x;
    }
    for (int64_t k = 0; k < batch; k++) {
        int64_t fa = 0, fb = 0;
        for (int d = 0; d < nd; d++) {
            if (d >= oa && sa[d - oa] > 1) fa += at[d] * ta[d - oa];
            if (d >= ob && sb[d - ob] > 1) fb += at[d] * tb[d - ob];
        }
        g.a = pa + fa * (int64_t)size;
        g.b = pb + fb * (int64_t)size;
        MS_TRY(ms__gemm(&g));
        g.c = (char *)g.c + (size_t)step * size;
        for (int d = nd - 1; d >= 0; d--) {
            int64_t x = d >= oa ? sa[d - oa] : 1, z = d >= ob ? sb[d - ob] : 1;
            if (++at[d] < (x == 1 ? z : x)) break;
            at[d] = 0;
        }
    }
    return MS_OK;
}

static const ms_op op_matmul;

static ms_tensor *transposed(const ms_tensor *t)
{
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
    int n = t->ndim;
    memcpy(shape, t->shape, sizeof shape);
    memcpy(stride, t->stride, sizeof stride);
    shape[n - 1] = t->shape[n - 2], shape[n - 2] = t->shape[n - 1];
    stride[n - 1] = t->stride[n - 2], stride[n - 2] = t->stride[n - 1];
    return ms__tensor_view(t, n, shape, stride, t->offset);
}

// Sets *out to the product a b, summed over the batch dimensions along which an input of shape `like` was
// broadcast.
static ms_status product_like(ms_tensor **out, ms_tensor *a, ms_tensor *b, int like_ndim, const int64_t *like)
{
    ms_tensor *p = NULL, *s = NULL;
    ms_status st = ms__op2(&p, &op_matmul, a, b);
    if (st == MS_OK) st = ms__sum_to(&s, p, like_ndim, like);
    ms__release(p);
    *out = s;
    return st;
}

static ms_status matmul_backward(ms_backward_call *c)
{
    ms_tensor *a = c->in[0], *b = c->in[1], *g = c->gout[0], *wa, *wb, *wg = NULL, *t = NULL, *r = NULL;
    ms_operand left = ms__operand(a, true), right = ms__operand(b, false);
    const int64_t *sa = left.shape, *sb = right.shape;
    int na = left.ndim, nb = right.ndim, ng = 0;
    int64_t sg[MS_MAX_DIMS], stride[MS_MAX_DIMS];
    ms_status st = MS_OK;
    if (!g) return MS_OK;
    wa = ms__tensor_view(a, na, sa, left.stride, a->offset);
    wb = ms__tensor_view(b, nb, sb, right.stride, b->offset);

    // sg, stride: shape and strides of the gradient with the dimensions that were added to 1-d inputs.
    for (int d = 0; d < g->ndim; d++) sg[ng] = g->shape[d], stride[ng++] = g->stride[d];
    if (b->ndim == 1) sg[ng] = 1, stride[ng++] = 1;
    if (a->ndim == 1) {
        sg[ng] = sg[ng - 1], stride[ng] = stride[ng - 1];
        sg[ng - 1] = 1, stride[ng - 1] = 1, ng++;
    }
    wg = ms__tensor_view(g, ng, sg, stride, g->offset);

    if (c->need[0]) {
        t = transposed(wb);
        if ((st = product_like(&r, wg, t, na, sa)) != MS_OK) goto out;
        c->gin[0] = a->ndim == 1 ? ms__tensor_view(r, 1, a->shape, &r->stride[1], r->offset) : ms__retain(r);
        ms__release(r);
        ms__release(t);
        r = t = NULL;
    }
    if (c->need[1]) {
        ms_tensor *ra = NULL, *rg = NULL;
        if (nb == 2 && na > 2) {  // one matrix for the whole batch: one product over all rows
            int64_t rows, rs;
            if ((st = ms__as_rows(&ra, wa, &rows, &rs)) != MS_OK) goto out;
            t = ms__tensor_view(ra, 2, (int64_t[]) { sa[na - 1], rows }, (int64_t[]) { ra->stride[na - 1], rs },
                                ra->offset);
            if ((st = ms__as_rows(&rg, wg, &rows, &rs)) == MS_OK) {
                ms_tensor *v = ms__tensor_view(rg, 2, (int64_t[]) { rows, sg[ng - 1] },
                                               (int64_t[]) { rs, rg->stride[ng - 1] }, rg->offset);
                st = ms__op2(&r, &op_matmul, t, v);
                ms__release(v);
            }
            ms__release(ra);
            ms__release(rg);
        } else {
            t = transposed(wa);
            st = product_like(&r, t, wg, nb, sb);
        }
        if (st != MS_OK) goto out;
        c->gin[1] = b->ndim == 1 ? ms__tensor_view(r, 1, b->shape, r->stride, r->offset) : ms__retain(r);
    }
out:
    ms__release(r);
    ms__release(t);
    ms__release(wg);
    ms__release(wb);
    ms__release(wa);
    return st;
}

static const ms_op op_matmul =
    MS_ROW("matmul", 2, 2, .doc = "The matrix product; leading dimensions broadcast.", .flags = MS_OP_LOW, .save_in = 3,
           .check = matmul_check, .run = { [MS_CPU] = matmul_cpu }, .backward = matmul_backward,
           .samples =
               "[3,4] [4,5]; [4] [4]; [3,4] [4]; [4] [4,5]; [2,3,4] [4,5]; [2,3,4] [2,4,5]; [2,1,3,4] [3,4,2]; [3,4] "
               "[2,4,5]; [2,3,4] [4]; [4] [2,4,3]; [0,4] [4,5]; [3,0] [0,2]; "
               "[20,40] [40,50]; [2,0,4] [2,4,3]");

MS_OPERATORS = { &op_matmul, &ms__op_linear, &ms__op_linear_backward, &op_linear_parts };
