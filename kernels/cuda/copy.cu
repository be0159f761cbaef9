// SPDX-License-Identifier: MIT
// cuda/copy.cu -- copies and fills of tensors, for the engine, and operators whose results depend on positions:
// arange_, tril, triu. Casts of single tensors are in elementwise.cu. The last two sections process lists of tensors in
// few launches: reductions over ranks, whose sources are in peers' memory, and copies and casts.
#include "cuda/strided.h"

// ---- copies without conversion, which move bytes and so keep the payload of NaN ----

// A thread moves EACH elements of type V; neighbouring threads move neighbouring elements.
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

// Whether the operands' rows can be moved 16 bytes at a time; if so, makes l count in units of 16 bytes.
static bool widen_words(strided *l)
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
    ROLLED
    for (int d = nd - 3; d >= 0; d--) {
        int64_t k = rest % l.shape[d];
        rest /= l.shape[d];
        from += k * l.stride[1][d];
        to += k * l.stride[0][d];
    }
    int64_t rows = l.shape[nd - 2] - tr * TILE, columns = l.shape[nd - 1] - tc * TILE;  // left from this tile on
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
static ms_status turn_matrix(int index, const strided &l)
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
    if (is_turned(&l)) return turn_matrix(index, l);
    bool wide = widen_words(&l);
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

// V: an unsigned integer of the elements' size.
template <class V> static __device__ __forceinline__ void fill_wide(V *p, V v)
{
    typedef std::conditional_t<sizeof(V) == 1, uint2, uint4> word;
    union {
        V one[sizeof(word) / sizeof(V)];
        word all;
    } u;
    UNROLL
    for (int j = 0; j < (int)(sizeof(word) / sizeof(V)); j++) u.one[j] = v;
    UNROLL
    for (int k = 0; k < (int)(WIDE * sizeof(V) / sizeof(word)); k++) put((word *)p + k, u.all);
}
template <class V> __global__ void fill_kernel(strided l, V v)
{
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= l.numel) return;
    int n = l.numel - i < WIDE ? (int)(l.numel - i) : WIDE;
    if (l.dense && n == WIDE && is_wide(l.data[0])) return fill_wide((V *)l.data[0] + i, v);
    for (int j = 0; j < n; j++) {
        int64_t at;
        place<1>(l, i + j, &at);
        *(V *)(l.data[0] + at) = v;
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
    uint64_t bits = (uint64_t)(int64_t)(t->dtype == MS_BOOL ? v != 0 : t->dtype > MS_BF16 ? v : 0);
    float f = (float)v;
    if (t->dtype == MS_F64) memcpy(&bits, &v, sizeof v);
    if (t->dtype == MS_F32) memcpy(&bits, &f, sizeof f);
    if (t->dtype == MS_F16) bits = ms_float_to_f16(f).bits;
    if (t->dtype == MS_BF16) bits = ms_float_to_bf16(f).bits;
    switch (l.size[0]) {
    case 1: return launch("fill", index, fill_kernel<uint8_t>, g.blocks, g.threads, l, (uint8_t)bits);
    case 2: return launch("fill", index, fill_kernel<uint16_t>, g.blocks, g.threads, l, (uint16_t)bits);
    case 4: return launch("fill", index, fill_kernel<uint32_t>, g.blocks, g.threads, l, (uint32_t)bits);
    default: return launch("fill", index, fill_kernel<uint64_t>, g.blocks, g.threads, l, bits);
    }
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
        store_lanes(l, k, n, v);
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

// Sets elements of contiguous matrices to 0: those above diagonal k if `lower` is set, otherwise those below it.
struct triangle {
    int64_t rows, cols, k;
    bool lower;
};
template <class V> __global__ void triangle_kernel(int64_t numel, V *out, triangle t)
{
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= numel) return;
    int n = numel - i < WIDE ? (int)(numel - i) : WIDE, cleared = 0;
    for (int j = 0; j < n; j++) {
        int64_t row = (i + j) / t.cols % t.rows, col = (i + j) % t.cols;
        bool stays = t.lower ? col <= row + t.k : col >= row + t.k;
        cleared |= !stays << j;
    }
    if (cleared == (1 << WIDE) - 1) return fill_wide(out + i, (V)0);
    for (int j = 0; j < n; j++)
        if (cleared >> j & 1) out[i + j] = 0;
}
static ms_status keep_triangle(ms_call *c, bool lower)
{
    ms_tensor *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    MS_TRY(ms__cuda_copy_tensor(o, c->in[0]));
    triangle t = { o->shape[o->ndim - 2], o->shape[o->ndim - 1], c->n_i ? c->i[0] : 0, lower };
    grid g = grid_of(up(o->numel, WIDE));
#define CLEAR(V) \
    return launch(c->op->name, index_of(o), triangle_kernel<V>, g.blocks, g.threads, o->numel, (V *)ms__data(o), t)
    switch (ms__dtype_size(o->dtype)) {
    case 1: CLEAR(uint8_t);
    case 2: CLEAR(uint16_t);
    case 4: CLEAR(uint32_t);
    default: CLEAR(uint64_t);
    }
#undef CLEAR
}
static ms_status run_tril(ms_call *c) { return keep_triangle(c, true); }
static ms_status run_triu(ms_call *c) { return keep_triangle(c, false); }

