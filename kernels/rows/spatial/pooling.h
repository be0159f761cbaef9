// SPDX-License-Identifier: MIT
// rows/spatial/pooling.h -- the sizes of a pooling, from its integers (rows/spatial/pooling.c).
#ifndef MS_POOLING_H
#define MS_POOLING_H

#include "formulas/windows.h"
#include "ops/op.h"

// c->i begins with these. Then follow, for each of `dims` dimensions, the kernel's size, then the strides, the
// paddings and the dilations; or, if adaptive, only the output's sizes. A backward's c->i ends with the input's sizes.
enum { MS_POOLING_DIMS, MS_POOLING_MODE, MS_POOLING_COUNT_PADDING, MS_POOLING_DIVISOR, MS_POOLING_SIZES };
enum { MS_POOLING_FLOOR, MS_POOLING_CEIL, MS_POOLING_ADAPTIVE };  // the output's size: rounded down, rounded up, given

// A tensor seen as planes of depth x height x width; dimensions that it lacks have one window of size 1.
typedef struct ms_pooling {
    int64_t planes, in, out;  // in, out: elements of a plane
    ms_window w[3];
    int64_t count_padding, divisor;  // for means; divisor 0: the number of elements of the window
} ms_pooling;

// The number of a forward's integers; in a backward the input's sizes follow them.
static inline int ms__pooling_integers(const int64_t *i)
{
    return MS_POOLING_SIZES + (int)i[MS_POOLING_DIMS] * (i[MS_POOLING_MODE] == MS_POOLING_ADAPTIVE ? 1 : 4);
}

// in: the sizes of the last dimensions of the input.
static inline ms_pooling ms__pooling_of(int64_t planes, const int64_t *in, const int64_t *i)
{
    int dims = (int)i[MS_POOLING_DIMS];
    const int64_t *size = i + MS_POOLING_SIZES;
    ms_pooling p = { planes,
                     1,
                     1,
                     { { 1, 1, 1, 1, 0, 1 }, { 1, 1, 1, 1, 0, 1 }, { 1, 1, 1, 1, 0, 1 } },
                     i[MS_POOLING_COUNT_PADDING],
                     i[MS_POOLING_DIVISOR] };
    for (int d = 0; d < dims; d++) {
        ms_window w = { in[d], 0, 0, 1, 0, 1 };
        if (i[MS_POOLING_MODE] == MS_POOLING_ADAPTIVE) {
            w.out = size[d];
        } else {
            w.kernel = size[d], w.stride = size[dims + d], w.pad = size[2 * dims + d], w.dilation = size[3 * dims + d];
            int64_t room = w.in + 2 * w.pad - w.dilation * (w.kernel - 1) - 1;
            if (i[MS_POOLING_MODE] == MS_POOLING_CEIL) room += w.stride - 1;
            w.out = room < 0 ? 0 : room / w.stride + 1;
            // With ceil_mode the last window begins inside of the input or of the padding before it.
            if (i[MS_POOLING_MODE] == MS_POOLING_CEIL && (w.out - 1) * w.stride >= w.in + w.pad) w.out--;
        }
        p.w[3 - dims + d] = w;
        p.in *= w.in, p.out *= w.out;
    }
    return p;
}

#endif
