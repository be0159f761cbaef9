// SPDX-License-Identifier: MIT
// rows/layers/loss.c -- cross_entropy, linear_cross_entropy and mse_loss.
#include "cpu/rows/layers.h"
#include "rows/grad.h"

enum { NONE, MEAN, SUM };

static ms_status check_reduction(ms_call *c)
{
    if (c->i[0] < NONE || c->i[0] > SUM)
        return ms__call_fail(c, "the reduction must be 0 (none), 1 (mean) or 2 (sum), got %lld", (long long)c->i[0]);
    return MS_OK;
}

// ---- cross_entropy --------------------------------------------------------------------------------

static ms_status not_ids(ms_call *c, const ms_tensor *ids)
{
    return ms__call_fail(c,
                         "target must be int64 or int32, got %s %s; write target:long(), or make it with "
                         "ms.tensor(..., { dtype = \"int64\" })",
                         ms__dtype_name(ids->dtype), ms__shape_text(ids->ndim, ids->shape));
}

// Integers: reduction, ignore_index, and wide: whether the loss of half-precision logits is float32.
// out[1]: log(sum(exp(logits))) of each row, in float32 or float64, so that backward needs one pass.
static ms_status cross_entropy_check(ms_call *c)
{
    const ms_tensor *x = c->in[0], *ids = c->in[1], *w = c->n_in > 2 ? c->in[2] : NULL;
    MS_TRY(check_reduction(c));
    if (!ms__is_float(x->dtype)) return ms__call_fail(c, "input must be floating point, got %s", ms__tensor_text(x));
    if (x->ndim < 1 || x->ndim > 2)
        return ms__call_fail(c, "input must be [classes] or [n, classes], got %s", ms__tensor_text(x));
    if (ids->dtype != MS_I64 && ids->dtype != MS_I32) return not_ids(c, ids);
    if (ids->ndim != x->ndim - 1 || (ids->ndim && ids->shape[0] != x->shape[0]))
        return ms__call_fail(c, "target must be %s for input %s, got %s", ms__shape_text(x->ndim - 1, x->shape),
                             ms__shape_text(x->ndim, x->shape), ms__shape_text(ids->ndim, ids->shape));
    if (w && (w->ndim != 1 || w->shape[0] != x->shape[x->ndim - 1] || w->dtype != x->dtype))
        return ms__call_fail(c, "the class weights must be %s [%lld], got %s", ms__dtype_name(x->dtype),
                             (long long)x->shape[x->ndim - 1], ms__tensor_text(w));
    if (c->n_f > 0 && !(c->f[0] >= 0 && c->f[0] <= 1))
        return ms__call_fail(c, "label_smoothing must be from 0 to 1, got %g", c->f[0]);
    int loss = x->dtype != MS_F64 && c->n_i > 2 && c->i[2] ? MS_F32 : x->dtype;
    MS_TRY(ms__call_out(c, 0, loss, ms__device(x), c->i[0] == NONE ? ids->ndim : 0, ids->shape));
    return ms__call_out(c, 1, x->dtype == MS_F64 ? MS_F64 : MS_F32, ms__device(x), ids->ndim, ids->shape);
}

// Inputs: gradient, logits, ids, weight (optional), logsumexp, and optionally its gradient. Integers: those of
// cross_entropy, then the mask (rows/grad.h). Number: label_smoothing.
static ms_status cross_entropy_backward_check(ms_call *c) { return ms__call_out_like(c, 0, c->in[1]); }

static const ms_op op_cross_entropy_backward =
    MS_ROW("cross_entropy_backward", 5, 6, .check = cross_entropy_backward_check,
           .run = { [MS_CPU] = ms__cpu_cross_entropy_backward });

static ms_status cross_entropy_backward(ms_backward_call *b)
{
    ms_tensor *in[] = { b->gout[0], b->in[0], b->in[1], b->n_in > 2 ? b->in[2] : NULL, b->out[1], b->gout[1] },
              *none = NULL;
    if (b->n_in > 2 && b->need[2])
        return ms__fail(MS_EUNSUPPORTED,
                        "cross_entropy: gradients of class weights are not supported; detach the weights");
    if (!in[0]) {  // only the logsumexp was used
        MS_TRY(ms__zeros_of(&none, &b->out_meta[0]));
        in[0] = b->gout[0] = none;
    }
    ms_status st = ms__grad_op(b, &op_cross_entropy_backward, 6, in, false);
    if (none) b->gout[0] = NULL;
    ms__release(none);
    return st;
}

