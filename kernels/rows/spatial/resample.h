// SPDX-License-Identifier: MIT
// rows/spatial/resample.h -- the axes of a resampling (rows/spatial/resample.c), from the call's c->i and c->f.
#ifndef MS_RESAMPLE_H
#define MS_RESAMPLE_H

#include "ops/op.h"

#define REAL float
#define R(x) x##_f32
#include "formulas/resample.h"
#undef REAL
#undef R
#define REAL double
#define R(x) x##_f64
#include "formulas/resample.h"
#undef REAL
#undef R

// c->i: D, the number of resampled dimensions, which are the last; the kind; align_corners; D sizes of the output; D
// paddings at the start; in a backward also D sizes of the input. c->f: D scales (ms_resample_axis).
enum { MS_RESAMPLE_DIMS, MS_RESAMPLE_KIND, MS_RESAMPLE_ALIGN, MS_RESAMPLE_SIZES };

static inline int ms__resample_integers(const int64_t *i) { return MS_RESAMPLE_SIZES + 2 * (int)i[MS_RESAMPLE_DIMS]; }

// in: the sizes of the last dimensions of the input.
static inline ms_resample_axis ms__resample_axis_of(const ms_call *c, const int64_t *in, int d)
{
    int dims = (int)c->i[MS_RESAMPLE_DIMS];
    const int64_t *size = c->i + MS_RESAMPLE_SIZES;
    ms_resample_axis a = {
        (int)c->i[MS_RESAMPLE_KIND], (int)c->i[MS_RESAMPLE_ALIGN], in[d], size[d], size[dims + d], c->f[d]
    };
    return a;
}
// Whether output o equals element o of the input, for every o.
static inline bool ms__resample_same(const ms_resample_axis *a)
{
    return a->in == a->out && (a->kind >= MS_REFLECT ? a->pad == 0 : a->scale == 1);
}

// The resampling of one dimension: matrices of `from` rows become matrices of `to` rows, each row of `inner` elements.
typedef struct {
    ms_resample_axis axis;
    int64_t outer, from, to, inner;
} ms_resample_pass;

// The passes of a call, in order: forward from the last dimension to the first, backward the other way. x: what the
// first pass reads; in: the sizes of the forward's input. Returns their number.
static inline int ms__resample_passes(const ms_call *c, const ms_tensor *x, const int64_t *in, bool back,
                                      ms_resample_pass *pass)
{
    int dims = (int)c->i[MS_RESAMPLE_DIMS], n = 0;
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    for (int k = 0; k < dims; k++) {
        int d = back ? k : dims - 1 - k, at = x->ndim - dims + d;
        ms_resample_pass p = { ms__resample_axis_of(c, in, d), 1, 0, 0, 1 };
        if (ms__resample_same(&p.axis)) continue;
        p.from = back ? p.axis.out : p.axis.in, p.to = back ? p.axis.in : p.axis.out;
        for (int e = 0; e < at; e++) p.outer *= shape[e];
        for (int e = at + 1; e < x->ndim; e++) p.inner *= shape[e];
        shape[at] = p.to;
        pass[n++] = p;
    }
    return n;
}

#endif
