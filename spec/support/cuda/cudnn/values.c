// SPDX-License-Identifier: MIT
// cudnn/values.c -- checks at compile time the plugin's enumerators against cuDNN's header, if it is installed.
#include "cuda/attention/cudnn_values.h"
#if __has_include(<cudnn.h>)
#include <cudnn.h>

#define SAME(name, value) _Static_assert((int)name == value, #name);
MS_CUDNN_VALUES(SAME)
#endif
