// SPDX-License-Identifier: MIT
// cuda/copy.cu -- copies and fills of tensors, for the engine, and operators whose results depend on positions:
// arange_, tril, triu. Casts are formulas (elementwise.cu).
#include "cuda/strided.h"

// ---- copies without conversion, which move bytes and so keep the payload of NaN ----

// A thread moves EACH elements of l.size[0] bytes; neighbouring threads move neighbouring elements.
#define EACH_OF(size) ((size) > 2 ? 4 : 8)
template <class V> static __device__ __forceinline__ void move(const strided &l)
{
    constexpr int EACH = EACH_OF(sizeof(V));
    int64_t first = (int64_t)blockIdx.x * blockDim.x * EACH + threadIdx.x, to[EACH];
    V v[EACH];
    UNROLL
    for (int j = 0; j < EACH; j++) {
        int64_t i = first + j * blockDim.x, at[2];
        if (i >= l.numel) break;
        place<2>(l, i, at);
        to[j] = at[0];
        v[j] = *(const V *)(l.data[1] + at[1]);
    }
    UNROLL
    for (int j = 0; j < EACH; j++)
        if (first + j * blockDim.x < l.numel) *(V *)(l.data[0] + to[j]) = v[j];
}
template <class V> __global__ void move_kernel(strided l) { move<V>(l); }
__global__ void move_wide_kernel(strided l) { move<uint4>(l); }

// Whether the operands' rows can be moved 16 bytes at a time; if so, l counts in such units.
static bool widen(strided *l)
{
    int last = l->ndim - 1, size = l->size[0], per = 16 / size;
    if (last < 0 || l->shape[last] % per) return false;
    for (int k = 0; k < 2; k++) {
        if ((uintptr_t)l->data[k] % 16 || l->stride[k][last] != size) return false;
        for (int d = 0; d < last; d++)
            if (l->stride[k][d] % 16) return false;
    }
    l->shape[last] /= per;
    l->numel /= per;
    l->stride[0][last] = l->stride[1][last] = 16;
    return true;
}

// A transposed source is read in TILE x TILE tiles through shared memory, so that reads and writes are both coalesced:
// 16 bytes at a time if `wide`. The source is contiguous along the rows, the destination along the columns.
enum { TILE = 64, TURN = 256 };
struct tiles {
    int64_t rows, columns;
    bool wide;
};
template <class V> __global__ void turn_kernel(strided l, tiles n)
{
    constexpr int LANES = 16 / sizeof(V);
    __shared__ V tile[TILE][TILE + 2];
    int64_t b = blockIdx.x, tc = b % n.columns, tr = b / n.columns % n.rows, rest = b / n.columns / n.rows;
    int nd = l.ndim;
    const char *from = l.data[1];
    char *to = l.data[0];
    for (int d = nd - 3; d >= 0; d--) {
        int64_t k = rest % l.shape[d];
        rest /= l.shape[d];
        from += k * l.stride[1][d];
        to += k * l.stride[0][d];
    }
    int64_t rows = l.shape[nd - 2] - tr * TILE, columns = l.shape[nd - 1] - tc * TILE;  // from this tile on
    from += tr * TILE * l.stride[1][nd - 2] + tc * TILE * l.stride[1][nd - 1];
    to += tr * TILE * l.stride[0][nd - 2] + tc * TILE * l.stride[0][nd - 1];
    union {
        uint4 all;
        V one[LANES];
    } v[TILE * TILE / LANES / TURN];
    UNROLL
    for (int j = 0; j < TILE * TILE / LANES / TURN; j++) {
        int at = ((int)threadIdx.x + j * TURN) * LANES, r = at % TILE, q = at / TILE;
        const V *p = (const V *)(from + q * l.stride[1][nd - 1]) + r;
        if (n.wide && r < rows && q < columns) v[j].all = *(const uint4 *)p;
        else UNROLL
        for (int e = 0; e < LANES; e++) v[j].one[e] = r + e < rows && q < columns ? p[e] : 0;
    }
    UNROLL
    for (int j = 0; j < TILE * TILE / LANES / TURN; j++) {
        int at = ((int)threadIdx.x + j * TURN) * LANES;
        UNROLL
        for (int e = 0; e < LANES; e++) tile[at / TILE][at % TILE + e] = v[j].one[e];
    }
    __syncthreads();
    UNROLL
    for (int j = 0; j < TILE * TILE / LANES / TURN; j++) {
        int at = ((int)threadIdx.x + j * TURN) * LANES, r = at / TILE, q = at % TILE;
        UNROLL
        for (int e = 0; e < LANES; e++) v[0].one[e] = tile[q + e][r];
        V *p = (V *)(to + r * l.stride[0][nd - 2]) + q;
        if (n.wide && r < rows && q < columns) put((uint4 *)p, v[0].all);
        else UNROLL
        for (int e = 0; e < LANES; e++)
            if (r < rows && q + e < columns) p[e] = v[0].one[e];
    }
}

