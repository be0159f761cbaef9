// SPDX-License-Identifier: MIT
// cuda/attention/flash.h -- tiles of attention on tensor cores, shared by flash.cu and flash_backward.cu.
//
// A block has 4 warps and computes 64 rows of a result, 16 per warp. A tile in shared memory has rows of D (64 or 128)
// numbers of 16 bits, in chunks of 16 bytes; chunk c of row r is stored at c ^ (r % 8), so that the chunks c of 8
// successive rows lie in different banks. Heads of other sizes are padded with zeros to 64 or 128 columns.
#ifndef MS_FLASH_H
#define MS_FLASH_H

#include "cuda/attention/attention.h"
#include "cuda/blocks.h"
#include "cuda/tensor_core.h"

// Whether flash.cu and flash_backward.cu can compute a call with these tensors.
bool ms__flash_fits(const ms_tensor *const *qkv, const heads &h);
ms_status ms__flash_attention(ms_call *c, const heads &h);
ms_status ms__flash_backward(ms_call *c, const heads &h);

enum { FLASH_THREADS = 128, FLASH_ROWS = 64 };
// N: rows of the tiles over which a block iterates. With 128 columns, 64 rows would need too many registers.
template <int D> struct passed {
    enum { N = D == 64 ? 64 : 32 };
};
// Bytes of shared memory of a block: `own` tiles of 64 rows that it keeps, and two pairs of tiles over which it
// iterates. wide: tiles have 128 columns, otherwise 64.
static inline int flash_shared(int own, bool wide)
{
    return 2 * (wide ? 128 * (own * FLASH_ROWS + 4 * passed<128>::N) : 64 * (own * FLASH_ROWS + 4 * passed<64>::N));
}

struct flash_part {
    uint16_t *data;             // NULL if the tensor is a gradient that is not needed
    int64_t rows, batch, head;  // strides of rows and of the two batch dimensions, in elements
};
struct flash {
    flash_part q, k, v, o, g, dq, dk, dv;  // g: the gradient of the output o
    float *lse, *delta;                    // one number per row of q; for delta, see flash_backward.cu
    const float *g_lse;                    // gradient of lse; NULL if there is none
    int heads, inner, tq, tk, d;           // heads: product of the batch dimensions; inner: size of the last one
    int share;                             // heads of q for each head of k and v
    ms_span span;
    float scale, cap;
    float unit;         // factor of scores before exp2: scale / ln 2; in ALTERED kernels 1 / ln 2 (mask_scores scales)
    float keep;         // factor of the probabilities that dropout keeps
    strided_part mask;  // data is NULL without a mask; strides of the two batch dimensions: stride[0], stride[1]
    dropped dropout;
};

// Both are in cudnn.cu. *done: whether cuDNN computes the call.
ms_status ms__cudnn_attention(const ms_call *c, const flash &f, bool *done);
ms_status ms__cudnn_backward(const ms_call *c, const flash &f, bool *done);

bool ms__flash_aligned(const ms_tensor *t, const heads &h);  // whether accesses of 16 bytes are aligned
flash_part ms__flash_part(const ms_tensor *t, const heads &h);
flash ms__flash_call(const heads &h, const ms_tensor *mask, const rng &random);

// A kernel's instance for the dtype and the size of heads. ALTERED kernels apply a mask, dropout or a cap.
#define FLASH_KERNEL_OF(kernel, type, f)                                               \
    ((f).d > 64 ? (is_altered(f) ? kernel<type, 128, true> : kernel<type, 128, false>) \
                : (is_altered(f) ? kernel<type, 64, true> : kernel<type, 64, false>))
#define FLASH_KERNEL(kernel, dtype, f) \
    ((dtype) == MS_BF16 ? FLASH_KERNEL_OF(kernel, of_bf16, f) : FLASH_KERNEL_OF(kernel, of_f16, f))
static inline bool is_altered(const flash &f) { return f.mask.data || f.dropout.p > 0 || f.cap > 0; }

// The operations of the two 16-bit types.
struct of_bf16 {
    static __device__ inline void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) { mma_bf16(d, a, b); }
    static __device__ inline uint32_t pack(float low, float high) { return pack_bf16(low, high); }
    static __device__ inline float value(uint32_t bits) { return ms__bits_float(bits << 16); }
};
struct of_f16 {
    static __device__ inline void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) { mma_f16(d, a, b); }
    static __device__ inline uint32_t pack(float low, float high) { return pack_f16(low, high); }
    static __device__ inline float value(uint32_t bits)
    {
        ms_f16 h;
        h.bits = (uint16_t)bits;
        return ms_f16_to_float(h);
    }
};

