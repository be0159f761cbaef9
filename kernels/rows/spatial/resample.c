// SPDX-License-Identifier: MIT
// rows/spatial/resample.c -- resample: interpolation of images, and padding with elements of the image, over the
// last one to three dimensions (formulas/resample.h). rows/spatial/resample.h describes the call's integers and
// numbers.
#include <math.h>
#include "cpu/rows/layers.h"
#include "rows/grad.h"
#include "rows/spatial/resample.h"

static ms_status check_resample(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int dims = (int)c->i[MS_RESAMPLE_DIMS];
    if (c->n_i <= MS_RESAMPLE_SIZES)
        return ms__call_fail(c, "got %d integers, expected more than %d", c->n_i, MS_RESAMPLE_SIZES);
    if (dims < 1 || dims > 3) return ms__call_fail(c, "the number of dimensions is %d, expected 1 to 3", dims);
    if (c->n_i < ms__resample_integers(c->i) || c->n_f < dims)
        return ms__call_fail(c, "got %d integers and %d numbers, expected %d and %d for %d dimensions", c->n_i, c->n_f,
                             ms__resample_integers(c->i), dims, dims);
    if (c->i[MS_RESAMPLE_KIND] < 0 || c->i[MS_RESAMPLE_KIND] > MS_CIRCULAR)
        return ms__call_fail(c, "the kind of resampling is %lld, expected 0 to %d", (long long)c->i[MS_RESAMPLE_KIND],
                             MS_CIRCULAR);
    if (!ms__is_float(x->dtype))
        return ms__call_fail(c, "needs a floating-point dtype, got %s; cast it first", ms__tensor_text(x));
    if (x->ndim < dims)
        return ms__call_fail(c, "the input %s has too few dimensions, expected at least %d", ms__tensor_text(x), dims);
    int64_t shape[MS_MAX_DIMS];
    const int64_t *in = x->shape + x->ndim - dims;
    memcpy(shape, x->shape, sizeof shape);
    for (int d = 0; d < dims; d++) {
        ms_resample_axis a = ms__resample_axis_of(c, in, d);
        int64_t before = a.pad, after = a.out - a.in - a.pad, most = a.kind == MS_REFLECT ? a.in - 1 : a.in;
        if (a.in < 1 || a.out < 1 || a.in > INT32_MAX || a.out > INT32_MAX)
            return ms__call_fail(c, "sizes must be from 1 to %d, got %lld for the output; the input is %s", INT32_MAX,
                                 (long long)a.out, ms__tensor_text(x));
        if (a.kind >= MS_REFLECT &&
            (before < -a.in || after < -a.in || (a.kind != MS_REPLICATE && (before > most || after > most))))
            return ms__call_fail(c, "a padding of %lld elements before and %lld after does not fit the size %lld of %s",
                                 (long long)before, (long long)after, (long long)a.in, ms__tensor_text(x));
        if (a.kind < MS_REFLECT && !(a.scale >= 0 && a.scale <= INT32_MAX))
            return ms__call_fail(c,
                                 "the step from one output element to the next is %g input elements, expected 0 to %d",
                                 a.scale, INT32_MAX);
        shape[x->ndim - dims + d] = a.out;
    }
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim, shape);
}

static ms_status check_resample_backward(ms_call *c)
{
    const ms_tensor *g = c->in[0];
    int64_t shape[MS_MAX_DIMS];
    int dims = (int)c->i[MS_RESAMPLE_DIMS];
    memcpy(shape, g->shape, sizeof shape);
    for (int d = 0; d < dims; d++) shape[g->ndim - dims + d] = c->i[ms__resample_integers(c->i) + d];
    return ms__call_out(c, 0, g->dtype, ms__device(g), g->ndim, shape);
}
static const ms_op resample_backward_row = MS_ROW("resample_backward", 1, 1, .check = check_resample_backward,
                                                  .run = { [MS_CPU] = ms__cpu_resample_backward });

static ms_status resample_grad(ms_backward_call *b)
{
    int64_t i[MS_MAX_I];
    const ms_meta *x = &b->in_meta[0];
    int n = ms__resample_integers(b->i), dims = (int)b->i[MS_RESAMPLE_DIMS];
    if (!b->gout[0]) return MS_OK;
    memcpy(i, b->i, (size_t)n * sizeof *i);
    for (int d = 0; d < dims; d++) i[n++] = x->shape[x->ndim - dims + d];
    return ms__run_op(&resample_backward_row, &(ms_op_args) { 1, b->gout, n, i, b->n_f, b->f }, 1, b->gin);
}

static const ms_op resample_row =
    MS_ROW("resample", 1, 1, .takes = "dims, kind, align, size..., before...; distance...",
           .doc = "Interpolation, or padding with elements of the image, over the last dims dimensions. kind: 0 "
                  "nearest, 1 nearest-exact, 2 linear, 3 cubic, 4 and 5 these two with antialiasing, 6 reflect, 7 "
                  "replicate, 8 circular. align: align_corners. size...: of the output. before...: padding. "
                  "distance...: of neighbouring outputs, in elements of the input.",
           .check = check_resample, .run = { [MS_CPU] = ms__cpu_resample }, .backward = resample_grad,
           .samples =
               "[2,3,5] i=1,0,0,8,0 f=0.625; [2,4,6] i=2,1,0,7,4,0,0 f=0.571428571,1.5; [2,5] i=1,2,0,9,0 f=0.5555; "
               "[1,2,4,5] i=2,2,0,7,3,0,0 f=0.5714,1.6667; [1,2,4,5] i=2,2,1,7,3,0,0 f=0.5,2; "
               "[2,3,4,5] i=3,2,0,6,2,5,0,0,0 f=0.5,2,1; [1,2,5,4] i=2,3,0,8,3,0,0 f=0.625,1.3333; "
               "[1,5,4] i=2,3,1,7,9,0,0 f=0.6667,0.375; [2,7,8] i=2,4,0,3,5,0,0 f=2.3333,1.6; "
               "[2,9,8] i=2,5,0,4,11,0,0 f=2.25,0.7272; [2,5] i=1,6,0,11,4 f=1; [2,4,5] i=2,6,0,7,4,2,-1 f=1,1; "
               "[2,3,4,5] i=3,7,0,9,4,8,4,0,2 f=1,1,1; [2,4,5] i=2,8,0,10,4,3,-1 f=1,1; "
               "[0,2,4] i=1,2,0,6,0 f=0.6667; [2,3,4] i=1,2,0,4,0 f=1");

MS_OPERATORS = { &resample_row, &resample_backward_row };
