// SPDX-License-Identifier: MIT
// rows/spatial/conv.c -- convolutions, over 1 to 3 dimensions: the cross-correlation of images [N, C, ...] with
// kernels [O, C / groups, ...], and transposed convolutions of images [N, C, ...] with kernels [C, O / groups, ...],
// which are the gradients of convolutions with respect to their images. rows/spatial/conv.h describes the integers.
#include <stdio.h>
#include "cpu/rows/layers.h"
#include "rows/grad.h"
#include "rows/spatial/conv.h"

// The number of dimensions beside batch and channels, which precedes the "d" at the end of an operator's name.
static int dims_of(const ms_call *c) { return c->op->name[strlen(c->op->name) - 2] - '0'; }

// Checks that n integers are in [least, INT32_MAX]. what: their name in the message.
static ms_status check_each(const ms_call *c, const char *what, const int64_t *i, int n, int64_t least)
{
    for (int k = 0; k < n; k++)
        if (i[k] < least || i[k] > INT32_MAX)  // so that one of them times a size cannot overflow
            return ms__call_fail(c, "the %s must be from %lld to %d, got %lld", what, (long long)least, INT32_MAX,
                                 (long long)i[k]);
    return MS_OK;
}

// Checks the dtypes, the sizes of input and weight, and the integers, but neither i[2 n] to i[3 n - 1] nor the bias.
// weight: names of the weight's first two dimensions; third: the name of what is in i[2 n] to i[3 n - 1].
static ms_status check_common(ms_call *c, const char *weight, const char *third)
{
    const ms_tensor *x = c->in[0], *w = c->in[1];
    int n = dims_of(c);
    for (int k = 0; k < c->n_in; k++)
        if (c->in[k] && (c->in[k]->dtype != x->dtype || !ms__is_float(x->dtype)))
            return ms__call_fail(
                c, "all arguments must have the same floating-point dtype, got %s and, as argument %d, %s",
                ms__tensor_text(x), k + 1, ms__tensor_text(c->in[k]));
    if (c->n_i < 4 * n + 1)
        return ms__call_fail(c,
                             "needs %d integers: for each dimension a stride, a padding, %s and a dilation; the number "
                             "of groups; got %d",
                             4 * n + 1, third, c->n_i);
    static const char *const sizes[] = { "L", "H, W", "D, H, W" };
    static const char *const kernels[] = { "length", "height, width", "depth, height, width" };
    if (x->ndim != n + 2)
        return ms__call_fail(c, "the input must be [N, C, %s], got %s", sizes[n - 1], ms__tensor_text(x));
    if (w->ndim != n + 2)
        return ms__call_fail(c, "the weight must be [%s, %s], got %s", weight, kernels[n - 1], ms__tensor_text(w));
    MS_TRY(check_each(c, "stride", c->i, n, 1));
    MS_TRY(check_each(c, "padding", c->i + n, n, 0));
    MS_TRY(check_each(c, "dilation", c->i + 3 * n, n, 1));
    MS_TRY(check_each(c, "number of groups", c->i + 4 * n, 1, 1));
    for (int k = 0; k < n; k++) {
        if (w->shape[2 + k] < 1)
            return ms__call_fail(c, "the weight's %s must be at least 1, got %s", kernels[n - 1],
                                 ms__shape_text(n + 2, w->shape));
        if (x->shape[2 + k] > INT32_MAX || w->shape[2 + k] > INT32_MAX)
            return ms__call_fail(c, "sizes of the input and the weight must be at most %d, got %s and %s", INT32_MAX,
                                 ms__tensor_text(x), ms__tensor_text(w));
    }
    return MS_OK;
}

static ms_status check_bias(const ms_call *c, int64_t channels)
{
    const ms_tensor *b = c->n_in > 2 ? c->in[2] : NULL;
    if (!b || (b->ndim == 1 && b->shape[0] == channels)) return MS_OK;
    return ms__call_fail(c, "the bias must be [%lld], got %s", (long long)channels, ms__shape_text(b->ndim, b->shape));
}

