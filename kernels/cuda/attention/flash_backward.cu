// SPDX-License-Identifier: MIT
// cuda/attention/flash_backward.cu -- gradients of attention without the matrix of scores, on tensor cores. Two passes
// compute the scores again, so that each sum is computed by one block in a fixed order. Together they take 7 matrix
// products, no atomics, and memory for one number per row: delta, the dot product of the rows of o and of its gradient
// g minus the gradient of the logsumexp. In the first pass a block computes dq and delta for 64 queries. In the second
// pass a block computes dk and dv for 64 keys, over the queries of all heads that share them; its scores are
// transposed, so that their registers are already fragments of its other products.
#include "cuda/attention/flash.h"

// The dot product of row i of g and of o. Lanes 2 r and 2 r + 1 call it with the same i: each adds up half of the
// products, and both get the sum. 0 for i >= tq.
template <class H> static __device__ inline float row_product(const flash &f, int head, int i)
{
    float sum = 0;
    if (i < f.tq) {
        const uint16_t *g = head_of(f.g, f, head) + (int64_t)i * f.g.rows,
                       *o = head_of(f.o, f, head) + (int64_t)i * f.o.rows;
        for (int c = (int)threadIdx.x % 2 * 8; c < f.d; c += 16) {
            uint4 a = *(const uint4 *)(g + c), b = *(const uint4 *)(o + c);
            uint32_t x[4] = { a.x, a.y, a.z, a.w }, y[4] = { b.x, b.y, b.z, b.w };
            UNROLL
            for (int k = 0; k < 4; k++) {
                sum = fmaf(H::value(x[k] & 0xffff), H::value(y[k] & 0xffff), sum);
                sum = fmaf(H::value(x[k] >> 16), H::value(y[k] >> 16), sum);
            }
        }
    }
    return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
}
// The probability of score s. lse comes from row_lse; if it is +inf, the probability is 0.
template <bool ALTERED> static __device__ inline float probability(float s, float unit, float lse)
{
    return exp2_fast(ALTERED ? (s - lse) * unit : fmaf(s, unit, -lse));
}
// The logsumexp of row i, in base 2 unless ALTERED; +inf for rows beyond the last and for rows without allowed keys.
template <bool ALTERED> static __device__ inline float row_lse(const flash &f, int head, int i)
{
    float lse = i < f.tq ? f.lse[(int64_t)head * f.tq + i] : INFINITY;
    return lse == -INFINITY ? INFINITY : ALTERED ? lse : lse * 1.44269504088896341f;
}

template <class H, int D, bool ALTERED>
__global__ void __launch_bounds__(FLASH_THREADS, 2) flash_queries_kernel(flash f)
{
    enum { N = passed<D>::N, TILE = N * D };
    uint16_t *q = (uint16_t *)dynamic_shared(), *grad = q + FLASH_ROWS * D, *kv = grad + FLASH_ROWS * D;
    int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16, g = lane / 4, t = lane % 4;
    int head = (int)blockIdx.x % f.heads, tile = ((int)gridDim.x - 1 - (int)blockIdx.x) / f.heads;
    int i0 = tile * FLASH_ROWS, first = (int)ms_span_first(f.span, i0) / N * N;
    int end = (int)ms_span_end(f.span, i0 + FLASH_ROWS - 1, f.tk);
    const uint16_t *keys = shared_of(f.k, f, head), *values = shared_of(f.v, f, head);
    copy_tile<FLASH_ROWS, D>(q, head_of(f.q, f, head), f.q.rows, i0, f.tq, f.d);
    copy_tile<FLASH_ROWS, D>(grad, head_of(f.g, f, head), f.g.rows, i0, f.tq, f.d);
    copy_tile<N, D>(kv, keys, f.k.rows, first, f.tk, f.d);
    copy_tile<N, D>(kv + TILE, values, f.v.rows, first, f.tk, f.d);
    copy_async_commit();

    int mine = i0 + row + lane / 2;
    float product = row_product<H>(f, head, mine);
    if (mine < f.tq) {
        if (f.g_lse) product -= f.g_lse[(int64_t)head * f.tq + mine];
        if (lane % 2 == 0) f.delta[(int64_t)head * f.tq + mine] = product;
    }
    float delta[2], lse[2];
    UNROLL
    for (int r = 0; r < 2; r++) {
        delta[r] = __shfl_sync(0xffffffffu, product, 2 * (g + 8 * r));
        lse[r] = row_lse<ALTERED>(f, head, i0 + row + g + 8 * r);
    }
    float dq[D / 8][4];
    UNROLL
    for (int n = 0; n < D / 8; n++) dq[n][0] = dq[n][1] = dq[n][2] = dq[n][3] = 0;
    for (int j0 = first, side = 0; j0 < end; j0 += N, side ^= 1) {
        uint16_t *now = kv + side * 2 * TILE, *next = kv + (side ^ 1) * 2 * TILE;
        copy_async_wait<0>();
        __syncthreads();
        if (j0 + N < end) {
            copy_tile<N, D>(next, keys, f.k.rows, j0 + N, f.tk, f.d);
            copy_tile<N, D>(next + TILE, values, f.v.rows, j0 + N, f.tk, f.d);
            copy_async_commit();
        }
        float s[N / 8][4], dp[N / 8][4];
        scores_of<H, D, N>(s, q, row, now);
        scores_of<H, D, N>(dp, grad, row, now + TILE);
        uint32_t kept = 0;
        if constexpr (ALTERED) {
            mask_scores<N, false>(s, f, head, i0 + row, j0);
            kept = kept_bits<N, false>(f, head, i0 + row, j0);
        }
        bool edge = j0 + N > f.tk || !attends(f, i0 + row, j0 + N - 1) || !attends(f, i0 + row + 15, j0);
        UNROLL
        for (int n = 0; n < N / 8; n++) {
            UNROLL
            for (int e = 0; e < 4; e++) {
                int i = i0 + row + g + e / 2 * 8, j = j0 + n * 8 + 2 * t + (e & 1);
                if (edge && (j >= f.tk || !attends(f, i, j))) s[n][e] = -INFINITY;
                float slope = ALTERED ? slope_of(f, s[n][e]) : 1;
                if (ALTERED) dp[n][e] = kept_or_0(dp[n][e] * f.keep, kept, n, e);
                s[n][e] = probability<ALTERED>(s[n][e], f.unit, lse[e / 2]) * (dp[n][e] - delta[e / 2]);
                if (ALTERED) s[n][e] *= slope;
            }
        }
        mix<H, D, N>(dq, s, now);
    }
    copy_async_wait<0>();  // if its queries attend to no key, the loop above has not waited for the copies
    __syncthreads();
    float scale[2] = { f.scale, f.scale };
    if (f.dq.data) store_rows<H, D>(dq, scale, q, row, { head_of(f.dq, f, head), f.dq.rows, i0, f.tq, f.d });
}

