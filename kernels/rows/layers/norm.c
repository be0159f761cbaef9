// SPDX-License-Identifier: MIT
// rows/layers/norm.c -- softmax, log_softmax, layer_norm and rms_norm, also of a sum (add_layer_norm,
// add_rms_norm).
#include "cpu/rows/layers.h"
#include "rows/grad.h"
#include "rows/layout.h"

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
    MS_TRY(ms__call_last_dim(c, &d));
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
    MS_ROW("softmax", 1, 1, .takes = "dim=-1",
           .doc = "Exponentials that add up to 1 along a dimension: `e^t / sum(e^t)`.",
           .flags = MS_OP_WIDE | MS_OP_METHOD, .save_out = 1, .check = softmax_check,
           .run = { [MS_CPU] = ms__cpu_softmax }, .backward = softmax_backward, .samples = SOFTMAX_SAMPLES);
static const ms_op op_log_softmax =
    MS_ROW("log_softmax", 1, 1, .takes = "dim=-1",
           .doc = "The logarithm of softmax along a dimension, computed without overflow.",
           .flags = MS_OP_WIDE | MS_OP_METHOD, .save_out = 1, .check = softmax_check,
           .run = { [MS_CPU] = ms__cpu_log_softmax }, .backward = log_softmax_backward, .samples = SOFTMAX_SAMPLES);

// ---- layer_norm, rms_norm -------------------------------------------------------------------------

// The arguments of a norm: `plain` normalises x; `added` has a second input, the residual, and normalises x + residual.
typedef struct {
    const char *names[4];
    int weight;  // the index of the weight
    int sum;     // the index of the output x + residual; 0 if there is none
} norm_form;
static const norm_form plain = { { "input", "weight", "bias" }, 1, 0 },
                       added = { { "input", "residual", "weight", "bias" }, 2, 1 };

// Whether backward may need what a forward keeps.
static bool is_norm_recorded(const ms_call *c)
{
    bool wanted = false;
    for (int k = 0; k < c->n_in; k++) wanted |= c->in[k] && c->in[k]->requires_grad;
    return wanted && ms__state.grad_mode;
}

// Checks that weight and bias have the shape of the normalised dimensions, x's last `dims`. The last output has the
// mean (0 for rms_norm) and 1 / sqrt(variance + eps) of each row, in float32 or float64; NULL if no backward needs it.
static ms_status check_last_dims(ms_call *c, int dims, const norm_form *form)
{
    const ms_tensor *x = c->in[0];
    MS_TRY(floats_only(c));
    if (dims < 1 || dims > x->ndim)
        return ms__call_fail(
            c, "the number of normalised dimensions is %d, expected 1 to %d, the number of dimensions of %s", dims,
            x->ndim, ms__tensor_text(x));
    if (form->sum && !ms__has_shape(c->in[1], x->ndim, x->shape))
        return ms__call_fail(c, "the residual must have the input's shape %s, got %s",
                             ms__shape_text(x->ndim, x->shape), ms__shape_text(c->in[1]->ndim, c->in[1]->shape));
    for (int k = form->weight; k < c->n_in; k++) {
        const ms_tensor *w = c->in[k];
        if (w && (w->ndim != dims || memcmp(w->shape, x->shape + x->ndim - dims, (size_t)dims * sizeof *w->shape) != 0))
            return ms__call_fail(c, "the %s must be %s, the normalised dimensions of the input, got %s", form->names[k],
                                 ms__shape_text(dims, x->shape + x->ndim - dims), ms__shape_text(w->ndim, w->shape));
    }
    MS_TRY(ms__call_out_like(c, 0, x));
    if (form->sum) MS_TRY(ms__call_out_like(c, form->sum, x));
    int64_t n = ms__row_length(x, dims), stats[] = { n ? x->numel / n : 0, 2 };
    int at = form->sum + 1;
    if (!is_norm_recorded(c)) {
        c->out[at] = NULL;
        c->n_out = at + 1;
        return MS_OK;
    }
    return ms__call_out(c, at, x->dtype == MS_F64 ? MS_F64 : MS_F32, ms__device(x), 2, stats);
}

