// SPDX-License-Identifier: MIT
// cpu/spatial/reach.h -- which outputs of a row of windows read inside of the input.
#ifndef MS_REACH_H
#define MS_REACH_H

#include "formulas/windows.h"

// Output o, for o from first to last - 1, reads element o * stride + shift of the input with element k of its window;
// the other outputs read padding there.
typedef struct {
    int64_t shift, first, last;
} ms_reach;

static inline ms_reach ms__reach_of(const ms_window *w, int64_t k)
{
    int64_t shift = k * w->dilation - w->pad, s = w->stride;
    int64_t first = shift < 0 ? (-shift + s - 1) / s : 0, last = w->in > shift ? (w->in - shift + s - 1) / s : 0;
    if (last > w->out) last = w->out;
    return (ms_reach) { shift, first < last ? first : last, last };
}

#endif
