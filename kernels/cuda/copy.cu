// SPDX-License-Identifier: MIT
// cuda/copy.cu -- operators whose results depend on positions: arange_, tril, triu. Copies, casts and fills are in
// elementwise.cu; the engine calls them.
#include "cuda/cuda.h"

enum { THREADS = 256 };

// Element k is first + k * step, computed as int64 for integer dtypes: exact beyond 2^53.
__global__ void arange_kernel(int64_t n, int dtype, char *out, int64_t stride, double first, double step, bool whole)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= n) return;
    if (whole) value<int64_t>::store(dtype, out + k * stride, (int64_t)first + k * (int64_t)step);
    else value<double>::store(dtype, out + k * stride, first + (double)k * step);
}
static ms_status run_arange(ms_call *c)
{
    ms_tensor *t = c->out[0];
    bool real = t->dtype <= MS_BF16;
    return launch(c->op->name, index_of(t), arange_kernel, up(t->numel, THREADS), THREADS, t->numel, (int)t->dtype,
                  (char *)ms__data(t), t->stride[0] * ms__dtype_size(t->dtype), c->f[0], c->f[1],
                  !real && c->f[1] == (double)(int64_t)c->f[1]);
}

// Sets the elements above (lower) or below diagonal k of contiguous matrices to 0.
__global__ void triangle_kernel(int64_t n, int64_t rows, int64_t cols, int64_t k, bool lower, int dtype, void *out)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= n) return;
    int64_t row = i / cols % rows, col = i % cols;
    bool stays = lower ? col <= row + k : col >= row + k;
    if (!stays) store<float>(dtype, out, i, 0);
}
static ms_status triangle(ms_call *c, bool lower)
{
    ms_status ms__cuda_copy_tensor(ms_tensor * dst, const ms_tensor *src);
    ms_tensor *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    MS_TRY(ms__cuda_copy_tensor(o, c->in[0]));
    return launch(c->op->name, index_of(o), triangle_kernel, up(o->numel, THREADS), THREADS, o->numel,
                  o->shape[o->ndim - 2], o->shape[o->ndim - 1], c->n_i ? c->i[0] : (int64_t)0, lower, (int)o->dtype,
                  ms__data(o));
}
static ms_status run_tril(ms_call *c) { return triangle(c, true); }
static ms_status run_triu(ms_call *c) { return triangle(c, false); }

extern const ms_cuda_kernel ms__cuda_copy[];
const ms_cuda_kernel ms__cuda_copy[] = {
    { "arange_", run_arange }, { "tril", run_tril }, { "triu", run_triu }, { NULL, NULL }
};
