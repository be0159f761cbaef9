// SPDX-License-Identifier: MIT
// cpu/product/gemm.c -- matrix products by our own loops: float32, float64 and float16 always; bfloat16 where the CPU
// has no fast instructions for it, the product is small, or oneDNN does not take it (ms__onednn_takes).
//
// Small products are not packed: elements of A are broadcast in place, and B is read in place when its columns are
// adjacent. Large products follow Goto and van de Geijn (2008): B is packed into panels as wide as a tile (tiles.h), as
// many at a time as fit in half of the second-level cache; A is packed into panels as high as a tile. A group of panels
// of A (one with AVX-512, where it stays in the first-level cache) passes along all panels of B before the next. (The
// opposite order, one panel of B against all of A, reads both from the second-level cache and is 13 % slower.) Strides
// that are powers of two, which cause conflicts in caches and TLBs, are met only while packing, or where A is read in
// place (FEW). Half types and int8 are converted while packing; their sums are float32, rounded once at the end. The
// order in which an element of C is summed depends neither on the number of threads nor on the tiles.
//
// Built with -ffp-contract=fast, as tiles.c.
#include <unistd.h>
#include "cpu/product/tiles.h"

enum {
    SMALL = 16 << 10,      // largest number of multiply-adds at which packing costs more than it saves
    IN_PLACE = 128 << 10,  // largest B in bytes that is read in place
    TASK = 256 << 10,      // multiply-adds of a task on rows that are read in place
    KC = 1024,         // depth of a panel in floats (doubles: half). It splits the sums, so it is the same on all CPUs
    FEW = 400,         // largest number of columns of C for which rows of A are read in place: packing would not pay
    ROWS = 2048,       // largest number of rows of A packed at a time
    ROWS_HALF = 1024,  // ROWS for half types
    ROWS_APART = 512,  // least of both, if threads pack rows of their own
    COLUMNS_HALF = 2304,  // half types, if k is above KC: most columns of C that have float32 sums at a time
    RUN = 128,  // bytes of a column of A packed together where A's columns are contiguous: two cache lines, fetched as
                // a pair
    APART = 256,  // rows or columns of C that a thread needs to compute them alone: it packs all of one operand itself
    SHARE = 256,  // cache lines of B's next columns prefetched per panel of A
};

// The bytes of the second-level cache that blocks are made for: 256 KiB, as sysconf may return 0, to 1 MiB. Larger
// blocks are no faster, and slower by a third if several cores share the cache, which sysconf does not tell.
static int64_t cache_bytes(void)
{
    static int64_t size;
    if (MS_LIKELY(size)) return size;
    int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE), least = 256 << 10, most = 1 << 20;
    return size = bytes < least ? least : bytes > most ? most : bytes;
}

static int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// A block of B: its first column and how many, its first row and how many.
typedef struct gemm_block {
    int64_t j, nc, p, kc;
} gemm_block;

// The state of a large product.
typedef struct gemm_work {
    const ms_gemm *g;
    int64_t threads;              // that share it
    int64_t size;                 // bytes of a number of the accumulating type: 4 or 8
    int64_t wide, high, group;    // columns in a panel of B, rows in a panel of A, rows computed together
    int64_t i0, mb;               // first of the current rows; their number
    int64_t first_col, last_col;  // columns [first_col, last_col) of C, finished before others begin
    int64_t j0, nc, p0, kc;       // packed columns of B: first and number; current depth: first and length
    struct {
        int64_t j, nc, p, kc;
    } then;            // the block computed next; nc is 0 if there is none or several threads share the work
    int64_t mc, cols;  // rows and columns of a task
    int64_t pack;      // columns that a packing task packs
    bool converts;     // A or B is of a half type or int8: its panels, and the sums, are float32
    bool last;         // the current depth is the last
    bool pack_a;       // A is packed; otherwise its rows are read in place
    bool fused;        // B is packed while the first rows are computed
    char *b, *a;       // packed panels, stored consecutively
    float *sums;       // if it converts: float32 sums of mb rows; if k is one block deep, sums of one panel per thread
    int64_t sums_rs;
} gemm_work;

#define REAL float
#define R(x) x##_f32
#include "cpu/product/gemm_body.h"
#include "cpu/product/gemm_small_body.h"
#undef REAL
#undef R

