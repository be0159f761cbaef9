// SPDX-License-Identifier: MIT
// cuda/product/linear.cu -- linear, matmul and gelu_mlp as products (product.cu).
#include "cuda/product.h"

#define PRODUCT product
#define PRODUCT_OF product_of
#define MULTIPLY(y, p) ms__cuda_product(index_of(y), p)
#define MULTIPLY_PARTS multiply_parts
#define ADD_ROWS(g, rows, rs, out) ms__cuda_column_sum(g, (g)->numel ? rows : 0, rs, out)
#define ACCUMULATE(p, on) ((p).add = (on))
#define MULTIPLY_AND_ADD_ROWS multiply_and_add_rows
static ms_status multiply_and_add_rows(const ms_tensor *y, product *p, const ms_tensor *out, bool *summed)
{
    p->row_sums = out ? ms__data(out) : NULL;
    ms_status st = ms__cuda_product(index_of(y), p);
    *summed = p->summed;
    return st;
}
static ms_status multiply_parts(const ms_tensor *y, product *p, int n)
{
    for (int k = 0; k < n; k++) MS_TRY(ms__cuda_product(index_of(y), &p[k]));
    return MS_OK;
}
#include "rows/linear_body.h"

static ms_status run_matmul(ms_call *c)
{
    ms_tensor *a = c->in[0], *b = c->in[1], *y = c->out[0], *held = NULL;
    if (y->numel == 0) return MS_OK;
    ms_operand left = ms__operand(a, true), right = ms__operand(b, false);
    const int64_t *sa = left.shape, *sb = right.shape, *ta = left.stride, *tb = right.stride;
    int na = left.ndim, nb = right.ndim;
    product p = product_of("matmul", a->dtype, sa[na - 2], sb[nb - 1], sa[na - 1]);
    p.a = ms__data(a), p.a_rs = ta[na - 2], p.a_cs = ta[na - 1];
    p.b = ms__data(b), p.b_rs = tb[nb - 2], p.b_cs = tb[nb - 1];
    p.c = ms__data(y);
    if (nb == 2 && na > 2) {  // one matrix on the right: all rows of the batch form one matrix
        MS_TRY(ms__as_rows(&held, a, &p.m, &p.a_rs));
        p.a = ms__data(held);
        p.a_cs = held->stride[na - 1];
    } else {
        p.nb = (na > nb ? na : nb) - 2;
        int oa = p.nb - (na - 2), ob = p.nb - (nb - 2);
        int64_t step = p.m * p.n;
        for (int d = p.nb - 1; d >= 0; d--) {
            int64_t x = d >= oa ? sa[d - oa] : 1, z = d >= ob ? sb[d - ob] : 1;
            p.batch[d] = x == 1 ? z : x;
            p.a_bs[d] = x > 1 ? ta[d - oa] : 0;
            p.b_bs[d] = z > 1 ? tb[d - ob] : 0;
            p.c_bs[d] = step;
            step *= p.batch[d];
        }
    }
    ms_status st = ms__cuda_product(index_of(y), &p);
    if (held) ms__release(held);
    return st;
}

// ---- gelu_mlp: gelu(x w1^T + b1) w2^T + b2 (rows/layers/mlp.c) ----

