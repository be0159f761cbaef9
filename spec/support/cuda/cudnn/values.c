// SPDX-License-Identifier: MIT
// cudnn/values.c -- checks at compile time that the plugin's enumerators of cuDNN equal those of its header, if any.
#include "cuda/attention/cudnn_values.h"
#if __has_include(<cudnn.h>)
#include <cudnn.h>

#define SAME(name, value) _Static_assert((int)name == value, #name);
MS_CUDNN_VALUES(SAME)
#endif
