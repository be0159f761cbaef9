// SPDX-License-Identifier: MIT
// rows/layers/mlp.c -- gelu_mlp: gelu(x w1^T + b1) w2^T + b2, with tanh's form of GELU. On the CPU it calls the kernels
// of linear and gelu, so it gives the same bits as these; on a GPU the products also compute GELU and its gradient
// (cuda/product/linear.cu).
//
// Sizes: x [..., in], w1 [hidden, in], w2 [out, hidden]. Outputs for backward: `before`, what GELU is applied to, and
// `hidden`, its result; hidden is not kept if backward is to compute it again.
#include "cpu/rows/layers.h"
#include "rows/grad.h"
#include "rows/product.h"

enum { X, W1, W2, B1, B2 };
enum { Y, BEFORE, HIDDEN, OUTPUTS };

static bool is_mlp_recorded(const ms_call *c)
{
    bool wanted = false;
    for (int k = 0; k < c->n_in; k++) wanted |= c->in[k] && c->in[k]->requires_grad;
    return wanted && ms__state.grad_mode;
}

static ms_tensor *optional(const ms_call *c, int k) { return c->n_in > k ? c->in[k] : NULL; }

// Checks a weight and its bias; the input has `size` columns.
static ms_status check_layer(ms_call *c, int w, int bias, int64_t size, const char *name)
{
    const ms_tensor *t = c->in[w], *b = optional(c, bias);
    if (t->ndim != 2 || t->shape[1] != size)
        return ms__call_fail(c, "the %s weight must be [out, %lld], got %s", name, (long long)size, ms__tensor_text(t));
    if (b && (b->ndim != 1 || b->shape[0] != t->shape[0]))
        return ms__call_fail(c, "the %s bias must be [%lld], got %s", name, (long long)t->shape[0],
                             ms__shape_text(b->ndim, b->shape));
    return MS_OK;
}

static ms_status gelu_mlp_check(ms_call *c)
{
    const ms_tensor *x = c->in[X];
    for (int k = 0; k < c->n_in; k++) {
        if (!c->in[k]) continue;
        if (!ms__is_float(c->in[k]->dtype) || c->in[k]->dtype != x->dtype)
            return ms__call_fail(
                c, "all arguments must have the same floating-point dtype, got %s and, as argument %d, %s",
                ms__tensor_text(x), k + 1, ms__tensor_text(c->in[k]));
    }
    if (x->ndim < 1) return ms__call_fail(c, "the input needs at least 1 dimension, got %s", ms__tensor_text(x));
    MS_TRY(check_layer(c, W1, B1, x->shape[x->ndim - 1], "first"));
    MS_TRY(check_layer(c, W2, B2, c->in[W1]->shape[0], "second"));
    if (c->n_i < 1) c->i[c->n_i++] = 0;
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = c->in[W2]->shape[0];
    MS_TRY(ms__call_out(c, Y, x->dtype, ms__device(x), x->ndim, shape));
    shape[x->ndim - 1] = c->in[W1]->shape[0];
    bool keep = is_mlp_recorded(c);
    for (int k = BEFORE; k < OUTPUTS; k++) {
        c->out[k] = NULL;
        c->n_out = k + 1;
        if (keep && (k == BEFORE || !c->i[0])) MS_TRY(ms__call_out(c, k, x->dtype, ms__device(x), x->ndim, shape));
    }
    return MS_OK;
}

// ---- CPU ----

static ms_status kernel(const ms_op *op, ms_call *sub)
{
    sub->op = op;
    return op->run[MS_CPU](sub);
}
static ms_status gelu(ms_tensor *before, ms_tensor *hidden)
{
    return kernel(&ms__op_gelu,
                  &(ms_call) { .n_in = 1, .in = { before }, .n_out = 1, .out = { hidden }, .n_i = 1, .i = { 1 } });
}
static ms_status linear(ms_tensor *x, ms_tensor *w, ms_tensor *b, ms_tensor *y)
{
    return kernel(&ms__op_linear, &(ms_call) { .n_in = 3, .in = { x, w, b }, .n_out = 1, .out = { y } });
}
// Sets *out to `given` (retained) or, if that is NULL, to a new tensor of the hidden activations' shape.
static ms_status take_hidden(ms_tensor **out, ms_tensor *given, const ms_call *c, const ms_tensor *x,
                             const ms_tensor *w1)
{
    int64_t shape[MS_MAX_DIMS];
    *out = NULL;
    if (given) {
        *out = ms__retain(given);
        return MS_OK;
    }
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = w1->shape[0];
    return ms__tensor_new(out, x->dtype, ms__device(x), x->ndim, shape, c->op->name);
}

static ms_status cpu_gelu_mlp(ms_call *c)
{
    ms_tensor *before = NULL, *hidden = NULL;
    ms_status st = take_hidden(&before, c->out[BEFORE], c, c->in[X], c->in[W1]);
    // If nothing is kept for backward, GELU overwrites its input.
    ms_tensor *to = c->out[BEFORE] ? c->out[HIDDEN] : before;
    if (st == MS_OK) st = take_hidden(&hidden, to, c, c->in[X], c->in[W1]);
    if (st == MS_OK) st = linear(c->in[X], c->in[W1], optional(c, B1), before);
    if (st == MS_OK) st = gelu(before, hidden);
    if (st == MS_OK) st = linear(hidden, c->in[W2], optional(c, B2), c->out[Y]);
    ms__release(hidden);
    ms__release(before);
    return st;
}