#define REAL double
#define R(x) x##_f64
#include "cpu/product/gemm_body.h"
#include "cpu/product/gemm_small_body.h"
#undef REAL
#undef R

#include "cpu/product/gemm_half_body.h"

// ---- large products -------------------------------------------------------------------------------

// Bytes of a number of A, of B.
static int64_t a_size(const ms_gemm *g) { return ms__dtype_size(g->dtype); }
static int64_t b_size(const ms_gemm *g) { return g->scale ? 1 : ms__dtype_size(g->dtype); }

// The size of nearly equal parts of n: at most `most`, then rounded up to a multiple of `unit`.
static int64_t even(int64_t n, int64_t most, int64_t unit)
{
    return ceil_div(ceil_div(n, ceil_div(n, most)), unit) * unit;
}

// Packs columns [j, j + n) of int8, n up to the width of a panel, multiplied by their scale. Columns that are
// contiguous pass through a buffer, in which they are floats.
static void pack_int8(const gemm_work *w, float *out, int64_t j, int64_t n)
{
    enum { LONG = 128 };
    const ms_gemm *g = w->g;
    const ms_tiles_f32 *tiles = ms__tiles_f32();
    const int8_t *b = (const int8_t *)g->b + w->p0 * g->b_rs + j * g->b_cs;
    float t[16 * LONG];
    if (g->scales_rows) {
        int64_t wide = ceil_div(n, tiles->lanes) * tiles->lanes;
        for (int64_t p = 0; p < w->kc; p++) {
            load_i8(out + p * w->wide, b + p * g->b_rs, n, g->scale[w->p0 + p]);
            for (int64_t q = n; q < wide; q++) out[p * w->wide + q] = 0;
        }
        return;
    }
    for (int64_t first = 0; first < n; first += tiles->lanes) {
        int64_t columns = n - first < tiles->lanes ? n - first : tiles->lanes;
        for (int64_t p = 0; p < w->kc; p += LONG) {
            int64_t k = w->kc - p < LONG ? w->kc - p : LONG;
            for (int64_t c = 0; c < columns; c++)
                load_i8(t + c * LONG, b + (first + c) * g->b_cs + p, k, g->scale[j + first + c]);
            tiles->pack(out + p * w->wide + first, w->wide, &(ms_matrix) { .data = t, .rs = 1, .cs = LONG }, k,
                        columns);
        }
    }
}

static void pack_task(void *arg, int64_t task, int64_t end, int64_t block)
{
    const gemm_work *w = arg;
    const ms_gemm *g = w->g;
    (void)end, (void)block;
    int64_t j = task * w->pack, stop = j + w->pack < w->nc ? j + w->pack : w->nc;
    if (g->b_cs == 1 && g->dtype != MS_F16 && !g->scale) {
        int64_t panels = (stop - j) / w->wide, at = w->p0 * g->b_rs + w->j0 + j;
        char *out = w->b + j * w->kc * w->size;
        if (w->converts)
            ms__tiles_f32()->pack_panels_bf16((float *)out, (const ms_bf16 *)g->b + at, g->b_rs, w->kc, panels);
        else if (w->size == 4)
            ms__tiles_f32()->pack_panels((float *)out, (const float *)g->b + at, g->b_rs, w->kc, panels);
        else ms__tiles_f64()->pack_panels((double *)out, (const double *)g->b + at, g->b_rs, w->kc, panels);
        j += panels * w->wide;
    }
    for (; j < stop; j += w->wide) {
        int64_t n = stop - j < w->wide ? stop - j : w->wide, at = w->p0 * g->b_rs + (w->j0 + j) * g->b_cs;
        ms_matrix b = { (const char *)g->b + at * b_size(g), g->b_rs, g->b_cs, g->dtype };
        char *out = w->b + j * w->kc * w->size;
        if (g->scale) pack_int8(w, (float *)out, w->j0 + j, n);
        else if (w->converts) pack_half((float *)out, w->wide, &b, w->kc, n);
        else if (w->size == 4) ms__tiles_f32()->pack((float *)out, w->wide, &b, w->kc, n);
        else ms__tiles_f64()->pack((double *)out, w->wide, &b, w->kc, n);
    }
}

