// SPDX-License-Identifier: MIT
// cpu/product/gemm_half_body.h -- part of gemm.c: half types and int8 in large products, whose panels are in float32.

// Convert contiguous numbers: load_f16, load_bf16 and load_i8 to floats, store_f16 and store_bf16 from floats.
static MS_KERNEL void load_f16(float *out, const ms_f16 *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = ms_f16_to_float(in[i]);
}

static MS_KERNEL void load_bf16(float *out, const ms_bf16 *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = ms_bf16_to_float(in[i]);
}

static MS_KERNEL void load_i8(float *out, const int8_t *in, int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i++) out[i] = (float)in[i] * scale;
}

static MS_KERNEL void store_f16(ms_f16 *out, const float *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = ms_float_to_f16(in[i]);
}

static MS_KERNEL void store_bf16(ms_bf16 *out, const float *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = ms_float_to_bf16(in[i]);
}

static void load_run(int dtype, float *out, const void *in, int64_t at, int64_t n)
{
    if (dtype == MS_F32) memcpy(out, (const float *)in + at, (size_t)n * sizeof *out);
    else if (dtype == MS_F16) load_f16(out, (const ms_f16 *)in + at, n);
    else load_bf16(out, (const ms_bf16 *)in + at, n);
}

static float load_one(int dtype, const void *in, int64_t at)
{
    return dtype == MS_F16 ? ms_f16_to_float(((const ms_f16 *)in)[at]) : ms_bf16_to_float(((const ms_bf16 *)in)[at]);
}

// As pack of the tiles. Squares of 16 x 16 numbers pass through a buffer.
static void pack_half(float *out, int64_t out_rs, const ms_matrix *b, int64_t k, int64_t n)
{
    const ms_tiles_f32 *tiles = ms__tiles_f32();
    int64_t lanes = tiles->lanes, wide = (n + lanes - 1) / lanes * lanes;
    if (b->cs == 1) {
        for (int64_t p = 0; p < k; p++) {
            load_run(b->dtype, out + p * out_rs, b->data, p * b->rs, n);
            for (int64_t j = n; j < wide; j++) out[p * out_rs + j] = 0;
        }
        return;
    }
    for (int64_t j = 0; j < wide; j += lanes) {
        int64_t w = n - j < lanes ? n - j : lanes, p = 0;
        if (b->dtype == MS_BF16 && b->rs == 1 && w == lanes)
            p = tiles->pack_columns_bf16(out + j, out_rs, (const ms_bf16 *)b->data + j * b->cs, b->cs, k);
        for (; p < k; p += 16) {
            float t[16 * 16] = { 0 };
            int64_t h = k - p < 16 ? k - p : 16;
            for (int64_t l = 0; l < w; l++) {
                int64_t from = p * b->rs + (j + l) * b->cs;
                if (b->rs == 1) load_run(b->dtype, t + l * 16, b->data, from, h);
                else
                    for (int64_t q = 0; q < h; q++) t[l * 16 + q] = load_one(b->dtype, b->data, from + q * b->rs);
            }
            tiles->pack(out + p * out_rs + j, out_rs, &(ms_matrix) { .data = t, .rs = 1, .cs = 16 }, h, lanes);
        }
    }
}

// As pack_rows of the tiles.
static void pack_rows_half(float *out, const ms_matrix *a, int64_t m, int64_t k, int64_t depth)
{
    enum { FLOATS = 8 << 10, LONG = 64, ROUND = FLOATS / LONG };
    const ms_tiles_f32 *tiles = ms__tiles_f32();
    float t[FLOATS] __attribute__((aligned(64)));
    int64_t high = tiles->rows;
    if (a->rs == 1) {  // columns are contiguous: convert them in t, at most LONG numbers of each
        for (int64_t p = 0; p < k; p += ROUND) {
            int64_t columns = k - p < ROUND ? k - p : ROUND;
            for (int64_t q = 0; q < columns; q++) load_run(a->dtype, t + q * LONG, a->data, (p + q) * a->cs, m);
            tiles->pack_rows(out + p * high, &(ms_matrix) { .data = t, .rs = 1, .cs = LONG }, m, columns, depth);
        }
        return;
    }
    for (int64_t i = 0; i < m; i += high) {
        int64_t rows = m - i < high ? m - i : high, p = 0;
        if (a->dtype == MS_BF16 && a->cs == 1 && rows == high)
            p = tiles->pack_rows_bf16(out + i * depth, (const ms_bf16 *)a->data + i * a->rs, a->rs, k);
        if (p == k) continue;
        for (int64_t r = 0; r < rows; r++) {
            int64_t from = (i + r) * a->rs + p * a->cs, rest = k - p;
            if (a->cs == 1) load_run(a->dtype, t + r * rest, a->data, from, rest);
            else
                for (int64_t q = 0; q < rest; q++) t[r * rest + q] = load_one(a->dtype, a->data, from + q * a->cs);
        }
        tiles->pack_rows(out + i * depth + p * high, &(ms_matrix) { .data = t, .rs = k - p, .cs = 1 }, rows, k - p,
                         depth);
    }
}
