// SPDX-License-Identifier: MIT
// cuda/optim.cu -- passes over all leaves of a device, each of at most three launches: the optimizer step (with the
// formulas of formulas/optim), which can limit the norm of gradients; the norm of gradients, clipping, and unscaling
// for amp.GradScaler. Also the update of its scale, scaling of one tensor, and the conversions before and after a
// library (NCCL) sums gradients over ranks.
#include <cfloat>

#include "cuda/blocks.h"

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

// v, rounded to the stored type S, as after a store and a load.
template <class S, class T> static __device__ __forceinline__ T stored(T v)
{
    S s;
    store_one(&s, v);
    return load_one<T>(&s);
}

template <class... P> static __device__ inline bool all_wide(P... p) { return (((uintptr_t)p | ...) & 15) == 0; }

// Steps elements [first, last) of one leaf. S: the type of parameter and gradient; T: that of states and arithmetic;
// KEEPS: the set of states (formulas/optim/list.h). MASTERS: the optimizer has the option master_weights. scale:
// multiplied with the gradient, unless it is 1.
template <class T, class S, bool MASTERS, int KEEPS, T FORMULA(T, T, T *, T *, T *, const T *)>
static __device__ __forceinline__ void run_part(const ms_optim_job &j, int64_t first, int64_t last, T scale)
{
    constexpr bool A = KEEPS & 1, B = KEEPS & 2, C = KEEPS & 4;
    T *a = (T *)j.state[0], *b = (T *)j.state[1], *c = (T *)j.state[2], f[MS_OPTIM_FACTORS + 1];
    S *p = (S *)j.p;
    T *m = MASTERS && sizeof(S) == 2 ? (T *)j.master : NULL;
    const S *g = (const S *)j.g;
    for (int k = 0; k <= MS_OPTIM_FACTORS; k++) f[k] = (T)j.factors[k];
    // Doubles are stepped one by one: WIDE of each operand would need too many registers.
    bool wide = !std::is_same_v<S, double> && all_wide(p + first, g + first, A ? a + first : NULL, B ? b + first : NULL,
                                                       C ? c + first : NULL, m + first);
    constexpr int N = KEEPS ? WIDE : 2 * WIDE;  // without states, one pack per operand is too few bytes in flight
    int64_t rest = wide ? first + (last - first) / N * N : first;
    if constexpr (!std::is_same_v<S, double>) {
        for (int64_t k = first + (int64_t)threadIdx.x * N; k < rest; k += BLOCK * N) {
            T x[N], d[N], u[WIDE], v[WIDE], w[WIDE];
            if (m) load_wide(m + k, x);
            else load_wide(p + k, x);
            load_wide(g + k, d);
            if constexpr (!KEEPS) {
                if (m) load_wide(m + k + WIDE, x + WIDE);
                else load_wide(p + k + WIDE, x + WIDE);
                load_wide(g + k + WIDE, d + WIDE);
            }
            if constexpr (A) load_wide(a + k, u);
            if constexpr (B) load_wide(b + k, v);
            if constexpr (C) load_wide(c + k, w);
            if (scale != 1)
                for (int l = 0; l < N; l++) d[l] = stored<S>(d[l] * scale);
            for (int l = 0; l < N; l++)
                x[l] = FORMULA(x[l], f[MS_OPTIM_SIGN] * d[l], A ? &u[l] : NULL, B ? &v[l] : NULL, C ? &w[l] : NULL, f);
            store_wide(p + k, x);
            if constexpr (!KEEPS) store_wide(p + k + WIDE, x + WIDE);
            if (m) {
                store_wide(m + k, x);
                if constexpr (!KEEPS) store_wide(m + k + WIDE, x + WIDE);
            }
            if constexpr (A) store_wide(a + k, u);
            if constexpr (B) store_wide(b + k, v);
            if constexpr (C) store_wide(c + k, w);
        }
    }
    for (int64_t k = rest + threadIdx.x; k < last; k += BLOCK) {
        T d = load_one<T>(g + k);
        if (scale != 1) d = stored<S>(d * scale);
        T x = FORMULA(m ? m[k] : load_one<T>(p + k), f[MS_OPTIM_SIGN] * d, A ? a + k : NULL, B ? b + k : NULL,
                      C ? c + k : NULL, f);
        store_one(p + k, x);
        if (m) m[k] = x;
    }
}

