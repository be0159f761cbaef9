// SPDX-License-Identifier: MIT
// rows/spatial/columns.h -- the sizes of im2col and col2im, from their integers (rows/spatial/columns.c).
#ifndef MS_COLUMNS_H
#define MS_COLUMNS_H

#include "formulas/windows.h"
#include "ops/op.h"

// c->i: 2 kernel sizes, 2 strides, 2 paddings, 2 dilations; for col2im also the height and width of the image.
enum { MS_COLUMNS_KERNEL, MS_COLUMNS_STRIDE = 2, MS_COLUMNS_PAD = 4, MS_COLUMNS_DILATION = 6, MS_COLUMNS_IMAGE = 8 };

typedef struct {
    int64_t planes;  // images x channels
    ms_window h, w;
} ms_columns;

static inline ms_window ms__columns_window(const int64_t *i, int d, int64_t in)
{
    ms_window w = {
        in, 0, i[MS_COLUMNS_KERNEL + d], i[MS_COLUMNS_STRIDE + d], i[MS_COLUMNS_PAD + d], i[MS_COLUMNS_DILATION + d]
    };
    int64_t room = in + 2 * w.pad - w.dilation * (w.kernel - 1) - 1;
    w.out = room < 0 ? 0 : room / w.stride + 1;
    return w;
}
static inline ms_columns ms__columns_of(int64_t planes, const int64_t *i, int64_t height, int64_t width)
{
    ms_columns v = { planes, ms__columns_window(i, 0, height), ms__columns_window(i, 1, width) };
    return v;
}

#endif
