// SPDX-License-Identifier: MIT
// rows/spatial/conv.c -- row of conv2d: cross-correlation of images [N, C, H, W] with kernels [O, C / groups, KH, KW].
// Integers: stride (2), padding (top, left, bottom, right), dilation (2), groups.
#include "cpu/rows/layers.h"
#include "rows/spatial/conv.h"
#include "rows/grad.h"

static ms_status conv_check(ms_call *c)
{
    const ms_tensor *x = c->in[0], *w = c->in[1], *b = c->n_in > 2 ? c->in[2] : NULL;
    for (int k = 0; k < c->n_in; k++)
        if (c->in[k] && (c->in[k]->dtype != x->dtype || !ms__is_float(x->dtype)))
            return ms__call_fail(
                c, "all arguments must have the same floating-point dtype, got %s and, as argument %d, %s",
                ms__tensor_text(x), k + 1, ms__tensor_text(c->in[k]));
    if (c->n_i < 9)
        return ms__call_fail(c,
                             "needs 9 integers: 2 strides, 4 paddings (top, left, bottom, right), 2 dilations, "
                             "groups; got %d",
                             c->n_i);
    if (x->ndim != 4) return ms__call_fail(c, "the input must be [N, C, H, W], got %s", ms__tensor_text(x));
    if (w->ndim != 4)
        return ms__call_fail(c, "the weight must be [out, in / groups, height, width], got %s", ms__tensor_text(w));
    if (c->i[0] < 1 || c->i[1] < 1)
        return ms__call_fail(c, "the stride must be positive, got (%lld, %lld)", (long long)c->i[0],
                             (long long)c->i[1]);
    for (int k = 2; k < 6; k++)
        if (c->i[k] < 0 || c->i[k] > INT32_MAX)  // so that adding it to a size twice cannot overflow
            return ms__call_fail(c, "the padding must be from 0 to %d, got %lld", INT32_MAX, (long long)c->i[k]);
    if (c->i[6] < 1 || c->i[7] < 1)
        return ms__call_fail(c, "the dilation must be positive, got (%lld, %lld)", (long long)c->i[6],
                             (long long)c->i[7]);
    int64_t groups = c->i[8];
    if (groups < 1) return ms__call_fail(c, "groups must be positive, got %lld", (long long)groups);
    if (w->shape[1] * groups != x->shape[1])
        return ms__call_fail(c,
                             "Given groups=%lld, weight of size %s, expected input%s to have %lld channels, but got "
                             "%lld channels instead",
                             (long long)groups, ms__shape_text(4, w->shape), ms__shape_text(4, x->shape),
                             (long long)(w->shape[1] * groups), (long long)x->shape[1]);
    if (w->shape[0] % groups != 0)
        return ms__call_fail(c,
                             "Given groups=%lld, expected the number of output channels, %lld, to be divisible by "
                             "groups; the weight is %s",
                             (long long)groups, (long long)w->shape[0], ms__shape_text(4, w->shape));
    if (w->shape[2] < 1 || w->shape[3] < 1)
        return ms__call_fail(c, "the weight's height and width must be at least 1, got %s",
                             ms__shape_text(4, w->shape));
    if (b && (b->ndim != 1 || b->shape[0] != w->shape[0]))
        return ms__call_fail(c, "the bias must be [%lld], got %s", (long long)w->shape[0],
                             ms__shape_text(b->ndim, b->shape));
    int64_t h = x->shape[2] + c->i[2] + c->i[4], wide = x->shape[3] + c->i[3] + c->i[5];
    int64_t kh = c->i[6] * (w->shape[2] - 1) + 1, kw = c->i[7] * (w->shape[3] - 1) + 1;
    if (h < kh || wide < kw)
        return ms__call_fail(c,
                             "Calculated padded input size per channel: (%lld x %lld). Kernel size: (%lld x %lld). "
                             "Kernel size can't be greater than actual input size",
                             (long long)h, (long long)wide, (long long)kh, (long long)kw);
    ms_conv v = ms__conv_of(x, w, c->i);
    return ms__call_out(c, 0, x->dtype, ms__device(x), 4, (int64_t[]) { v.n, v.out, v.oh, v.ow });
}

// Inputs: gradient, x, w. The last integer is the mask (rows/grad.h). Outputs: those of dx, dw, db that the mask
// selects.
static ms_status conv_backward_check(ms_call *c)
{
    int64_t mask = c->i[c->n_i - 1];
    int k = 0;
    if (mask & 1) MS_TRY(ms__call_out_like(c, k++, c->in[1]));
    if (mask & 2) MS_TRY(ms__call_out_like(c, k++, c->in[2]));
    if (mask & 4) MS_TRY(ms__call_out(c, k++, c->in[0]->dtype, ms__device(c->in[0]), 1, &c->in[2]->shape[0]));
    return MS_OK;
}

static const ms_op op_conv_backward =
    MS_ROW("conv2d_backward", 3, 3, .check = conv_backward_check, .run = { [MS_CPU] = ms__cpu_conv2d_backward });

static ms_status conv_backward(ms_backward_call *b)
{
    return ms__grad_op(b, &op_conv_backward, 3, (ms_tensor *[]) { b->gout[0], b->in[0], b->in[1] }, false);
}

static const ms_op op_conv =
    MS_ROW("conv2d", 2, 3, .flags = MS_OP_LOW, .save_in = 3, .check = conv_check, .run = { [MS_CPU] = ms__cpu_conv2d },
           .backward = conv_backward,
           .samples =
               "[2,3,5,6] [4,3,3,2] [4] i=1,1,0,0,0,0,1,1,1; [2,3,5,6] [4,3,3,2] i=2,1,1,2,1,2,1,1,1; [1,4,7,6] "
               "[6,2,3,3] [6] i=2,2,1,1,1,1,1,1,2; "
               "[1,2,7,8] [3,2,2,3] [3] i=1,1,0,1,1,2,2,3,1; [2,3,4,5] [4,3,1,1] i=1,1,0,0,0,0,1,1,1; [2,3,4,5] "
               "[4,3,1,1] [4] i=1,1,0,0,0,0,1,1,1; "
               "[1,4,5,5] [4,1,3,3] [4] i=1,1,1,1,1,1,1,1,4; [0,2,4,4] [3,2,3,3] [3] i=1,1,0,0,0,0,1,1,1; [1,2,3,4] "
               "[3,2,3,4] i=1,1,0,0,0,0,1,1,1");

const ms_op *const ms__ops_conv[] = { &op_conv, &op_conv_backward, NULL };
