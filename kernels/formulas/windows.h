// SPDX-License-Identifier: MIT
// formulas/windows.h -- the windows of pooling along one dimension, shared by CPU and GPU. Output o reads elements
// first, first + dilation, ... below `end`. Windows of a fixed size begin at o * stride - pad; adaptive ones divide the
// input into `out` windows of nearly equal sizes, which may overlap by an element.
#ifndef MS_FORMULAS_WINDOWS
#define MS_FORMULAS_WINDOWS

#include "tensor/dtype.h"

typedef struct ms_window {
    int64_t in, out;                        // sizes of the input and of the output
    int64_t kernel, stride, pad, dilation;  // kernel 0: adaptive
} ms_window;

MS_FN int64_t ms_window_first(const ms_window *w, int64_t o)
{
    if (w->kernel == 0) return o * w->in / w->out;
    int64_t first = o * w->stride - w->pad;
    return first < 0 ? first + (-first + w->dilation - 1) / w->dilation * w->dilation : first;
}
MS_FN int64_t ms_window_end(const ms_window *w, int64_t o)
{
    if (w->kernel == 0) return ((o + 1) * w->in + w->out - 1) / w->out;
    int64_t end = o * w->stride - w->pad + (w->kernel - 1) * w->dilation + 1;
    return end < w->in ? end : w->in;
}
// The number of elements by which a mean over the window divides; with `padding` the elements of the padding
// count too, except for those that only ceil_mode adds.
MS_FN int64_t ms_window_count(const ms_window *w, int64_t o, int padding)
{
    int64_t first = ms_window_first(w, o), end = ms_window_end(w, o);
    if (padding && w->kernel) {
        first = o * w->stride - w->pad, end = first + w->kernel;
        if (end > w->in + w->pad) end = w->in + w->pad;
    }
    return end - first;
}

// The windows of outputs from ms_window_from to below ms_window_to may contain element i; with dilation some do not.
MS_FN int64_t ms_window_from(const ms_window *w, int64_t i)
{
    if (w->kernel == 0) return i * w->out / w->in;
    int64_t n = i + w->pad - (w->kernel - 1) * w->dilation;
    return n > 0 ? (n + w->stride - 1) / w->stride : 0;
}
MS_FN int64_t ms_window_to(const ms_window *w, int64_t i)
{
    int64_t to = w->kernel == 0 ? ((i + 1) * w->out + w->in - 1) / w->in : (i + w->pad) / w->stride + 1;
    return to < w->out ? to : w->out;
}

#endif