// Writes sizes as "2 x 3 x 4".
static const char *conv_sizes_text(char *text, size_t bytes, int n, const int64_t *sizes)
{
    int used = 0;
    for (int k = 0; k < n; k++)
        used += snprintf(text + used, bytes - (size_t)used, "%s%lld", k ? " x " : "", (long long)sizes[k]);
    return text;
}

// ---- convolution ----------------------------------------------------------------------------------

static ms_status conv_check(ms_call *c)
{
    MS_TRY(check_common(c, "out, in / groups", "a padding at the end"));
    const ms_tensor *x = c->in[0], *w = c->in[1];
    int n = dims_of(c), ndim = n + 2;
    int64_t groups = c->i[4 * n], padded[MS_CONV_DIMS], kernel[MS_CONV_DIMS];
    MS_TRY(check_each(c, "padding", c->i + 2 * n, n, 0));
    if (w->shape[1] * groups != x->shape[1])
        return ms__call_fail(c,
                             "Given groups=%lld, weight of size %s, expected input%s to have %lld channels, but got "
                             "%lld channels instead",
                             (long long)groups, ms__shape_text(ndim, w->shape), ms__shape_text(ndim, x->shape),
                             (long long)(w->shape[1] * groups), (long long)x->shape[1]);
    if (w->shape[0] % groups != 0)
        return ms__call_fail(c,
                             "Given groups=%lld, expected the number of output channels, %lld, to be divisible by "
                             "groups; the weight is %s",
                             (long long)groups, (long long)w->shape[0], ms__shape_text(ndim, w->shape));
    MS_TRY(check_bias(c, w->shape[0]));
    bool fits = true;
    for (int k = 0; k < n; k++) {
        padded[k] = x->shape[2 + k] + c->i[n + k] + c->i[2 * n + k];
        kernel[k] = c->i[3 * n + k] * (w->shape[2 + k] - 1) + 1;
        fits = fits && padded[k] >= kernel[k];
    }
    char a[80], b[80];
    if (!fits)
        return ms__call_fail(c,
                             "Calculated padded input size per channel: (%s). Kernel size: (%s). "
                             "Kernel size can't be greater than actual input size",
                             conv_sizes_text(a, sizeof a, n, padded), conv_sizes_text(b, sizeof b, n, kernel));
    ms_conv v = ms__conv_of(x, w, c->i);
    int64_t shape[] = { v.n, v.out, v.od, v.oh, v.ow };
    shape[MS_CONV_DIMS - n] = v.n, shape[MS_CONV_DIMS - n + 1] = v.out;
    return ms__call_out(c, 0, x->dtype, ms__device(x), ndim, shape + MS_CONV_DIMS - n);
}

// Inputs: gradient, x, w. The last of c->i is the mask (rows/grad.h). Outputs: those of dx, dw, db that the mask
// selects; the bias has as many elements as the gradient has channels.
static ms_status check_conv_backward(ms_call *c)
{
    int64_t mask = c->i[c->n_i - 1];
    int k = 0;
    if (mask & 1) MS_TRY(ms__call_out_like(c, k++, c->in[1]));
    if (mask & 2) MS_TRY(ms__call_out_like(c, k++, c->in[2]));
    if (mask & 4) MS_TRY(ms__call_out(c, k++, c->in[0]->dtype, ms__device(c->in[0]), 1, &c->in[0]->shape[1]));
    return MS_OK;
}

static const ms_op op_conv_backward =
    MS_ROW("conv_backward", 3, 3, .check = check_conv_backward, .run = { [MS_CPU] = ms__cpu_conv_backward });

static ms_status conv_backward(ms_backward_call *b)
{
    return ms__grad_op(b, &op_conv_backward, 3, (ms_tensor *[]) { b->gout[0], b->in[0], b->in[1] }, false);
}