// Whether l is a transposition that turn_kernel can copy; if so, makes the dimension along which the source is
// contiguous the second to last.
static bool is_turned(strided *l)
{
    int n = l->ndim, size = l->size[0], other = -1;
    if (n < 2 || (size != 2 && size != 4) || l->stride[0][n - 1] != size || l->stride[1][n - 1] == size ||
        l->shape[n - 1] < 16)
        return false;
    for (int d = 0; d < n - 1; d++)
        if (l->stride[1][d] == size && l->shape[d] >= 16) other = d;
    if (other < 0) return false;
    for (int d = other; d < n - 2; d++) {
        int64_t shape = l->shape[d], a = l->stride[0][d], b = l->stride[1][d];
        l->shape[d] = l->shape[d + 1], l->stride[0][d] = l->stride[0][d + 1], l->stride[1][d] = l->stride[1][d + 1];
        l->shape[d + 1] = shape, l->stride[0][d + 1] = a, l->stride[1][d + 1] = b;
    }
    return true;
}
static ms_status turn(int index, const strided &l)
{
    int n = l.ndim;
    int64_t rows = l.shape[n - 2], columns = l.shape[n - 1], lanes = 16 / l.size[0];
    tiles t = { up(rows, TILE), up(columns, TILE), rows % lanes == 0 && columns % lanes == 0 };
    for (int k = 0; k < 2; k++) {
        t.wide = t.wide && (uintptr_t)l.data[k] % 16 == 0;
        for (int d = 0; d < n; d++) t.wide = t.wide && (l.stride[k][d] % 16 == 0 || l.stride[k][d] == l.size[0]);
    }
    int64_t blocks = t.rows * t.columns * (l.numel / (rows * columns));
    if (l.size[0] == 2) return launch_blocks("copy", index, turn_kernel<uint16_t>, blocks, TURN, l, t);
    return launch_blocks("copy", index, turn_kernel<uint32_t>, blocks, TURN, l, t);
}

ms_status ms__cuda_copy_tensor(ms_tensor *dst, const ms_tensor *src)
{
    if (dst->numel == 0) return MS_OK;
    if (dst->dtype != src->dtype) return ms__cuda_convert(dst, src);
    int index = index_of(dst);
    const ms_tensor *x[] = { dst, src };
    strided l = strided_of(2, x);
    if (l.ndim <= 1 && (l.ndim == 0 || (l.stride[0][0] == l.size[0] && l.stride[1][0] == l.size[0]))) {
        MS_TRY(ms__cuda_use(index));
        size_t bytes = (size_t)l.numel * l.size[0];
        CUDA_TRY(index,
                 cudaMemcpyAsync(l.data[0], l.data[1], bytes, cudaMemcpyDeviceToDevice,
                                 ms__cuda_stream(index, MS_STREAM_COMPUTE)),
                 "%zu bytes", bytes);
        return MS_OK;
    }
    if (is_turned(&l)) return turn(index, l);
    bool wide = widen(&l);
    grid g = grid_of(up(l.numel, wide ? 4 : EACH_OF(l.size[0])));
    if (wide) return launch("copy", index, move_wide_kernel, g.blocks, g.threads, l);
    switch (l.size[0]) {
    case 1: return launch("copy", index, move_kernel<uint8_t>, g.blocks, g.threads, l);
    case 2: return launch("copy", index, move_kernel<uint16_t>, g.blocks, g.threads, l);
    case 4: return launch("copy", index, move_kernel<uint32_t>, g.blocks, g.threads, l);
    default: return launch("copy", index, move_kernel<uint64_t>, g.blocks, g.threads, l);
    }
}

// ---- fills ----

