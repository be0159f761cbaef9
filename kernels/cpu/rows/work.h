// SPDX-License-Identifier: MIT
// cpu/rows/work.h -- tensors in the dtype that a kernel computes in, for kernels that compute half types in float32.
#ifndef MS_WORK_H
#define MS_WORK_H

#include "rows/ops.h"

// *out: t with contiguous elements of `dtype`: t itself (retained) or a copy.
static inline ms_status ms__as_dtype(ms_tensor **out, ms_tensor *t, int dtype)
{
    if (t->dtype == dtype) return ms__contiguous(out, t);
    return ms__run_op(&ms__op_cast, &(ms_op_args) { 1, &t, .n_i = 1, .i = (int64_t[]) { dtype } }, 1, out);
}

// *work: the tensor that the kernel writes: `out` itself (retained), or, if the kernel's dtype is not that of `out`, a
// tensor that ms__put_back copies to `out` later.
static inline ms_status ms__work_on(ms_tensor **work, ms_tensor *out, int dtype, const char *what)
{
    *work = NULL;
    if (!out) return MS_OK;
    if (out->dtype == dtype) {
        *work = ms__retain(out);
        return MS_OK;
    }
    return ms__tensor_new(work, dtype, ms__device(out), out->ndim, out->shape, what);
}

static inline ms_status ms__put_back(ms_tensor *out, ms_tensor *work, ms_status st)
{
    if (st == MS_OK && work && work != out) st = ms__copy(out, work);
    ms__release(work);
    return st;
}

#endif