// The inputs of backward: the gradient of y, x, w1, w2 and what forward kept (HIDDEN may be absent); on a GPU also the
// gradients that the weights already have, if any.
enum { G, IN_X, IN_W1, IN_W2, IN_BEFORE, IN_HIDDEN, SO_FAR_1, SO_FAR_2 };

// Computes the gradients of one layer. out: dx, dw and db; those that are not needed are NULL.
static ms_status mlp_linear_backward(ms_tensor *g, ms_tensor *x, ms_tensor *w, ms_tensor *const *out)
{
    ms_call sub = { .n_in = 3, .in = { g, x, w }, .n_i = 1 };
    for (int k = 0; k < 3; k++)
        if (out[k]) {
            sub.i[0] |= (int64_t)1 << k;
            sub.out[sub.n_out++] = out[k];
        }
    return sub.n_out ? kernel(&ms__op_linear_backward, &sub) : MS_OK;
}
static ms_status cpu_gelu_mlp_backward(ms_call *c)
{
    ms_tensor *kept = c->in[IN_HIDDEN], *g = c->in[G], *x = c->in[IN_X], *w1 = c->in[IN_W1], *before = c->in[IN_BEFORE],
              *hidden = NULL, *d = NULL;
    ms_tensor *first[] = { ms__grad_out(c, X), ms__grad_out(c, W1), ms__grad_out(c, B1) };
    bool inner = first[0] || first[1] || first[2];
    ms_status st = take_hidden(&hidden, kept, c, x, w1);
    if (st == MS_OK && !kept) st = gelu(before, hidden);
    if (st == MS_OK && inner) st = take_hidden(&d, NULL, c, x, w1);
    ms_tensor *second[] = { inner ? d : NULL, ms__grad_out(c, W2), ms__grad_out(c, B2) };
    if (st == MS_OK) st = mlp_linear_backward(g, hidden, c->in[IN_W2], second);
    if (st == MS_OK && inner)
        st = kernel(&ms__op_gelu_backward,
                    &(ms_call) { .n_in = 2, .in = { d, before }, .n_out = 1, .out = { d }, .n_i = 1, .i = { 1 } });
    if (st == MS_OK && inner) st = mlp_linear_backward(d, x, w1, first);
    ms__release(d);
    ms__release(hidden);
    return st;
}

// ---- backward ----

// Integers: recompute, mask (rows/grad.h). Outputs: those of the gradients of x, w1, w2, b1, b2 that the mask selects.
// A weight's gradient is added to its earlier gradient, if the latter is an input.
static ms_status gelu_mlp_backward_check(ms_call *c)
{
    const ms_tensor *g = c->in[G];
    int64_t mask = c->i[c->n_i - 1];
    int k = 0;
    if (mask >> X & 1) MS_TRY(ms__call_out_like(c, k++, c->in[IN_X]));
    for (int layer = 0; layer < 2; layer++) {
        if (!(mask >> (W1 + layer) & 1)) continue;
        int so_far = SO_FAR_1 + layer;
        if (c->n_in > so_far && c->in[so_far]) ms__call_inplace(c, k++, so_far);
        else MS_TRY(ms__call_out_like(c, k++, c->in[IN_W1 + layer]));
    }
    for (int layer = 0; layer < 2; layer++)
        if (mask >> (B1 + layer) & 1)
            MS_TRY(ms__call_out(c, k++, g->dtype, ms__device(g), 1, c->in[IN_W1 + layer]->shape));
    return MS_OK;
}
static const ms_op op_gelu_mlp_backward =
    MS_ROW("gelu_mlp_backward", 6, 8, .check = gelu_mlp_backward_check, .run = { [MS_CPU] = cpu_gelu_mlp_backward });

static ms_status gelu_mlp_backward(ms_backward_call *b)
{
    bool there = ms__is_cuda(b->in_meta[X].device);
    ms_tensor *in[] = { b->gout[0],
                        b->in[X],
                        b->in[W1],
                        b->in[W2],
                        b->out[BEFORE],
                        b->out[HIDDEN],
                        there && b->need[W1] ? b->so_far(b, W1) : NULL,
                        there && b->need[W2] ? b->so_far(b, W2) : NULL };
    return ms__grad_op(b, &op_gelu_mlp_backward, in[7] ? 8 : in[6] ? 7 : 6, in, false);
}

static const ms_op op_gelu_mlp =
    MS_ROW("gelu_mlp", 3, 5, .takes = "w1, w2, b1?, b2? | recompute?",
           .doc = "gelu(x w1^T + b1) w2^T + b2, with gelu by tanh; recompute: backward computes the activations again.",
           .flags = MS_OP_LOW, .save_in = 1 << X | 1 << W1 | 1 << W2, .save_out = 1 << BEFORE | 1 << HIDDEN,
           .n_shown = 1, .check = gelu_mlp_check, .run = { [MS_CPU] = cpu_gelu_mlp }, .backward = gelu_mlp_backward,
           .samples = "[3,4] [8,4] [5,8] [8] [5]; [3,4] [8,4] [5,8] [8] [5] i=1; [2,3,4] [7,4] [5,7]; "
                      "[4] [8,4] [2,8] [8]; [20,19] [33,19] [17,33] - [17] i=1; [0,4] [8,4] [5,8] [8] [5]");

MS_OPERATORS = { &op_gelu_mlp, &op_gelu_mlp_backward };
