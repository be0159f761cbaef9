// SPDX-License-Identifier: MIT
// ptx/functions.cu -- a kernel for each function of CUDA's library (functions.h): *y = NAME(x[0], x[1]).
#include "functions.h"

#define ONE(T, name) \
    extern "C" __global__ void of_##name(T *y, const T *x) { *y = name(x[0]); }
#define TWO(T, name) \
    extern "C" __global__ void of_##name(T *y, const T *x) { *y = name(x[0], x[1]); }
#define D1(name) ONE(double, name)
#define D2(name) TWO(double, name)
#define F1(name) ONE(float, name)
#define F2(name) TWO(float, name)
MS_DOUBLES_1(D1)
MS_DOUBLES_2(D2)
MS_FLOATS_1(F1)
MS_FLOATS_2(F2)