static const ms_op op_cross_entropy =
    MS_ROW("cross_entropy", 2, 3, .takes = "target, weight? | reduction, ignore_index=-100, wide=0; label_smoothing=0",
           .doc = "The cross-entropy between logits and classes.", .flags = MS_OP_WIDE, .save_in = 7, .save_out = 2,
           .check = cross_entropy_check, .run = { [MS_CPU] = ms__cpu_cross_entropy },
           .backward = cross_entropy_backward,
           .samples =
               "[4,5] [4]i5 i=1,-100; [4,5] [4]i5 i=0,-100; [4,5] [4]i5 i=2,-100; [6,5] [6]i5 i=1,2; [4,5] [4]i5 "
               "i=1,-100 f=0.1; [5] []i5 i=1,-100; [40,300] [40]i300 i=1,-100; "
               "[6,5] [6]i5 i=1,2 f=0.3; [0,5] [0]i5 i=2,-100; [3,17] [3]i17 i=0,4 f=0.2");

// ---- linear_cross_entropy -------------------------------------------------------------------------

// cross_entropy of x w^T + bias, in chunks of rows, so that the logits of all rows need not exist at once. Inputs: x,
// w, ids, and optionally bias and class weights. Integers: reduction, ignore_index, rows of a chunk (0: all), wide as
// in cross_entropy, and one that the check adds: the mask of the inputs whose gradients are computed with the loss.
// These gradients are for a loss whose own gradient is 1; backward multiplies them by the loss's gradient. With
// reduction "none" and in float16 they are computed in backward instead, which computes the logits again: with "none"
// each row has a gradient of its own, and in float16 small gradients would round to 0 without the loss's scale.
enum { X, W, IDS, BIAS, WEIGHT, INPUTS };  // inputs; gradients of X, W and BIAS are outputs 1, 2 and 3

static const int differentiable[] = { X, W, BIAS };

static ms_status linear_cross_entropy_check(ms_call *c)
{
    const ms_tensor *x = c->in[X], *w = c->in[W], *ids = c->in[IDS];
    MS_TRY(check_reduction(c));
    if (x->ndim != 2 || w->ndim != 2 || x->shape[1] != w->shape[1])
        return ms__call_fail(c, "the input must be [n, in] and the weight [classes, in], got %s and %s",
                             ms__tensor_text(x), ms__tensor_text(w));
    if (!ms__is_float(x->dtype) || w->dtype != x->dtype)
        return ms__call_fail(c, "input and weight must have the same floating-point dtype, got %s and %s",
                             ms__tensor_text(x), ms__tensor_text(w));
    if (ids->dtype != MS_I64 && ids->dtype != MS_I32) return not_ids(c, ids);
    if (ids->ndim != 1 || ids->shape[0] != x->shape[0])
        return ms__call_fail(c, "target must be [%lld], got %s", (long long)x->shape[0], ms__tensor_text(ids));
    for (int k = BIAS; k <= WEIGHT; k++) {
        const ms_tensor *v = c->n_in > k ? c->in[k] : NULL;
        if (v && (v->ndim != 1 || v->shape[0] != w->shape[0] || v->dtype != x->dtype))
            return ms__call_fail(c, "the %s must be %s [%lld], got %s", k == BIAS ? "bias" : "class weights",
                                 ms__dtype_name(x->dtype), (long long)w->shape[0], ms__tensor_text(v));
    }
    if (c->n_f > 0 && !(c->f[0] >= 0 && c->f[0] <= 1))
        return ms__call_fail(c, "label_smoothing must be from 0 to 1, got %g", c->f[0]);
    if (c->n_i > 2 && c->i[2] < 0)
        return ms__call_fail(c, "a chunk must have 1 or more rows, or 0 for all rows; got %lld", (long long)c->i[2]);
    for (; c->n_i < 5; c->n_i++) c->i[c->n_i] = c->n_i == 1 ? -100 : 0;
    // Under autocast the loss is float32, as in cross_entropy.
    c->i[3] = x->dtype != MS_F64 && (c->i[3] || ms__state.autocast);
    c->i[4] = 0;
    bool at_once = c->i[0] != NONE && x->dtype != MS_F16 && ms__state.grad_mode && !ms__is_meta(ms__device(x));
    for (int k = 0; k < MS_COUNT(differentiable); k++) {
        int in = differentiable[k];
        if (at_once && in < c->n_in && c->in[in] && c->in[in]->requires_grad) c->i[4] |= (int64_t)1 << in;
    }
    MS_TRY(ms__call_out(c, 0, c->i[3] ? MS_F32 : x->dtype, ms__device(x), c->i[0] == NONE ? 1 : 0, ids->shape));
    while (c->n_out <= MS_COUNT(differentiable)) c->out[c->n_out++] = NULL;  // the kernel allocates these outputs
    return MS_OK;
}

// Inputs: gradient, then the inputs of linear_cross_entropy. The last integer is the mask (rows/grad.h). Outputs: those
// of dx, dw, dbias that the mask selects.
static ms_status linear_cross_entropy_backward_check(ms_call *c)
{
    for (int k = 0, n = 0; k < MS_COUNT(differentiable); k++)
        if (c->i[c->n_i - 1] >> differentiable[k] & 1) MS_TRY(ms__call_out_like(c, n++, c->in[1 + differentiable[k]]));
    return MS_OK;
}

