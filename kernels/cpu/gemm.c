// gemm.c -- products by our own loops: small ones of every dtype, and large ones that oneDNN does not
// do (float64, float16) or does slower.
//
// Small: no packing; A is broadcast from where it is, B read from where it is when its columns are
// adjacent. Large (Goto, van de Geijn 2008): B is cut into panels of KC x 3 vectors that stay in the
// first cache while rows pass by; A is packed only when its rows are not runs of memory. Half types
// are converted while packing and accumulate in a float32 block of C, rounded once at the end.
// Every element of C is summed in the same order whatever the number of threads.
//
// Built with -ffp-contract=fast (CMakeLists.txt): here, and only here, a*b + c may become an fma.
#include "gemm.h"

enum {
    SMALL = 16 << 10,           // multiply-adds up to which packing costs more than it saves
    KC = 192,                   // depth of a panel: 192 x 48 floats = 36 KiB
    MC = 128,                   // rows of A that a task takes
    NC = 960,                   // columns packed at a time: 192 x 960 floats = 720 KiB, in the second cache
};

// Without AVX-512 our vectors are taken apart.
static bool narrow(void)
{
    static int known = -1;
    if (MS_UNLIKELY(known < 0)) known = strcmp(ms_cpu_isa(), "v4") != 0;
    return known;
}

#define EACH_LANE(f, s) { f(s, 0), f(s, 1), f(s, 2), f(s, 3), f(s, 4), f(s, 5), f(s, 6), f(s, 7), \
                          f(s, 8), f(s, 9), f(s, 10), f(s, 11), f(s, 12), f(s, 13), f(s, 14), f(s, 15) }
#define REAL float
#define INDEX int32_t
#define R(x) x##_f32
#define LANES 16
#include "gemm_body.h"
#undef REAL
#undef INDEX
#undef R
#undef LANES
#undef EACH_LANE

#define EACH_LANE(f, s) { f(s, 0), f(s, 1), f(s, 2), f(s, 3), f(s, 4), f(s, 5), f(s, 6), f(s, 7) }
#define REAL double
#define INDEX int64_t
#define R(x) x##_f64
#define LANES 8
#include "gemm_body.h"
#undef REAL
#undef INDEX
#undef R
#undef LANES
#undef EACH_LANE

// ---- half types: panels in float32 ----------------------------------------------------------------

// Runs of memory to floats and back.
static MS_KERNEL void load_f16(float *out, const ms_f16 *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = ms_f16_to_float(in[i]);
}

static MS_KERNEL void load_bf16(float *out, const ms_bf16 *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = ms_bf16_to_float(in[i]);
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
    if (dtype == MS_F16) load_f16(out, (const ms_f16 *)in + at, n);
    else load_bf16(out, (const ms_bf16 *)in + at, n);
}

static float load_one(int dtype, const void *in, int64_t at)
{
    return dtype == MS_F16 ? ms_f16_to_float(((const ms_f16 *)in)[at]) : ms_bf16_to_float(((const ms_bf16 *)in)[at]);
}

// Like pack_f32: squares of 16 x 16 pass through a tile.
static void pack_half(int dtype, float *out, int64_t out_rs, const void *b, int64_t at, int64_t rs, int64_t cs, int64_t k, int64_t n)
{
    int64_t wide = (n + 15) / 16 * 16;
    if (cs == 1) {
        for (int64_t p = 0; p < k; p++) {
            load_run(dtype, out + p * out_rs, b, at + p * rs, n);
            for (int64_t j = n; j < wide; j++) out[p * out_rs + j] = 0;
        }
        return;
    }
    for (int64_t j = 0; j < wide; j += 16)
        for (int64_t p = 0; p < k; p += 16) {
            float t[16 * 16] = { 0 };
            int64_t w = n - j < 16 ? n - j : 16, h = k - p < 16 ? k - p : 16;
            for (int64_t l = 0; l < w; l++) {
                int64_t from = at + p * rs + (j + l) * cs;
                if (rs == 1) load_run(dtype, t + l * 16, b, from, h);
                else for (int64_t q = 0; q < h; q++) t[l * 16 + q] = load_one(dtype, b, from + q * rs);
            }
            pack_f32(out + p * out_rs + j, out_rs, t, 1, 16, h, 16);
        }
}

