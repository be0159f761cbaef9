// SPDX-License-Identifier: MIT
// ops/data.h -- filling and copying tensors from C code.
#ifndef MS_DATA_H
#define MS_DATA_H

#include "ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

ms_status ms__zeros(ms_tensor **out, int dtype, int device, int ndim, const int64_t *shape);
ms_status ms__zero(ms_tensor *t);  // fills t with 0; any strides
// Copies src to dst with broadcasting and conversion, for any strides, also between devices. Records no graph.
ms_status ms__copy(ms_tensor *dst, ms_tensor *src);
// As ms__copy, for use in kernels: does not wait for the storages' events.
ms_status ms__copy_data(ms_tensor *dst, const ms_tensor *src);
ms_status ms__fill_data(ms_tensor *t, double value);
ms_status ms__contiguous(ms_tensor **out, ms_tensor *t);  // t itself (retained) or a contiguous copy; no graph
// As ms__contiguous, but the result is in host memory.
ms_status ms__on_cpu(ms_tensor **out, ms_tensor *t, const char *what);

// A list of copies, each like a call of ms__copy. Copies of contiguous tensors within one GPU are launched together at
// the end where possible, and their tensors must live until then; all others run when they are added.
typedef struct ms_copies {
    int n, cap, index;
    struct ms_cuda_copy *list;
} ms_copies;
ms_status ms__copies_add(ms_copies *c, ms_tensor *dst, ms_tensor *src /* NULL: zeros */);
// Launches the list unless `sofar` is a failure, and frees it.
ms_status ms__copies_end(ms_copies *c, ms_status sofar);

// While a step is recorded (device/capturing.h), calls, fills and copies are made by these functions, which also add
// them to the step. ops/captured.c sets them when the library is loaded.
typedef struct ms_step_recorder {
    ms_status (*call)(ms_call *call, ms_status (*run)(ms_call *), uint64_t drawn);
    ms_status (*fill)(ms_tensor *t, double value);
    ms_status (*copy)(ms_tensor *dst, const ms_tensor *src);
} ms_step_recorder;
extern ms_step_recorder ms__step_recorder;

#ifdef __cplusplus
}
#endif

#endif