extern const ms_cuda_kernel ms__cuda_copy[];
const ms_cuda_kernel ms__cuda_copy[] = {
    { "arange_", run_arange }, { "tril", run_tril }, { "triu", run_triu }, { NULL, NULL }
};

// Elements that a block handles.
constexpr int64_t SPAN = BLOCK * WIDE * 2;

// ---- reductions over ranks: in the order of the ranks, bitwise equal to the CPU's (comm/movers/reduce.c) ----

enum { PARTS = 24, POINTERS = 2 * MS_CUDA_MEMBERS + 64 };
enum { SUM = MS_DIST_SUM, AVG = MS_DIST_AVG, MAX = MS_DIST_MAX, MIN = MS_DIST_MIN, PROD = MS_DIST_PROD };
struct reduction {
    int how, n_ranks, n_dst, n_parts;
    double scale;
    int64_t block[PARTS];                // the first block of each part
    int64_t numel[PARTS], zeros[PARTS];  // elements that are reduced; elements after them that are set to 0
    const char *src[POINTERS];           // sources of all parts, then destinations
};

// The part that contains block b.
template <class L> static __device__ inline int part_of(const L &l, int n, int64_t b)
{
    int k = 0;
    ROLLED
    while (k + 1 < n && l.block[k + 1] <= b) k++;
    return k;
}

// T: the stored type; A: that of sums. `logical`: bool, for which a sum is `or` and a product `and`.
template <class T, class A, bool logical> struct element {
    static __device__ inline A load(const T *p) { return (A)*p; }
    static __device__ inline void store(T *p, A v) { *p = (T)v; }
};
template <> struct element<ms_f16, float, false> {
    static __device__ inline float load(const ms_f16 *p) { return ms_f16_to_float(*p); }
    static __device__ inline void store(ms_f16 *p, float v) { *p = ms_float_to_f16(v); }
};
template <> struct element<ms_bf16, float, false> {
    static __device__ inline float load(const ms_bf16 *p) { return ms_bf16_to_float(*p); }
    static __device__ inline void store(ms_bf16 *p, float v) { *p = ms_float_to_bf16(v); }
};

template <class A, bool logical> static __device__ inline A combine(int how, A a, A x)
{
    if constexpr (logical) return how == MIN || how == PROD ? (A)(a & x) : (A)(a | x);
    if constexpr (std::is_integral_v<A>) {
        typedef std::make_unsigned_t<A> U;  // sums of integers wrap around
        if (how == SUM || how == AVG) return (A)((U)a + (U)x);
        if (how == PROD) return (A)((U)a * (U)x);
    }
    if (how == MAX) return x > a || x != x ? x : a;
    if (how == MIN) return x < a || x != x ? x : a;
    return how == PROD ? a * x : a + x;
}
template <class A> static __device__ inline A finish(const reduction &l, A a)
{
    if constexpr (std::is_floating_point_v<A>) {
        if (l.how == AVG) a /= (A)l.n_ranks;
        if (l.scale != 1) a *= (A)l.scale;
    }
    return a;
}

template <class T> constexpr bool has_wide = std::is_same_v<T, float> || (sizeof(T) == 2 && !std::is_integral_v<T>);