// Adds the bias to the sums of `rows` rows and n columns, and rounds them into C.
static void finish_block(const gemm_work *w, float *s, int64_t row, int64_t col, int64_t rows, int64_t n)
{
    const ms_gemm *g = w->g;
    float bias[256];
    for (int64_t j = 0; j < n; j += 256) {
        int64_t m = n - j < 256 ? n - j : 256;
        if (g->bias) load_run(g->dtype, bias, g->bias, col + j, m);
        for (int64_t r = 0; r < rows; r++) {
            float *from = s + r * w->sums_rs + j;
            int64_t at = (row + r) * g->c_rs + col + j;
            if (g->bias)
                for (int64_t q = 0; q < m; q++) from[q] += bias[q];
            if (g->dtype == MS_F32) memcpy((float *)g->c + at, from, (size_t)m * sizeof *from);
            else if (g->dtype == MS_F16) store_f16((ms_f16 *)g->c + at, from, m);
            else store_bf16((ms_bf16 *)g->c + at, from, m);
        }
    }
}

// Packs rows [i, i + m) of the current rows, depths [p, stop). i is a multiple of the panel height.
static void pack_part(const gemm_work *w, int64_t i, int64_t m, int64_t p, int64_t stop)
{
    const ms_gemm *g = w->g;
    int64_t at = (w->i0 + i) * g->a_rs + (w->p0 + p) * g->a_cs, k = stop - p;
    ms_matrix a = { (const char *)g->a + at * a_size(g), g->a_rs, g->a_cs, g->dtype };
    char *out = w->a + (i * w->kc + p * w->high) * w->size;
    if (ms__is_half(g->dtype)) pack_rows_half((float *)out, &a, m, k, w->kc);
    else if (w->size == 4) ms__tiles_f32()->pack_rows((float *)out, &a, m, k, w->kc);
    else ms__tiles_f64()->pack_rows((double *)out, &a, m, k, w->kc);
}

static void pack_rows(const gemm_work *w, int64_t i, int64_t m) { pack_part(w, i, m, 0, w->kc); }

// The number of rows packed together where A's columns are contiguous: a multiple of the rows computed together.
static int64_t run_rows(const gemm_work *w)
{
    int64_t run = RUN / a_size(w->g);
    return run > w->group ? run : w->group;
}

static void pack_rows_task(void *arg, int64_t task, int64_t end, int64_t unused)
{
    const gemm_work *w = arg;
    int64_t step = run_rows(w), i = task * step;
    (void)end, (void)unused;
    pack_rows(w, i, w->mb - i < step ? w->mb - i : step);
}

static void row_half(const gemm_work *w, int64_t i, int64_t rows, int64_t j, int64_t n, gemm_ahead *ahead)
{
    float *s = w->sums;
    if (w->p0 == 0 && w->last) s += w->threads > 1 ? ms__thread_num() * w->group * w->sums_rs : 0;
    else s += i * w->sums_rs + w->j0 + j - w->first_col;
    const float *a = (const float *)w->a + i * w->kc, *b = (const float *)w->b + j * w->kc;
    ms_operands_f32 o = { a, 1, w->high, b, w->wide, s, w->sums_rs, NULL, w->p0 > 0 };
    const ms_tiles_f32 *t = ms__tiles_f32();
    t->sweep((n + t->lanes - 1) / t->lanes * t->lanes, rows, w->kc, &o, NULL, ahead);
    if (w->last) finish_block(w, s, w->i0 + i, w->j0 + j, rows, n);
}

// What to prefetch while rows [i, i + group) of [top, bottom) are computed: this group's share of the rows packed next.
// These are packed `step` rows at a time.
static gemm_ahead rows_ahead(const gemm_work *w, int64_t top, int64_t i, int64_t bottom, int64_t step)
{
    const ms_gemm *g = w->g;
    int64_t size = a_size(g), next = top + ((i - top) / step + 1) * step,
            at = (w->i0 + next) * g->a_rs + w->p0 * g->a_cs;
    gemm_ahead f = { 0 };
    if (next + step > bottom) return f;
    if (g->a_rs == 1) {  // columns are contiguous: prefetch `step` rows of each
        int64_t part = (i - top) % step / w->group, parts = step / w->group, from = w->kc * part / parts;
        f.lines = (int)(step * size / 128) * 2;
        f.apart = 64;
        f.jump = g->a_cs * size - f.lines * 64;
        f.groups = w->kc * (part + 1) / parts - from;
        at += from * g->a_cs;
        next += part * w->group;
    } else {  // prefetch one line of each row
        f.lines = (int)w->group;
        f.apart = g->a_rs * size;
        f.jump = 64 - w->group * f.apart;
        f.groups = g->a_cs == 1 ? w->kc * size / 64 : 0;
    }
    f.at = (const char *)g->a + at * size;
    f.to = w->a + next * w->kc * w->size;
    return f;
}

