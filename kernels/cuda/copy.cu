// SPDX-License-Identifier: MIT
// cuda/copy.cu -- operators whose results depend on positions: arange_, tril, triu. Copies, casts and fills are in
// elementwise.cu; the engine calls them.
#include "cuda/cuda.h"

enum { THREADS = 256 };

// Element k is first + k * step, computed as int64 for integer dtypes (whole): exact beyond 2^53.
struct progression {
    double first, step;
    bool whole;
};
__global__ void arange_kernel(int64_t n, int dtype, char *out, int64_t stride, progression p)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= n) return;
    if (p.whole) value<int64_t>::store(dtype, out + k * stride, (int64_t)p.first + k * (int64_t)p.step);
    else value<double>::store(dtype, out + k * stride, p.first + (double)k * p.step);
}
static ms_status run_arange(ms_call *c)
{
    ms_tensor *t = c->out[0];
    progression p = { c->f[0], c->f[1], t->dtype > MS_BF16 && c->f[1] == (double)(int64_t)c->f[1] };
    return launch(c->op->name, index_of(t), arange_kernel, up(t->numel, THREADS), THREADS, t->numel, (int)t->dtype,
                  (char *)ms__data(t), t->stride[0] * ms__dtype_size(t->dtype), p);
}

// Sets the elements above (lower) or below diagonal k of contiguous matrices to 0.
struct triangle {
    int64_t rows, cols, k;
    bool lower;
};
__global__ void triangle_kernel(int64_t n, triangle t, int dtype, void *out)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= n) return;
    int64_t row = i / t.cols % t.rows, col = i % t.cols;
    bool stays = t.lower ? col <= row + t.k : col >= row + t.k;
    if (!stays) store<float>(dtype, out, i, 0);
}
static ms_status keep_triangle(ms_call *c, bool lower)
{
    ms_status ms__cuda_copy_tensor(ms_tensor * dst, const ms_tensor *src);
    ms_tensor *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    MS_TRY(ms__cuda_copy_tensor(o, c->in[0]));
    triangle t = { o->shape[o->ndim - 2], o->shape[o->ndim - 1], c->n_i ? c->i[0] : 0, lower };
    return launch(c->op->name, index_of(o), triangle_kernel, up(o->numel, THREADS), THREADS, o->numel, t, (int)o->dtype,
                  ms__data(o));
}
static ms_status run_tril(ms_call *c) { return keep_triangle(c, true); }
static ms_status run_triu(ms_call *c) { return keep_triangle(c, false); }

extern const ms_cuda_kernel ms__cuda_copy[];
const ms_cuda_kernel ms__cuda_copy[] = {
    { "arange_", run_arange }, { "tril", run_tril }, { "triu", run_triu }, { NULL, NULL }
};