#define CONV(NAME, DOC, SAMPLES)                                                                                  \
    MS_ROW(NAME, 2, 3, .flags = MS_OP_LOW, .save_in = 3, .check = conv_check, .run = { [MS_CPU] = ms__cpu_conv }, \
           .backward = conv_backward, .takes = "stride..., before..., after..., dilation..., groups", .doc = DOC, \
           .samples = SAMPLES)

static const ms_op op_conv1d = CONV("conv1d", "Convolution over the last dimension. before, after: padding.",
                                    "[2,3,7] [4,3,3] [4] i=1,0,0,1,1; [2,4,9] [6,2,3] [6] i=2,1,2,2,2; "
                                    "[1,3,5] [2,3,1] i=1,0,0,1,1; [1,2,4] [3,2,4] [3] "
                                    "i=3,5,4,1,1; [0,2,4] [3,2,3] [3] i=1,0,0,1,1");
static const ms_op op_conv2d = CONV(
    "conv2d", "Convolution over the last 2 dimensions; stride... and the like: one for each. before, after: padding.",
    "[2,3,5,6] [4,3,3,2] [4] i=1,1,0,0,0,0,1,1,1; [2,3,5,6] [4,3,3,2] i=2,1,1,2,1,2,1,1,1; [1,4,7,6] [6,2,3,3] [6] "
    "i=2,2,1,1,1,1,1,1,2; [1,2,7,8] [3,2,2,3] [3] i=1,1,0,1,1,2,2,3,1; [2,3,4,5] [4,3,1,1] i=1,1,0,0,0,0,1,1,1; "
    "[2,3,4,5] [4,3,1,1] [4] i=1,1,0,0,0,0,1,1,1; [1,4,5,5] [4,1,3,3] [4] i=1,1,1,1,1,1,1,1,4; [0,2,4,4] [3,2,3,3] [3] "
    "i=1,1,0,0,0,0,1,1,1; [1,2,3,4] [3,2,3,4] i=1,1,0,0,0,0,1,1,1");
static const ms_op op_conv3d = CONV(
    "conv3d", "Convolution over the last 3 dimensions; stride... and the like: one for each. before, after: padding.",
    "[2,3,3,4,3] [5,3,2,3,2] [5] i=1,1,1,0,0,0,0,0,0,1,1,1,1; [1,4,4,3,5] [2,2,2,1,3] [2] i=2,1,2,1,0,1,1,1,0,2,1,1,2; "
    "[2,3,2,3,2] [2,3,1,1,1] i=1,1,1,0,0,0,0,0,0,1,1,1,1; [0,2,3,3,3] [3,2,2,2,2] [3] i=1,1,1,0,0,0,0,0,0,1,1,1,1");

// ---- transposed convolution -----------------------------------------------------------------------

static ms_status transposed_check(ms_call *c)
{
    MS_TRY(check_common(c, "in, out / groups", "an output padding"));
    const ms_tensor *x = c->in[0], *w = c->in[1];
    int n = dims_of(c), ndim = n + 2;
    int64_t groups = c->i[4 * n], shape[MS_MAX_DIMS];
    if (x->shape[1] != w->shape[0] || w->shape[0] % groups != 0)
        return ms__call_fail(c,
                             "Given transposed=1, groups=%lld, weight of size %s, expected input%s to have %lld "
                             "channels, and this number to be a multiple of groups, but got %lld instead",
                             (long long)groups, ms__shape_text(ndim, w->shape), ms__shape_text(ndim, x->shape),
                             (long long)w->shape[0], (long long)x->shape[1]);
    MS_TRY(check_bias(c, w->shape[1] * groups));
    shape[0] = x->shape[0];
    shape[1] = w->shape[1] * groups;
    for (int k = 0; k < n; k++) {
        int64_t stride = c->i[k], padding = c->i[n + k], more = c->i[2 * n + k], dilation = c->i[3 * n + k];
        if (more < 0 || (more >= stride && more >= dilation))
            return ms__call_fail(
                c,
                "output padding must be at least 0 and smaller than either stride or dilation, but got "
                "output_padding %lld, stride %lld, dilation %lld",
                (long long)more, (long long)stride, (long long)dilation);
        // The product is below 2^62, and the other terms are below 2^33: no overflow.
        shape[2 + k] = (x->shape[2 + k] - 1) * stride - 2 * padding + more + 1;
        int64_t reach = dilation * (w->shape[2 + k] - 1);
        if (x->shape[2 + k] < 1 || shape[2 + k] > INT64_MAX - reach || shape[2 + k] + reach < 1)
            return ms__call_fail(c,
                                 "dimension %d of the input %s gives no valid output size with kernel %lld, stride "
                                 "%lld, padding %lld and dilation %lld",
                                 k + 3, ms__shape_text(ndim, x->shape), (long long)w->shape[2 + k], (long long)stride,
                                 (long long)padding, (long long)dilation);
        shape[2 + k] += reach;
    }
    return ms__call_out(c, 0, x->dtype, ms__device(x), ndim, shape);
}