// Selects among the sets of states that a formula accepts.
template <class T, class S, int ACCEPTS, T FORMULA(T, T, T *, T *, T *, const T *), int KEEPS = 0>
static __device__ __forceinline__ void run_states(const ms_optim_job &j, int64_t first, int64_t last, T scale)
{
    constexpr bool MASTERS = ACCEPTS & MS_KEEPS_MASTERS;
    int keeps = (j.state[0] ? 1 : 0) | (j.state[1] ? 2 : 0) | (j.state[2] ? 4 : 0);
    if constexpr (ACCEPTS >> KEEPS & 1)
        if (keeps == KEEPS) run_part<T, S, MASTERS, KEEPS, FORMULA>(j, first, last, scale);
    if constexpr (KEEPS < 7) run_states<T, S, ACCEPTS, FORMULA, KEEPS + 1>(j, first, last, scale);
}

template <int KIND, class T, class S>
static __device__ __forceinline__ void run_leaf(const ms_optim_job &j, int64_t first, int64_t last, T scale)
{
#define OPTIMIZER(NAME, FORMULA) \
    if constexpr (KIND == KIND_##NAME) run_states<T, S, MS_KEEPS_##FORMULA, step::NAME>(j, first, last, scale);
#include "formulas/optim/list.h"
}

// The entry to which a block belongs: the last one whose first block (.block, ascending) is not after it.
template <class E> static __device__ inline const E &entry_of(int n, const E *list, int64_t block)
{
    int low = 0, high = n - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (list[mid].block <= block) low = mid;
        else high = mid - 1;
    }
    return list[low];
}

// Combines the sum so far with a part's: the sum of both or, for an infinite p, the larger one, or the NaN.
static __device__ inline double fold_part(double sum, double part, double p)
{
    if (p - p != 0) return ((part > sum) | (part != part)) ? part : sum;
    return sum + part;
}
// The norm of all gradients: from `sums`, one per owner (ms_norm_part), or, if sums is NULL, `total`. The gradients are
// multiplied by factor_of(norm): most / (norm + 1e-6), but at most 1, and 1 if `most` is not finite.
struct clip_norm {
    const double *sums;
    int owners, dtype;
    double p, total, most;
    void *out;          // gets the norm; NULL if it is not stored
    const float *skip;  // if *skip is not 0, the optimizer changes nothing; NULL: it steps
};
static __device__ inline double norm_of(const clip_norm &norm)
{
    double total = norm.total;
    if (norm.sums) {
        total = 0;
        ROLLED
        for (int k = 0; k < norm.owners; k++) total = fold_part(total, norm.sums[k], norm.p);
        total = norm.p - norm.p != 0 || norm.p == 1 ? total
                : norm.p == 2                       ? ms_sqrt_f64(total)
                                                    : ms_pow_f64(total, 1 / norm.p);
    }
    if (norm.out && blockIdx.x == 0 && threadIdx.x == 0) {
        if (norm.dtype == MS_F64) *(double *)norm.out = total;
        else *(float *)norm.out = (float)total;  // also of half types' gradients
    }
    return total;
}
static __device__ inline double factor_of(const clip_norm &norm)
{
    double f = norm.most / (norm_of(norm) + 1e-6);
    return norm.most - norm.most != 0 || f >= 1 ? 1 : f;  // a NaN factor scales the gradients, too
}

// Steps the leaves. Multiplies gradients by the factor of `norm`, or by the job's scale if norm has no sums. One kernel
// for each optimizer, so that none needs the registers of another.
template <int KIND> __global__ void optim_kernel(int n, const ms_optim_job *jobs, int64_t block, clip_norm norm)
{
    if (norm.skip && *norm.skip != 0) return;
    const ms_optim_job &j = entry_of(n, jobs, blockIdx.x);
    int64_t first = ((int64_t)blockIdx.x - j.block) * block, last = first + block < j.numel ? first + block : j.numel;
    double scale = norm.sums ? factor_of(norm) : j.scale;
#define RUN(S, T) run_leaf<KIND, T, S>(j, first, last, (T)scale)
    WITH_FLOAT_TYPE(j.dtype, RUN)
#undef RUN
}

static ms_status to_device(int index, void *there, const void *here, size_t bytes, int n)
{
    CUDA_TRY(index,
             cudaMemcpyAsync(there, here, bytes, cudaMemcpyHostToDevice, ms__cuda_stream(index, MS_STREAM_COMPUTE)),
             "copying a list of %d entries", n);
    return MS_OK;
}

