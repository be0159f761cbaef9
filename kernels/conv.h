// conv.h -- sizes of one convolution, from its tensors and integers (conv.c).
#ifndef MS_CONV_H
#define MS_CONV_H

#include "op.h"

typedef struct ms_conv {
    int64_t n, in, h, w, out, kh, kw;           // images, channels, rows, columns; kernels
    int64_t sh, sw, top, left, dh, dw, groups;  // strides, padding, dilation
    int64_t oh, ow;                             // rows and columns of the output
} ms_conv;

ms_conv ms__conv_of(const ms_tensor *x, const ms_tensor *w, const int64_t *i);

#endif