template <class H, int D, bool ALTERED> __global__ void __launch_bounds__(FLASH_THREADS, 2) flash_keys_kernel(flash f)
{
    enum { N = passed<D>::N, TILE = N * D };
    uint16_t *k = (uint16_t *)dynamic_shared(), *v = k + FLASH_ROWS * D, *qg = v + FLASH_ROWS * D;
    int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16, g = lane / 4, t = lane % 4;
    // In causal attention more queries attend to the first keys than to later ones, so the blocks that
    // start first take the first keys.
    int shared = f.heads / f.share, head = (int)blockIdx.x % shared * f.share, last = head + f.share - 1;
    int j0 = (int)blockIdx.x / shared * FLASH_ROWS, first = (int)ms_span_first(ms_span_turned(f.span), j0);
    int end = (int)ms_span_end(ms_span_turned(f.span), j0 + FLASH_ROWS - 1, f.tq);
    copy_tile<FLASH_ROWS, D>(k, shared_of(f.k, f, head), f.k.rows, j0, f.tk, f.d);
    copy_tile<FLASH_ROWS, D>(v, shared_of(f.v, f, head), f.v.rows, j0, f.tk, f.d);
    copy_tile<N, D>(qg, head_of(f.q, f, head), f.q.rows, first, f.tq, f.d);
    copy_tile<N, D>(qg + TILE, head_of(f.g, f, head), f.g.rows, first, f.tq, f.d);
    copy_async_commit();

    float dk[D / 8][4], dv[D / 8][4];
    UNROLL
    for (int n = 0; n < D / 8; n++)
        dk[n][0] = dk[n][1] = dk[n][2] = dk[n][3] = dv[n][0] = dv[n][1] = dv[n][2] = dv[n][3] = 0;
    for (int i0 = first, side = 0; i0 < end && head <= last; side ^= 1) {
        uint16_t *now = qg + side * 2 * TILE, *next = qg + (side ^ 1) * 2 * TILE;
        int h = head, i = i0 + N < end ? i0 + N : first;  // of the next tile
        if (i == first) h++;
        copy_async_wait<0>();
        __syncthreads();
        if (h <= last) {
            copy_tile<N, D>(next, head_of(f.q, f, h), f.q.rows, i, f.tq, f.d);
            copy_tile<N, D>(next + TILE, head_of(f.g, f, h), f.g.rows, i, f.tq, f.d);
            copy_async_commit();
        }
        float s[N / 8][4], dp[N / 8][4];  // rows are keys, columns queries
        scores_of<H, D, N>(s, k, row, now);
        scores_of<H, D, N>(dp, v, row, now + TILE);
        uint32_t kept = 0;
        if constexpr (ALTERED) {
            mask_scores<N, true>(s, f, head, j0 + row, i0);
            kept = kept_bits<N, true>(f, head, j0 + row, i0);
        }
        bool edge = !attends(f, i0, j0 + row + 15) || !attends(f, i0 + N - 1, j0 + row);
        UNROLL
        for (int n = 0; n < N / 8; n++) {
            float lse[2], delta[2];
            UNROLL
            for (int c = 0; c < 2; c++) {
                int i = i0 + n * 8 + 2 * t + c;
                lse[c] = row_lse<ALTERED>(f, head, i);
                delta[c] = i < f.tq ? f.delta[(int64_t)head * f.tq + i] : 0;
            }
            UNROLL
            for (int e = 0; e < 4; e++) {
                int j = j0 + row + g + e / 2 * 8, i = i0 + n * 8 + 2 * t + (e & 1);
                if (edge && !attends(f, i, j)) s[n][e] = -INFINITY;
                float slope = ALTERED ? slope_of(f, s[n][e]) : 1;
                s[n][e] = probability<ALTERED>(s[n][e], f.unit, lse[e & 1]);
                if (ALTERED) dp[n][e] = kept_or_0(dp[n][e] * f.keep, kept, n, e);
                dp[n][e] = s[n][e] * (dp[n][e] - delta[e & 1]);
                if (ALTERED) dp[n][e] *= slope;
                if (ALTERED) s[n][e] = kept_or_0(s[n][e], kept, n, e);
            }
        }
        mix<H, D, N>(dv, s, now + TILE);
        mix<H, D, N>(dk, dp, now);
        head = h, i0 = i;
    }
    copy_async_wait<0>();  // if no query attends to these keys, the loop above has not waited for the copies
    __syncthreads();
    float scale[2] = { f.scale, f.scale }, keep = ALTERED ? f.keep : 1, kept[2] = { keep, keep };
    if (f.dk.data) store_rows<H, D>(dk, scale, k, row, { shared_of(f.dk, f, last), f.dk.rows, j0, f.tk, f.d });
    if (f.dv.data) store_rows<H, D>(dv, kept, v, row, { shared_of(f.dv, f, last), f.dv.rows, j0, f.tk, f.d });
}