// All jobs must be of one optimizer.
ms_status ms__cuda_optim(int index, const ms_optim_pass *p, const ms_cuda_step *reads)
{
    static void (*const kernels[])(int, const ms_optim_job *, int64_t, clip_norm) = {
#define OPTIMIZER(NAME, FORMULA) optim_kernel<KIND_##NAME>,
#include "formulas/optim/list.h"
    };
    clip_norm norm = {};
    if (reads && reads->job)
        norm = { (const double *)reads->job->room->data,
                 reads->job->owners,
                 reads->dtype,
                 reads->job->p,
                 0,
                 reads->max_norm,
                 reads->norm,
                 NULL };
    if (reads) norm.skip = reads->skip;
    if (p->n == 0) return MS_OK;
    auto run = [&](const ms_optim_job *there) {
        return launch("optimizer", index, kernels[p->jobs->kind], p->blocks, BLOCK, p->n, there, p->block, norm);
    };
    if (p->there) return run(p->there);
    ms_block *there;
    size_t bytes = (size_t)p->n * sizeof *p->jobs;
    MS_TRY(ms__alloc(&there, MS_CUDA | index << 8, bytes, "optimizer"));
    ms_status st = ms__cuda_use(index);
    if (st == MS_OK) st = to_device(index, there->data, p->jobs, bytes, p->n);
    if (st == MS_OK) st = run((const ms_optim_job *)there->data);
    ms__free(there);
    return st;
}

// ---- norms ----

constexpr int PIECE = 16384;  // each block processes a piece of the elements; its length is a multiple of PIECE

// Adds |v|^p to a thread's sum or, for an infinite p, takes the larger of |v| and the sum, or the NaN. SQUARES: p is 2.
template <bool SQUARES> static __device__ __forceinline__ double fold_power(double sum, double v, double p)
{
    double a = v < 0 ? -v : v;
    if (SQUARES) return sum + v * v;
    if (p == 1) return sum + a;
    if (p - p != 0) return ((a > sum) | (a != a)) ? a : sum;
    return sum + ms_pow_f64(a, p);
}
static __device__ inline double fold_block(double sum, double p, double *shared)
{
    return p - p != 0 ? block_max(sum, shared) : block_sum(sum, shared);
}

template <bool SQUARES, class S>
static __device__ __forceinline__ double norm_part(const S *g, int64_t first, int64_t last, double p)
{
    double sum = 0;
    int64_t rest = is_wide(g + first) ? first + (last - first) / (2 * WIDE) * (2 * WIDE) : first;
    for (int64_t k = first + (int64_t)threadIdx.x * 2 * WIDE; k < rest; k += BLOCK * 2 * WIDE) {
        real_of<S> v[2 * WIDE];
        load_wide(g + k, v);
        load_wide(g + k + WIDE, v + WIDE);
        for (int l = 0; l < 2 * WIDE; l++) sum = fold_power<SQUARES>(sum, (double)v[l], p);
    }
    for (int64_t k = rest + threadIdx.x; k < last; k += BLOCK)
        sum = fold_power<SQUARES>(sum, load_one<double>(g + k), p);
    return sum;
}

