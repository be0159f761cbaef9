// SPDX-License-Identifier: MIT
// cpu/spatial/resample.c -- resample on the CPU: a pass for each dimension that changes. A table
// lists, for each row of the result, the rows of the input that it sums and their weights; the table of backward is the
// transposed one. Half types are computed in float32 and rounded once, after the last pass.
#include "cpu/cpu.h"
#include "cpu/rows/layers.h"
#include "cpu/rows/rows.h"
#include "cpu/rows/work.h"
#include "rows/spatial/resample.h"

enum { IN_CACHE = 256 << 10 };  // elements between two passes over a plane: a whole pass would go through memory

static int64_t pass_numel(const ms_resample_pass *p, int64_t rows) { return p->outer * rows * p->inner; }

#define REAL float
#define R(x) x##_f32
#include "cpu/spatial/resample_body.h"
#undef REAL
#undef R
#define REAL double
#define R(x) x##_f64
#include "cpu/spatial/resample_body.h"

static ms_status resample_passes(ms_call *c, bool back)
{
    ms_tensor *x = NULL, *y = NULL, *o = c->out[0];
    ms_resample_pass pass[3];
    int dtype = o->dtype == MS_F64 ? MS_F64 : MS_F32, dims = (int)c->i[MS_RESAMPLE_DIMS];
    if (o->numel == 0) return MS_OK;
    const int64_t *in = back ? o->shape + o->ndim - dims : c->in[0]->shape + o->ndim - dims;
    int n = ms__resample_passes(c, c->in[0], in, back, pass);
    if (n == 0) return ms__copy_data(o, c->in[0]);
    ms_status st = ms__as_dtype(&x, c->in[0], dtype);
    if (!st) st = ms__work_on(&y, o, dtype, c->op->name);
    if (!st)
        st = dtype == MS_F64 ? passes_f64(c, pass, n, back, ms__data(x), ms__data(y))
                             : passes_f32(c, pass, n, back, ms__data(x), ms__data(y));
    ms__release(x);
    return ms__put_back(o, y, st);
}
ms_status ms__cpu_resample(ms_call *c) { return resample_passes(c, false); }
ms_status ms__cpu_resample_backward(ms_call *c) { return resample_passes(c, true); }