template <class T> __global__ void fill_kernel(strided l, T v)
{
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= l.numel) return;
    int n = l.numel - i < WIDE ? (int)(l.numel - i) : WIDE;
    if (l.dense) {
        T all[WIDE];
        UNROLL
        for (int j = 0; j < WIDE; j++) all[j] = v;
        store_lanes<T>(l, i, n, all);
    } else
        for (int j = 0; j < n; j++) {
            int64_t at;
            place<1>(l, i + j, &at);
            value<T>::store(l.dtype[0], l.data[0] + at, v);
        }
}
ms_status ms__cuda_fill_tensor(ms_tensor *t, double v)
{
    if (t->numel == 0) return MS_OK;
    int index = index_of(t);
    if (v == 0 && !std::signbit(v) && ms__is_contiguous(t)) {
        MS_TRY(ms__cuda_use(index));
        CUDA_TRY(index, cudaMemsetAsync(ms__data(t), 0, ms__nbytes(t), ms__cuda_stream(index, MS_STREAM_COMPUTE)),
                 "%zu bytes", ms__nbytes(t));
        return MS_OK;
    }
    const ms_tensor *x[] = { t };
    strided l = strided_of(1, x);
    grid g = grid_of(up(l.numel, WIDE));
    if (t->dtype == MS_BOOL) v = v != 0;
    if (t->dtype == MS_F64) return launch("fill", index, fill_kernel<double>, g.blocks, g.threads, l, v);
    if (t->dtype <= MS_BF16) return launch("fill", index, fill_kernel<float>, g.blocks, g.threads, l, (float)v);
    return launch("fill", index, fill_kernel<int64_t>, g.blocks, g.threads, l, (int64_t)v);
}

// ---- positions ----

// Element k is first + k * step. whole: computed in int64, exact beyond 2^53, because dtype and step are integers.
struct progression {
    double first, step;
    bool whole;
};
__global__ void arange_kernel(strided l, progression p)
{
    int64_t k = GLOBAL_INDEX * WIDE, stride = l.dense ? l.size[0] : l.stride[0][0];
    if (k >= l.numel) return;
    int n = l.numel - k < WIDE ? (int)(l.numel - k) : WIDE;
    char *out = l.data[0] + k * stride;
    if (l.dense && l.dtype[0] <= MS_BF16 && l.dtype[0] != MS_F64) {
        float v[WIDE];
        UNROLL
        for (int j = 0; j < WIDE; j++) v[j] = (float)(p.first + (double)(k + j) * p.step);
        store_lanes<float>(l, k, n, v);
        return;
    }
    for (int j = 0; j < n; j++)
        if (p.whole) value<int64_t>::store(l.dtype[0], out + j * stride, (int64_t)p.first + (k + j) * (int64_t)p.step);
        else value<double>::store(l.dtype[0], out + j * stride, p.first + (double)(k + j) * p.step);
}
static ms_status run_arange(ms_call *c)
{
    ms_tensor *t = c->out[0];
    progression p = { c->f[0], c->f[1], t->dtype > MS_BF16 && c->f[1] == (double)(int64_t)c->f[1] };
    const ms_tensor *x[] = { t };
    grid g = grid_of(up(t->numel, WIDE));
    return launch(c->op->name, index_of(t), arange_kernel, g.blocks, g.threads, strided_of(1, x), p);
}

// Sets the elements above (lower) or below diagonal k of contiguous matrices to 0.
struct triangle {
    int64_t rows, cols, k;
    bool lower;
};
__global__ void triangle_kernel(strided l, triangle t)
{
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= l.numel) return;
    int n = l.numel - i < WIDE ? (int)(l.numel - i) : WIDE, cleared = 0;
    for (int j = 0; j < n; j++) {
        int64_t row = (i + j) / t.cols % t.rows, col = (i + j) % t.cols;
        bool stays = t.lower ? col <= row + t.k : col >= row + t.k;
        cleared |= !stays << j;
    }
    const float zeros[WIDE] = {};
    if (cleared == (1 << WIDE) - 1 && l.dense) store_lanes<float>(l, i, n, zeros);
    else
        for (int j = 0; j < n; j++)
            if (cleared >> j & 1) store<float>(l.dtype[0], l.data[0], i + j, 0);
}
static ms_status keep_triangle(ms_call *c, bool lower)
{
    ms_tensor *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    MS_TRY(ms__cuda_copy_tensor(o, c->in[0]));
    triangle t = { o->shape[o->ndim - 2], o->shape[o->ndim - 1], c->n_i ? c->i[0] : 0, lower };
    const ms_tensor *x[] = { o };
    grid g = grid_of(up(o->numel, WIDE));
    return launch(c->op->name, index_of(o), triangle_kernel, g.blocks, g.threads, strided_of(1, x), t);
}
static ms_status run_tril(ms_call *c) { return keep_triangle(c, true); }
static ms_status run_triu(ms_call *c) { return keep_triangle(c, false); }

extern const ms_cuda_kernel ms__cuda_copy[];
const ms_cuda_kernel ms__cuda_copy[] = {
    { "arange_", run_arange }, { "tril", run_tril }, { "triu", run_triu }, { NULL, NULL }
};