static const ms_op op_transposed_backward = MS_ROW("conv_transpose_backward", 3, 3, .check = check_conv_backward,
                                                   .run = { [MS_CPU] = ms__cpu_conv_transpose_backward });

static ms_status transposed_backward(ms_backward_call *b)
{
    return ms__grad_op(b, &op_transposed_backward, 3, (ms_tensor *[]) { b->gout[0], b->in[0], b->in[1] }, false);
}

#define TRANSPOSED(NAME, DOC, SAMPLES)                                                    \
    MS_ROW(NAME, 2, 3, .flags = MS_OP_LOW, .save_in = 3, .check = transposed_check,       \
           .run = { [MS_CPU] = ms__cpu_conv_transpose }, .backward = transposed_backward, \
           .takes = "stride..., padding..., more..., dilation..., groups", .doc = DOC, .samples = SAMPLES)

static const ms_op op_transposed1d =
    TRANSPOSED("conv_transpose1d", "Transposed convolution over the last dimension. more: output padding.",
               "[2,3,4] [3,4,3] [4] i=1,0,0,1,1; [2,4,3] [4,3,3] [6] i=2,1,1,2,2; [2,3,5] [3,2,1] "
               "i=1,0,0,1,1; [1,2,3] [2,3,2] i=3,0,"
               "2,1,1; [0,2,3] [2,3,2] [3] i=1,0,0,1,1");
static const ms_op op_transposed2d = TRANSPOSED(
    "conv_transpose2d",
    "Transposed convolution over the last 2 dimensions; stride... and the like: one for each. more: output padding.",
    "[2,3,3,4] [3,4,3,2] [4] i=1,1,0,0,0,0,1,1,1; [1,4,3,2] [4,3,3,3] [6] "
    "i=2,2,1,1,1,0,1,1,2; [1,2,3,3] [2,3,2,3] i=1,3,"
    "0,1,0,2,2,1,1; [2,3,4,2] [3,2,1,1] [2] i=1,1,0,0,0,0,1,1,1; [1,4,3,3] [4,1,3,3] "
    "[4] i=2,2,0,0,0,0,1,1,4; [0,2,3,3] "
    "[2,3,2,2] [3] i=1,1,0,0,0,0,1,1,1");
static const ms_op op_transposed3d = TRANSPOSED(
    "conv_transpose3d",
    "Transposed convolution over the last 3 dimensions; stride... and the like: one for each. more: output padding.",
    "[2,3,2,3,2] [3,2,2,3,2] [2] i=1,1,1,0,0,0,0,0,0,1,1,1,1; [1,4,2,2,3] [4,1,3,2,1] [2] i=2,1,2,1,0,0,1,0,1,1,2,1,2; "
    "[0,2,2,2,2] [2,3,2,2,2] [3] i=1,1,1,0,0,0,0,0,0,1,1,1,1");

MS_OPERATORS = { &op_conv1d,       &op_conv2d,       &op_conv3d,       &op_conv_backward,
                 &op_transposed1d, &op_transposed2d, &op_transposed3d, &op_transposed_backward };
