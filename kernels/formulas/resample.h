// SPDX-License-Identifier: MIT
// formulas/resample.h -- resampling along one dimension: each output is a weighted sum of a few elements of the input.
// Interpolation and padding with elements of the input are the two uses. Included once per type, by C and by nvcc, with
// REAL and R(name). Forward adds the elements of an output in the order of their numbers k, backward the gradients of
// an element in the order of the outputs.
#ifndef MS_FORMULAS_RESAMPLE
#define MS_FORMULAS_RESAMPLE

#include "tensor/dtype.h"

typedef enum {
    MS_NEAREST,        // element floor(o scale)
    MS_NEAREST_EXACT,  // element floor((o + 1/2) scale)
    MS_LINEAR,
    MS_CUBIC,  // Keys 1981 with a = -3/4, over 4 elements
    MS_LINEAR_AA,
    MS_CUBIC_AA,  // LINEAR_AA, CUBIC_AA: antialiased; when downsampling the filter widens so that every element counts
    MS_REFLECT,
    MS_REPLICATE,
    MS_CIRCULAR  // REFLECT, REPLICATE, CIRCULAR: paddings; output o is element o - pad, which may lie outside
} ms_resample_kind;

typedef struct {
    int kind, align;  // align: the first and last elements of input and output coincide
    int64_t in, out, pad;
    double scale;  // distance of outputs in elements of the input
} ms_resample_axis;

// Whether the first and the last element that an output reads never decrease from an output to the next.
MS_FN int ms_resample_ordered(int kind) { return kind != MS_REFLECT && kind != MS_CIRCULAR; }
MS_FN int64_t ms_resample_padded(const ms_resample_axis *a, int64_t o)
{
    int64_t i = o - a->pad;
    if (a->kind == MS_REFLECT) return i < 0 ? -i : i >= a->in ? 2 * (a->in - 1) - i : i;
    if (a->kind == MS_CIRCULAR) return i < 0 ? i + a->in : i >= a->in ? i - a->in : i;
    return i < 0 ? 0 : i >= a->in ? a->in - 1 : i;
}
// Indices are computed in float for every dtype, as in PyTorch.
MS_FN int64_t ms_resample_nearest(const ms_resample_axis *a, int64_t o)
{
    float at = ((float)o + (a->kind == MS_NEAREST_EXACT ? 0.5f : 0.0f)) * (float)a->scale;
    int64_t i = (int64_t)at;
    return i < a->in ? i : a->in - 1;
}
#endif

// What an output reads: `count` elements from `first` on; indices outside of the input are clamped to it. t: for LINEAR
// and CUBIC the position between two elements, from 0 to 1; for an antialias filter (LINEAR_AA, CUBIC_AA) its centre.
// total: the sum of such a filter's weights.
typedef struct {
    int64_t first, count;
    REAL t, total;
} R(ms_taps);

MS_FN REAL R(ms_cubic_near)(REAL x, REAL a) { return ((a + 2) * x - (a + 3)) * x * x + 1; }
MS_FN REAL R(ms_cubic_far)(REAL x, REAL a) { return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a; }
MS_FN REAL R(ms_stretched)(int kind, REAL x)
{
    x = x < 0 ? -x : x;
    if (kind == MS_LINEAR_AA) return x < 1 ? 1 - x : 0;
    return x < 1 ? R(ms_cubic_near)(x, (REAL)-0.5) : x < 2 ? R(ms_cubic_far)(x, (REAL)-0.5) : 0;
}
MS_FN REAL R(ms_stretched_weight)(const ms_resample_axis *a, R(ms_taps) s, int64_t k)
{
    REAL scale = (REAL)a->scale, inverse = scale >= 1 ? 1 / scale : 1;
    return R(ms_stretched)(a->kind, ((REAL)(k + s.first) - s.t + (REAL)0.5) * inverse);
}

