// SPDX-License-Identifier: MIT
// cuda/spatial/columns.cu -- im2col and col2im on the GPU: a thread for each element of the result. col2im adds the
// columns of a pixel in the order of the kernel's elements.
#include "cuda/blocks.h"
#include "rows/spatial/columns.h"

template <class S> __global__ void im2col_kernel(ms_columns v, const S *x, S *y)
{
    int64_t i = GLOBAL_INDEX, places = v.h.out * v.w.out;
    if (i >= v.planes * v.h.kernel * v.w.kernel * places) return;
    int64_t row = i / places, place = i - row * places, oh = place / v.w.out, ow = place - oh * v.w.out;
    int64_t line = row / v.w.kernel, kx = row - line * v.w.kernel, plane = line / v.h.kernel;
    int64_t h = oh * v.h.stride - v.h.pad + (line - plane * v.h.kernel) * v.h.dilation;
    int64_t w = ow * v.w.stride - v.w.pad + kx * v.w.dilation;
    bool inside = h >= 0 && h < v.h.in && w >= 0 && w < v.w.in;
    store_one(y + i, inside ? one_of(x + (plane * v.h.in + h) * v.w.in + w) : (real_of<S>)0);
}

template <class S> __global__ void col2im_kernel(ms_columns v, const S *x, S *y)
{
    int64_t i = GLOBAL_INDEX, places = v.h.out * v.w.out;
    if (i >= v.planes * v.h.in * v.w.in) return;
    int64_t row = i / v.w.in, w = i - row * v.w.in, plane = row / v.h.in, h = row - plane * v.h.in;
    real_of<S> sum = 0;
    x += plane * v.h.kernel * v.w.kernel * places;
    for (int64_t ky = 0; ky < v.h.kernel; ky++) {
        int64_t top = h + v.h.pad - ky * v.h.dilation, oh = top / v.h.stride;
        if (top < 0 || oh * v.h.stride != top || oh >= v.h.out) continue;
        for (int64_t kx = 0; kx < v.w.kernel; kx++) {
            int64_t left = w + v.w.pad - kx * v.w.dilation, ow = left / v.w.stride;
            if (left < 0 || ow * v.w.stride != left || ow >= v.w.out) continue;
            sum += one_of(x + (ky * v.w.kernel + kx) * places + oh * v.w.out + ow);
        }
    }
    store_one(y + i, sum);
}

static ms_status run(ms_call *c, const ms_tensor *image, bool back)
{
    held_inputs h;
    ms_tensor *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    MS_TRY(h.hold(c, 1));
    ms_columns v = ms__columns_of(image->shape[0] * image->shape[1], c->i, image->shape[2], image->shape[3]);
    grid g = grid_of(o->numel);
#define RUN(S, T)                                                                                               \
    return launch(c->op->name, index_of(o), back ? col2im_kernel<S> : im2col_kernel<S>, g.blocks, g.threads, v, \
                  (const S *)ms__data(h.in[0]), (S *)ms__data(o))
    WITH_FLOAT_TYPE(o->dtype, RUN)
#undef RUN
    return MS_OK;
}
static ms_status run_im2col(ms_call *c) { return run(c, c->in[0], false); }
static ms_status run_col2im(ms_call *c) { return run(c, c->out[0], true); }

extern const ms_cuda_kernel ms__cuda_columns[];
const ms_cuda_kernel ms__cuda_columns[] = { { "im2col", run_im2col }, { "col2im", run_col2im }, { NULL, NULL } };