// The number of dimensions is 1 unless given, which is for rms_norm only.
static ms_status norm_check(ms_call *c, const norm_form *form)
{
    if (c->n_i < 1) c->i[c->n_i++] = 1;
    return check_last_dims(c, (int)c->i[0], form);
}
static ms_status layer_norm_check(ms_call *c) { return norm_check(c, &plain); }
static ms_status rms_norm_check(ms_call *c) { return norm_check(c, &plain); }
static ms_status add_layer_norm_check(ms_call *c) { return norm_check(c, &added); }
static ms_status add_rms_norm_check(ms_call *c) { return norm_check(c, &added); }

// Inputs: gradient, x, w (optional), mean and 1 / sqrt(variance + eps) of each row, and optionally the gradient that x
// already has, to which dx is added. The last integer is the mask (rows/grad.h). Outputs: those of dx, dw, db that the
// mask selects; dw and db have the shape of the normalised dimensions.
static ms_status norm_backward_check(ms_call *c)
{
    const ms_tensor *x = c->in[1];
    int64_t mask = c->i[c->n_i - 1];
    int k = 0, dims = (int)c->i[0];
    if (c->n_in == 5) ms__call_inplace(c, k++, 4);
    else if (mask & 1) MS_TRY(ms__call_out_like(c, k++, x));
    for (int in = 1; in <= 2; in++)
        if (mask >> in & 1) MS_TRY(ms__call_out(c, k++, x->dtype, ms__device(x), dims, x->shape + x->ndim - dims));
    return MS_OK;
}

static const ms_op op_layer_norm_backward = MS_ROW("layer_norm_backward", 4, 5, .check = norm_backward_check,
                                                   .run = { [MS_CPU] = ms__cpu_layer_norm_backward });
static const ms_op op_rms_norm_backward =
    MS_ROW("rms_norm_backward", 4, 5, .check = norm_backward_check, .run = { [MS_CPU] = ms__cpu_rms_norm_backward });

// On a GPU the kernel adds dx to the gradient that x already has, if any. x has one if a residual connection also
// uses x; adding to this gradient saves a launch and two passes over dx.
static ms_status norm_grad_op(ms_backward_call *b, const ms_op *op)
{
    ms_tensor *so_far = b->need[0] && ms__is_cuda(b->in_meta[0].device) ? b->so_far(b, 0) : NULL;
    ms_tensor *in[] = { b->gout[0], b->in[0], b->n_in > 1 ? b->in[1] : NULL, b->out[1], so_far };
    return ms__grad_op(b, op, so_far ? 5 : 4, in, false);
}
static ms_status layer_norm_backward(ms_backward_call *b) { return norm_grad_op(b, &op_layer_norm_backward); }
static ms_status rms_norm_backward(ms_backward_call *b) { return norm_grad_op(b, &op_rms_norm_backward); }

// x and the residual have the same gradient, that of their sum: of_sum, the sum's gradient as an output, plus the
// gradient through the norm. On a GPU the norm's kernel adds to of_sum in place if nothing else uses of_sum.
static ms_status add_norm_backward(ms_backward_call *b, const ms_op *op)
{
    ms_tensor *of_sum = b->gout[1], *out[3] = { NULL }, *all = of_sum ? ms__retain(of_sum) : NULL;
    int64_t i[MS_MAX_I];
    bool sum = b->need[0] || b->need[1];
    int n = b->n_i, n_out = 0, at = 0;
    if (b->gout[0]) {
        bool add = sum && of_sum && ms__is_cuda(ms__device(of_sum)) && of_sum->refs == 2 && !of_sum->slot &&
                   of_sum->storage->refs == 1 && ms__is_contiguous(of_sum);
        ms_tensor *in[] = { b->gout[0], b->out[1], b->n_in > 2 ? b->in[2] : NULL, b->out[2], of_sum };
        memcpy(i, b->i, (size_t)n * sizeof *i);
        i[n] = sum;
        for (int k = 2; k < b->n_in; k++) i[n] |= (int64_t)b->need[k] << (k - 1);
        for (int k = 0; k < 3; k++) n_out += i[n] >> k & 1;
        ms_status st =
            n_out ? ms__run_op(op, &(ms_op_args) { add ? 5 : 4, in, n + 1, i, b->n_f, b->f }, n_out, out) : MS_OK;
        if (st == MS_OK && sum && of_sum && !add) {
            ms_tensor *both = NULL;
            st = ms__op2(&both, ms__op_by_name("add"), of_sum, out[0]);
            ms__release(out[0]);
            out[0] = both;
        }
        ms__release(all);
        if (st != MS_OK) return st;
        all = sum ? out[at++] : NULL;
        for (int k = 2; k < b->n_in; k++)
            if (b->need[k]) b->gin[k] = out[at++];
    }
    if (all && b->need[0]) b->gin[0] = ms__retain(all);
    if (all && b->need[1]) b->gin[1] = ms__retain(all);
    ms__release(all);
    return MS_OK;
}
static ms_status add_layer_norm_backward(ms_backward_call *b) { return add_norm_backward(b, &op_layer_norm_backward); }
static ms_status add_rms_norm_backward(ms_backward_call *b) { return add_norm_backward(b, &op_rms_norm_backward); }

