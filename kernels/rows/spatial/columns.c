// SPDX-License-Identifier: MIT
// rows/spatial/columns.c -- im2col, which copies the windows of images [N, C, H, W] to columns [N, C KH KW, L],
// and col2im, which adds columns to the images from which im2col takes them. Each is the other's gradient.
#include "cpu/rows/layers.h"
#include "rows/grad.h"
#include "rows/spatial/columns.h"

static ms_status check_integers(ms_call *c, int n)
{
    static const char *const what[] = { "kernel size", "stride", "padding", "dilation", "size of the image" };
    if (!ms__is_float(c->in[0]->dtype))
        return ms__call_fail(c, "needs a floating-point dtype, got %s; cast it first", ms__tensor_text(c->in[0]));
    for (int k = 0; k < n; k++) {
        int least = k < MS_COLUMNS_PAD || k / 2 == MS_COLUMNS_DILATION / 2;
        if (c->i[k] < least || c->i[k] > INT32_MAX)
            return ms__call_fail(c, "a %s is %lld, expected %d to %d", what[k / 2], (long long)c->i[k], least,
                                 INT32_MAX);
    }
    return MS_OK;
}
static ms_status no_window(ms_call *c, int64_t height, int64_t width)
{
    const int64_t *kernel = c->i + MS_COLUMNS_KERNEL, *pad = c->i + MS_COLUMNS_PAD;
    const int64_t *dilation = c->i + MS_COLUMNS_DILATION;
    return ms__call_fail(c,
                         "a kernel of %lld x %lld with dilation %lld x %lld does not fit images of %lld x %lld with "
                         "padding %lld x %lld",
                         (long long)kernel[0], (long long)kernel[1], (long long)dilation[0], (long long)dilation[1],
                         (long long)height, (long long)width, (long long)pad[0], (long long)pad[1]);
}

static ms_status check_im2col(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    MS_TRY(check_integers(c, MS_COLUMNS_IMAGE));
    if (x->ndim != 4) return ms__call_fail(c, "the input must be [N, C, H, W], got %s", ms__tensor_text(x));
    ms_columns v = ms__columns_of(0, c->i, x->shape[2], x->shape[3]);
    if (v.h.out < 1 || v.w.out < 1) return no_window(c, x->shape[2], x->shape[3]);
    return ms__call_out(c, 0, x->dtype, ms__device(x), 3,
                        (int64_t[]) { x->shape[0], x->shape[1] * v.h.kernel * v.w.kernel, v.h.out * v.w.out });
}
static ms_status check_col2im(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    MS_TRY(check_integers(c, MS_COLUMNS_IMAGE + 2));
    int64_t height = c->i[MS_COLUMNS_IMAGE], width = c->i[MS_COLUMNS_IMAGE + 1];
    ms_columns v = ms__columns_of(0, c->i, height, width);
    int64_t kernel = v.h.kernel * v.w.kernel;
    if (v.h.out < 1 || v.w.out < 1) return no_window(c, height, width);
    if (x->ndim != 3 || x->shape[1] % kernel || x->shape[2] != v.h.out * v.w.out)
        return ms__call_fail(c, "the input must be [N, C x %lld, %lld] for images of %lld x %lld, got %s",
                             (long long)kernel, (long long)(v.h.out * v.w.out), (long long)height, (long long)width,
                             ms__tensor_text(x));
    return ms__call_out(c, 0, x->dtype, ms__device(x), 4,
                        (int64_t[]) { x->shape[0], x->shape[1] / kernel, height, width });
}

static ms_status grad_by(ms_backward_call *b, const char *row, int n, const int64_t *i)
{
    if (!b->gout[0]) return MS_OK;
    return ms__run_op(ms__op_by_name(row), &(ms_op_args) { 1, b->gout, n, i, 0, NULL }, 1, b->gin);
}
static ms_status im2col_grad(ms_backward_call *b)
{
    int64_t i[MS_COLUMNS_IMAGE + 2];
    memcpy(i, b->i, MS_COLUMNS_IMAGE * sizeof *i);
    i[MS_COLUMNS_IMAGE] = b->in_meta[0].shape[2], i[MS_COLUMNS_IMAGE + 1] = b->in_meta[0].shape[3];
    return grad_by(b, "col2im", MS_COLUMNS_IMAGE + 2, i);
}
static ms_status col2im_grad(ms_backward_call *b) { return grad_by(b, "im2col", MS_COLUMNS_IMAGE, b->i); }

static const ms_op im2col_row =
    MS_ROW("im2col", 1, 1, .takes = "kernel, kernel, stride, stride, pad, pad, dilation, dilation",
           .doc = "The windows of an image as columns.", .check = check_im2col, .run = { [MS_CPU] = ms__cpu_im2col },
           .backward = im2col_grad,
           .samples = "[2,3,5,6] i=2,3,1,2,1,0,1,1; [1,2,7,7] i=3,2,2,1,0,2,2,3; [1,1,4,5] i=1,1,1,1,0,0,1,1; "
                      "[0,2,4,4] i=2,2,2,2,0,0,1,1; [1,1,3,26] i=2,3,1,1,0,1,1,1; [2,1,3,37] i=1,3,1,2,0,1,1,1; "
                      "[1,2,4,29] i=2,5,2,3,1,2,1,1; [1,1,3,40] i=1,3,1,4,0,0,1,2");
static const ms_op col2im_row =
    MS_ROW("col2im", 1, 1, .takes = "kernel, kernel, stride, stride, pad, pad, dilation, dilation, height, width",
           .doc = "The sum of windows, given as columns, at their places in an image of this height and width.",
           .check = check_col2im, .run = { [MS_CPU] = ms__cpu_col2im }, .backward = col2im_grad,
           .samples =
               "[2,18,12] i=2,3,1,2,1,0,1,1,5,6; [1,12,16] i=3,2,2,1,0,2,2,3,7,7; [1,1,20] i=1,1,1,1,0,0,1,1,4,5; "
               "[0,8,4] i=2,2,2,2,0,0,1,1,4,4; [1,6,52] i=2,3,1,1,0,1,1,1,3,26; [2,3,57] i=1,3,1,2,0,1,1,1,3,37; "
               "[1,20,30] i=2,5,2,3,1,2,1,1,4,29; [1,3,27] i=1,3,1,4,0,0,1,2,3,40");

MS_OPERATORS = { &im2col_row, &col2im_row };
