// SPDX-License-Identifier: MIT
// rows/spatial/pooling.c -- max_pool and avg_pool: the largest element, or the mean, of each window over the
// last one to three dimensions. rows/spatial/pooling.h describes the integers.
#include "cpu/rows/layers.h"
#include "rows/grad.h"
#include "rows/spatial/pooling.h"

static const char *pool_sizes_text(int n, const int64_t *sizes) { return ms__shape_text(n, sizes); }

static ms_status check_windows(ms_call *c, int dims, const int64_t *i)
{
    for (int d = 0; d < dims; d++) {
        int64_t kernel = i[d], stride = i[dims + d], pad = i[2 * dims + d], dilation = i[3 * dims + d];
        if (kernel < 1 || stride < 1 || dilation < 1 || kernel > INT32_MAX || stride > INT32_MAX ||
            dilation > INT32_MAX)
            return ms__call_fail(c, "kernel size, stride and dilation must be from 1 to %d, got %lld, %lld and %lld",
                                 INT32_MAX, (long long)kernel, (long long)stride, (long long)dilation);
        if (pad < 0 || pad > ((kernel - 1) * dilation + 1) / 2)
            return ms__call_fail(c,
                                 "pad should be at most half of effective kernel size, but got pad=%lld, "
                                 "kernel_size=%lld and dilation=%lld",
                                 (long long)pad, (long long)kernel, (long long)dilation);
    }
    return MS_OK;
}

static ms_status check_pool(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int dims = (int)c->i[MS_POOLING_DIMS];
    if (c->n_i <= MS_POOLING_SIZES)
        return ms__call_fail(c, "got %d integers, expected more than %d", c->n_i, MS_POOLING_SIZES);
    if (dims < 1 || dims > 3) return ms__call_fail(c, "the number of dimensions is %d, expected 1 to 3", dims);
    if (c->n_i < ms__pooling_integers(c->i))
        return ms__call_fail(c, "got %d integers, expected %d for %d dimensions", c->n_i, ms__pooling_integers(c->i),
                             dims);
    if (!ms__is_float(x->dtype))
        return ms__call_fail(c, "needs a floating-point dtype, got %s; cast it first", ms__tensor_text(x));
    if (x->ndim < dims)
        return ms__call_fail(c, "the input %s has too few dimensions, expected at least %d", ms__tensor_text(x), dims);
    const int64_t *in = x->shape + x->ndim - dims, *size = c->i + MS_POOLING_SIZES;
    int64_t shape[MS_MAX_DIMS], plane = 1;
    for (int d = 0; d < dims; d++) {
        if (in[d] == 0 || (in[d] > 0 && plane > INT32_MAX / in[d]))
            return ms__call_fail(c, "expected 1 to %d elements in the pooled dimensions (the last %d), got %s",
                                 INT32_MAX, dims, ms__tensor_text(x));
        plane *= in[d];
    }
    if (c->i[MS_POOLING_MODE] != MS_POOLING_ADAPTIVE) MS_TRY(check_windows(c, dims, size));
    ms_pooling p = ms__pooling_of(1, in, c->i);
    memcpy(shape, x->shape, sizeof shape);
    for (int d = 0; d < dims; d++) {
        int64_t out = p.w[3 - dims + d].out;
        bool adaptive = c->i[MS_POOLING_MODE] == MS_POOLING_ADAPTIVE;
        if (adaptive ? out < 0 || out > INT32_MAX : out < 1)
            return ms__call_fail(c,
                                 adaptive ? "the output's size %lld is not from 0 to 2147483647, input %s"
                                          : "the output would have size %lld: input %s, windows of size %s",
                                 (long long)out, ms__tensor_text(x), pool_sizes_text(dims, size));
        shape[x->ndim - dims + d] = out;
    }
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim, shape);
}
// Outputs: the largest elements, and the position of each in its plane, counted in row-major order.
static ms_status check_max_pool(ms_call *c)
{
    MS_TRY(check_pool(c));
    return ms__call_out(c, 1, MS_I64, ms__device(c->in[0]), c->out[0]->ndim, c->out[0]->shape);
}

