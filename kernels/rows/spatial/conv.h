// SPDX-License-Identifier: MIT
// rows/spatial/conv.h -- the sizes of a convolution, from its tensors and integers (rows/spatial/conv.c).
#ifndef MS_CONV_H
#define MS_CONV_H

#include "ops/op.h"

typedef struct ms_conv {
    int64_t n, in, h, w, out, kh, kw;  // images; input channels, rows, columns; output channels; kernel rows, columns
    int64_t sh, sw, top, left, dh, dw, groups;  // strides; rows and columns of padding before the image; dilations
    int64_t oh, ow;                             // rows and columns of the output
} ms_conv;

// i: 2 strides, 4 paddings (top, left, bottom, right), 2 dilations, groups.
static inline ms_conv ms__conv_of(const ms_tensor *x, const ms_tensor *w, const int64_t *i)
{
    ms_conv v = { x->shape[0], x->shape[1], x->shape[2], x->shape[3], w->shape[0], w->shape[2], w->shape[3], i[0],
                  i[1],        i[2],        i[3],        i[6],        i[7],        i[8],        0,           0 };
    v.oh = (v.h + i[2] + i[4] - v.dh * (v.kh - 1) - 1) / v.sh + 1;
    v.ow = (v.w + i[3] + i[5] - v.dw * (v.kw - 1) - 1) / v.sw + 1;
    return v;
}

// Whether the unfolded matrix would equal the image: a kernel of 1 x 1 with stride 1 and no padding.
static inline bool ms__conv_pointwise(const ms_conv *v)
{
    return v->kh == 1 && v->kw == 1 && v->sh == 1 && v->sw == 1 && v->oh == v->h && v->ow == v->w && v->top == 0 &&
           v->left == 0;
}

#endif
