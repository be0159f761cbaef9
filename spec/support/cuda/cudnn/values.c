// SPDX-License-Identifier: MIT
// cudnn/values.c -- the plugin's enumerators of cuDNN equal the library's. Empty where there is no header of it.
#include "cuda/attention/cudnn_values.h"
#if __has_include(<cudnn.h>)
#include <cudnn.h>

#define SAME(name, value) _Static_assert((int)name == value, #name);
MS_CUDNN_VALUES(SAME)
#endif
