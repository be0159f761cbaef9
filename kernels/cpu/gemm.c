// gemm.c -- products by our own loops: all of float32, float64 and float16, and bfloat16 where the CPU
// has no instructions for it.
//
// Small: no packing; A is broadcast from where it is, B read from where it is when its columns are
// adjacent. Large (Goto, van de Geijn 2008): B is cut into panels of KC x 3 vectors, A into panels of
// KC x 8 rows, as many of them as fit well into the second cache; strides that are powers of two, on which
// caches and address tables run into themselves, are met only while packing. Half types are converted
// while packing and accumulate in a float32 block of C, rounded once at the end.
// Every element of C is summed in the same order whatever the number of threads, rows and columns at a time.
//
// Built with -ffp-contract=fast (CMakeLists.txt): here, and only here, a*b + c may become an fma.
#include <omp.h>
#include <unistd.h>
#include "gemm.h"

enum {
    SMALL = 16 << 10,           // multiply-adds up to which packing costs more than it saves
    KC = 512,                   // depth of panels in floats (half as many doubles). Sums are cut here, so it is one number for all CPUs
    FEW = 400,                  // columns up to which rows of A are read where they are: they pass by too few times to pay for packing
    MC = 1024, NC = 3072,       // rows of A and columns of B packed at a time, at most
    NC_HALF = 528,              // half types: their float32 sums are m x NC
};

// Without AVX-512 our vectors are taken apart.
static bool narrow(void)
{
    static int known = -1;
    if (MS_UNLIKELY(known < 0)) known = strcmp(ms_cpu_isa(), "v4") != 0;
    return known;
}

// Rows of a packed panel of A: what the tiles take.
static int64_t panel_rows(void) { return narrow() ? 6 : 8; }