// What to prefetch of B's next columns while a panel of A is computed, when `left` more panels follow. Only the last
// panels prefetch: lines fetched too early would be evicted.
static gemm_ahead columns_ahead(const gemm_work *w, int64_t left)
{
    const ms_gemm *g = w->g;
    int64_t size = b_size(g), shares = ceil_div(w->then.nc * w->then.kc * size / 64, SHARE),
            groups = ceil_div(w->mb, w->group), share;
    if (shares > groups) shares = groups;
    share = shares - 1 - left;
    bool rows = g->b_cs == 1;
    gemm_ahead f = { 0 };
    if (share < 0 || (!rows && g->b_rs != 1)) return f;
    int64_t runs = rows ? w->then.kc : w->then.nc, stride = rows ? g->b_rs : g->b_cs, from = runs * share / shares;
    f.at = (const char *)g->b + (w->then.p * g->b_rs + w->then.j * g->b_cs + from * stride) * size;
    f.lines = (int)((rows ? w->then.nc : w->then.kc) * size / 128) * 2;
    f.apart = 64;
    f.jump = stride * size - f.lines * 64;
    f.groups = f.lines ? runs * (share + 1) / shares - from : 0;
    return f;
}

// The number of tasks that share a set of rows.
static int64_t across(const gemm_work *w) { return ceil_div(w->nc, w->cols); }

static void row_task(void *arg, int64_t task, int64_t end, int64_t unused)
{
    const gemm_work *w = arg;
    const ms_gemm *g = w->g;
    int64_t top = task / across(w) * w->mc, bottom = w->mb - top < w->mc ? w->mb : top + w->mc,
            j = task % across(w) * w->cols;
    int64_t n = w->nc - j < w->cols ? w->nc - j : w->cols, step = g->a_rs == 1 ? run_rows(w) : w->group;
    bool fresh = w->pack_a && across(w) == 1 && w->j0 == w->first_col;
    // If A's columns are contiguous, their next rows are packed in small parts while the preceding panels are computed:
    // the prefetched lines are then in the second-level cache.
    bool along = g->a_rs == 1 && !ms__is_half(g->dtype);
    (void)end, (void)unused;

    for (int64_t i = top; i < bottom; i += w->group) {
        int64_t rows = bottom - i < w->group ? bottom - i : w->group;
        gemm_ahead ahead = { 0 };
        if (fresh) {
            if ((i - top) % step == 0 && !(along && i > top && i + step <= bottom))
                pack_rows(w, i, bottom - i < step ? bottom - i : step);
            ahead = rows_ahead(w, top, i, bottom, step);
        }
        gemm_ahead columns = { 0 };
        if (w->then.nc) {
            columns = columns_ahead(w, (bottom - 1 - i) / w->group);
            ahead.then = &columns;
        }
        if (w->converts) row_half(w, i, rows, j, n, &ahead);
        else if (w->size == 4) row_f32(w, i, rows, j, n, &ahead);
        else row_f64(w, i, rows, j, n, &ahead);
        int64_t part = (i - top) % step / w->group, parts = step / w->group, next = i + (parts - part) * w->group;
        if (fresh && along && next + step <= bottom)
            pack_part(w, next, step, w->kc * part / parts, w->kc * (part + 1) / parts);
    }
}

static int64_t lanes(const gemm_work *w) { return w->size == 4 ? ms__tiles_f32()->lanes : ms__tiles_f64()->lanes; }

// Runs tasks on the threads that share the product.
static void run_gemm_tasks(gemm_work *w, int64_t n, ms_range_fn fn)
{
    if (w->threads > 1) ms__parallel_tasks(n, fn, w);
    else
        for (int64_t k = 0; k < n; k++) fn(w, k, k + 1, k);
}

