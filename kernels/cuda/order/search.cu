// SPDX-License-Identifier: MIT
// cuda/order/search.cu -- searchsorted and nonzero.
#include "cuda/blocks.h"
#include "formulas/order.h"

// ---- searchsorted: a thread for each number ----

struct search_job {
    int dtype, out_type;
    bool right;
    int64_t numel, n, per_line;  // n: boundaries of a line; per_line: numbers looked up in it
    const void *sorted, *x;
    void *o;
};
static __device__ inline bool after(double b, double v, bool right) { return ms_after_f64(b, v, right); }
static __device__ inline bool after(int64_t b, int64_t v, bool right) { return ms_after_i64(b, v, right); }
template <class T> __global__ void search_kernel(search_job j)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= j.numel) return;
    T v = load<T>(j.dtype, j.x, i);
    int64_t line = i / j.per_line * j.n, low = 0, high = j.n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (after(load<T>(j.dtype, j.sorted, line + middle), v, j.right)) low = middle + 1;
        else high = middle;
    }
    if (j.out_type == MS_I32) ((int32_t *)j.o)[i] = (int32_t)low;
    else ((int64_t *)j.o)[i] = low;
}
static ms_status run_searchsorted(ms_call *c)
{
    held_inputs h;
    ms_tensor *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    MS_TRY(h.hold(c, 2));
    const ms_tensor *sorted = h.in[0], *x = h.in[1];
    search_job j = { x->dtype, o->dtype,         c->n_i > 0 && c->i[0], o->numel,   sorted->shape[sorted->ndim - 1],
                     o->numel, ms__data(sorted), ms__data(x),           ms__data(o) };
    if (sorted->ndim > 1) j.per_line = x->shape[x->ndim - 1];
    grid g = grid_of(o->numel);
    return launch(c->op->name, index_of(o), x->dtype <= MS_BF16 ? search_kernel<double> : search_kernel<int64_t>,
                  g.blocks, g.threads, j);
}

// ---- nonzero: blocks count their parts, then each finds its place after the parts before it ----

enum { MOST_PARTS = 1024 };
struct nonzero_job {
    int dtype;
    int64_t n, part, parts, wanted;
    const void *x;
    int64_t *counts, *o;
};
static __device__ inline bool is_there(const nonzero_job &j, int64_t i)
{
    return value<double>::load(j.dtype, (const char *)j.x + i * ms__dtype_size(j.dtype)) != 0;
}
__global__ void count_kernel(nonzero_job j)
{
    __shared__ int64_t shared[WARPS];
    int64_t first = blockIdx.x * j.part, last = first + j.part < j.n ? first + j.part : j.n, sum = 0;
    for (int64_t i = first + threadIdx.x; i < last; i += BLOCK) sum += is_there(j, i);
    sum = group_sum(sum, BLOCK, shared);
    if (threadIdx.x == 0) j.counts[blockIdx.x] = sum;
}
__global__ void place_kernel(nonzero_job j)
{
    __shared__ int64_t shared[WARPS];
    __shared__ int places[BLOCK];
    int t = threadIdx.x;
    int64_t first = blockIdx.x * j.part, last = first + j.part < j.n ? first + j.part : j.n, before = 0;
    ROLLED
    for (int64_t p = t; p < (int64_t)blockIdx.x; p += BLOCK) before += j.counts[p];
    before = group_sum(before, BLOCK, shared);
    for (int64_t begin = first; begin < last; begin += BLOCK) {
        int64_t i = begin + t;
        int mine = i < last && is_there(j, i);
        places[t] = mine;
        __syncthreads();
        for (int step = 1; step < BLOCK; step *= 2) {
            int left = t >= step ? places[t - step] : 0;
            __syncthreads();
            places[t] += left;
            __syncthreads();
        }
        int64_t to = before + places[t] - 1;
        if (mine && to < j.wanted) j.o[to] = i;
        before += places[BLOCK - 1];
        __syncthreads();
    }
}
static ms_status run_nonzero(ms_call *c)
{
    held_inputs h;
    scratch room;
    ms_tensor *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    MS_TRY(h.hold(c, 1));
    const ms_tensor *x = h.in[0];
    MS_TRY(ms__cuda_fill_tensor(o, -1));
    int64_t part = up(up(x->numel, MOST_PARTS), 4 * BLOCK) * 4 * BLOCK, parts = part ? up(x->numel, part) : 0;
    if (parts == 0) return MS_OK;
    MS_TRY(room.alloc(c, ms__device(x), parts * (int64_t)sizeof(int64_t)));
    nonzero_job j = {
        x->dtype, x->numel, part, parts, c->i[0], ms__data(x), (int64_t *)room.data, (int64_t *)ms__data(o)
    };
    MS_TRY(launch_blocks(c->op->name, index_of(o), count_kernel, parts, BLOCK, j));
    return launch_blocks(c->op->name, index_of(o), place_kernel, parts, BLOCK, j);
}

extern const ms_cuda_kernel ms__cuda_search[];
const ms_cuda_kernel ms__cuda_search[] = { { "searchsorted", run_searchsorted },
                                           { "nonzero", run_nonzero },
                                           { NULL, NULL } };
