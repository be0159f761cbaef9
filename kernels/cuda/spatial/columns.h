// SPDX-License-Identifier: MIT
// cuda/spatial/columns.h -- images unfolded to matrices (im2col), and matrices folded back to images (col2im): for
// convolutions, and for the operators of these names.
#ifndef MS_CUDA_COLUMNS_H
#define MS_CUDA_COLUMNS_H

#include "cuda/cuda.h"
#include "rows/spatial/conv.h"

// `count` images from image `first` on, restricted to the channels of a group. last: no more images follow.
struct images {
    int64_t group, first, count;
    bool last;
};

// An operator that unfolds or folds: its images have this dtype, and the sizes of v.
struct unfolding {
    const char *what;
    int index, dtype;
    ms_conv v;
};

// Unfolds each image to `rows` rows of L columns, where L is the number of output positions: a row for each element of
// the kernel in each channel of the group; if `rows` is larger by one, the last row has ones, for a bias.
ms_status ms__cuda_unfold(const unfolding *u, const images &some, int64_t rows, const void *x, void *cols);
// Stores in dx, for each element of the images, the sum over the kernel elements that read it, in their order, rounded
// once. bias: NULL, or a number for each channel, which is added. cols_dtype: that of the images, or the one in which
// their elements are added.
ms_status ms__cuda_fold(const unfolding *u, const images &some, int cols_dtype, const void *cols, const void *bias,
                        void *dx);

#endif
