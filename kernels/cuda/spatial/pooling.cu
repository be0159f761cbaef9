// SPDX-License-Identifier: MIT
// cuda/spatial/pooling.cu -- max_pool and avg_pool on the GPU, and their gradients: a thread for each output, in
// backward for each element of the input, which adds the gradients of the windows that contain it, in order.
#include "cuda/blocks.h"
#include "rows/spatial/pooling.h"

// A position in a plane.
struct place {
    int64_t plane, d, h, w;
};
static __device__ inline place output_place(int64_t i, int64_t depth, int64_t height, int64_t width)
{
    int64_t row = i / width, slice = row / height, plane = slice / depth;
    return { plane, slice - plane * depth, row - slice * height, i - row * width };
}
static __device__ inline place output_of(const ms_pooling &p, int64_t i)
{
    return output_place(i, p.w[0].out, p.w[1].out, p.w[2].out);
}

// at: receives the positions of the largest elements; with NULL, the windows' means are computed instead.
template <class S> __global__ void pool_kernel(ms_pooling p, const S *x, S *y, int64_t *at)
{
    typedef real_of<S> T;
    int64_t i = GLOBAL_INDEX, best = -1;
    if (i >= p.planes * p.out) return;
    place o = output_of(p, i);
    int64_t d_end = ms_window_end(&p.w[0], o.d), h_end = ms_window_end(&p.w[1], o.h),
            w_end = ms_window_end(&p.w[2], o.w);
    T result = at ? -(T)INFINITY : 0;
    x += o.plane * p.in;
    for (int64_t d = ms_window_first(&p.w[0], o.d); d < d_end; d += p.w[0].dilation)
        for (int64_t h = ms_window_first(&p.w[1], o.h); h < h_end; h += p.w[1].dilation)
            for (int64_t w = ms_window_first(&p.w[2], o.w); w < w_end; w += p.w[2].dilation) {
                int64_t k = (d * p.w[1].in + h) * p.w[2].in + w;
                T v = one_of(x + k);
                if (!at) result += v;
                else if ((v > result) | (v != v) | (best < 0)) result = v, best = k;
            }
    if (at) {
        at[i] = best;
    } else {
        int padding = p.count_padding != 0;
        int64_t count = p.divisor ? p.divisor
                                  : ms_window_count(&p.w[0], o.d, padding) * ms_window_count(&p.w[1], o.h, padding) *
                                        ms_window_count(&p.w[2], o.w, padding);
        result /= (T)count;
    }
    store_one(y + i, result);
}

template <class S> __global__ void pool_backward_kernel(ms_pooling p, const S *g, const int64_t *at, S *dx)
{
    typedef real_of<S> T;
    int64_t i = GLOBAL_INDEX;
    if (i >= p.planes * p.in) return;
    place e = output_place(i, p.w[0].in, p.w[1].in, p.w[2].in);
    int64_t d_to = ms_window_to(&p.w[0], e.d), h_to = ms_window_to(&p.w[1], e.h), w_to = ms_window_to(&p.w[2], e.w);
    int64_t here = i - e.plane * p.in;
    int padding = p.count_padding != 0;
    T sum = 0;
    g += e.plane * p.out;
    if (at) at += e.plane * p.out;
    for (int64_t d = ms_window_from(&p.w[0], e.d); d < d_to; d++)
        for (int64_t h = ms_window_from(&p.w[1], e.h); h < h_to; h++) {
            int64_t rest = 0;
            if (!at) rest = ms_window_count(&p.w[0], d, padding) * ms_window_count(&p.w[1], h, padding);
            for (int64_t w = ms_window_from(&p.w[2], e.w); w < w_to; w++) {
                int64_t o = (d * p.w[1].out + h) * p.w[2].out + w;
                if (!at)
                    sum += one_of(g + o) / (T)(p.divisor ? p.divisor : rest * ms_window_count(&p.w[2], w, padding));
                else if (at[o] == here) sum += one_of(g + o);
            }
        }
    store_one(dx + i, sum);
}

static ms_status pool_windows(ms_call *c, ms_tensor *at)
{
    held_inputs h;
    ms_tensor *y = c->out[0];
    int dims = (int)c->i[MS_POOLING_DIMS];
    if (y->numel == 0) return MS_OK;
    MS_TRY(h.hold(c, 1));
    ms_pooling p = ms__pooling_of(1, h.in[0]->shape + y->ndim - dims, c->i);
    p.planes = y->numel / p.out;
    grid n = grid_of(y->numel);
#define RUN(S, T)                                                                                                 \
    return launch(c->op->name, index_of(y), pool_kernel<S>, n.blocks, n.threads, p, (const S *)ms__data(h.in[0]), \
                  (S *)ms__data(y), (int64_t *)data_of(at))
    WITH_FLOAT_TYPE(y->dtype, RUN)
#undef RUN
    return MS_OK;
}
static ms_status run_max_pool(ms_call *c) { return pool_windows(c, c->out[1]); }
static ms_status run_avg_pool(ms_call *c) { return pool_windows(c, NULL); }

static ms_status run_backward(ms_call *c)
{
    held_inputs h;
    ms_tensor *dx = c->out[0];
    int dims = (int)c->i[MS_POOLING_DIMS];
    if (dx->numel == 0) return MS_OK;
    MS_TRY(h.hold(c, 2));
    ms_pooling p = ms__pooling_of(1, dx->shape + dx->ndim - dims, c->i);
    p.planes = dx->numel / p.in;
    grid n = grid_of(dx->numel);
#define RUN(S, T)                                                                             \
    return launch(c->op->name, index_of(dx), pool_backward_kernel<S>, n.blocks, n.threads, p, \
                  (const S *)ms__data(h.in[0]), (const int64_t *)data_of(h.in[1]), (S *)ms__data(dx))
    WITH_FLOAT_TYPE(dx->dtype, RUN)
#undef RUN
    return MS_OK;
}

extern const ms_cuda_kernel ms__cuda_pooling[];
const ms_cuda_kernel ms__cuda_pooling[] = { { "max_pool", run_max_pool },
                                            { "max_pool_backward", run_backward },
                                            { "avg_pool", run_avg_pool },
                                            { "avg_pool_backward", run_backward },
                                            { NULL, NULL } };
