// SPDX-License-Identifier: MIT
// rows/linear_body.h -- linear, its gradients and linear_parts as products. The CPU (rows/product.c) and the GPU
// (cuda/product/linear.cu) include it and define PRODUCT (the struct of a product), PRODUCT_OF, MULTIPLY, ACCUMULATE
// (makes a product add to C), MULTIPLY_PARTS (several products with the same A), ADD_ROWS (sums g's rows) and
// MULTIPLY_AND_ADD_ROWS (a product that may also compute that sum, and then sets *summed).

// The products of linear's call c and of its gradients. x, g: its input and gradient as matrices of `rows` rows, rs
// elements apart. bias: contiguous; may be NULL.
static PRODUCT linear_product(const ms_call *c, const ms_tensor *x, const ms_tensor *bias, int64_t rows, int64_t rs)
{
    const ms_tensor *w = c->in[1];
    PRODUCT p = PRODUCT_OF("linear", x->dtype, rows, w->shape[0], w->shape[1]);
    p.a = ms__data(x), p.a_rs = rs, p.a_cs = x->stride[x->ndim - 1];
    p.b = ms__data(w), p.b_rs = w->stride[1], p.b_cs = w->stride[0];
    p.bias = bias ? ms__data(bias) : NULL;
    p.c = ms__data(c->out[0]);
    return p;
}

static PRODUCT dx_product(const ms_call *c, const ms_tensor *g, int64_t rows, int64_t rs)
{
    const ms_tensor *w = c->in[2];
    PRODUCT p = PRODUCT_OF("linear_backward", g->dtype, rows, w->shape[1], w->shape[0]);
    p.a = ms__data(g), p.a_rs = rs, p.a_cs = g->stride[g->ndim - 1];
    p.b = ms__data(w), p.b_rs = w->stride[0], p.b_cs = w->stride[1];
    p.c = ms__data(ms__grad_out(c, 0));
    return p;
}

static PRODUCT dw_product(const ms_call *c, const ms_tensor *g, int64_t g_rs, const ms_tensor *x, int64_t x_rs,
                          int64_t rows)
{
    const ms_tensor *w = c->in[2];
    PRODUCT p = PRODUCT_OF("linear_backward", g->dtype, w->shape[0], w->shape[1], rows);
    p.a = ms__data(g), p.a_rs = g->stride[g->ndim - 1], p.a_cs = g_rs;
    p.b = ms__data(x), p.b_rs = x_rs, p.b_cs = x->stride[x->ndim - 1];
    p.c = ms__data(ms__grad_out(c, 1));
    ACCUMULATE(p, c->n_in > 3);
    return p;
}

static ms_status run_linear(ms_call *c)
{
    ms_tensor *x, *bias = c->n_in > 2 ? c->in[2] : NULL, *b = NULL, *y = c->out[0];
    int64_t rows, rs;
    if (y->numel == 0) return MS_OK;
    MS_TRY(ms__as_rows(&x, c->in[0], &rows, &rs));
    ms_status st = bias ? ms__contiguous(&b, bias) : MS_OK;
    if (st == MS_OK) {
        PRODUCT p = linear_product(c, x, b, rows, rs);
        st = MULTIPLY(y, &p);
    }
    ms__release(b);
    ms__release(x);
    return st;
}

// Inputs: gradient, x, w, and optionally the gradient that w already has. Integer: mask (rows/grad.h). Outputs: those
// of dx = g w, dw = g^T x, db = sum of g's rows that the mask selects. If w already has a gradient, dw is that
// tensor, and the product is added to it.
static ms_status run_linear_backward(ms_call *c)
{
    ms_tensor *g = NULL, *x = NULL, *dx = ms__grad_out(c, 0), *dw = ms__grad_out(c, 1), *db = ms__grad_out(c, 2),
              *whole;
    int64_t rows, g_rs, x_rs = 0, outs = c->in[2]->shape[0];
    bool summed = false;
    ms_status st = ms__as_rows(&g, c->in[0], &rows, &g_rs);
    if (st == MS_OK && dw) st = ms__as_rows(&x, c->in[1], &rows, &x_rs);
    // The sum of rows needs adjacent columns.
    if (st == MS_OK && db && g->stride[g->ndim - 1] != 1 && outs > 1 && (st = ms__contiguous(&whole, g)) == MS_OK) {
        ms__release(g);
        g = whole;
        g_rs = outs;
    }
    if (st == MS_OK && dx) {
        PRODUCT p = dx_product(c, g, rows, g_rs);
        st = MULTIPLY(dx, &p);
    }
    if (st == MS_OK && dw) {
        PRODUCT p = dw_product(c, g, g_rs, x, x_rs, rows);
        st = MULTIPLY_AND_ADD_ROWS(dw, &p, db, &summed);
    }
    if (st == MS_OK && db && !summed) st = ADD_ROWS(g, rows, g_rs, db);
    ms__release(x);
    ms__release(g);
    return st;
}

#ifdef MULTIPLY_PARTS
// The products of linear_parts, whose results are adjacent columns. Inputs: x, the weights, their biases.
static ms_status run_linear_parts(ms_call *c)
{
    int n = (int)c->i[0], done = 0;
    ms_tensor *x, *y = c->out[0], *bias[MS_LINEAR_PARTS] = { NULL };
    PRODUCT p[MS_LINEAR_PARTS];
    int64_t rows, rs, at = 0, total = y->shape[y->ndim - 1];
    if (y->numel == 0) return MS_OK;
    MS_TRY(ms__as_rows(&x, c->in[0], &rows, &rs));
    ms_status st = MS_OK;
    for (int k = 0; k < n && st == MS_OK; k++) {
        ms_tensor *b = c->n_in > 1 + n + k ? c->in[1 + n + k] : NULL;
        ms_call part = *c;
        part.in[1] = c->in[1 + k];
        if (b) st = ms__contiguous(&bias[k], b);
        if (st != MS_OK || part.in[1]->shape[0] == 0) continue;
        p[done] = linear_product(&part, x, bias[k], rows, rs);
        p[done].c = (char *)p[done].c + at * ms__dtype_size(y->dtype);
        p[done++].c_rs = total;
        at += part.in[1]->shape[0];
    }
    if (st == MS_OK) st = MULTIPLY_PARTS(y, p, done);
    for (int k = 0; k < n; k++) ms__release(bias[k]);
    ms__release(x);
    return st;
}
#endif