// Rows of A, converted, k adjacent.
static void pack_rows_half(int dtype, float *out, const void *a, int64_t at, int64_t rs, int64_t cs, int64_t m, int64_t k)
{
    if (cs == 1) {
        for (int64_t i = 0; i < m; i++) load_run(dtype, out + i * k, a, at + i * rs, k);
        return;
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t p = 0; p < k; p++) out[i * k + p] = load_one(dtype, a, at + i * rs + p * cs);
}

// ---- large products -------------------------------------------------------------------------------

typedef struct work {
    const ms_gemm *g;
    void   *packed;             // panels of B: kc x 3 vectors each, one after the other
    int64_t j0, nc, p0, kc;     // the columns and the depth at hand
    int64_t wide;               // columns of a panel
    bool    half, first, last;
    bool    pack_a;
    float  *sums;               // half types: m x nc, accumulated in float32
} work;

static void pack_task(void *arg, int64_t panel, int64_t end, int64_t block)
{
    const work *w = arg;
    const ms_gemm *g = w->g;
    int64_t j = panel * w->wide, n = w->nc - j < w->wide ? w->nc - j : w->wide, at = w->p0 * g->b_rs + (w->j0 + j) * g->b_cs;
    (void)end, (void)block;
    if (w->half) pack_half(g->dtype, (float *)w->packed + j * w->kc, w->wide, g->b, at, g->b_rs, g->b_cs, w->kc, n);
    else if (g->dtype == MS_F32) pack_f32((float *)w->packed + j * w->kc, w->wide, (const float *)g->b + at, g->b_rs, g->b_cs, w->kc, n);
    else pack_f64((double *)w->packed + j * w->kc, w->wide, (const double *)g->b + at, g->b_rs, g->b_cs, w->kc, n);
}

static void row_task(void *arg, int64_t block, int64_t end, int64_t unused)
{
    const work *w = arg;
    const ms_gemm *g = w->g;
    int64_t i0 = block * MC, m = g->m - i0 < MC ? g->m - i0 : MC, at = i0 * g->a_rs + w->p0 * g->a_cs;
    bool wide_type = g->dtype == MS_F64, add = !w->first;
    double room[MC * KC / 2 + 8] __attribute__((aligned(64)));      // MC x KC floats, or half as deep doubles
    (void)end, (void)unused;

    if (w->half) pack_rows_half(g->dtype, (float *)room, g->a, at, g->a_rs, g->a_cs, m, w->kc);
    else if (w->pack_a && wide_type) pack_rows_f64(room, (const double *)g->a + at, g->a_rs, g->a_cs, m, w->kc);
    else if (w->pack_a) pack_rows_f32((float *)room, (const float *)g->a + at, g->a_rs, g->a_cs, m, w->kc);

    for (int64_t j = 0; j < w->nc; j += w->wide) {
        int64_t n = w->nc - j < w->wide ? w->nc - j : w->wide, col = w->j0 + j;
        if (w->half) {
            panel_f32(n, m, w->kc, (float *)room, w->kc, 1, (float *)w->packed + j * w->kc, w->wide, w->sums + i0 * w->nc + j, w->nc, NULL, add);
            continue;
        }
        for (int64_t i = 0; i < m; i += w->pack_a ? 8 : m) {
            int64_t rows = !w->pack_a ? m : m - i < 8 ? m - i : 8;
            if (wide_type) {
                const double *a = w->pack_a ? room + i * w->kc : (const double *)g->a + at, *bias = w->last && g->bias ? (const double *)g->bias + col : NULL;
                panel_f64(n, rows, w->kc, a, w->pack_a ? 1 : g->a_rs, w->pack_a ? 8 : g->a_cs, (double *)w->packed + j * w->kc, w->wide,
                          (double *)g->c + (i0 + i) * g->c_rs + col, g->c_rs, bias, add);
            } else {
                const float *a = w->pack_a ? (float *)room + i * w->kc : (const float *)g->a + at, *bias = w->last && g->bias ? (const float *)g->bias + col : NULL;
                panel_f32(n, rows, w->kc, a, w->pack_a ? 1 : g->a_rs, w->pack_a ? 8 : g->a_cs, (float *)w->packed + j * w->kc, w->wide,
                          (float *)g->c + (i0 + i) * g->c_rs + col, g->c_rs, bias, add);
            }
        }
    }
    if (!w->half || !w->last) return;
    for (int64_t i = i0; i < i0 + m; i++) {
        float *s = w->sums + i * w->nc;
        if (g->bias)
            for (int64_t j = 0; j < w->nc; j++) s[j] += load_one(g->dtype, g->bias, w->j0 + j);
        if (g->dtype == MS_F16) store_f16((ms_f16 *)g->c + i * g->c_rs + w->j0, s, w->nc);
        else store_bf16((ms_bf16 *)g->c + i * g->c_rs + w->j0, s, w->nc);
    }
}

