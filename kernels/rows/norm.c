// SPDX-License-Identifier: MIT
// rows/norm.c -- rows of softmax, log_softmax, layer_norm and rms_norm.
#include "cpu/rows/layers.h"
#include "rows/grad.h"

static ms_status floats_only(ms_call *c)
{
    for (int k = 0; k < c->n_in; k++) {
        if (!c->in[k]) continue;
        if (!ms__is_float(c->in[k]->dtype))
            return ms__call_fail(c, "needs a floating-point dtype, got %s", ms__tensor_text(c->in[k]));
        if (c->in[k]->dtype != c->in[0]->dtype)
            return ms__call_fail(c, "all arguments must have the same dtype, got %s and, as argument %d, %s",
                                 ms__tensor_text(c->in[0]), k + 1, ms__tensor_text(c->in[k]));
    }
    return MS_OK;
}

// ---- softmax --------------------------------------------------------------------------------------

static ms_status softmax_check(ms_call *c)
{
    int d;
    MS_TRY(floats_only(c));
    if (c->n_i < 1) return ms__call_fail(c, "needs a dimension");
    MS_TRY(ms__call_dim(c, c->i[0], c->in[0]->ndim, &d));
    return ms__call_out_like(c, 0, c->in[0]);
}

// Inputs: gradient, output. Integers: dimension, the mask (rows/grad.h).
static ms_status softmax_backward_check(ms_call *c) { return ms__call_out_like(c, 0, c->in[1]); }

static const ms_op op_softmax_backward =
    MS_ROW("softmax_backward", 2, 2, .check = softmax_backward_check, .run = { [MS_CPU] = ms__cpu_softmax_backward });
static const ms_op op_log_softmax_backward = MS_ROW("log_softmax_backward", 2, 2, .check = softmax_backward_check,
                                                    .run = { [MS_CPU] = ms__cpu_log_softmax_backward });

static ms_status softmax_backward(ms_backward_call *b)
{
    return ms__grad_op(b, &op_softmax_backward, 2, (ms_tensor *[]) { b->gout[0], b->out[0] }, false);
}
static ms_status log_softmax_backward(ms_backward_call *b)
{
    return ms__grad_op(b, &op_log_softmax_backward, 2, (ms_tensor *[]) { b->gout[0], b->out[0] }, false);
}

#define SOFTMAX_SAMPLES \
    "[3,4] i=1; [3,4] i=0; [2,3,4] i=1; [2,3,4] i=-1; [5] i=0; [] i=0; [3,0] i=1; [0,3] i=1; [2,70] i=1; [3,300] i=1"

static const ms_op op_softmax =
    MS_ROW("softmax", 1, 1, .flags = MS_OP_WIDE, .save_out = 1, .check = softmax_check,
           .run = { [MS_CPU] = ms__cpu_softmax }, .backward = softmax_backward, .samples = SOFTMAX_SAMPLES);
static const ms_op op_log_softmax =
    MS_ROW("log_softmax", 1, 1, .flags = MS_OP_WIDE, .save_out = 1, .check = softmax_check,
           .run = { [MS_CPU] = ms__cpu_log_softmax }, .backward = log_softmax_backward, .samples = SOFTMAX_SAMPLES);

// ---- layer_norm, rms_norm -------------------------------------------------------------------------

// Checks that weight and bias have the shape of the normalised dimensions, x's last `dims`.
static ms_status norm_check(ms_call *c, int dims)
{
    const ms_tensor *x = c->in[0];
    MS_TRY(floats_only(c));
    if (c->n_f < 1) return ms__call_fail(c, "needs eps");
    if (dims < 1 || dims > x->ndim)
        return ms__call_fail(
            c, "the number of normalised dimensions must be 1 or more, and at most that of the input %s, got %d",
            ms__tensor_text(x), dims);
    for (int k = 1; k < c->n_in; k++) {
        const ms_tensor *w = c->in[k];
        if (w && (w->ndim != dims || memcmp(w->shape, x->shape + x->ndim - dims, (size_t)dims * sizeof *w->shape) != 0))
            return ms__call_fail(c, "the %s must be %s, the normalised dimensions of the input, got %s",
                                 k == 1 ? "weight" : "bias", ms__shape_text(dims, x->shape + x->ndim - dims),
                                 ms__shape_text(w->ndim, w->shape));
    }
    return ms__call_out_like(c, 0, x);
}

