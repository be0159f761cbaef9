// SPDX-License-Identifier: MIT
// train/flag.h -- numbers that a GPU computes and the host reads later.
#ifndef MS_TRAIN_FLAG_H
#define MS_TRAIN_FLAG_H

#include "tensor/tensor.h"

// Refuses a tensor that is not one float32 element or is on meta. who: for the message.
ms_status ms__flag_check(const char *who, const ms_tensor *t);

#endif
