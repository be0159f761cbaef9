// SPDX-License-Identifier: MIT
// rows/layers/batch_norm.c -- batch_norm: normalisation over all dimensions except the second.
//
// Training normalises by the statistics of the batch and returns them (biased variance); the caller updates the running
// statistics. With half types the statistics are float32, and the weights may be float32.
#include "cpu/rows/layers.h"
#include "rows/grad.h"
#include "rows/ops.h"

static int stats_dtype(int dtype) { return dtype == MS_F64 ? MS_F64 : MS_F32; }

// Inputs: x [N, C, ...], and optionally weight, bias, running mean and running var. Integers: training, and the number
// of adjacent channels that share their statistics. Number: eps. Outputs: y; in training also mean and var.
static ms_status batch_norm_check(ms_call *c)
{
    static const char *const what[] = { "input", "weight", "bias", "running mean", "running variance" };
    const ms_tensor *x = c->in[0];
    if (!ms__is_float(x->dtype)) return ms__call_fail(c, "needs a floating-point dtype, got %s", ms__tensor_text(x));
    if (x->ndim < 2)
        return ms__call_fail(c, "the input needs at least 2 dimensions, batch and channels, got %s",
                             ms__tensor_text(x));
    bool training = c->i[0] != 0;
    int64_t share = c->n_i > 1 ? c->i[1] : 1, statistics = x->shape[1] / (share > 0 ? share : 1);
    if (share < 1 || x->shape[1] % share || (share > 1 && !training))
        return ms__call_fail(c, "%lld channels cannot share statistics in the input %s%s", (long long)share,
                             ms__shape_text(x->ndim, x->shape), training ? "" : " when not training");
    for (int k = 1; k < c->n_in; k++) {
        const ms_tensor *t = c->in[k];
        if (!t) continue;
        if (t->ndim != 1 || t->shape[0] != x->shape[1])
            return ms__call_fail(c, "the %s must be [%lld], one number per channel of the input %s, got %s", what[k],
                                 (long long)x->shape[1], ms__shape_text(x->ndim, x->shape),
                                 ms__shape_text(t->ndim, t->shape));
        if (t->dtype != x->dtype && t->dtype != stats_dtype(x->dtype))
            return ms__call_fail(c, "the %s must be %s like the input%s, got %s", what[k], ms__dtype_name(x->dtype),
                                 x->dtype == stats_dtype(x->dtype) ? "" : ", or float32", ms__dtype_name(t->dtype));
    }
    if (!training && (c->n_in < 5 || !c->in[3] || !c->in[4]))
        return ms__call_fail(c, "needs a running mean and variance when not training");
    MS_TRY(ms__call_out_like(c, 0, x));
    for (int k = 1; training && k <= 2; k++)
        MS_TRY(ms__call_out(c, k, stats_dtype(x->dtype), ms__device(x), 1, &statistics));
    return MS_OK;
}

// Inputs: gradient (optional), x, weight (optional), mean, var, and optionally the gradients of mean and of var.
// Integers: training, channels that share statistics, the mask (rows/grad.h). Number: eps. Outputs: those of dx, dw, db
// and, in evaluation, of the gradients of the running statistics that the mask selects.
static ms_status batch_norm_backward_check(ms_call *c)
{
    const ms_tensor *x = c->in[1];
    int64_t mask = c->i[c->n_i - 1];
    int k = 0;
    if (mask & 1) MS_TRY(ms__call_out_like(c, k++, x));
    for (int in = 1; in < 5; in++)
        if (mask >> in & 1) MS_TRY(ms__call_out(c, k++, stats_dtype(x->dtype), ms__device(x), 1, &x->shape[1]));
    return MS_OK;
}

static const ms_op op_batch_norm_backward = MS_ROW("batch_norm_backward", 7, 7, .check = batch_norm_backward_check,
                                                   .run = { [MS_CPU] = ms__cpu_batch_norm_backward });