static const ms_op op_linear_cross_entropy_backward =
    MS_ROW("linear_cross_entropy_backward", 4, 6, .check = linear_cross_entropy_backward_check,
           .run = { [MS_CPU] = ms__cpu_linear_cross_entropy_backward });

static ms_status linear_cross_entropy_backward(ms_backward_call *b)
{
    if (b->n_in > WEIGHT && b->need[WEIGHT])
        return ms__fail(MS_EUNSUPPORTED,
                        "linear_cross_entropy: gradients of class weights are not supported; detach the weights");
    if (b->i[4] == 0) {
        ms_tensor *in[1 + INPUTS] = { b->gout[0] };
        for (int k = 0; k < b->n_in; k++) in[1 + k] = b->in[k];
        return ms__grad_op(b, &op_linear_cross_entropy_backward, 1 + INPUTS, in, false);
    }
    for (int k = 0; k < MS_COUNT(differentiable); k++) {
        int in = differentiable[k];
        if (b->gout[0] && in < b->n_in && b->need[in])
            MS_TRY(ms__op2(&b->gin[in], &ms__op_mul, b->out[1 + k], b->gout[0]));
    }
    return MS_OK;
}

static const ms_op op_linear_cross_entropy =
    MS_ROW("linear_cross_entropy", 3, 5,
           .takes = "linear_weight, ids, linear_bias?, weight? | reduction, ignore_index=-100, rows=0, wide=0; "
                    "label_smoothing=0",
           .doc = "cross_entropy of a linear layer's results, which are made for `rows` rows at a time (0: a number "
                  "that fits the caches).",
           .flags = MS_OP_LOW, .save_in = 31, .save_out = 14, .n_shown = 1, .check = linear_cross_entropy_check,
           .run = { [MS_CPU] = ms__cpu_linear_cross_entropy }, .backward = linear_cross_entropy_backward,
           .samples =
               "[4,3] [5,3] [4]i5 i=1,-100,2; [5,3] [7,3] [5]i7 [7] i=1,2,2; [5,3] [7,3] [5]i7 i=0,-100,2; [5,3] [4,3] "
               "[5]i4 [4] i=2,-100,3 f=0.1; [6,9] [11,9] [6]i11 [11] i=0,3,4 f=0.2; [9,4] [6,4] [9]i6 i=2,1,4; "
               "[3,2] [4,2] [3]i4 i=1,-100; [40,20] [300,20] [40]i300 [300] i=1,-100,16; [0,3] [5,3] [0]i5 i=2,-100,1");

// ---- mse_loss -------------------------------------------------------------------------------------

static ms_status mse_loss_check(ms_call *c)
{
    const ms_tensor *a = c->in[0], *b = c->in[1];
    MS_TRY(check_reduction(c));
    if (!ms__is_float(a->dtype) || a->dtype != b->dtype)
        return ms__call_fail(c, "both arguments must have %s dtype, got %s and %s",
                             ms__is_float(a->dtype) ? "the same" : "a floating-point", ms__tensor_text(a),
                             ms__tensor_text(b));
    if (a->ndim != b->ndim || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0)
        return ms__call_fail(c, "both arguments must have the same shape, got %s and %s",
                             ms__shape_text(a->ndim, a->shape), ms__shape_text(b->ndim, b->shape));
    return ms__call_out(c, 0, a->dtype, ms__device(a), c->i[0] == NONE ? a->ndim : 0, a->shape);
}

// Inputs: gradient, a, b. Integers: reduction, the mask (rows/grad.h). Outputs: those of da, db that are
// needed.
static ms_status mse_loss_backward_check(ms_call *c)
{
    int64_t mask = c->i[c->n_i - 1];
    int k = 0;
    for (int in = 0; in < 2; in++)
        if (mask >> in & 1) MS_TRY(ms__call_out_like(c, k++, c->in[1]));
    return MS_OK;
}

static const ms_op op_mse_loss_backward = MS_ROW("mse_loss_backward", 3, 3, .check = mse_loss_backward_check,
                                                 .run = { [MS_CPU] = ms__cpu_mse_loss_backward });

static ms_status mse_loss_backward(ms_backward_call *b)
{
    return ms__grad_op(b, &op_mse_loss_backward, 3, (ms_tensor *[]) { b->gout[0], b->in[0], b->in[1] }, false);
}

static const ms_op op_mse_loss =
    MS_ROW("mse_loss", 2, 2, .takes = "target | reduction", .doc = "The squares of the differences.",
           .flags = MS_OP_WIDE, .save_in = 3, .check = mse_loss_check, .run = { [MS_CPU] = ms__cpu_mse_loss },
           .backward = mse_loss_backward,
           .samples =
               "[3,4] [3,4] i=1; [3,4] [3,4] i=0; [3,4] [3,4] i=2; [] [] i=1; [0,3] [0,3] i=2; [70,33] [70,33] i=1");

MS_OPERATORS = {
    &op_cross_entropy, &op_cross_entropy_backward, &op_linear_cross_entropy, &op_linear_cross_entropy_backward,
    &op_mse_loss,      &op_mse_loss_backward
};