static __device__ inline uint16_t *head_of(const flash_part &x, const flash &f, int head)
{
    return x.data + head / f.inner * x.batch + head % f.inner * x.head;
}

// The head of keys or values that a head of queries attends to.
static __device__ inline uint16_t *shared_of(const flash_part &x, const flash &f, int head)
{
    return x.data + head / f.inner * x.batch + head % f.inner / f.share * x.head;
}
// Whether query i attends to key j.
static __device__ inline bool attends(const flash &f, int i, int j)
{
    return j <= i + (int)f.span.high && j >= i + (int)f.span.low;
}

template <int D> static __device__ inline uint16_t *chunk_at(uint16_t *tile, int row, int chunk)
{
    return tile + row * D + (chunk ^ (row & 7)) * 8;
}

// Begins to copy rows [first, first + ROWS) of a head to a tile; rows from `end` on and columns from d on become 0. The
// rows that one thread copies are a multiple of 8 apart, so its chunk has the same position in each (chunk_at).
template <int ROWS, int D>
static __device__ inline void copy_tile(uint16_t *tile, const uint16_t *head, int64_t stride, int first, int end, int d)
{
    constexpr int STEP = FLASH_THREADS / (D / 8);
    int row = (int)threadIdx.x / (D / 8), chunk = (int)threadIdx.x % (D / 8);
    uint16_t *to = chunk_at<D>(tile, row, chunk);
    const uint16_t *from = head + (first + row) * stride + chunk * 8;
    UNROLL
    for (int k = 0; k < ROWS / STEP; k++, from += STEP * stride) {
        bool there = first + row + k * STEP < end && chunk * 8 < d;
        copy_async<16>(to + k * STEP * D, there ? from : head, there ? 16 : 0);
    }
}