// Computes the current rows of A times the current columns of B.
static void column_block(gemm_work *w)
{
    int64_t panels = ceil_div(w->nc, w->wide);
    w->pack = ceil_div(panels, w->threads) * w->wide;
    // A single thread packs at most 8 panels at a time, because a row of B is packed into all of them at once.
    if (w->threads == 1 && w->pack > 8 * w->wide) w->pack = 8 * w->wide;
    // Groups of several panels gain nothing by it: 2 % slower on AVX2.
    w->fused = w->group == w->high && w->g->b_cs == 1 && w->nc % lanes(w) == 0 && w->pack_a && !w->converts &&
               w->mc >= w->mb && w->mb >= w->high;
    if (!w->fused) run_gemm_tasks(w, ceil_div(w->nc, w->pack), pack_task);
    if (w->pack_a && across(w) > 1 && w->j0 == w->first_col)
        run_gemm_tasks(w, ceil_div(w->mb, run_rows(w)), pack_rows_task);
    run_gemm_tasks(w, ceil_div(w->mb, w->mc) * across(w), row_task);
}

// Determines the next block of B for the same rows of A: the next columns, or the next depth from the first column on.
static void what_follows(gemm_work *w, int64_t nc, int64_t kc)
{
    bool beside = w->j0 + w->nc < w->last_col;
    w->then.j = beside ? w->j0 + w->nc : w->first_col;
    w->then.p = beside ? w->p0 : w->p0 + w->kc;
    w->then.kc = w->g->k - w->then.p < kc ? w->g->k - w->then.p : kc;
    w->then.nc = w->then.kc == 0 ? 0 : w->last_col - w->then.j < nc ? w->last_col - w->then.j : nc;
}

// How a product is divided: depth of panels, rows at a time, columns whose sums are kept, columns packed at a time.
typedef struct gemm_cut {
    int64_t kc, mb, jb, nc;
} gemm_cut;

// B's panels get half of the second-level cache. With several threads, each thread gets about two tasks: first the rows
// are divided, into tasks of at least 128 rows, which amortise loading B's panels; then the columns. If that gives too
// few tasks, a task gets fewer rows, at least four panels of A, and then fewer columns.
static gemm_cut cut_blocks(gemm_work *w, int64_t beside)
{
    const ms_gemm *g = w->g;
    int64_t threads = w->threads;
    int64_t rows = (w->converts ? ROWS_HALF : ROWS) / beside;
    gemm_cut c = { .kc = even(g->k, KC * 4 / w->size, 16),
                   .mb = even(g->m, rows < ROWS_APART ? ROWS_APART : rows, w->high),
                   .jb = g->n };
    if (w->converts && c.kc < g->k && g->n > COLUMNS_HALF) c.jb = even(g->n, COLUMNS_HALF, w->wide);

    int64_t fit = cache_bytes() / 2 / (c.kc * w->size) / w->wide * w->wide, down = 1, across = 1;
    w->cols = even(c.jb, fit < 2 * w->wide ? 2 * w->wide : fit, w->wide);
    if (threads > 1) {
        int64_t most = ceil_div(c.jb, w->cols);
        down = c.mb / 128 < 1 ? 1 : c.mb / 128 < 2 * threads ? c.mb / 128 : 2 * threads;
        across = ceil_div(2 * threads, down) < most ? ceil_div(2 * threads, down) : most;
        if (down * across < 2 * threads && c.mb > down * 4 * w->high) {
            down = ceil_div(2 * threads, across);
            if (down > c.mb / (4 * w->high)) down = c.mb / (4 * w->high);
        }
        if (down * across < threads && w->cols > 2 * w->wide) {
            w->cols = even(c.jb, ceil_div(w->cols, ceil_div(threads, down * across)), w->wide);
            most = ceil_div(c.jb, w->cols);
            across = ceil_div(2 * threads, down) < most ? ceil_div(2 * threads, down) : most;
        }
    }
    w->mc = even(c.mb, ceil_div(c.mb, down), w->high);
    c.nc = w->cols * across;
    return c;
}

// Multiplies the current rows and columns through all depths. Between blocks Ctrl-C ends the product, because a large
// one takes seconds.
static void all_depths(gemm_work *w, const gemm_cut *c)
{
    const ms_gemm *g = w->g;
    for (w->p0 = 0; w->p0 < g->k; w->p0 += w->kc) {
        w->kc = g->k - w->p0 < c->kc ? g->k - w->p0 : c->kc;
        w->last = w->p0 + w->kc == g->k;
        for (w->j0 = w->first_col; w->j0 < w->last_col && !ms__state.interrupted; w->j0 += c->nc) {
            w->nc = w->last_col - w->j0 < c->nc ? w->last_col - w->j0 : c->nc;
            if (w->threads == 1) what_follows(w, c->nc, c->kc);
            column_block(w);
        }
    }
}