MS_FN R(ms_taps) R(ms_taps_of)(const ms_resample_axis *a, int64_t o)
{
    R(ms_taps) s = { 0, 1, 0, 1 };
    REAL scale = (REAL)a->scale;
    if (a->kind >= MS_REFLECT) {
        s.first = ms_resample_padded(a, o);
    } else if (a->kind <= MS_NEAREST_EXACT) {
        s.first = ms_resample_nearest(a, o);
    } else if (a->kind <= MS_CUBIC) {
        REAL at = a->align ? scale * (REAL)o : scale * ((REAL)o + (REAL)0.5) - (REAL)0.5;
        if (a->kind == MS_LINEAR && at < 0) at = 0;
        int64_t i = (int64_t)at;
        if ((REAL)i > at) i--;
        if (i > a->in - 1) i = a->in - 1;
        s.t = at - (REAL)i < 1 ? at - (REAL)i : 1;
        s.count = a->kind == MS_LINEAR ? 2 : 4;
        s.first = a->kind == MS_LINEAR ? i : i - 1;
    } else {
        REAL half = (REAL)(a->kind == MS_LINEAR_AA ? 1 : 2) * (scale >= 1 ? scale : 1);
        s.t = scale * ((REAL)o + (REAL)0.5);
        REAL from = s.t - half + (REAL)0.5, to = s.t + half + (REAL)0.5;
        s.first = from > 0 ? (int64_t)from : 0;
        s.count = ((int64_t)to < a->in ? (int64_t)to : a->in) - s.first;
        if (s.count < 0) s.count = 0;
        s.total = 0;
        for (int64_t k = 0; k < s.count; k++) s.total += R(ms_stretched_weight)(a, s, k);
        if (s.total == 0) s.total = 1;
    }
    return s;
}
// The index of the k-th element that an output reads, and its weight.
MS_FN int64_t R(ms_tap_at)(const ms_resample_axis *a, R(ms_taps) s, int64_t k)
{
    int64_t i = s.first + k;
    return i < 0 ? 0 : i > a->in - 1 ? a->in - 1 : i;
}
MS_FN REAL R(ms_tap_weight)(const ms_resample_axis *a, R(ms_taps) s, int64_t k)
{
    REAL far = (REAL)-0.75;
    switch (a->kind) {
    case MS_LINEAR: return k == 0 ? 1 - s.t : s.t;
    case MS_CUBIC:
        return k == 0   ? R(ms_cubic_far)(s.t + 1, far)
               : k == 1 ? R(ms_cubic_near)(s.t, far)
               : k == 2 ? R(ms_cubic_near)(1 - s.t, far)
                        : R(ms_cubic_far)(2 - s.t, far);
    case MS_LINEAR_AA:
    case MS_CUBIC_AA: return R(ms_stretched_weight)(a, s, k) / s.total;
    default: return 1;
    }
}

// Three ranges [from, to), some of which may be empty, that contain all outputs that read a given element. They may
// also contain outputs that do not read it.
typedef struct {
    int64_t from[3], to[3];
} R(ms_readers);

// The first output that reads no element before i or, if `last` is set, whose last element read is not before i.
MS_FN int64_t R(ms_first_output)(const ms_resample_axis *a, int64_t i, int last)
{
    int64_t low = 0, high = a->out;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        R(ms_taps) s = R(ms_taps_of)(a, middle);
        if (R(ms_tap_at)(a, s, last ? s.count - 1 : 0) >= i) high = middle;
        else low = middle + 1;
    }
    return low;
}
MS_FN R(ms_readers) R(ms_readers_of)(const ms_resample_axis *a, int64_t i)
{
    R(ms_readers) r = { { 0, 0, 0 }, { 0, 0, 0 } };
    if (ms_resample_ordered(a->kind)) {
        r.from[0] = R(ms_first_output)(a, i, 1);
        r.to[0] = R(ms_first_output)(a, i + 1, 0);
        return r;
    }
    int64_t before = a->kind == MS_REFLECT ? (i > 0 ? -i : -a->in * 4) : i - a->in;
    int64_t after = a->kind == MS_REFLECT ? (i < a->in - 1 ? 2 * (a->in - 1) - i : -a->in * 4) : i + a->in;
    r.from[0] = before + a->pad, r.from[1] = i + a->pad, r.from[2] = after + a->pad;
    for (int k = 0; k < 3; k++) {
        if (r.from[k] < 0 || r.from[k] >= a->out) r.from[k] = 0;
        else r.to[k] = r.from[k] + 1;
    }
    return r;
}