template <class T, class A, bool logical> __global__ void ranks_kernel(const __grid_constant__ reduction l)
{
    int k = part_of(l, l.n_parts, blockIdx.x);
    int64_t first = ((int64_t)blockIdx.x - l.block[k]) * SPAN, n = l.numel[k], end = first + SPAN;
    const char *const *src = l.src + k * l.n_ranks;
    char *const *dst = (char *const *)(l.src + l.n_parts * l.n_ranks + k * l.n_dst);
    int64_t last = end < n ? end : n, i = first;
    if constexpr (has_wide<T>) {
        bool wide = true;
        ROLLED
        for (int r = 0; r < l.n_ranks; r++) wide = wide && is_wide(src[r]);
        ROLLED
        for (int d = 0; d < l.n_dst; d++) wide = wide && is_wide(dst[d]);
        if (wide) {
            int64_t rest = first + (last > first ? (last - first) / WIDE * WIDE : 0);
            for (i = first + (int64_t)threadIdx.x * WIDE; i < rest; i += BLOCK * WIDE) {
                A sum[WIDE], x[WIDE];
                load_wide((const T *)src[0] + i, sum);
                for (int r = 1; r < l.n_ranks; r++) {
                    load_wide((const T *)src[r] + i, x);
                    UNROLL
                    for (int j = 0; j < WIDE; j++) sum[j] = combine<A, logical>(l.how, sum[j], x[j]);
                }
                UNROLL
                for (int j = 0; j < WIDE; j++) sum[j] = finish(l, sum[j]);
                ROLLED
                for (int d = 0; d < l.n_dst; d++) store_wide((T *)dst[d] + i, sum);
            }
            i = rest;
        }
    }
    for (i += threadIdx.x; i < last; i += BLOCK) {
        typedef element<T, A, logical> E;
        A sum = E::load((const T *)src[0] + i);
        for (int r = 1; r < l.n_ranks; r++) sum = combine<A, logical>(l.how, sum, E::load((const T *)src[r] + i));
        sum = finish(l, sum);
        ROLLED
        for (int d = 0; d < l.n_dst; d++) E::store((T *)dst[d] + i, sum);
    }
    for (i = (first > n ? first : n) + threadIdx.x; i < end && i < n + l.zeros[k]; i += BLOCK) ROLLED
    for (int d = 0; d < l.n_dst; d++) element<T, A, logical>::store((T *)dst[d] + i, (A)0);
}

static ms_status launch_reduction(int index, int dtype, const reduction &l, int64_t blocks)
{
    switch (dtype) {
    case MS_F32: return launch("reduce", index, ranks_kernel<float, float, false>, blocks, BLOCK, l);
    case MS_F64: return launch("reduce", index, ranks_kernel<double, double, false>, blocks, BLOCK, l);
    case MS_F16: return launch("reduce", index, ranks_kernel<ms_f16, float, false>, blocks, BLOCK, l);
    case MS_BF16: return launch("reduce", index, ranks_kernel<ms_bf16, float, false>, blocks, BLOCK, l);
    case MS_I64: return launch("reduce", index, ranks_kernel<int64_t, int64_t, false>, blocks, BLOCK, l);
    case MS_I32: return launch("reduce", index, ranks_kernel<int32_t, int32_t, false>, blocks, BLOCK, l);
    case MS_U8: return launch("reduce", index, ranks_kernel<uint8_t, uint8_t, false>, blocks, BLOCK, l);
    case MS_I8: return launch("reduce", index, ranks_kernel<int8_t, int8_t, false>, blocks, BLOCK, l);
    case MS_I16: return launch("reduce", index, ranks_kernel<int16_t, int16_t, false>, blocks, BLOCK, l);
    default: return launch("reduce", index, ranks_kernel<uint8_t, uint8_t, true>, blocks, BLOCK, l);
    }
}

ms_status ms__cuda_reduce_ranks(int index, int stream, const ms_cuda_reduction *r);
ms_status ms__cuda_reduce_ranks(int index, int stream, const ms_cuda_reduction *r)
{
    int each = r->n_ranks + r->n_dst;
    if (r->n_ranks > MS_CUDA_MEMBERS || r->n_dst > MS_CUDA_MEMBERS)
        return ms__fail(MS_EUNSUPPORTED, "reduce: %d ranks on cuda:%d, at most %d are supported", r->n_ranks, index,
                        MS_CUDA_MEMBERS);
    on_stream here(stream);
    for (int k = 0; k < r->n_parts;) {
        reduction l = {};
        int64_t blocks = 0;
        int n = r->n_parts - k;
        if (n > PARTS) n = PARTS;
        if (n > POINTERS / each) n = POINTERS / each;
        l.how = r->reduction;
        l.n_ranks = r->n_ranks;
        l.n_dst = r->n_dst;
        l.n_parts = n;
        l.scale = r->scale;
        for (int i = 0; i < n; i++) {
            l.block[i] = blocks;
            l.numel[i] = r->numel[k + i];
            l.zeros[i] = r->zeros ? r->zeros[k + i] : 0;
            blocks += up(l.numel[i] + l.zeros[i], SPAN);
        }
        memcpy(l.src, r->src + (size_t)k * r->n_ranks, (size_t)(n * r->n_ranks) * sizeof *l.src);
        memcpy(l.src + n * r->n_ranks, r->dst + (size_t)k * r->n_dst, (size_t)(n * r->n_dst) * sizeof *l.src);
        MS_TRY(launch_reduction(index, r->dtype, l, blocks));
        k += n;
    }
    return MS_OK;
}