// Sets the sizes of tiles and panels.
static void shape(gemm_work *w)
{
    if (w->size == 4) {
        const ms_tiles_f32 *t = ms__tiles_f32();
        w->wide = t->wide, w->high = t->rows, w->group = t->rows * t->group;
    } else {
        const ms_tiles_f64 *t = ms__tiles_f64();
        w->wide = t->wide, w->high = t->rows, w->group = t->rows * t->group;
    }
}

// The state and the division of product g on some threads; the bytes of A's and B's panels, and of the sums.
typedef struct gemm_plan {
    gemm_work w;
    gemm_cut c;
    size_t a_bytes, b_bytes, s_bytes;
} gemm_plan;

// beside: products that are computed at a time. few: whether C, of which g may be a part, has few columns.
static gemm_plan gemm_plan_of(const ms_gemm *g, int64_t threads, int64_t beside, bool few)
{
    gemm_plan p = { .w = { .g = g, .threads = threads } };
    gemm_work *w = &p.w;
    w->converts = ms__is_half(g->dtype) || g->scale;
    w->size = g->dtype == MS_F64 ? 8 : 4;
    shape(w);
    w->pack_a = w->converts || g->a_cs != 1 || !few;
    p.c = cut_blocks(w, beside);

    bool deep = p.c.kc < g->k;
    int64_t depth = deep ? p.c.kc : g->k;
    p.a_bytes = w->pack_a ? (size_t)(p.c.mb * depth * w->size) : 0;
    p.b_bytes = (size_t)(p.c.nc * depth * w->size);
    if (w->converts) {
        w->sums_rs = (deep ? p.c.jb : w->cols) + 16;  // + 16: rows a power of two apart would share sets of the cache
        p.s_bytes = (size_t)((deep ? p.c.mb : w->group * threads) * w->sums_rs) * 4;
    }
    return p;
}

static size_t room_of(const gemm_plan *p) { return p->a_bytes + p->b_bytes + p->s_bytes; }

static void multiply_blocks(gemm_plan *p, char *room)
{
    gemm_work *w = &p->w;
    const ms_gemm *g = w->g;
    w->b = room;
    w->a = w->b + p->b_bytes;
    w->sums = p->s_bytes ? (float *)(w->a + p->a_bytes) : NULL;
    for (w->i0 = 0; w->i0 < g->m; w->i0 += p->c.mb) {
        w->mb = g->m - w->i0 < p->c.mb ? g->m - w->i0 : p->c.mb;
        for (w->first_col = 0; w->first_col < g->n; w->first_col += p->c.jb) {
            w->last_col = g->n - w->first_col < p->c.jb ? g->n : w->first_col + p->c.jb;
            all_depths(w, &p->c);
        }
    }
}

// A product divided into parts of `step` rows or columns.
typedef struct gemm_parts {
    const ms_gemm *g;
    bool rows;
    int64_t step, threads;
    char *room;
    size_t bytes;  // of room, per thread
} gemm_parts;

static ms_gemm gemm_part_of(const gemm_parts *d, int64_t part)
{
    ms_gemm g = *d->g;
    int64_t at = part * d->step, left = (d->rows ? g.m : g.n) - at, n = left < d->step ? left : d->step;
    int64_t size = a_size(&g);
    if (d->rows) {
        g.m = n;
        g.a = (const char *)g.a + at * g.a_rs * size;
        g.c = (char *)g.c + at * g.c_rs * size;
        return g;
    }
    g.n = n;
    g.b = (const char *)g.b + at * g.b_cs * b_size(&g);
    g.c = (char *)g.c + at * size;
    if (g.bias) g.bias = (const char *)g.bias + at * size;
    if (g.scale && !g.scales_rows) g.scale += at;
    return g;
}

static void part_task(void *arg, int64_t part, int64_t end, int64_t unused)
{
    const gemm_parts *d = arg;
    const ms_gemm g = gemm_part_of(d, part);
    gemm_plan p = gemm_plan_of(&g, 1, d->threads, d->g->n <= FEW);
    (void)end, (void)unused;
    multiply_blocks(&p, d->room + (size_t)ms__thread_num() * d->bytes);
}