// One block per piece of a gradient: stores the piece's sum and owner.
template <bool SQUARES>
__global__ void norm_kernel(int n, const ms_norm_part *list, int64_t piece, double p, double *sums, int *owners)
{
    __shared__ double shared[BLOCK];
    const ms_norm_part &t = entry_of(n, list, blockIdx.x);
    int64_t first = ((int64_t)blockIdx.x - t.block) * piece, last = first + piece < t.numel ? first + piece : t.numel;
    double sum;
#define RUN(S, T) sum = norm_part<SQUARES>((const S *)t.g, first, last, p)
    WITH_FLOAT_TYPE(t.dtype, RUN)
#undef RUN
    sum = SQUARES ? block_sum(sum, shared) : fold_block(sum, p, shared);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum, owners[blockIdx.x] = t.owner;
}
// One block per owner: combines the sums of its pieces.
__global__ void norm_join_kernel(int64_t pieces, double p, const double *sums, const int *owners, double *out)
{
    __shared__ double shared[BLOCK];
    double sum = 0;
    ROLLED
    for (int64_t k = threadIdx.x; k < pieces; k += BLOCK)
        if (owners[k] == (int)blockIdx.x) sum = fold_part(sum, sums[k], p);
    sum = fold_block(sum, p, shared);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// Multiplies elements [first, last) by f. With CHECKS, returns whether one that this thread multiplied was not finite.
template <class T, bool CHECKS = false, class S>
static __device__ __forceinline__ bool scale_part(S *g, int64_t first, int64_t last, T f)
{
    bool bad = false;
    int64_t rest = is_wide(g + first) ? first + (last - first) / (2 * WIDE) * (2 * WIDE) : first;
    for (int64_t k = first + (int64_t)threadIdx.x * 2 * WIDE; k < rest; k += BLOCK * 2 * WIDE) {
        T v[2 * WIDE];
        load_wide(g + k, v);
        load_wide(g + k + WIDE, v + WIDE);
        for (int l = 0; l < 2 * WIDE; l++) {
            if (CHECKS) bad |= v[l] - v[l] != 0;
            v[l] *= f;
        }
        store_wide(g + k, v);
        store_wide(g + k + WIDE, v + WIDE);
    }
    for (int64_t k = rest + threadIdx.x; k < last; k += BLOCK) {
        T v = load_one<T>(g + k);
        if (CHECKS) bad |= v - v != 0;
        store_one(g + k, v * f);
    }
    return bad;
}

__global__ void scale_kernel(int64_t n, int64_t piece, int dtype, void *g, double f)
{
    int64_t first = (int64_t)blockIdx.x * piece, last = first + piece < n ? first + piece : n;
#define RUN(S, T) scale_part<T>((S *)g, first, last, (T)f)
    WITH_FLOAT_TYPE(dtype, RUN)
#undef RUN
}
ms_status ms__cuda_scale(int index, int dtype, void *g, int64_t n, double f)
{
    return launch("scale", index, scale_kernel, up(n, PIECE), BLOCK, n, (int64_t)PIECE, dtype, g, f);
}

// Each block computes the norm, and scales its piece if the norm is too large or NaN.
__global__ void clip_kernel(ms_norm_job j, const ms_norm_part *list, clip_norm norm)
{
    double f = factor_of(norm);
    if (f == 1) return;
    const ms_norm_part &t = entry_of(j.n, list, blockIdx.x);
    int64_t first = ((int64_t)blockIdx.x - t.block) * j.piece;
    int64_t last = first + j.piece < t.numel ? first + j.piece : t.numel;
#define RUN(S, T) scale_part<T>((S *)t.g, first, last, (T)f)
    WITH_FLOAT_TYPE(t.dtype, RUN)
#undef RUN
}

// Multiplies the gradients by *inverse, and sets *found to 1 if one of them is not finite.
__global__ void unscale_kernel(ms_norm_job j, const ms_norm_part *list, const float *inverse, float *found)
{
    const ms_norm_part &t = entry_of(j.n, list, blockIdx.x);
    int64_t first = ((int64_t)blockIdx.x - t.block) * j.piece;
    int64_t last = first + j.piece < t.numel ? first + j.piece : t.numel;
    double f = *inverse;
    bool bad;
#define RUN(S, T) bad = scale_part<T, true>((S *)t.g, first, last, (T)f)
    WITH_FLOAT_TYPE(t.dtype, RUN)
#undef RUN
    if (bad) *(volatile float *)found = 1;  // several threads may: all store the same
}

// As unscale_kernel, but the first gradient that is not finite and those after it keep their values. sums: the largest
// |g| of each owner. Every block reads the sums of the owners up to its own, block 0 all sums.
__global__ void unscale_until_kernel(ms_norm_job j, const ms_norm_part *list, const double *sums, const float *inverse,
                                     float *found)
{
    __shared__ double shared[BLOCK];
    const ms_norm_part &t = entry_of(j.n, list, blockIdx.x);
    double most = 0;
    ROLLED
    for (int k = threadIdx.x; k < j.owners && (blockIdx.x == 0 || k <= t.owner); k += BLOCK)
        if (sums[k] - sums[k] != 0) most = k <= t.owner ? 2 : most > 1 ? most : 1;
    most = block_max(most, shared);
    if (most > 0 && blockIdx.x == 0 && threadIdx.x == 0) *found = 1;
    if (most > 1) return;
    int64_t first = ((int64_t)blockIdx.x - t.block) * j.piece;
    int64_t last = first + j.piece < t.numel ? first + j.piece : t.numel;
    double f = *inverse;
#define RUN(S, T) scale_part<T>((S *)t.g, first, last, (T)f)
    WITH_FLOAT_TYPE(t.dtype, RUN)
#undef RUN
}

// The arrays in a job's memory on the device (ms_norm_job): the sums, one for each value of ms_norm_part.owner; each
// block's part of a sum (pieces); the list of gradients; the owner of each block's gradient.
struct norm_room {
    double *sums, *pieces;
    const ms_norm_part *list;
    int *owners;
    explicit norm_room(const ms_norm_job *j)
    {
        sums = (double *)j->room->data;
        pieces = sums + j->owners;
        ms_norm_part *own = (ms_norm_part *)(pieces + j->blocks);
        list = j->there ? j->there : own;
        owners = (int *)(own + j->n);
    }
};

// Divides the gradients into blocks of `piece` elements, allocates the job's memory and copies the list there.
static ms_status begin_norms(int index, ms_norm_job *j, ms_norm_part *list)
{
    int64_t numel = 0;
    for (int k = 0; k < j->n; k++) numel += list[k].numel;
    // At most 8192 blocks and one more per tensor, so that each of the threads that add them up has few.
    j->piece = up(up(numel, 8192), PIECE) * PIECE;
    j->blocks = 0;
    for (int k = 0; k < j->n; k++) {
        list[k].block = j->blocks;
        j->blocks += up(list[k].numel, j->piece);
    }
    size_t bytes = (size_t)(j->owners + j->blocks) * sizeof(double) + (size_t)j->n * sizeof *list +
                   (size_t)j->blocks * sizeof(int);
    MS_TRY(ms__alloc(&j->room, MS_CUDA | index << 8, bytes, "clip_grad_norm_"));
    MS_TRY(ms__cuda_use(index));
    if (j->there) return MS_OK;
    return to_device(index, (void *)norm_room(j).list, list, (size_t)j->n * sizeof *list, j->n);
}

ms_status ms__cuda_norms(int index, ms_norm_job *j, ms_norm_part *list)
{
    MS_TRY(begin_norms(index, j, list));
    norm_room r(j);
    MS_TRY(launch_blocks("clip_grad_norm_", index, j->p == 2 ? norm_kernel<true> : norm_kernel<false>, j->blocks, BLOCK,
                         j->n, r.list, j->piece, j->p, r.pieces, r.owners));
    return launch_blocks("clip_grad_norm_", index, norm_join_kernel, j->owners, BLOCK, j->blocks, j->p,
                         (const double *)r.pieces, (const int *)r.owners, r.sums);
}

ms_status ms__cuda_clip(int index, const ms_norm_job *j, const double *total, double max_norm, int dtype, void *out)
{
    norm_room r(j);
    clip_norm norm = { total ? NULL : r.sums, j->owners, dtype, j->p, total ? *total : 0, max_norm, out, NULL };
    return launch("clip_grad_norm_", index, clip_kernel, max_norm - max_norm != 0 ? 1 : j->blocks, BLOCK, *j, r.list,
                  norm);
}

ms_status ms__cuda_unscale(int index, ms_norm_job *j, ms_norm_part *list, const float *inverse, float *found, bool stop)
{
    MS_TRY(stop ? ms__cuda_norms(index, j, list) : begin_norms(index, j, list));
    norm_room r(j);
    if (!stop) return launch("unscale_", index, unscale_kernel, j->blocks, BLOCK, *j, r.list, inverse, found);
    return launch_blocks("unscale_", index, unscale_until_kernel, j->blocks, BLOCK, *j, r.list, (const double *)r.sums,
                         inverse, found);
}

__global__ void adapt_kernel(float *scale, const float *found, double bad, double good)
{
    double now = *scale, grown = now * good;
    if (*found > 0) *scale = (float)(now * bad);
    else if (grown <= FLT_MAX) *scale = (float)grown;
}

ms_status ms__cuda_adapt(int index, float *scale, const float *found, double bad, double good)
{
    return launch("update", index, adapt_kernel, 1, 1, scale, found, bad, good);
}

// Counts one more decision in a tally, whose new value is `value`, and makes its counts visible to the host.
static __device__ inline void publish(const ms_tally_place &t, uint32_t value)
{
    uint32_t done = t.there->done + 1;
    *t.there = { done, value };
    uint64_t both = done | (uint64_t)value << 32;  // an ms_tally_counts: the host is little-endian
#ifdef MS_EMULATED
    __atomic_store_n(t.host, both, __ATOMIC_RELEASE);
#else
    *(volatile uint64_t *)t.host = both;
#endif
}

// Copies to each job its factors for the number of steps made (ms_optim_choice), and counts the decision of *skip. One
// block. A number of steps for which there is no set of factors would be an error of the engine; it is clamped.
__global__ void choose_kernel(ms_optim_choice c)
{
    constexpr int FACTORS = MS_OPTIM_FACTORS + 1;
    uint32_t made = c.tally.there->value;
    int64_t at = (int32_t)(made - c.sets->base), depth = c.sets->depth;
    at = at < 0 ? 0 : at < depth ? at : depth - 1;
    ROLLED
    for (int k = threadIdx.x; depth > 0 && k < c.n * FACTORS; k += BLOCK) {
        int job = k / FACTORS, f = k % FACTORS;
        c.jobs[job].factors[f] = c.factors[(c.group[job] * depth + at) * FACTORS + f];
    }
    __syncthreads();
    if (threadIdx.x == 0) publish(c.tally, made + (*c.skip == 0));
}

ms_status ms__cuda_choose(int index, const ms_optim_choice *c)
{
    return launch_blocks("optimizer", index, choose_kernel, 1, BLOCK, *c);
}

__global__ void adapt_by_kernel(ms_scale_change c)
{
    const ms_scale_rule &r = *c.rule;
    double good = r.growth_tracker == r.growth_tracker ? r.growth_tracker : *c.tracker, now = *c.scale, sum = 0;
    ROLLED
    for (int k = 0; k < c.n; k++) sum += *c.found[k];
    if (sum != 0) {
        good = 0;
        *c.scale = (float)(now * r.backoff_factor);
    } else if (++good == r.growth_interval) {
        good = 0;
        if (now * r.growth_factor <= FLT_MAX) *c.scale = (float)(now * r.growth_factor);
    }
    *c.tracker = good;
}

ms_status ms__cuda_adapt_by(int index, const ms_scale_change *c)
{
    return launch("update", index, adapt_by_kernel, 1, 1, *c);
}

// ---- sums computed by the transport's library (NCCL) ----

// Runs after the library's sum: divides by a mean's divisor, scales, and rounds to the result's dtype, in the CPU's
// arithmetic. Half types were converted to float32 before the sum, unless the script lets the library add them as is.
template <class S, class D>
__global__ void finish_kernel(D *dst, const S *src, int64_t n, real_of<S> divisor, real_of<S> scale)
{
    real_of<S> v[WIDE];
    int64_t j = GLOBAL_INDEX * WIDE;
    if (j >= n) return;
    read_pack(src, j, n, (real_of<S>)0, v);
    UNROLL
    for (int e = 0; e < WIDE; e++) {
        if (divisor != 1) v[e] /= divisor;
        if (scale != 1) v[e] *= scale;
    }
    write_pack(dst, j, n, v);
}

template <class S, class D> static ms_status finish(int index, const ms_cuda_finish *f)
{
    grid g = grid_of(up(f->n, WIDE));
    return launch("finish", index, finish_kernel<S, D>, g.blocks, g.threads, (D *)f->dst, (const S *)f->src, f->n,
                  (real_of<S>)f->divisor, (real_of<S>)f->scale);
}

ms_status ms__cuda_finish(int index, int stream, const ms_cuda_finish *f);
ms_status ms__cuda_finish(int index, int stream, const ms_cuda_finish *f)
{
    on_stream here(stream);
    if (f->src_dtype == MS_F16) {
        if (f->dst_dtype == MS_F16) return finish<ms_f16, ms_f16>(index, f);
        return finish<ms_f16, float>(index, f);
    }
    if (f->src_dtype == MS_BF16) {
        if (f->dst_dtype == MS_BF16) return finish<ms_bf16, ms_bf16>(index, f);
        return finish<ms_bf16, float>(index, f);
    }
    if (f->src_dtype == MS_F64) return finish<double, double>(index, f);
    return f->dst_dtype == MS_F16    ? finish<float, ms_f16>(index, f)
           : f->dst_dtype == MS_BF16 ? finish<float, ms_bf16>(index, f)
                                     : finish<float, float>(index, f);
}