// ---- copies and casts ----

enum { COPIES = 72 };
struct copies {
    int n;
    int64_t block[COPIES], numel[COPIES];
    void *dst[COPIES];
    const void *src[COPIES];           // NULL: dst is set to 0
    uint8_t to[COPIES], from[COPIES];  // dtypes; both are MS_U8 to copy bytes and to set them to 0
};

template <class D, class S> static __device__ inline void cast_span(D *dst, const S *src, int64_t first, int64_t last)
{
    int64_t i = first;
    if (is_wide(dst) && is_wide(src)) {
        int64_t rest = first + (last - first) / WIDE * WIDE;
        // A block has two turns.
        ROLLED
        for (i = first + (int64_t)threadIdx.x * WIDE; i < rest; i += BLOCK * WIDE) {
            float v[WIDE];
            load_wide(src + i, v);
            store_wide(dst + i, v);
        }
        i = rest;
    }
    for (i += threadIdx.x; i < last; i += BLOCK)
        element<D, float, false>::store(dst + i, element<S, float, false>::load(src + i));
}
// From one of two other dtypes, A and B: bytes of the same dtype are copied.
template <class A, class B, class D>
static __device__ inline void cast_from(bool first_of_them, D *dst, const void *src, int64_t first, int64_t last)
{
    if (first_of_them) cast_span(dst, (const A *)src, first, last);
    else cast_span(dst, (const B *)src, first, last);
}
static __device__ inline void copy_span(char *dst, const char *src, int64_t first, int64_t last)
{
    int64_t i = first;
    if (is_wide(dst) && (!src || is_wide(src))) {
        int64_t rest = first + (last - first) / 16 * 16;
        ROLLED
        for (i = first + (int64_t)threadIdx.x * 16; i < rest; i += BLOCK * 16)
            put((uint4 *)(dst + i), src ? *(const uint4 *)(src + i) : make_uint4(0, 0, 0, 0));
        i = rest;
    }
    for (i += threadIdx.x; i < last; i += BLOCK) dst[i] = src ? src[i] : (char)0;
}

__global__ void copies_kernel(const __grid_constant__ copies l)
{
    int k = part_of(l, l.n, blockIdx.x);
    int64_t first = ((int64_t)blockIdx.x - l.block[k]) * SPAN, last = first + SPAN;
    if (last > l.numel[k]) last = l.numel[k];
    if (l.to[k] == MS_U8) {
        copy_span((char *)l.dst[k], (const char *)l.src[k], first, last);
        return;
    }
    int from = l.from[k];
    switch (l.to[k]) {
    case MS_F32: cast_from<ms_f16, ms_bf16>(from == MS_F16, (float *)l.dst[k], l.src[k], first, last); break;
    case MS_F16: cast_from<float, ms_bf16>(from == MS_F32, (ms_f16 *)l.dst[k], l.src[k], first, last); break;
    default: cast_from<float, ms_f16>(from == MS_F32, (ms_bf16 *)l.dst[k], l.src[k], first, last); break;
    }
}

ms_status ms__cuda_copy_all(int index, int stream, int n, const ms_cuda_copy *list);
ms_status ms__cuda_copy_all(int index, int stream, int n, const ms_cuda_copy *list)
{
    on_stream here(stream);
    for (int k = 0; k < n;) {
        copies l = {};
        int64_t blocks = 0;
        for (; k < n && l.n < COPIES; k++) {
            const ms_cuda_copy *c = &list[k];
            if (c->numel == 0) continue;
            bool bytes = !c->src || c->dst_dtype == c->src_dtype;
            int i = l.n++;
            l.block[i] = blocks;
            l.numel[i] = bytes ? c->numel * ms__dtype_size(c->dst_dtype) : c->numel;
            l.dst[i] = c->dst;
            l.src[i] = c->src;
            l.to[i] = (uint8_t)(bytes ? MS_U8 : c->dst_dtype);
            l.from[i] = (uint8_t)(bytes ? MS_U8 : c->src_dtype);
            blocks += up(l.numel[i], SPAN);
        }
        MS_TRY(launch("copy", index, copies_kernel, blocks, BLOCK, l));
    }
    return MS_OK;
}