static ms_status large(const ms_gemm *g)
{
    int lanes = g->dtype == MS_F64 ? 8 : 16;
    int64_t deep = g->dtype == MS_F64 ? KC / 2 : KC, parts = (g->k + deep - 1) / deep;
    int64_t kc = (g->k + parts - 1) / parts, nc = g->n < NC ? g->n : NC;
    work w = { .g = g, .wide = 3 * lanes, .half = ms__is_half(g->dtype) };
    ms_block *packed, *sums = NULL;
    int64_t room = (nc + w.wide - 1) / w.wide * w.wide;

    // Broadcasting reads 8 rows side by side: fine while each is a run of memory.
    w.pack_a = !w.half && g->a_cs != 1;
    MS_TRY(ms__alloc(&packed, MS_CPU, (size_t)(room * kc) * (lanes == 8 ? 8 : 4), g->what));
    if (w.half) {
        ms_status st = ms__alloc(&sums, MS_CPU, (size_t)(g->m * nc) * 4, g->what);
        if (st != MS_OK) {
            ms__free(packed);
            return st;
        }
        w.sums = sums->data;
    }
    w.packed = packed->data;
    for (w.j0 = 0; w.j0 < g->n; w.j0 += nc) {
        w.nc = g->n - w.j0 < nc ? g->n - w.j0 : nc;
        for (w.p0 = 0; w.p0 < g->k; w.p0 += w.kc) {
            w.kc = g->k - w.p0 < kc ? g->k - w.p0 : kc;
            w.first = w.p0 == 0;
            w.last = w.p0 + w.kc == g->k;
            ms__parallel_tasks((w.nc + w.wide - 1) / w.wide, pack_task, &w);
            ms__parallel_tasks((g->m + MC - 1) / MC, row_task, &w);
        }
    }
    if (sums) ms__free(sums);
    ms__free(packed);
    return MS_OK;
}

// ---- choice ---------------------------------------------------------------------------------------

// k = 0: the empty sum.
static void only_bias(const ms_gemm *g)
{
    size_t size = (size_t)ms__dtype_size(g->dtype);
    for (int64_t i = 0; i < g->m; i++) {
        char *row = (char *)g->c + (size_t)(i * g->c_rs) * size;
        if (g->bias) memcpy(row, g->bias, (size_t)g->n * size);
        else memset(row, 0, (size_t)g->n * size);
    }
}

ms_status ms__gemm_own(const ms_gemm *g)
{
    if (g->m == 0 || g->n == 0) return MS_OK;
    if (g->k == 0) return only_bias(g), MS_OK;
    if (g->dtype == MS_F32 && small_f32(g)) return MS_OK;
    if (g->dtype == MS_F64 && small_f64(g)) return MS_OK;
    return large(g);
}