static ms_status layer_norm_check(ms_call *c)
{
    if (c->n_i < 1) return ms__call_fail(c, "needs the number of normalised dimensions");
    return norm_check(c, (int)c->i[0]);
}
static ms_status rms_norm_check(ms_call *c) { return norm_check(c, 1); }

// Inputs: gradient, x, w (optional), and optionally the gradient that x already has. The last integer is the mask
// (rows/grad.h). Outputs: those of dx, dw, db that the mask selects; dw and db have the shape of the normalised
// dimensions.
static ms_status norm_backward_check(ms_call *c, int dims)
{
    const ms_tensor *x = c->in[1];
    int64_t mask = c->i[c->n_i - 1];
    int k = 0;
    if (c->n_in == 4) ms__call_inplace(c, k++, 3);
    else if (mask & 1) MS_TRY(ms__call_out_like(c, k++, x));
    for (int in = 1; in <= 2; in++)
        if (mask >> in & 1) MS_TRY(ms__call_out(c, k++, x->dtype, ms__device(x), dims, x->shape + x->ndim - dims));
    return MS_OK;
}
static ms_status layer_norm_backward_check(ms_call *c) { return norm_backward_check(c, (int)c->i[0]); }
static ms_status rms_norm_backward_check(ms_call *c) { return norm_backward_check(c, 1); }

static const ms_op op_layer_norm_backward = MS_ROW("layer_norm_backward", 2, 4, .check = layer_norm_backward_check,
                                                   .run = { [MS_CPU] = ms__cpu_layer_norm_backward });
static const ms_op op_rms_norm_backward = MS_ROW("rms_norm_backward", 2, 4, .check = rms_norm_backward_check,
                                                 .run = { [MS_CPU] = ms__cpu_rms_norm_backward });

// On a GPU the kernel adds dx to the gradient that x already has, if any. x has one if a residual connection uses it,
// too; adding to it saves a launch and two passes over dx.
static ms_status norm_backward(ms_backward_call *b, const ms_op *op)
{
    ms_tensor *so_far = b->need[0] && ms__is_cuda(b->in_meta[0].device) ? b->so_far(b, 0) : NULL;
    ms_tensor *in[] = { b->gout[0], b->in[0], b->n_in > 1 ? b->in[1] : NULL, so_far };
    return ms__grad_op(b, op, so_far ? 4 : 3, in, false);
}
static ms_status layer_norm_backward(ms_backward_call *b) { return norm_backward(b, &op_layer_norm_backward); }
static ms_status rms_norm_backward(ms_backward_call *b) { return norm_backward(b, &op_rms_norm_backward); }

static const ms_op op_layer_norm =
    MS_ROW("layer_norm", 1, 3, .flags = MS_OP_WIDE, .save_in = 3, .check = layer_norm_check,
           .run = { [MS_CPU] = ms__cpu_layer_norm }, .backward = layer_norm_backward,
           .samples =
               "[3,8] [8] [8] i=1 f=1e-5; [3,8] i=1 f=1e-5; [3,8] [8] i=1 f=1e-5; [2,3,4] [3,4] [3,4] i=2 f=1e-3; "
               "[2,3,20] [20] [20] i=1 f=1e-5; [0,4] [4] [4] i=1 f=1e-5; "
               "[70,130] [130] [130] i=1 f=1e-5");
static const ms_op op_rms_norm =
    MS_ROW("rms_norm", 1, 2, .flags = MS_OP_WIDE, .save_in = 3, .check = rms_norm_check,
           .run = { [MS_CPU] = ms__cpu_rms_norm }, .backward = rms_norm_backward,
           .samples = "[3,8] [8] f=1e-5; [3,8] f=1e-5; [2,3,20] [20] f=1e-5; [0,4] [4] f=1e-5; [70,130] [130] f=1e-5");

const ms_op *const ms__ops_norm[] = {
    &op_softmax,    &op_softmax_backward,    &op_log_softmax, &op_log_softmax_backward,
    &op_layer_norm, &op_layer_norm_backward, &op_rms_norm,    &op_rms_norm_backward,
    NULL,
};
