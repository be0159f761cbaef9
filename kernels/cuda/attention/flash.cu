// SPDX-License-Identifier: MIT
// cuda/attention/flash.cu -- attention without the matrix of scores, for bfloat16 and float16 on tensor cores (Dao
// 2023: "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning").
//
// A block computes 64 queries of a head and iterates over tiles of 64 or 32 keys, only over tiles with keys that its
// queries attend to. Keys and values of the next tile are copied while one is computed. Each
// row keeps its running maximum and sum; the output is divided by the sum at the end. Saves the logsumexp.
#include "cuda/attention/flash.h"

template <class H, int D, bool ALTERED> __global__ void __launch_bounds__(FLASH_THREADS, 2) flash_kernel(flash f)
{
    enum { N = passed<D>::N, TILE = N * D };
    uint16_t *q = (uint16_t *)dynamic_shared(), *kv = q + FLASH_ROWS * D;  // two pairs of tiles: keys and values
    int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16, g = lane / 4, t = lane % 4;
    // In causal attention the last queries attend to more keys than earlier ones, so the first blocks compute the last
    // queries.
    int head = (int)blockIdx.x % f.heads, tile = ((int)gridDim.x - 1 - (int)blockIdx.x) / f.heads;
    int i0 = tile * FLASH_ROWS, first = (int)ms_span_first(f.span, i0) / N * N;
    int end = (int)ms_span_end(f.span, i0 + FLASH_ROWS - 1, f.tk);
    const uint16_t *keys = shared_of(f.k, f, head), *values = shared_of(f.v, f, head);
    copy_tile<FLASH_ROWS, D>(q, head_of(f.q, f, head), f.q.rows, i0, f.tq, f.d);
    copy_tile<N, D>(kv, keys, f.k.rows, first, f.tk, f.d);
    copy_tile<N, D>(kv + TILE, values, f.v.rows, first, f.tk, f.d);
    copy_async_commit();

    float o[D / 8][4], most[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 };
    UNROLL
    for (int n = 0; n < D / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0;
    for (int j0 = first, side = 0; j0 < end; j0 += N, side ^= 1) {
        uint16_t *now = kv + side * 2 * TILE, *next = kv + (side ^ 1) * 2 * TILE;
        copy_async_wait<0>();
        __syncthreads();
        if (j0 + N < end) {
            copy_tile<N, D>(next, keys, f.k.rows, j0 + N, f.tk, f.d);
            copy_tile<N, D>(next + TILE, values, f.v.rows, j0 + N, f.tk, f.d);
            copy_async_commit();
        }
        float s[N / 8][4];
        scores_of<H, D, N>(s, q, row, now);
        if constexpr (ALTERED) mask_scores<N, false>(s, f, head, i0 + row, j0);
        bool edge = j0 + N > f.tk || !attends(f, i0 + row, j0 + N - 1) || !attends(f, i0 + row + 15, j0);
        if (edge) {
            UNROLL
            for (int n = 0; n < N / 8; n++) {
                UNROLL
                for (int e = 0; e < 4; e++) {
                    int i = i0 + row + g + e / 2 * 8, j = j0 + n * 8 + 2 * t + (e & 1);
                    if (j >= f.tk || !attends(f, i, j)) s[n][e] = -INFINITY;
                }
            }
        }
        UNROLL
        for (int r = 0; r < 2; r++) {
            float m = most[r];
            UNROLL
            for (int n = 0; n < N / 8; n++) m = fmaxf(m, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            // m is -inf if each score so far is -inf or NaN, because fmaxf ignores NaN.
            float base = m == -INFINITY ? 0 : m, factor = exp2_fast((most[r] - base) * f.unit);
            most[r] = m;
            sum[r] *= factor;
            UNROLL
            for (int n = 0; n < N / 8; n++) {
                UNROLL
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    s[n][e] = exp_score<ALTERED>(s[n][e], f.unit, base);
                    sum[r] += s[n][e];
                }
            }
            UNROLL
            for (int n = 0; n < D / 8; n++) o[n][2 * r] *= factor, o[n][2 * r + 1] *= factor;
        }
        if constexpr (ALTERED) {
            uint32_t kept = kept_bits<N, false>(f, head, i0 + row, j0);
            UNROLL
            for (int k = 0; k < N / 2; k++) s[k / 4][k % 4] = kept_or_0(s[k / 4][k % 4], kept, k / 4, k % 4);
        }
        mix<H, D, N>(o, s, now + TILE);
    }
    copy_async_wait<0>();  // if its queries attend to no key, the loop above has not waited for the copies
    __syncthreads();
    float factor[2];
    UNROLL
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        factor[r] = sum[r] == 0 ? 0 : f.keep / sum[r];
        int i = i0 + row + g + 8 * r;
        if (t == 0 && i < f.tq)
            f.lse[(int64_t)head * f.tq + i] = (ALTERED ? most[r] : most[r] * f.scale) + log_of(sum[r]);
    }
    store_rows<H, D>(o, factor, q, row, { head_of(f.o, f, head), f.o.rows, i0, f.tq, f.d });
}