// Inputs: gradient, and positions for max_pool. c->i: the integers of the forward, then the input's sizes.
static ms_status check_pool_backward(ms_call *c)
{
    const ms_tensor *g = c->in[0];
    int64_t shape[MS_MAX_DIMS];
    int dims = (int)c->i[MS_POOLING_DIMS];
    memcpy(shape, g->shape, sizeof shape);
    for (int d = 0; d < dims; d++) shape[g->ndim - dims + d] = c->i[ms__pooling_integers(c->i) + d];
    return ms__call_out(c, 0, g->dtype, ms__device(g), g->ndim, shape);
}
static const ms_op max_pool_backward_row =
    MS_ROW("max_pool_backward", 2, 2, .check = check_pool_backward, .run = { [MS_CPU] = ms__cpu_max_pool_backward });
static const ms_op avg_pool_backward_row =
    MS_ROW("avg_pool_backward", 1, 1, .check = check_pool_backward, .run = { [MS_CPU] = ms__cpu_avg_pool_backward });

static ms_status pool_grad(ms_backward_call *b, const ms_op *row, int n_in)
{
    int64_t i[MS_MAX_I];
    const ms_meta *x = &b->in_meta[0];
    int n = ms__pooling_integers(b->i), dims = (int)b->i[MS_POOLING_DIMS];
    if (!b->gout[0]) return MS_OK;
    memcpy(i, b->i, (size_t)n * sizeof *i);
    for (int d = 0; d < dims; d++) i[n++] = x->shape[x->ndim - dims + d];
    ms_tensor *in[] = { b->gout[0], n_in > 1 ? b->out[1] : NULL };
    return ms__run_op(row, &(ms_op_args) { n_in, in, n, i, 0, NULL }, 1, b->gin);
}
static ms_status max_pool_grad(ms_backward_call *b) { return pool_grad(b, &max_pool_backward_row, 2); }
static ms_status avg_pool_grad(ms_backward_call *b) { return pool_grad(b, &avg_pool_backward_row, 1); }

static const ms_op max_pool_row =
    MS_ROW("max_pool", 1, 1, .takes = "dims, mode, count_padding, divisor, size...",
           .doc = "The largest element of each window over the last dims dimensions, and its position. mode 0, 1: "
                  "size... is kernels, strides, paddings, dilations, and the output's size is rounded down (0) or up "
                  "(1); 2: size... is the output's size.",
           .save_out = 2, .check = check_max_pool, .run = { [MS_CPU] = ms__cpu_max_pool }, .backward = max_pool_grad,
           .samples = "[2,3,9] i=1,0,0,0,3,2,1,1; [2,3,7,6] i=2,0,0,0,3,2,2,2,1,0,1,1; "
                      "[1,2,8,9] i=2,1,0,0,2,3,2,3,0,1,2,1; [2,1,4,5,6] i=3,0,0,0,2,2,3,1,2,2,0,1,1,1,1,2; "
                      "[3,5] i=1,1,0,0,2,2,1,1; [2,3,7,5] i=2,2,0,0,3,2; [2,4,3,5] i=3,2,0,0,2,3,7; "
                      "[0,3,4,4] i=2,0,0,0,2,2,2,2,0,0,1,1");
static const ms_op avg_pool_row =
    MS_ROW("avg_pool", 1, 1, .takes = "dims, mode, count_padding, divisor, size...",
           .doc = "The mean of each window over the last dims dimensions; divisor: divides by it instead (0: no). "
                  "mode, size...: as for max_pool.",
           .check = check_pool, .run = { [MS_CPU] = ms__cpu_avg_pool }, .backward = avg_pool_grad,
           .samples = "[2,3,9] i=1,0,1,0,3,2,1,1; [2,3,7,6] i=2,0,0,0,3,2,2,2,1,0,1,1; "
                      "[1,2,8,9] i=2,1,1,0,2,3,2,3,0,1,1,1; [2,1,4,5,6] i=3,1,0,0,2,2,3,1,2,2,0,1,1,1,1,1; "
                      "[1,2,8,5] i=2,0,1,7,3,3,1,1,1,1,1,1; [2,3,7,5] i=2,2,0,0,3,2; [2,4,3,5] i=3,2,0,0,2,3,7; "
                      "[0,3,4,4] i=2,0,0,0,2,2,2,2,0,0,1,1; [6,5] i=1,2,0,0,1");

MS_OPERATORS = { &max_pool_row, &max_pool_backward_row, &avg_pool_row, &avg_pool_backward_row };