static ms_status batch_norm_backward(ms_backward_call *b)
{
    bool training = b->i[0] != 0;
    ms_tensor *in[] = {
        b->gout[0],
        b->in[0],
        b->n_in > 1 ? b->in[1] : NULL,
        training ? b->out[1] : b->in[3],
        training ? b->out[2] : b->in[4],
        training ? b->gout[1] : NULL,
        training ? b->gout[2] : NULL,
    };
    ms_tensor *out[5] = { NULL };
    int64_t mask = 0, i[3] = { training, b->n_i > 1 ? b->i[1] : 1, 0 };
    int n_out = 0, o = 0;
    for (int k = 0; k < b->n_in; k++)
        if (b->need[k] && (k < 3 || !training)) mask |= (int64_t)1 << k, n_out++;
    if (!n_out || (!in[0] && !in[5] && !in[6])) return MS_OK;
    i[2] = mask;
    MS_TRY(ms__run_op(&op_batch_norm_backward, &(ms_op_args) { 7, in, 3, i, b->n_f, b->f }, n_out, out));
    for (int k = 0; k < b->n_in; k++)
        if (mask >> k & 1) b->gin[k] = out[o++];
    for (int k = 1; k < b->n_in; k++)  // the kernel computes gradients of half-type weights in float32
        if (b->gin[k] && b->gin[k]->dtype != b->in_meta[k].dtype) {
            ms_tensor *wide = b->gin[k];
            b->gin[k] = NULL;
            MS_TRY(ms__grad_to(&b->gin[k], wide, &b->in_meta[k]));
        }
    return MS_OK;
}

static const ms_op op_batch_norm =
    MS_ROW("batch_norm", 1, 5, .takes = "weight?, bias?, running_mean?, running_var? | training?, share=1; eps",
           .doc = "Normalizes each channel by the batch's mean and variance (training, which returns them, too) or by "
                  "given ones. In training, groups of `share` adjacent channels may have theirs together.",
           .flags = MS_OP_WIDE, .save_in = 1 | 2 | 8 | 16, .save_out = 2 | 4, .check = batch_norm_check,
           .run = { [MS_CPU] = ms__cpu_batch_norm }, .backward = batch_norm_backward,
           .samples =
               "[5,3] [3] [3] i=1 f=1e-5; [5,3] i=1 f=1e-5; [4,3,2] [3] i=1 f=1e-3; [2,3,4,5] [3] [3] i=1 f=1e-5; "
               "[3,70] [70] [70] i=1 f=1e-5; [2,6,5] [6] [6] i=1,3 f=1e-5; [5,4] [4] - i=1,2 f=1e-3; [1,40,17] [40] "
               "[40] i=1,8 f=1e-5; [7,3] [3] [3] i=1 f=1e-5; [2,2,5,7] - [2] i=1 f=1e-5; "
               "[5,3] [3] [3] [3] [3]+ i=0 f=1e-5; [2,3,4,5] [3] [3] [3] [3]+ i=0 f=1e-3; [4,3,2] - - [3] [3]+ i=0 "
               "f=1e-5; [0,3] [3] [3] [3] [3]+ i=0 f=1e-5");

// ---- the statistics alone -------------------------------------------------------------------------

// The mean and biased variance of every channel of x [N, C, ...], as batch_norm computes them: for statistics over
// several ranks. The statistics of an empty batch are 0.
static ms_status stats_check(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    if (!ms__is_float(x->dtype)) return ms__call_fail(c, "needs a floating-point dtype, got %s", ms__tensor_text(x));
    if (x->ndim < 2)
        return ms__call_fail(c, "the input needs at least 2 dimensions, batch and channels, got %s",
                             ms__tensor_text(x));
    for (int k = 0; k < 2; k++) MS_TRY(ms__call_out(c, k, stats_dtype(x->dtype), ms__device(x), 1, &x->shape[1]));
    return MS_OK;
}

// Calls batch_norm_backward without a gradient of y. Then neither the weight (NULL) nor eps (any number) has an effect.
static ms_status stats_backward(ms_backward_call *b)
{
    ms_tensor *in[] = { NULL, b->in[0], NULL, b->out[0], b->out[1], b->gout[0], b->gout[1] };
    if (!b->need[0] || (!b->gout[0] && !b->gout[1])) return MS_OK;
    return ms__run_op(&op_batch_norm_backward,
                      &(ms_op_args) { 7, in, 3, (int64_t[]) { true, 1, 1 }, 1, (double[]) { 1 } }, 1, &b->gin[0]);
}

static const ms_op op_batch_norm_stats =
    MS_ROW("batch_norm_stats", 1, 1, .doc = "The mean and the biased variance of each channel.", .flags = MS_OP_WIDE,
           .save_in = 1, .save_out = 1 | 2, .check = stats_check, .run = { [MS_CPU] = ms__cpu_batch_norm_stats },
           .backward = stats_backward, .samples = "[5,3]; [4,3,2]; [2,3,4,5]; [3,70]; [2,2,5,7]; [0,3]");

MS_OPERATORS = { &op_batch_norm, &op_batch_norm_backward, &op_batch_norm_stats };