// Loads fragment a (tensor_core.h) from rows `row` to row + 15, columns 16 k to 16 k + 15 of a tile.
template <int D> static __device__ inline void load_a(uint32_t a[4], uint16_t *tile, int row, int k)
{
    int lane = (int)threadIdx.x % 32;
    load_matrices<4>(a, chunk_at<D>(tile, row + lane % 16, 2 * k + lane / 16));
}
// Loads two fragments b from a transposed tile: rows 8 n to 8 n + 15 of the tile become columns, and its columns 16 k
// to 16 k + 15 become rows.
template <int D> static __device__ inline void load_columns(uint32_t b[4], uint16_t *tile, int n, int k)
{
    int lane = (int)threadIdx.x % 32;
    load_matrices<4>(b, chunk_at<D>(tile, 8 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
}
// Loads two fragments b from rows 16 k to 16 k + 15, columns 8 n to 8 n + 15 of a tile.
template <int D> static __device__ inline void load_rows(uint32_t b[4], uint16_t *tile, int k, int n)
{
    int lane = (int)threadIdx.x % 32;
    load_matrices<4, true>(b, chunk_at<D>(tile, 16 * k + lane % 16, n + lane / 16));
}

// s (16 x N) = a b^T: rows `row` to row + 15 of tile a, and the N rows of tile b.
template <class H, int D, int N>
static __device__ inline void scores_of(float (*s)[4], uint16_t *a, int row, uint16_t *b)
{
    UNROLL
    for (int n = 0; n < N / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
    UNROLL
    for (int k = 0; k < D / 16; k++) {
        uint32_t fa[4];
        load_a<D>(fa, a, row, k);
        UNROLL
        for (int n = 0; n < N / 8; n += 2) {
            uint32_t fb[4];
            load_columns<D>(fb, b, n, k);
            H::mma(s[n], fa, fb);
            H::mma(s[n + 1], fa, fb + 2);
        }
    }
}
// o (16 x D) += p b: p (16 x N) is rounded to 16 bits, b is a tile of N rows.
template <class H, int D, int N> static __device__ inline void mix(float (*o)[4], const float (*p)[4], uint16_t *b)
{
    UNROLL
    for (int k = 0; k < N / 16; k++) {
        uint32_t fa[4] = { H::pack(p[2 * k][0], p[2 * k][1]), H::pack(p[2 * k][2], p[2 * k][3]),
                           H::pack(p[2 * k + 1][0], p[2 * k + 1][1]), H::pack(p[2 * k + 1][2], p[2 * k + 1][3]) };
        UNROLL
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t fb[4];
            load_rows<D>(fb, b, k, n);
            H::mma(o[n], fa, fb);
            H::mma(o[n + 1], fa, fb + 2);
        }
    }
}
// Query i and key j of element e of the warp's fragment n (see scores_of): row and column are those of the warp's first
// element. TURNED: rows are keys, columns queries.
struct place {
    int i, j;
};
template <bool TURNED> static __device__ inline place place_of(int row, int column, int n, int e)
{
    int lane = (int)threadIdx.x % 32, r = row + lane / 4 + e / 2 * 8, c = column + n * 8 + 2 * (lane % 4) + (e & 1);
    return TURNED ? place { c, r } : place { r, c };
}
// Scales scores, and applies the cap and the mask.
template <int N, bool TURNED>
static __device__ inline void mask_scores(float (*s)[4], const flash &f, int head, int row, int column)
{
    int64_t start = head / f.inner * f.mask.stride[0] + head % f.inner * f.mask.stride[1];
    UNROLL
    for (int n = 0; n < N / 8; n++) {
        UNROLL
        for (int e = 0; e < 4; e++) {
            place at = place_of<TURNED>(row, column, n, e);
            s[n][e] *= f.scale;
            if (f.cap > 0) s[n][e] = ms_capped_f32(s[n][e], f.cap);
            if (f.mask.data && at.i < f.tq && at.j < f.tk)
                s[n][e] = masked(f.mask, start + at.i * f.mask.rs + at.j * f.mask.cs, s[n][e]);
        }
    }
}
// Which probabilities of a warp's 16 rows dropout keeps: bit 4 n + e is set if element e of fragment n is kept.
template <int N, bool TURNED> static __device__ inline uint32_t kept_bits(const flash &f, int head, int row, int column)
{
    static_assert(N <= 64, "a bit for each of N / 2 elements");
    if (f.dropout.p <= 0) return 0xffffffffu;
    uint32_t bits = 0;
    uint64_t first = (uint64_t)head * (uint64_t)f.tq;
    rng random = rng_now(f.dropout.random);
    ROLLED
    for (int k = 0; k < N / 2; k++) {
        place at = place_of<TURNED>(row, column, k / 4, k % 4);
        uint64_t number = (first + (uint64_t)at.i) * (uint64_t)f.tk + (uint64_t)at.j;
        bits |= (uint32_t)is_weight_kept(f.dropout, random, number) << k;
    }
    return bits;
}
// The slope of the cap at a score that a bool mask may have hidden.
static __device__ inline float slope_of(const flash &f, float s)
{
    return f.cap > 0 && s != -INFINITY ? ms_cap_slope_f32(s, f.cap) : 1;
}
// x, or 0 if the bit of element e of fragment n is not set.
static __device__ inline float kept_or_0(float x, uint32_t kept, int n, int e)
{
    return kept >> (4 * n + e) & 1 ? x : 0;
}
// exp((s - top) scale); in ALTERED kernels, whose scores are scaled already, exp(s - top). ALTERED kernels subtract
// before they multiply, because s * unit may be infinite if a mask adds the most negative number.
template <bool ALTERED> static __device__ inline float exp_score(float s, float unit, float top)
{
    return exp2_fast(ALTERED ? (s - top) * unit : fmaf(s, unit, -top * unit));
}
// The destination of a tile's rows: rows [first, end) of a head, of d elements each.
struct tile_rows {
    uint16_t *head;
    int64_t stride;
    int first, end, d;
};
// Writes a warp's 16 rows of results to `to`, through its own rows of a tile in shared memory; the block has met since
// the tile was read. factor[0], factor[1]: the factors of a lane's parts of rows lane / 4 and lane / 4 + 8.
template <class H, int D>
static __device__ inline void store_rows(const float (*o)[4], const float *factor, uint16_t *tile, int row,
                                         tile_rows to)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    UNROLL
    for (int n = 0; n < D / 8; n++) {
        *(uint32_t *)(chunk_at<D>(tile, row + g, n) + 2 * t) = H::pack(o[n][0] * factor[0], o[n][1] * factor[0]);
        *(uint32_t *)(chunk_at<D>(tile, row + g + 8, n) + 2 * t) = H::pack(o[n][2] * factor[1], o[n][3] * factor[1]);
    }
    __syncwarp();
    UNROLL
    for (int k = 0; k < D / 16; k++) {
        int c = k * 32 + lane, r = c / (D / 8), chunk = c % (D / 8);
        if (to.first + row + r < to.end && chunk * 8 < to.d)
            *(uint4 *)(to.head + (int64_t)(to.first + row + r) * to.stride + chunk * 8) =
                *(const uint4 *)chunk_at<D>(tile, row + r, chunk);
    }
}

#endif