// ---- launches ----

// Inputs: gradient, q, k, v, mask (may be NULL), out, lse, and optionally the gradient of lse.
ms_status ms__flash_backward(ms_call *c, const heads &h)
{
    ms_tensor *g = NULL, *q = c->in[1], *g_lse = NULL;
    ms_tensor *dq = ms__grad_out(c, 0), *dk = ms__grad_out(c, 1), *dv = ms__grad_out(c, 2);
    flash f = ms__flash_call(h, c->in[4], rng_of_seeded(c));
    const char *what = c->op->name;
    int index = index_of(q);
    int shared = flash_shared(2, h.d > 64);
    ms_block *delta = NULL;
    bool done = false;
    ms_status st = ms__alloc(&delta, ms__device(q), (size_t)(h.count * h.tq) * sizeof(float), what);
    if (st == MS_OK && !ms__flash_aligned(c->in[0], h)) st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK && c->n_in > 7 && c->in[7]) st = ms__contiguous(&g_lse, c->in[7]);
    if (st == MS_OK) {
        f.q = ms__flash_part(q, h), f.k = ms__flash_part(c->in[2], h), f.v = ms__flash_part(c->in[3], h);
        f.g = ms__flash_part(g ? g : c->in[0], h), f.o = ms__flash_part(c->in[5], h);
        if (dq) f.dq = ms__flash_part(dq, h);
        if (dk) f.dk = ms__flash_part(dk, h);
        if (dv) f.dv = ms__flash_part(dv, h);
        f.lse = (float *)ms__data(c->in[6]);
        f.delta = (float *)delta->data;
        f.g_lse = (const float *)data_of(g_lse);
        st = ms__cudnn_backward(c, f, &done);
    }
    if (st == MS_OK && !done) {
        st = launch_shared(what, index, FLASH_KERNEL(flash_queries_kernel, q->dtype, f), h.count * up(h.tq, FLASH_ROWS),
                           block_size { FLASH_THREADS, shared }, f);
    }
    if (st == MS_OK && !done && (dk || dv))
        st = launch_shared(what, index, FLASH_KERNEL(flash_keys_kernel, q->dtype, f),
                           h.count / h.share * up(h.tk, FLASH_ROWS), block_size { FLASH_THREADS, shared }, f);
    if (g) ms__release(g);
    if (g_lse) ms__release(g_lse);
    if (delta) ms__free(delta);
    return st;
}