// oneDNN does bfloat16 (with tiles where the CPU has them) and large float32 squares, whose panels it lays out better than we do (1024 and up: 2-8 % faster, TN excepted).
ms_status ms__gemm(const ms_gemm *g)
{
    if (!ms__is_float(g->dtype)) return ms__gemm_integer(g);
    double work = (double)g->m * (double)g->n * (double)g->k;
    if (work > SMALL && (g->dtype == MS_BF16 || g->dtype == MS_F32)) {
        // Below AVX-512 oneDNN splits sums among threads: bits would depend on their number.
        bool large_square = g->m >= 1024 && g->n >= 1024 && g->k >= 1024 && g->a_cs == 1 && !narrow();
        if ((g->dtype == MS_BF16 || large_square) && ms__onednn_takes(g)) return ms__gemm_onednn(g);
    }
    return ms__gemm_own(g);
}

// ---- sums of columns ------------------------------------------------------------------------------

// Blocks of 64 rows, each summed row by row into its own partial row, then the partial rows in order.
enum { SUM_ROWS = 64, SUM_COLS = 512 };

typedef struct colsum { int dtype; void *out; const void *x; int64_t m, n, rs; } colsum;

static MS_KERNEL void add_rows_f32(float *s, const float *x, int64_t rows, int64_t n, int64_t rs)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < n; j++) s[j] += x[i * rs + j];
}

static MS_KERNEL void add_rows_f64(double *s, const double *x, int64_t rows, int64_t n, int64_t rs)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < n; j++) s[j] += x[i * rs + j];
}

static void colsum_task(void *arg, int64_t block, int64_t end, int64_t unused)
{
    const colsum *w = arg;
    int64_t j0 = block * SUM_COLS, n = w->n - j0 < SUM_COLS ? w->n - j0 : SUM_COLS;
    (void)end, (void)unused;
    if (w->dtype == MS_F64) {
        double total[SUM_COLS] = { 0 };
        for (int64_t i = 0; i < w->m; i += SUM_ROWS) {
            double s[SUM_COLS] = { 0 };
            add_rows_f64(s, (const double *)w->x + i * w->rs + j0, w->m - i < SUM_ROWS ? w->m - i : SUM_ROWS, n, w->rs);
            for (int64_t j = 0; j < n; j++) total[j] += s[j];
        }
        memcpy((double *)w->out + j0, total, (size_t)n * sizeof(double));
        return;
    }
    float total[SUM_COLS] = { 0 };
    for (int64_t i = 0; i < w->m; i += SUM_ROWS) {
        float s[SUM_COLS] = { 0 }, t[SUM_COLS];
        int64_t rows = w->m - i < SUM_ROWS ? w->m - i : SUM_ROWS;
        if (w->dtype == MS_F32) add_rows_f32(s, (const float *)w->x + i * w->rs + j0, rows, n, w->rs);
        else for (int64_t r = 0; r < rows; r++) {
            load_run(w->dtype, t, w->x, (i + r) * w->rs + j0, n);
            add_rows_f32(s, t, 1, n, 0);
        }
        for (int64_t j = 0; j < n; j++) total[j] += s[j];
    }
    if (w->dtype == MS_F32) memcpy((float *)w->out + j0, total, (size_t)n * sizeof(float));
    else if (w->dtype == MS_F16) store_f16((ms_f16 *)w->out + j0, total, n);
    else store_bf16((ms_bf16 *)w->out + j0, total, n);
}

void ms__column_sum(int dtype, void *out, const void *x, int64_t m, int64_t n, int64_t rs)
{
    colsum w = { dtype, out, x, m, n, rs };
    int64_t blocks = (n + SUM_COLS - 1) / SUM_COLS;
    if (m * n < 1 << 15) for (int64_t b = 0; b < blocks; b++) colsum_task(&w, b, b + 1, b);
    else ms__parallel_tasks(blocks, colsum_task, &w);
}
