// SPDX-License-Identifier: MIT
// cpu/product/conv_work.h -- convolutions that are no products of unfolded images: those of oneDNN and depthwise ones.
#ifndef MS_CONV_WORK_H
#define MS_CONV_WORK_H

#include "rows/spatial/conv.h"

// A convolution, of which one of three contiguous operands is computed from the other two: the output, or the gradient
// of the weight or of the image.
enum { MS_CONV_IMAGE, MS_CONV_WEIGHT, MS_CONV_OUTPUT };

typedef struct ms_conv_work {
    const ms_conv *v;
    int dtype;
    int result;         // the operand that is computed
    void *operands[3];  // in the order of the constants
    const void *bias;   // added to the output; NULL: none
    size_t room;        // bytes that copies of images and outputs may take; 16 MiB or one image is always allowed
    const char *what;   // operator's name, for errors
} ms_conv_work;

// Computes a convolution by oneDNN. Sets *done to false and computes nothing unless it is in float32 and large enough,
// groups have multiples of 16 channels, and oneDNN has a fast kernel. The bits depend on sizes and the CPU, never on
// the number of threads.
ms_status ms__conv_onednn(const ms_conv_work *c, bool *done);

// Computes a convolution directly if its groups have one input channel (cpu/product/conv_depthwise.c); sets *done to
// whether it has.
ms_status ms__conv_depthwise(const ms_conv_work *c, bool *done);

// Initialises oneDNN on the first call; false if that fails (cpu/product/onednn.c).
bool ms__onednn_ready(void);

#endif
