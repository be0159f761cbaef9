// SPDX-License-Identifier: MIT
// rows/spatial/conv.h -- the sizes of a convolution over 1 to 3 dimensions, from its tensors and integers
// (rows/spatial/conv.c).
#ifndef MS_CONV_H
#define MS_CONV_H

#include "ops/op.h"

// Kernels compute over three dimensions: depth, rows, columns. Those that a tensor lacks have size 1.
enum { MS_CONV_DIMS = 3 };

typedef struct ms_conv {
    int64_t n, in, d, h, w;    // number of images; their channels, depth, rows, columns
    int64_t out, od, oh, ow;   // channels, depth, rows and columns of the output
    int64_t kd, kh, kw;        // sizes of the kernel
    int64_t sd, sh, sw;        // strides
    int64_t front, top, left;  // padding before the image
    int64_t dd, dh, dw;        // dilations
    int64_t groups;
} ms_conv;

// A convolution of x with the weight w, whose first dimension is that of the output's channels. i: for each dimension
// its stride, then for each the padding before, for each the padding after, for each the dilation; groups.
static inline ms_conv ms__conv_of(const ms_tensor *x, const ms_tensor *w, const int64_t *i)
{
    int n = x->ndim - 2;
    int64_t s[6][MS_CONV_DIMS], out[MS_CONV_DIMS];  // s: size, kernel, stride, before, after, dilation
    for (int k = 0; k < MS_CONV_DIMS; k++) {
        int d = k - (MS_CONV_DIMS - n);
        s[0][k] = d < 0 ? 1 : x->shape[2 + d];
        s[1][k] = d < 0 ? 1 : w->shape[2 + d];
        s[2][k] = d < 0 ? 1 : i[d];
        s[3][k] = d < 0 ? 0 : i[n + d];
        s[4][k] = d < 0 ? 0 : i[2 * n + d];
        s[5][k] = d < 0 ? 1 : i[3 * n + d];
        out[k] = (s[0][k] + s[3][k] + s[4][k] - s[5][k] * (s[1][k] - 1) - 1) / s[2][k] + 1;
    }
    return (ms_conv) { x->shape[0], x->shape[1], s[0][0], s[0][1], s[0][2], w->shape[0], out[0],  out[1],
                       out[2],      s[1][0],     s[1][1], s[1][2], s[2][0], s[2][1],     s[2][2], s[3][0],
                       s[3][1],     s[3][2],     s[5][0], s[5][1], s[5][2], i[4 * n] };
}

// A transposed convolution to y is the gradient of a convolution of y with respect to y: its input has the place of the
// convolution's output. i: the strides, then the paddings, the output paddings and the dilations, one of each for every
// dimension; then groups.
static inline ms_conv ms__conv_transposed_of(const ms_tensor *y, const ms_tensor *w, const int64_t *i)
{
    int n = y->ndim - 2;
    int64_t j[4 * MS_CONV_DIMS + 1];
    for (int k = 0; k <= 4 * n; k++) j[k] = k / n == 2 ? i[k - n] - i[k] : i[k];
    return ms__conv_of(y, w, j);
}

// The numbers of elements of the kernel, of an image's channel, and of an output's channel.
MS_FN int64_t ms__conv_kernel(const ms_conv *v) { return v->kd * v->kh * v->kw; }
MS_FN int64_t ms__conv_size(const ms_conv *v) { return v->d * v->h * v->w; }
MS_FN int64_t ms__conv_positions(const ms_conv *v) { return v->od * v->oh * v->ow; }

// Whether unfolding (im2col) would give the image itself: a kernel of size 1 with stride 1 and no padding.
static inline bool ms__conv_pointwise(const ms_conv *v)
{
    return ms__conv_kernel(v) == 1 && v->sd == 1 && v->sh == 1 && v->sw == 1 && v->od == v->d && v->oh == v->h &&
           v->ow == v->w && v->front == 0 && v->top == 0 && v->left == 0;
}

#endif
