// SPDX-License-Identifier: MIT
// cuda/special/ctc.cu -- the CTC loss on a GPU (formulas/ctc.h): a block computes a sample, and its threads the labels
// of a time step. The caller checks lengths and classes (nn/loss/ctc.lua). Memory is safe without this: lengths that
// the tensors do not hold are cut, and classes that do not exist have probability 0 and are not read.
#include "cuda/blocks.h"
#include "formulas/ctc.h"
#include "rows/special/ctc.h"

static __device__ inline void store_value(const ms_ctc &s, void *to, int64_t at, double value)
{
    if (s.wide) ((double *)to)[at] = value;
    else ((float *)to)[at] = (float)value;
}

static __global__ void loss_kernel(ms_ctc_call j)
{
    int64_t n = blockIdx.x;
    ms_ctc s = ms__ctc_sample(&j, n);
    double *row = j.alpha + n * j.times * j.wide, *before = NULL;
    for (int64_t t = 0; t < s.times; t++, row += j.wide) {
        for (int64_t k = threadIdx.x; k < 2 * s.length + 1; k += BLOCK) row[k] = ms_ctc_alpha(&s, t, k, before);
        before = row;
        __syncthreads();
    }
    if (threadIdx.x) return;
    double loss = ms_ctc_loss(&s, before);
    store_value(s, j.loss, n, j.zero_infinity && loss == -MS_CTC_NONE ? 0 : loss);
}

// The caller has filled grad with 0; elements of classes other than the blank and those of the target stay 0.
static __global__ void gradient_kernel(ms_ctc_call j)
{
    int64_t n = blockIdx.x;
    ms_ctc s = ms__ctc_sample(&j, n);
    const double *alpha = j.alpha + n * j.times * j.wide;
    double *rows = j.scratch + n * 2 * j.wide, *after = NULL, grad;
    double loss = ms_ctc_loss(&s, s.times ? alpha + (s.times - 1) * j.wide : NULL);
    int64_t at = n * j.grad_loss_step;
    double g = s.wide ? ((const double *)j.grad_loss)[at] : (double)((const float *)j.grad_loss)[at];
    if (j.zero_infinity && loss == -MS_CTC_NONE) s.times = 0;
    for (int64_t t = s.times - 1; t >= 0; t--) {
        double *beta = rows + (t & 1) * j.wide;
        for (int64_t k = threadIdx.x; k < 2 * s.length + 1; k += BLOCK) beta[k] = ms_ctc_beta(&s, t, k, after);
        __syncthreads();
        ms_ctc_row row = { alpha + t * j.wide, beta, loss };
        for (int64_t k = threadIdx.x; k < 2 * s.length + 1; k += BLOCK)
            if (ms_ctc_gradient(&s, t, k, &row, &grad))
                store_value(s, j.grad, (t * j.batch + n) * s.classes + ms_ctc_class(&s, k), g * grad);
        after = beta;
    }
}

static ms_status run_ctc_loss(ms_call *c)
{
    ms_ctc_call j;
    ms__ctc_call(&j, c, 0);
    j.loss = ms__data(c->out[0]), j.alpha = (double *)ms__data(c->out[1]);
    MS_TRY(ms__cuda_fill_tensor(c->out[1], 0));  // the kernel writes no rows behind a sample's length
    return launch_blocks("ctc_loss", index_of(c->out[0]), loss_kernel, j.batch, BLOCK, j);
}
static ms_status run_ctc_loss_backward(ms_call *c)
{
    ms_ctc_call j;
    scratch rows;
    ms__ctc_call(&j, c, 1);
    if (c->out[0]->numel == 0) return MS_OK;
    MS_TRY(ms__cuda_fill_tensor(c->out[0], 0));
    MS_TRY(rows.alloc(c, ms__device(c->out[0]), j.batch * 2 * j.wide * (int64_t)sizeof(double)));
    j.grad_loss = ms__data(c->in[0]), j.grad_loss_step = c->in[0]->stride[0];
    j.alpha = (double *)ms__data(c->in[5]), j.grad = ms__data(c->out[0]), j.scratch = (double *)rows.data;
    return launch_blocks("ctc_loss_backward", index_of(c->out[0]), gradient_kernel, j.batch, BLOCK, j);
}

extern const ms_cuda_kernel ms__cuda_ctc[];
const ms_cuda_kernel ms__cuda_ctc[] = { { "ctc_loss", run_ctc_loss },
                                        { "ctc_loss_backward", run_ctc_loss_backward },
                                        { NULL, NULL } };