// Threads share a product in one of two ways. Where each gets APART rows or columns, each computes a part of C alone,
// as one thread would: it packs all of the other operand, but waits for nobody, and packs and prefetches its next
// operands while it multiplies. Otherwise the threads share all panels.
static ms_status large(const ms_gemm *g)
{
    int64_t threads = ms_num_threads(), longer = g->m > g->n ? g->m : g->n;
    gemm_parts d = { .g = g, .rows = g->m > g->n, .threads = threads };
    ms_block *scratch;
    if (threads == 1 || longer / threads < APART) {
        gemm_plan p = gemm_plan_of(g, threads, 1, g->n <= FEW);
        MS_TRY(ms__alloc_scratch(&scratch, room_of(&p), g->what));
        multiply_blocks(&p, scratch->data);
    } else {
        int64_t each = longer / threads / (2 * APART);  // parts of a thread: some, as other work may delay it
        d.step = ceil_div(ceil_div(longer, threads * (each < 1 ? 1 : each > 4 ? 4 : each)), 64) * 64;
        int64_t parts = ceil_div(longer, d.step);
        for (int64_t k = 0; k < parts; k += parts - 1) {
            const ms_gemm part = gemm_part_of(&d, k);
            const gemm_plan p = gemm_plan_of(&part, 1, threads, g->n <= FEW);
            if (room_of(&p) > d.bytes) d.bytes = (room_of(&p) + 63) / 64 * 64;
        }
        MS_TRY(ms__alloc_scratch(&scratch, d.bytes * (size_t)threads, g->what));
        d.room = scratch->data;
        ms__parallel_tasks(parts, part_task, &d);
    }
    ms__free(scratch);
    return ms__check_interrupt();
}

// ---- choice of implementation -------------------------------------------------------------------

// k = 0: every sum is empty, so C is the bias or 0.
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
    if (g->scale) return large(g);
    if (g->dtype == MS_F32 && small_f32(g)) return MS_OK;
    if (g->dtype == MS_F64 && small_f64(g)) return MS_OK;
    return large(g);
}

// oneDNN computes bfloat16 where the CPU has faster instructions for it than multiply-adds of float32: tiles, or AMD's
// dot products of pairs; elsewhere it takes ten times as long as our own loops. Intel's dot products have half the rate
// of float32 (Sapphire Rapids): our own loops take half of oneDNN's time. For float32 they are as fast as oneDNN at
// size 512 and faster at 1024 and 2048 (docs/performance.md#products), and give the same bits with any number of
// threads, which oneDNN does not guarantee below AVX-512.
static bool has_bf16(void)
{
    static int known = -1;
    if (MS_UNLIKELY(known < 0)) {
        known = 0;
#if defined(__x86_64__)
        __builtin_cpu_init();
        known = __builtin_cpu_supports("avx512bf16") && strcmp(ms_cpu_isa(), "v4") == 0 &&
                (ms__onednn_tiles() || !__builtin_cpu_is("intel"));
#endif
    }
    return known;
}

ms_status ms__gemm(const ms_gemm *g)
{
    MS_TRY(ms__check_interrupt());
    if (!ms__is_float(g->dtype)) return ms__gemm_integer(g);
    if (ms__gemm_takes_few(g)) return ms__gemm_few(g);
    if (g->dtype == MS_BF16 && !g->scale && has_bf16() && (double)g->m * (double)g->n * (double)g->k > SMALL &&
        ms__onednn_takes(g))
        return ms__gemm_onednn(g);
    return ms__gemm_own(g);
}

ms_status ms__gemm_parts(const ms_gemm *g, int n)
{
    ms_status st;
    if (ms__gemm_few_parts(g, n, &st)) return st;
    for (int k = 0; k < n; k++) MS_TRY(ms__gemm(&g[k]));
    return MS_OK;
}

ms_gemm_fn ms__gemm_fn(const ms_gemm *g)
{
    ms_gemm_fn direct = ms__gemm_takes_few(g) ? ms__gemm_few : NULL;
    if (!direct && !g->scale && g->m > 0 && g->n > 0 && g->k > 0)
        direct = g->dtype == MS_F32 ? direct_f32(g) : g->dtype == MS_F64 ? direct_f64(g) : NULL;
    return direct ? direct : ms__gemm;
}
