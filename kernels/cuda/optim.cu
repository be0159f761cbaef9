// SPDX-License-Identifier: MIT
// cuda/optim.cu -- the fused optimizer step (one launch for all leaves of a device, with the formulas of
// formulas/optim) and the norm of gradients.
#include "cuda/cuda.h"

#define MS_OPTIM_FORMULAS
#define REAL float
#define R(name) name##_f32
#define R_SQRT ms_sqrt_f32
#include "formulas/optim/list.h"
#undef REAL
#undef R
#undef R_SQRT
#define REAL double
#define R(name) name##_f64
#define R_SQRT ms_sqrt_f64
#include "formulas/optim/list.h"
#undef REAL
#undef R
#undef R_SQRT
#undef MS_OPTIM_FORMULAS

enum {
#define OPTIMIZER(NAME, FORMULA) KIND_##NAME,
#include "formulas/optim/list.h"
};

// The formulas of both types as overloads, so that a template can select them.
#define OPTIMIZER(NAME, FORMULA)                                                                               \
    static __device__ inline float NAME(float x, float g, float *a, float *b, float *c, const float *f)        \
    {                                                                                                          \
        return ms_##FORMULA##_f32(x, g, a, b, c, f);                                                           \
    }                                                                                                          \
    static __device__ inline double NAME(double x, double g, double *a, double *b, double *c, const double *f) \
    {                                                                                                          \
        return ms_##FORMULA##_f64(x, g, a, b, c, f);                                                           \
    }
struct step {
#include "formulas/optim/list.h"
};

template <class T> static __device__ inline void run_part(const ms_optim_job &j, int64_t first, int64_t last)
{
    T *a = (T *)j.state[0], *b = (T *)j.state[1], *c = (T *)j.state[2], f[MS_OPTIM_FACTORS];
    for (int k = 0; k < MS_OPTIM_FACTORS; k++) f[k] = (T)j.factors[k];
    for (int64_t k = first + threadIdx.x; k < last; k += blockDim.x) {
        T x = load<T>(j.dtype, j.p, k), g = load<T>(j.dtype, j.g, k);
        switch (j.kind) {
#define OPTIMIZER(NAME, FORMULA)                                                       \
    case KIND_##NAME:                                                                  \
        x = step::NAME(x, g, a ? &a[k] : NULL, b ? &b[k] : NULL, c ? &c[k] : NULL, f); \
        break;
#include "formulas/optim/list.h"
        }
        store<T>(j.dtype, j.p, k, x);
    }
}

__global__ void optim_kernel(int n, const ms_optim_job *jobs, int64_t block)
{
    int low = 0, high = n - 1;  // search for the last leaf that begins at or before this block
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (jobs[mid].block <= (int64_t)blockIdx.x) low = mid;
        else high = mid - 1;
    }
    const ms_optim_job j = jobs[low];
    int64_t first = ((int64_t)blockIdx.x - j.block) * block, last = first + block < j.numel ? first + block : j.numel;
    if (j.dtype == MS_F64) run_part<double>(j, first, last);
    else run_part<float>(j, first, last);
}

ms_status ms__cuda_optim(int index, int n, const ms_optim_job *jobs, int64_t blocks, int64_t block)
{
    ms_block *there;
    size_t bytes = (size_t)n * sizeof *jobs;
    if (n == 0) return MS_OK;
    MS_TRY(ms__alloc(&there, MS_CUDA | index << 8, bytes, "optimizer"));
    ms_status st = ms__cuda_use(index);
    if (st == MS_OK) {
        cudaError_t e = cudaMemcpyAsync(there->data, jobs, bytes, cudaMemcpyHostToDevice,
                                        ms__cuda_stream(index, MS_STREAM_COMPUTE));
        if (e != cudaSuccess) st = ms__cuda_failed(e, "cudaMemcpyAsync", index, "the list of %d leaves", n);
    }
    if (st == MS_OK)
        st = launch("optimizer", index, optim_kernel, blocks, BLOCK, n, (const ms_optim_job *)there->data, block);
    ms__free(there);
    return st;
}

// ---- norms ----

enum { PIECE = 16384 };
__global__ void norm_kernel(int64_t n, int dtype, const void *g, double p, double *parts)
{
    __shared__ double shared[BLOCK];
    int64_t first = (int64_t)blockIdx.x * PIECE, last = first + PIECE < n ? first + PIECE : n;
    double sum = 0;
    for (int64_t k = first + threadIdx.x; k < last; k += BLOCK) {
        double v = load<double>(dtype, g, k), a = v < 0 ? -v : v;
        if (p == 2) sum += v * v;
        else if (p == 1) sum += a;
        else if (p - p != 0) sum = ((a > sum) | (a != a)) ? a : sum;
        else sum += ms_pow_f64(a, p);
    }
    sum = p - p != 0 ? block_max(sum, shared) : block_sum(sum, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
__global__ void norm_join_kernel(int64_t count, double p, const double *parts, double *out)
{
    double sum = 0;
    for (int64_t k = 0; k < count; k++)
        sum = p - p != 0 ? (((parts[k] > sum) | (parts[k] != parts[k])) ? parts[k] : sum) : sum + parts[k];
    *out = sum;
}
ms_status ms__cuda_norm(int index, int dtype, const void *g, int64_t n, double p, double *out)
{
    ms_block *room;
    int64_t parts = up(n, PIECE);
    MS_TRY(ms__alloc(&room, MS_CUDA | index << 8, (size_t)(parts + 1) * sizeof(double), "clip_grad_norm_"));
    ms_status st =
        launch_blocks("clip_grad_norm_", index, norm_kernel, parts, BLOCK, n, dtype, g, p, (double *)room->data);
    if (st == MS_OK)
        st = launch("clip_grad_norm_", index, norm_join_kernel, 1, 1, parts, p, (const double *)room->data, out);
    ms__free(room);
    return st;
}

template <class T> __global__ void scale_kernel(int64_t n, int dtype, void *g, T f)
{
    int64_t k = GLOBAL_INDEX;
    if (k < n) store<T>(dtype, g, k, load<T>(dtype, g, k) * f);
}
ms_status ms__cuda_scale(int index, int dtype, void *g, int64_t n, double f)
{
    if (dtype == MS_F64)
        return launch("clip_grad_norm_", index, scale_kernel<double>, up(n, BLOCK), BLOCK, n, dtype, g, f);
    return launch("clip_grad_norm_", index, scale_kernel<float>, up(n, BLOCK), BLOCK, n, dtype, g, (float)f);
}