// ---- launches ----

bool ms__flash_aligned(const ms_tensor *t, const heads &h)
{
    strided_part x = strided_part_of(t, h);
    bool fits = (uintptr_t)x.data % 16 == 0 && x.cs == 1 && x.rs % 8 == 0;
    for (int d = 0; d < h.n; d++) fits = fits && x.stride[d] % 8 == 0;
    return fits;
}
flash_part ms__flash_part(const ms_tensor *t, const heads &h)
{
    strided_part x = strided_part_of(t, h);
    return { (uint16_t *)x.data, x.rs, h.n > 1 ? x.stride[h.n - 2] : 0, h.n > 0 ? x.stride[h.n - 1] : 0 };
}
flash ms__flash_call(const heads &h, const ms_tensor *mask, const rng &random)
{
    flash f = {};
    f.dropout = dropped_with(h.p, random);
    f.keep = (float)keep_factor(h.p);
    if (mask) {
        f.mask = strided_part_of(mask, h);
        f.mask.stride[1] = h.n > 0 ? f.mask.stride[h.n - 1] : 0;
        f.mask.stride[0] = h.n > 1 ? f.mask.stride[h.n - 2] : 0;
    }
    f.heads = (int)h.count, f.inner = h.n > 0 ? (int)h.shape[h.n - 1] : 1;
    f.tq = (int)h.tq, f.tk = (int)h.tk, f.d = (int)h.d;
    f.share = (int)h.share, f.span = h.span;
    f.scale = (float)h.scale, f.cap = (float)h.cap, f.unit = (float)((is_altered(f) ? 1 : h.scale) / std::log(2.0));
    return f;
}
bool ms__flash_fits(const ms_tensor *const *qkv, const heads &h)
{
    int dtype = qkv[0]->dtype;
    const int64_t most = 1 << 30, longest = MS_FAR - 256;  // i + MS_FAR fits in 32 bits for all rows of the tiles
    bool fits = (dtype == MS_BF16 || dtype == MS_F16) && h.n <= 2 && h.d <= 128 && h.d % 8 == 0 && h.scale > 0 &&
                h.tq < longest && h.tk < longest && h.count * up(h.tq > h.tk ? h.tq : h.tk, FLASH_ROWS) < most;
    for (int k = 0; k < 3; k++) fits = fits && ms__flash_aligned(qkv[k], h);
    return fits;
}

ms_status ms__flash_attention(ms_call *c, const heads &h)
{
    ms_tensor *q = c->in[0];
    flash f = ms__flash_call(h, c->n_in > 3 ? c->in[3] : NULL, rng_of(c));
    f.q = ms__flash_part(q, h), f.k = ms__flash_part(c->in[1], h), f.v = ms__flash_part(c->in[2], h);
    f.o = ms__flash_part(c->out[0], h);
    f.lse = (float *)ms__data(c->out[1]);
    bool done;
    MS_TRY(ms__cudnn_attention(c, f, &done));
    if (done) return MS_OK;
    return launch_shared(c->op->name, index_of(q), FLASH_KERNEL(flash_kernel, q->dtype, f),
                         h.count * up(h.tq, FLASH_ROWS), block_size { FLASH_THREADS, flash_shared(1, h.d > 64) }, f);
}
