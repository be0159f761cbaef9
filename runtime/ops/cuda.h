// SPDX-License-Identifier: MIT
// ops/cuda.h -- the table of engine functions that the CUDA plugin may call. The plugin is loaded at run time and
// cannot link the engine's symbols, which are hidden.
#ifndef MS_OP_CUDA_H
#define MS_OP_CUDA_H

#include "device/device.h"
#include "ops/op.h"

typedef struct ms_cuda_engine {
    ms_status (*fail)(ms_status code, const char *fmt, ...);
    ms_status (*call_fail)(const ms_call *c, const char *fmt, ...);
    const char *(*tensor_text)(const ms_tensor *t);
    const char *(*shape_text)(int ndim, const int64_t *shape);
    const char *(*dtype_name)(int dtype);
    int (*promote)(int a, int b);
    int (*result_dtype)(const ms_tensor *a, const ms_tensor *b);
    ms_status (*broadcast)(const ms_call *c, const ms_tensor *a, const ms_tensor *b, int *ndim, int64_t *shape);
    ms_status (*tensor_new)(ms_tensor **out, int dtype, int device, int ndim, const int64_t *shape, const char *what);
    ms_status (*tensor_like)(ms_tensor **out, const ms_tensor *t, const char *what);
    ms_tensor *(*tensor_view)(const ms_tensor *t, int ndim, const int64_t *shape, const int64_t *stride,
                              int64_t offset);
    bool (*is_contiguous)(const ms_tensor *t);
    ms_status (*contiguous)(ms_tensor **out, ms_tensor *t);
    ms_tensor *(*retain)(ms_tensor *t);
    void (*release)(ms_tensor *t);
    ms_status (*alloc)(ms_block **out, int device, size_t bytes, const char *what);
    void (*free)(ms_block *b);
    ms_status (*apart)(ms_tensor **use, const ms_tensor *o, ms_tensor *x);
    double (*largest_below)(int dtype, double x);
    unsigned (*reduced_dims)(const ms_tensor *x, int n, const int64_t *d);
    void (*queued_text)(int index, char *text, size_t n);
} ms_cuda_engine;

#endif