enum { X, W1, W2, B1, B2 };
// A call of linear, or of its backward, to which `want` adds those of dx, dw, db that are needed.
static ms_call linear_call(const ms_call *c, ms_tensor *a, ms_tensor *b, ms_tensor *third)
{
    ms_call sub = {};
    sub.op = c->op;
    sub.n_in = 3;
    sub.in[0] = a, sub.in[1] = b, sub.in[2] = third;
    return sub;
}
static void want(ms_call *sub, int k, ms_tensor *out)
{
    if (!out) return;
    sub->i[0] |= (int64_t)1 << k;
    sub->out[sub->n_out++] = out;
}
static ms_status linear_gradients(ms_call *sub, ms_tensor *so_far)
{
    sub->n_i = 1;
    if (so_far) sub->in[sub->n_in++] = so_far;
    return sub->n_out ? run_linear_backward(sub) : MS_OK;
}
// A tensor of the activations' shape: the given one or a new one.
struct activations {
    ms_tensor *t = NULL;
    ms_status take(const ms_call *c, ms_tensor *given, const ms_tensor *x, const ms_tensor *w1)
    {
        int64_t shape[MS_MAX_DIMS];
        if (given) {
            t = ms__retain(given);
            return MS_OK;
        }
        memcpy(shape, x->shape, sizeof shape);
        shape[x->ndim - 1] = w1->shape[0];
        return ms__tensor_new(&t, x->dtype, ms__device(x), x->ndim, shape, c->op->name);
    }
    ~activations()
    {
        if (t) ms__release(t);
    }
};
// x seen as a matrix, whose columns are the last dimension of x.
struct matrix_rows {
    ms_tensor *t = NULL;
    int64_t rows = 0, rs = 0;
    ms_status take(ms_tensor *x) { return ms__as_rows(&t, x, &rows, &rs); }
    ~matrix_rows()
    {
        if (t) ms__release(t);
    }
};
static ms_status run_gelu_mlp(ms_call *c)
{
    held_inputs h;
    activations before, hidden;
    matrix_rows x;
    const ms_tensor *w1 = c->in[W1];
    MS_TRY(h.hold(c));
    MS_TRY(before.take(c, c->out[1], c->in[X], w1));
    MS_TRY(hidden.take(c, c->out[2], c->in[X], w1));
    MS_TRY(x.take(c->in[X]));
    product p = product_of(c->op->name, w1->dtype, x.rows, w1->shape[0], w1->shape[1]);
    p.a = ms__data(x.t), p.a_rs = x.rs, p.a_cs = x.t->stride[x.t->ndim - 1];
    p.b = ms__data(w1), p.b_rs = w1->stride[1], p.b_cs = w1->stride[0];
    p.bias = data_of(h.in[B1]);
    p.c = ms__data(hidden.t);
    p.epilogue = PRODUCT_GELU;
    p.aux = ms__data(before.t);
    MS_TRY(ms__cuda_product(index_of(c->out[0]), &p));
    ms_call second = linear_call(c, hidden.t, c->in[W2], h.in[B2]);
    second.out[0] = c->out[0];
    second.n_out = 1;
    return run_linear(&second);
}
// Inputs: gradient, x, w1, w2, before, hidden (may be NULL), and optionally the gradients that w1 and w2 already have.
static ms_status run_gelu_mlp_backward(ms_call *c)
{
    activations hidden, d;
    matrix_rows g;
    ms_tensor *x = c->in[1], *w1 = c->in[2], *w2 = c->in[3], *before = c->in[4];
    ms_tensor *dx = ms__grad_out(c, X), *dw1 = ms__grad_out(c, W1), *db1 = ms__grad_out(c, B1),
              *dw2 = ms__grad_out(c, W2), *db2 = ms__grad_out(c, B2);
    int index = index_of(x);
    MS_TRY(g.take(c->in[0]));
    product p = product_of(c->op->name, x->dtype, g.rows, w1->shape[0], w2->shape[0]);
    p.aux = ms__data(before);
    MS_TRY(hidden.take(c, c->in[5], x, w1));
    if (!c->in[5] && dw2 && before->numel) {
        p.epilogue = PRODUCT_GELU;
        p.c = ms__data(hidden.t);
        MS_TRY(ms__cuda_gelu(index, &p));
    }
    ms_call second = linear_call(c, c->in[0], hidden.t, w2);
    want(&second, 1, dw2);
    want(&second, 2, db2);
    MS_TRY(linear_gradients(&second, c->n_in > 7 ? c->in[7] : NULL));
    if (!dx && !dw1 && !db1) return MS_OK;
    MS_TRY(d.take(c, NULL, x, w1));
    p.a = ms__data(g.t), p.a_rs = g.rs, p.a_cs = g.t->stride[g.t->ndim - 1];
    p.b = ms__data(w2), p.b_rs = w2->stride[0], p.b_cs = w2->stride[1];
    p.c = ms__data(d.t);
    p.epilogue = PRODUCT_GELU_GRADIENT;
    p.column_sums = data_of(db1);
    MS_TRY(ms__cuda_product(index, &p));
    if (db1 && !p.summed) MS_TRY(ms__cuda_column_sum(d.t, d.t->numel ? g.rows : 0, w1->shape[0], db1));
    ms_call first = linear_call(c, d.t, x, w1);
    want(&first, 0, dx);
    want(&first, 1, dw1);
    return linear_gradients(&first, c->n_in > 6 ? c->in[6] : NULL);
}

extern const ms_cuda_kernel ms__cuda_product_rows[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_product_rows[] = { ROW(linear) ROW(linear_backward) ROW(matmul) ROW(gelu_mlp)
                                                     ROW(gelu_mlp_backward) ROW(linear_parts) { NULL, NULL } };