static const ms_op op_layer_norm =
    MS_ROW("layer_norm", 1, 3, .takes = "weight?, bias? | dims; eps",
           .doc = "Normalizes over the last dims dimensions: (x - mean) / sqrt(var + eps) * w + b.",
           .flags = MS_OP_WIDE, .save_in = 3, .save_out = 2, .n_shown = 1, .check = layer_norm_check,
           .run = { [MS_CPU] = ms__cpu_layer_norm }, .backward = layer_norm_backward,
           .samples =
               "[3,8] [8] [8] i=1 f=1e-5; [3,8] i=1 f=1e-5; [3,8] [8] i=1 f=1e-5; [2,3,4] [3,4] [3,4] i=2 f=1e-3; "
               "[2,3,20] [20] [20] i=1 f=1e-5; [0,4] [4] [4] i=1 f=1e-5; "
               "[70,130] [130] [130] i=1 f=1e-5");
static const ms_op op_rms_norm =
    MS_ROW("rms_norm", 1, 2, .takes = "weight? | dims=1; eps",
           .doc = "Normalizes over the last dims dimensions: x / sqrt(mean(x^2) + eps) * w.", .flags = MS_OP_WIDE,
           .save_in = 3, .save_out = 2, .n_shown = 1, .check = rms_norm_check, .run = { [MS_CPU] = ms__cpu_rms_norm },
           .backward = rms_norm_backward,
           .samples = "[3,8] [8] f=1e-5; [3,8] f=1e-5; [2,3,20] [20] i=1 f=1e-5; [2,3,4] [3,4] i=2 f=1e-3; "
                      "[2,3,4] i=2 f=1e-3; [0,4] [4] f=1e-5; [70,130] [130] f=1e-5");
static const ms_op op_add_layer_norm =
    MS_ROW("add_layer_norm", 2, 4, .takes = "residual, weight?, bias? | dims; eps",
           .doc = "layer_norm of the sum of two tensors, and that sum.", .flags = MS_OP_WIDE, .save_in = 4,
           .save_out = 6, .n_shown = 2, .check = add_layer_norm_check, .run = { [MS_CPU] = ms__cpu_add_layer_norm },
           .backward = add_layer_norm_backward,
           .samples = "[3,8] [3,8] [8] [8] i=1 f=1e-5; [3,8] [3,8] i=1 f=1e-5; [2,3,4] [2,3,4] [3,4] i=2 f=1e-3; "
                      "[0,4] [0,4] [4] [4] i=1 f=1e-5; [70,130] [70,130] [130] [130] i=1 f=1e-5");
static const ms_op op_add_rms_norm =
    MS_ROW("add_rms_norm", 2, 3, .takes = "residual, weight? | dims=1; eps",
           .doc = "rms_norm of the sum of two tensors, and that sum.", .flags = MS_OP_WIDE, .save_in = 4, .save_out = 6,
           .n_shown = 2, .check = add_rms_norm_check, .run = { [MS_CPU] = ms__cpu_add_rms_norm },
           .backward = add_rms_norm_backward,
           .samples = "[3,8] [3,8] [8] f=1e-5; [3,8] [3,8] f=1e-5; [2,3,4] [2,3,4] [3,4] i=2 f=1e-3; "
                      "[0,4] [0,4] [4] f=1e-5; [70,130] [70,130] [130] f=1e-5");

MS_OPERATORS = { &op_softmax,        &op_softmax_backward,    &op_log_softmax, &op_log_softmax_backward,
                 &op_layer_norm,     &op_layer_norm_backward, &op_rms_norm,    &op_rms_norm_backward,
                 &op_add_layer_norm, &op_add_rms_norm };