// Bytes of the second (2) or third cache, between bounds.
static int64_t cache_bytes(int level)
{
    static int64_t known[2];
    int64_t *size = &known[level - 2];
    if (MS_LIKELY(*size)) return *size;
    int64_t bytes = sysconf(level == 2 ? _SC_LEVEL2_CACHE_SIZE : _SC_LEVEL3_CACHE_SIZE), least = level == 2 ? 256 << 10 : 8 << 20;
    return *size = bytes < least ? least : bytes;
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

// Rows of A into panels, converted on the way.
static void pack_rows_half(int dtype, float *out, const void *a, int64_t at, int64_t rs, int64_t cs, int64_t m, int64_t k, int64_t high)
{
    float t[MC > 8 * KC ? MC : 8 * KC] __attribute__((aligned(64)));
    if (rs == 1) {                      // a column at a time
        for (int64_t p = 0; p < k; p++) {
            load_run(dtype, t, a, at + p * cs, m);
            for (int64_t i = 0; i < m; i += high)
                memcpy(out + i * k + p * high, t + i, (size_t)(m - i < high ? m - i : high) * sizeof(float));
        }
        return;
    }
    for (int64_t i = 0; i < m; i += high) {
        int64_t rows = m - i < high ? m - i : high;
        for (int64_t r = 0; r < rows; r++) {
            int64_t from = at + (i + r) * rs;
            if (cs == 1) load_run(dtype, t + r * k, a, from, k);
            else for (int64_t p = 0; p < k; p++) t[r * k + p] = load_one(dtype, a, from + p * cs);
        }
        pack_rows_f32(out + i * k, t, k, 1, rows, k, high);
    }
}

// ---- large products -------------------------------------------------------------------------------

typedef struct work {
    const ms_gemm *g;
    int64_t size;               // bytes of an accumulating number: 4 or 8
    int64_t wide, high;         // columns of a panel of B, rows of one of A
    int64_t j0, nc, p0, kc;     // the columns and the depth at hand
    int64_t mc, cols;           // rows and columns of a task
    int64_t across;             // tasks beside each other
    bool    half, first, last, pack_a;
    char   *b, *a;              // packed: B's panels one after the other, A's block for each thread
    size_t  a_bytes;            // of one thread's block (and, of a half type that is one block deep, of its sums)
    float  *sums;               // half types: m x wide, panel after panel
    int     slots;              // threads that have a block of their own
} work;

enum { PACK_PANELS = 8 };       // a task of packing

static void pack_task(void *arg, int64_t task, int64_t end, int64_t block)
{
    const work *w = arg;
    const ms_gemm *g = w->g;
    (void)end, (void)block;
    int64_t j = task * PACK_PANELS * w->wide, stop = j + PACK_PANELS * w->wide < w->nc ? j + PACK_PANELS * w->wide : w->nc;
    if (g->b_cs == 1 && !w->half) {
        int64_t panels = (stop - j) / w->wide, at = w->p0 * g->b_rs + w->j0 + j;
        char *out = w->b + j * w->kc * w->size;
        if (w->size == 4) pack_panels_f32((float *)out, (const float *)g->b + at, g->b_rs, w->kc, panels);
        else pack_panels_f64((double *)out, (const double *)g->b + at, g->b_rs, w->kc, panels);
        j += panels * w->wide;
    }
    for (; j < stop; j += w->wide) {
        int64_t n = stop - j < w->wide ? stop - j : w->wide, at = w->p0 * g->b_rs + (w->j0 + j) * g->b_cs;
        char *out = w->b + j * w->kc * w->size;
        if (w->half) pack_half(g->dtype, (float *)out, w->wide, g->b, at, g->b_rs, g->b_cs, w->kc, n);
        else if (w->size == 4) pack_f32((float *)out, w->wide, (const float *)g->b + at, g->b_rs, g->b_cs, w->kc, n);
        else pack_f64((double *)out, w->wide, (const double *)g->b + at, g->b_rs, g->b_cs, w->kc, n);
    }
}

// The finished sums of a panel: m rows of n columns, `wide` apart, plus the bias, rounded.
static void finish(const work *w, float *s, int64_t i0, int64_t col, int64_t m, int64_t n)
{
    const ms_gemm *g = w->g;
    float bias[3 * 16];
    if (g->bias) load_run(g->dtype, bias, g->bias, col, n);
    for (int64_t i = 0; i < m; i++, s += w->wide) {
        int64_t at = (i0 + i) * g->c_rs + col;
        if (g->bias)
            for (int64_t j = 0; j < n; j++) s[j] += bias[j];
        if (g->dtype == MS_F16) store_f16((ms_f16 *)g->c + at, s, n);
        else store_bf16((ms_bf16 *)g->c + at, s, n);
    }
}

static void row_task(void *arg, int64_t task, int64_t end, int64_t unused)
{
    const work *w = arg;
    const ms_gemm *g = w->g;
    int64_t i0 = task / w->across * w->mc, m = g->m - i0 < w->mc ? g->m - i0 : w->mc, from = task % w->across * w->cols;
    int64_t to = w->nc - from < w->cols ? w->nc : from + w->cols, at = i0 * g->a_rs + w->p0 * g->a_cs;
    bool add = !w->first;
    char *room = w->a + (size_t)(w->slots > 1 ? omp_get_thread_num() : 0) * w->a_bytes;
    (void)end, (void)unused;

    if (w->half) pack_rows_half(g->dtype, (float *)room, g->a, at, g->a_rs, g->a_cs, m, w->kc, w->high);
    else if (w->pack_a && w->size == 4) pack_rows_f32((float *)room, (const float *)g->a + at, g->a_rs, g->a_cs, m, w->kc, w->high);
    else if (w->pack_a) pack_rows_f64((double *)room, (const double *)g->a + at, g->a_rs, g->a_cs, m, w->kc, w->high);

    for (int64_t j = from; j < to; j += w->wide) {
        int64_t n = to - j < w->wide ? to - j : w->wide, col = w->j0 + j;
        const void *b = w->b + j * w->kc * w->size;
        if (w->half) {
            float *s = w->sums ? w->sums + j * g->m + i0 * w->wide : (float *)room + w->mc * w->kc;
            packed_panel_f32((n + 15) / 16 * 16, m, w->kc, (float *)room, b, s, w->wide, NULL, add);
            if (w->last) finish(w, s, i0, col, m, n);
        } else if (w->size == 4) {
            const float *bias = w->last && g->bias ? (const float *)g->bias + col : NULL;
            float *c = (float *)g->c + i0 * g->c_rs + col;
            if (w->pack_a) packed_panel_f32(n, m, w->kc, (float *)room, b, c, g->c_rs, bias, add);
            else panel_f32(n, m, w->kc, (const float *)g->a + at, g->a_rs, g->a_cs, b, w->wide, c, g->c_rs, bias, add);
        } else {
            const double *bias = w->last && g->bias ? (const double *)g->bias + col : NULL;
            double *c = (double *)g->c + i0 * g->c_rs + col;
            if (w->pack_a) packed_panel_f64(n, m, w->kc, (double *)room, b, c, g->c_rs, bias, add);
            else panel_f64(n, m, w->kc, (const double *)g->a + at, g->a_rs, g->a_cs, b, w->wide, c, g->c_rs, bias, add);
        }
    }
}

static int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// n cut into equal parts of at most `most`, each a multiple of `unit`.
static int64_t even(int64_t n, int64_t most, int64_t unit) { return ceil_div(ceil_div(n, ceil_div(n, most)), unit) * unit; }

static ms_status large(const ms_gemm *g)
{
    work w = { .g = g, .half = ms__is_half(g->dtype), .size = g->dtype == MS_F64 ? 8 : 4, .high = panel_rows() };
    int64_t kc = even(g->k, KC * 4 / w.size, 16), depth = kc < g->k ? kc : g->k, threads = ms_num_threads();
    w.wide = 3 * 64 / w.size;
    w.pack_a = w.half || g->a_cs != 1 || g->n > FEW;

    // Three eighths of the second cache for a block of A (a panel of B passes through it); an eighth of the third, which others share, for B's panels.
    int64_t mc = cache_bytes(2) * 3 / 8 / (kc * w.size), nc = cache_bytes(3) / 8 / (kc * w.size);
    mc = even(g->m, mc < MC - w.high ? mc : MC - w.high, w.high);
    nc = even(g->n, w.half ? NC_HALF : nc < NC ? nc : NC, w.wide);
    // Several threads: about two tasks each, cut first along columns, which need A's block again, then along rows.
    int64_t tasks = threads > 1 ? 2 * threads : 1, down = ceil_div(g->m, mc), across = 1;
    if (down < tasks) {
        int64_t most = ceil_div(nc, 8 * w.wide);
        across = ceil_div(tasks, down) < most ? ceil_div(tasks, down) : most;
        if (down * across < tasks) {
            int64_t rows = even(g->m, ceil_div(g->m, ceil_div(tasks, across)), w.high);
            mc = rows < 4 * w.high ? mc < 4 * w.high ? mc : 4 * w.high : rows;
        }
    }
    w.mc = mc;
    w.cols = even(nc, ceil_div(nc, across), w.wide);
    bool deep = kc < g->k;
    w.slots = threads > 1 ? (int)threads : 1;
    w.a_bytes = w.pack_a ? ((size_t)(mc * depth + (w.half && !deep ? mc * w.wide : 0)) * (size_t)w.size + 63) / 64 * 64 : 0;

    size_t b_bytes = (size_t)(nc * depth * w.size), s_bytes = w.half && deep ? (size_t)(g->m * nc) * 4 : 0;
    ms_block *scratch;
    MS_TRY(ms__alloc(&scratch, MS_CPU, b_bytes + s_bytes + (size_t)w.slots * w.a_bytes, g->what));
    w.b = scratch->data;
    w.sums = s_bytes ? (float *)(w.b + b_bytes) : NULL;
    w.a = w.b + b_bytes + s_bytes;
    for (w.j0 = 0; w.j0 < g->n; w.j0 += nc) {
        w.nc = g->n - w.j0 < nc ? g->n - w.j0 : nc;
        w.across = ceil_div(w.nc, w.cols);
        for (w.p0 = 0; w.p0 < g->k; w.p0 += w.kc) {
            w.kc = g->k - w.p0 < kc ? g->k - w.p0 : kc;
            w.first = w.p0 == 0;
            w.last = w.p0 + w.kc == g->k;
            ms__parallel_tasks(ceil_div(w.nc, PACK_PANELS * w.wide), pack_task, &w);
            ms__parallel_tasks(ceil_div(g->m, w.mc) * w.across, row_task, &w);
        }
    }
    ms__free(scratch);
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

// oneDNN does bfloat16 where the CPU has instructions for it (tiles, or dot products of pairs): elsewhere it takes ten times as long as
// our own loops. These do float32 as fast as oneDNN at 512 and 1024 and faster at 2048, and give the same bits with any number of
// threads, which oneDNN does not promise below AVX-512; at depths or widths of 128 oneDNN is 7-19 % ahead (scripts/bench/results).
static bool has_bf16(void)
{
    static int known = -1;
    if (MS_UNLIKELY(known < 0)) {
        known = 0;
#if defined(__x86_64__)
        __builtin_cpu_init();
        known = __builtin_cpu_supports("avx512bf16") && !narrow();
#endif
    }
    return known;
}

ms_status ms__gemm(const ms_gemm *g)
{
    if (!ms__is_float(g->dtype)) return ms__gemm_integer(g);
    if (g->dtype == MS_BF16 && has_bf16() && (double)g->m * (double)g->n * (double)g->k > SMALL && ms__onednn_takes(g)) return ms__gemm_onednn(g);
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
