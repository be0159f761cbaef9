// SPDX-License-Identifier: MIT
// cpu/rows/reduce.c -- reductions over dimensions on the CPU, called folds below.
//
// There are two ways to traverse a tensor. By rows: the elements of one fold are read one after another, and blocks of
// up to BLOCK elements are folded in 64 lanes, at every ISA level. By columns: the elements along the last kept
// dimension belong to different folds; they are read together and folded into a row of accumulators, ROWS rows at a
// time. Either way the results of blocks are combined in order in the wide type, and long folds are divided into up to
// SEGMENTS parts that any thread may compute. Shapes and strides alone determine the traversal and the division, so
// results depend neither on the ISA level nor on the number of threads.
#include "cpu/cpu.h"
#include "cpu/rows/fold.h"
#include "formulas/math32.h"
#include "rows/layout.h"

enum { BLOCK = 4096, LANES = 64, TILE = 512, ROWS = 64, SEGMENTS = 64 };

// ---- inner folds ----

// START: the value of a lane before the first element. STEP: the new value of lane a after element v, with parameter m.
// JOIN: the combination of lanes a and b. T is the computing type, W the wide type.
#define FOLD(name, S, T, W, START, STEP, JOIN)                                                                \
    static MS_KERNEL W row_##name##_##S(int64_t n, const void *from, double parameter)                        \
    {                                                                                                         \
        const T *x = from;                                                                                    \
        T lane[LANES], m = (T)parameter;                                                                      \
        (void)m;                                                                                              \
        for (int k = 0; k < LANES; k++) lane[k] = START;                                                      \
        int64_t i = 0;                                                                                        \
        for (; i + LANES <= n; i += LANES)                                                                    \
            for (int k = 0; k < LANES; k++) {                                                                 \
                T a = lane[k], v = x[i + k];                                                                  \
                lane[k] = STEP;                                                                               \
            }                                                                                                 \
        int rest = (int)(n - i);                                                                              \
        for (int k = 0; k < rest; k++) {                                                                      \
            T a = lane[k], v = x[i + k];                                                                      \
            lane[k] = STEP;                                                                                   \
        }                                                                                                     \
        for (int width = LANES / 2; width; width /= 2)                                                        \
            for (int k = 0; k < width; k++) {                                                                 \
                T a = lane[k], b = lane[k + width];                                                           \
                lane[k] = JOIN;                                                                               \
            }                                                                                                 \
        return (W)lane[0];                                                                                    \
    }                                                                                                         \
    static MS_KERNEL void column_##name##_##S(int64_t n, void *to, const void *from, const double *parameter) \
    {                                                                                                         \
        T *acc = to;                                                                                          \
        const T *x = from;                                                                                    \
        for (int64_t k = 0; k < n; k++) {                                                                     \
            T a = acc[k], v = x[k], m = parameter ? (T)parameter[k] : 0;                                      \
            (void)m;                                                                                          \
            acc[k] = STEP;                                                                                    \
        }                                                                                                     \
    }                                                                                                         \
    static void join_##name##_##S(int64_t n, void *to, const void *from)                                      \
    {                                                                                                         \
        W *acc = to;                                                                                          \
        const T *x = from;                                                                                    \
        for (int64_t k = 0; k < n; k++) {                                                                     \
            W a = acc[k], b = (W)x[k];                                                                        \
            acc[k] = JOIN;                                                                                    \
        }                                                                                                     \
    }                                                                                                         \
    static void combine_##name##_##S(int64_t n, void *to, const void *from)                                   \
    {                                                                                                         \
        W *acc = to;                                                                                          \
        const W *x = from;                                                                                    \
        for (int64_t k = 0; k < n; k++) {                                                                     \
            W a = acc[k], b = x[k];                                                                           \
            acc[k] = JOIN;                                                                                    \
        }                                                                                                     \
    }                                                                                                         \
    static void start_##name##_##S(int64_t n, void *narrow, void *wide)                                       \
    {                                                                                                         \
        T *t = narrow;                                                                                        \
        W *w = wide;                                                                                          \
        for (int64_t k = 0; k < n; k++) {                                                                     \
            if (t) t[k] = START;                                                                              \
            if (w) w[k] = (W)(START);                                                                         \
        }                                                                                                     \
    }                                                                                                         \
    static void put_##name##_##S(void *to, int64_t n, const void *x, double parameter)                        \
    {                                                                                                         \
        W a = *(W *)to, b = row_##name##_##S(n, x, parameter);                                                \
        *(W *)to = JOIN;                                                                                      \
    }
typedef struct {
    void (*put)(void *wide, int64_t n, const void *x, double parameter);  // combines the fold of n elements with *wide
    void (*column)(int64_t n, void *narrow, const void *x, const double *parameter);
    void (*join)(int64_t n, void *wide, const void *narrow);
    void (*combine)(int64_t n, void *wide, const void *other_wide);
    void (*start)(int64_t n, void *narrow, void *wide);
} fold_fns;
#define FNS(name, S)                                                                                       \
    {                                                                                                      \
        put_##name##_##S, column_##name##_##S, join_##name##_##S, combine_##name##_##S, start_##name##_##S \
    }
// clang-format off
#define REAL_FOLD(name, F32START, F64START, STEP, JOIN)                                                     \
    FOLD(name, f32, float, double, F32START, STEP, JOIN)                                                    \
    FOLD(name, f64, double, double, F64START, STEP, JOIN)
// clang-format on

#define INF __builtin_inf()
#define INFF __builtin_inff()
#define LARGER(x, y) ((x) > (y) || (x) != (x) ? (x) : (y))  // NaN propagates
#define SMALLER(x, y) ((x) < (y) || (x) != (x) ? (x) : (y))
// clang-format off
REAL_FOLD(sum, 0, 0, a + v, a + b)
FOLD(sum, i64, int64_t, int64_t, 0, (int64_t)((uint64_t)a + (uint64_t)v), (int64_t)((uint64_t)a + (uint64_t)b))
REAL_FOLD(prod, 1, 1, a * v, a * b)
FOLD(prod, i64, int64_t, int64_t, 1, (int64_t)((uint64_t)a * (uint64_t)v), (int64_t)((uint64_t)a * (uint64_t)b))
REAL_FOLD(max, -INFF, -INF, LARGER(v, a), LARGER(b, a))
FOLD(max, i64, int64_t, int64_t, INT64_MIN, v > a ? v : a, b > a ? b : a)
REAL_FOLD(min, INFF, INF, SMALLER(v, a), SMALLER(b, a))
FOLD(min, i64, int64_t, int64_t, INT64_MAX, v < a ? v : a, b < a ? b : a)
REAL_FOLD(count, 0, 0, a + (v != 0), a + b)
FOLD(count, i64, int64_t, int64_t, 0, a + (v != 0), a + b)
REAL_FOLD(abs_sum, 0, 0, a + (v < 0 ? -v : v), a + b)
REAL_FOLD(square_sum, 0, 0, a + v * v, a + b)
REAL_FOLD(abs_max, 0, 0, LARGER((v < 0 ? -v : v), a), LARGER(b, a))
REAL_FOLD(abs_min, INFF, INF, SMALLER((v < 0 ? -v : v), a), SMALLER(b, a))
REAL_FOLD(deviation, 0, 0, a + (v - m) * (v - m), a + b)
FOLD(power_sum, f32, float, double, 0, a + ms_pow_f32(v < 0 ? -v : v, m), a + b)
FOLD(power_sum, f64, double, double, 0, a + ms_pow_f64(v < 0 ? -v : v, m), a + b)
FOLD(exp_sum, f32, float, double, 0, a + ms_exp_f32(v - m), a + b)
FOLD(exp_sum, f64, double, double, 0, a + ms_exp_f64(v - m), a + b)
// clang-format on

#define REALS(name)                    \
    {                                  \
        FNS(name, f32), FNS(name, f64) \
    }
#define ALL(name)                                      \
    {                                                  \
        FNS(name, f32), FNS(name, f64), FNS(name, i64) \
    }
static const fold_fns fns[MS_FOLDS][MS_CLASSES] = {
    [MS_FOLD_SUM] = ALL(sum),
    [MS_FOLD_PROD] = ALL(prod),
    [MS_FOLD_MAX] = ALL(max),
    [MS_FOLD_MIN] = ALL(min),
    [MS_FOLD_COUNT] = ALL(count),
    [MS_FOLD_ABS_SUM] = REALS(abs_sum),
    [MS_FOLD_SQUARE_SUM] = REALS(square_sum),
    [MS_FOLD_ABS_MAX] = REALS(abs_max),
    [MS_FOLD_ABS_MIN] = REALS(abs_min),
    [MS_FOLD_POWER_SUM] = REALS(power_sum),
    [MS_FOLD_DEVIATION] = REALS(deviation),
    [MS_FOLD_EXP_SUM] = REALS(exp_sum),
};

// ---- the plan ----

void ms__fold_plan(ms_fold_plan *p, const char *what, const ms_tensor *x, unsigned dims)
{
    p->what = what;
    int size = ms__dtype_size(x->dtype);
    p->data = ms__data(x);
    p->dtype = x->dtype;
    p->cls = x->dtype == MS_BOOL ? MS_C_I64 : ms__class_of(x->dtype);
    p->nk = p->nr = 0;
    p->outputs = p->length = 1;
    for (int d = 0; d < x->ndim; d++) {
        if (dims >> d & 1) {
            p->rshape[p->nr] = x->shape[d];
            p->rstride[p->nr++] = x->stride[d] * size;
            p->length *= x->shape[d];
        } else {
            p->kshape[p->nk] = x->shape[d];
            p->kstride[p->nk++] = x->stride[d] * size;
            p->outputs *= x->shape[d];
        }
    }
    p->nk = ms__join_dims(p->nk, p->kshape, p->kstride);
    p->nr = ms__join_dims(p->nr, p->rshape, p->rstride);
    p->columns = false;
    if (p->nk > 0 && p->nr > 0) {
        int64_t cols = p->kshape[p->nk - 1], run = p->rshape[p->nr - 1];
        p->columns = (p->kstride[p->nk - 1] < p->rstride[p->nr - 1] && cols >= 4) || (run < 8 && cols >= 64);
    }
    p->segments = 1;
    p->segment = p->length;
    if (p->columns) {
        if (p->length > ROWS && p->length * p->kshape[p->nk - 1] > 65536) {
            int64_t rows = (p->length + 15) / 16;
            p->segment = (rows + ROWS - 1) / ROWS * ROWS;
        }
    } else if (p->length > 65536) {
        int64_t part = (p->length + SEGMENTS - 1) / SEGMENTS;
        if (part < 65536) part = 65536;
        p->segment = (part + BLOCK - 1) / BLOCK * BLOCK;
    }
    if (p->segment > 0) p->segments = (p->length + p->segment - 1) / p->segment;
    if (p->segments < 1) p->segments = 1;
}

static int64_t strided_offset(int64_t index, int n, const int64_t *shape, const int64_t *stride)
{
    int64_t at = 0;
    for (int d = n - 1; d >= 0; d--) {
        if (d == 0) return at + index * stride[0];
        at += index % shape[d] * stride[d];
        index /= shape[d];
    }
    return at;
}

// ---- traversal by rows and by columns ----

typedef struct {
    const ms_fold_plan *p;
    const fold_fns *f;
    const double *parameter;
    int step;
    char *wide;     // [segments, outputs], in the wide type
    int64_t group;  // by rows: outputs per task
} fold_job;

// Folds elements [from, to) of one output.
static void fold_row(const fold_job *j, const char *base, int64_t from, int64_t to, void *wide, double parameter)
{
    const ms_fold_plan *p = j->p;
    const fold_fns *f = j->f;
    int inner = p->nr - 1, size = ms__class_size(p->cls);
    int64_t run = inner >= 0 ? p->rshape[inner] : 1, stride = inner >= 0 ? p->rstride[inner] : 0;
    bool direct = p->dtype == ms__class_dtype(p->cls) && (stride == size || run == 1);
    double buffer[BLOCK];
    while (from < to) {
        int64_t at = from % run, n = run - at < to - from ? run - at : to - from;
        const char *x = base + at * stride + (inner > 0 ? strided_offset(from / run, inner, p->rshape, p->rstride) : 0);
        if (run >= 512 || inner <= 0) {
            if (n > BLOCK) n = BLOCK;
            if (direct) f->put(wide, n, x, parameter);
            else {
                ms__load(p->cls, p->dtype, n, buffer, x, stride);
                f->put(wide, n, buffer, parameter);
            }
            from += n;
            continue;
        }
        // Short runs are first collected in a buffer.
        int64_t have = 0;
        while (from < to && have + n <= BLOCK) {
            ms__load(p->cls, p->dtype, n, (char *)buffer + have * size, x, stride);
            have += n;
            from += n;
            n = run < to - from ? run : to - from;
            x = base + strided_offset(from / run, inner, p->rshape, p->rstride);
        }
        f->put(wide, have, buffer, parameter);
    }
}

static void rows_range(void *arg, int64_t first, int64_t last, int64_t task)
{
    (void)first;
    (void)last;
    const fold_job *j = arg;
    const ms_fold_plan *p = j->p;
    int64_t m0 = task / p->segments * j->group, m1 = m0 + j->group < p->outputs ? m0 + j->group : p->outputs,
            s = task % p->segments;
    int64_t from = s * p->segment, to = from + p->segment < p->length ? from + p->segment : p->length;
    char *wide = j->wide + s * p->outputs * 8;
    j->f->start(m1 - m0, NULL, wide + m0 * 8);
    for (int64_t m = m0; m < m1; m++)
        fold_row(j, p->data + strided_offset(m, p->nk, p->kshape, p->kstride), from, to, wide + m * 8,
                 j->parameter ? j->parameter[m * j->step] : 0);
}

static void columns_range(void *arg, int64_t first, int64_t last, int64_t task)
{
    (void)first;
    (void)last;
    const fold_job *j = arg;
    const ms_fold_plan *p = j->p;
    int64_t cols = p->kshape[p->nk - 1], tiles = (cols + TILE - 1) / TILE;
    int64_t tile = task % tiles, s = task / tiles % p->segments, o = task / tiles / p->segments;
    int64_t c0 = tile * TILE, n = cols - c0 < TILE ? cols - c0 : TILE, m0 = o * cols + c0;
    int64_t from = s * p->segment, to = from + p->segment < p->length ? from + p->segment : p->length;
    int64_t stride = p->kstride[p->nk - 1];
    const char *base = p->data + strided_offset(o, p->nk - 1, p->kshape, p->kstride) + c0 * stride;
    bool direct = p->dtype == ms__class_dtype(p->cls) && (stride == ms__class_size(p->cls) || n == 1);
    char *wide = j->wide + (s * p->outputs + m0) * 8;
    double narrow[TILE], buffer[TILE], same[TILE];
    const double *parameter = j->parameter;
    if (parameter && j->step) parameter += m0;
    else if (parameter) {
        for (int64_t k = 0; k < n; k++) same[k] = *parameter;
        parameter = same;
    }
    j->f->start(n, narrow, wide);
    int64_t index[MS_MAX_DIMS], rest = from;
    const char *x = base;
    for (int d = p->nr - 1; d >= 0; d--) {
        index[d] = rest % p->rshape[d];
        rest /= p->rshape[d];
        x += index[d] * p->rstride[d];
    }
    for (int64_t r = from; r < to; r++) {
        if (direct) j->f->column(n, narrow, x, parameter);
        else {
            ms__load(p->cls, p->dtype, n, buffer, x, stride);
            j->f->column(n, narrow, buffer, parameter);
        }
        if ((r - from) % ROWS == ROWS - 1 || r == to - 1) {
            j->f->join(n, wide, narrow);
            j->f->start(n, narrow, NULL);
        }
        for (int d = p->nr - 1; d >= 0; d--) {
            x += p->rstride[d];
            if (++index[d] < p->rshape[d]) break;
            x -= p->rshape[d] * p->rstride[d];
            index[d] = 0;
        }
    }
}

ms_status ms__fold(const ms_fold_plan *p, ms_fold_kind kind, const double *parameter, int step, void *wide)
{
    const fold_fns *f = &fns[kind][p->cls];
    if (p->outputs == 0) return MS_OK;
    if (p->length == 0) {
        f->start(p->outputs, NULL, wide);
        return MS_OK;
    }
    char *parts = wide;
    if (p->segments > 1) {
        parts = malloc((size_t)(p->segments * p->outputs) * 8);
        if (!parts)
            return ms__no_memory((size_t)(p->segments * p->outputs) * 8, p->what, "%lld partial results",
                                 (long long)(p->segments * p->outputs));
    }
    fold_job j = { p, f, parameter, step, parts, 1 };
    if (p->columns) {
        int64_t cols = p->kshape[p->nk - 1], tiles = (cols + TILE - 1) / TILE;
        int64_t weight = p->segment * (cols < TILE ? cols : TILE);
        ms__parallel(tiles * p->segments * (p->outputs / cols) * weight, weight, columns_range, &j);
    } else {
        if (p->segments == 1 && p->length < 16384) j.group = (16384 + p->length - 1) / p->length;
        int64_t weight = j.group * p->segment;
        ms__parallel((p->outputs + j.group - 1) / j.group * p->segments * weight, weight, rows_range, &j);
    }
    if (p->segments > 1) {
        memcpy(wide, parts, (size_t)p->outputs * 8);
        for (int64_t s = 1; s < p->segments; s++) f->combine(p->outputs, wide, parts + s * p->outputs * 8);
        free(parts);
    }
    return MS_OK;
}

// ---- the first element equal to the fold ----

// IS(v, w): whether element v is the wanted one. `first` looks for a block that has it, then for the element.
#define FIND(S, T, W, IS)                                                                                      \
    static MS_KERNEL int64_t first_##S(int64_t n, const void *from, const void *wide)                          \
    {                                                                                                          \
        const T *x = from, w = (T) * (const W *)wide;                                                          \
        int64_t k = 0;                                                                                         \
        for (int any = 0; k + LANES <= n; k += LANES) {                                                        \
            for (int l = 0; l < LANES; l++) any |= IS(x[k + l], w);                                            \
            if (any) break;                                                                                    \
        }                                                                                                      \
        for (; k < n; k++)                                                                                     \
            if (IS(x[k], w)) return k;                                                                         \
        return -1;                                                                                             \
    }                                                                                                          \
    static MS_KERNEL void mark_##S(int64_t n, int64_t *index, int64_t row, const void *from, const void *wide) \
    {                                                                                                          \
        const T *x = from;                                                                                     \
        const W *w = wide;                                                                                     \
        for (int64_t k = 0; k < n; k++) index[k] = ((index[k] < 0) & IS(x[k], (T)w[k])) ? row : index[k];      \
    }
#define SAME(v, w) (((v) == (w)) | (((v) != (v)) & ((w) != (w))))
#define EQUAL(v, w) ((v) == (w))
FIND(f32, float, double, SAME)
FIND(f64, double, double, SAME)
FIND(i64, int64_t, int64_t, EQUAL)

typedef struct {
    const ms_fold_plan *p;
    const char *wide;
    int64_t *index, group;  // group: how many outputs a task of find_rows finds
} find_job;

static void find_rows(void *arg, int64_t begin, int64_t end, int64_t task)
{
    (void)begin;
    (void)end;
    static int64_t (*const first[])(int64_t, const void *, const void *) = { first_f32, first_f64, first_i64 };
    const find_job *j = arg;
    const ms_fold_plan *p = j->p;
    int inner = p->nr - 1;
    int64_t run = inner >= 0 ? p->rshape[inner] : 1, stride = inner >= 0 ? p->rstride[inner] : 0;
    bool direct = p->dtype == ms__class_dtype(p->cls) && (stride == ms__class_size(p->cls) || run == 1);
    double buffer[TILE];
    int64_t m1 = (task + 1) * j->group < p->outputs ? (task + 1) * j->group : p->outputs;
    for (int64_t m = task * j->group; m < m1; m++) {
        const char *base = p->data + strided_offset(m, p->nk, p->kshape, p->kstride);
        int64_t found = -1;
        for (int64_t at = 0; at < p->length && found < 0;) {
            int64_t in_run = at % run, n = run - in_run < TILE ? run - in_run : TILE;
            const char *x =
                base + in_run * stride + (inner > 0 ? strided_offset(at / run, inner, p->rshape, p->rstride) : 0);
            if (!direct) ms__load(p->cls, p->dtype, n, buffer, x, stride);
            found = first[p->cls](n, direct ? (const void *)x : buffer, j->wide + m * 8);
            if (found >= 0) found += at;
            at += n;
        }
        j->index[m] = found < 0 ? 0 : found;
    }
}

static void find_columns(void *arg, int64_t begin, int64_t end, int64_t task)
{
    (void)begin;
    (void)end;
    static void (*const mark[])(int64_t, int64_t *, int64_t, const void *, const void *) = { mark_f32, mark_f64,
                                                                                             mark_i64 };
    const find_job *j = arg;
    const ms_fold_plan *p = j->p;
    int64_t cols = p->kshape[p->nk - 1], tiles = (cols + TILE - 1) / TILE, o = task / tiles, c0 = task % tiles * TILE;
    int64_t n = cols - c0 < TILE ? cols - c0 : TILE, m0 = o * cols + c0, stride = p->kstride[p->nk - 1];
    const char *base = p->data + strided_offset(o, p->nk - 1, p->kshape, p->kstride) + c0 * stride;
    bool direct = p->dtype == ms__class_dtype(p->cls) && (stride == ms__class_size(p->cls) || n == 1);
    double buffer[TILE];
    for (int64_t k = 0; k < n; k++) j->index[m0 + k] = -1;
    for (int64_t r = 0; r < p->length; r++) {
        const char *x = base + strided_offset(r, p->nr, p->rshape, p->rstride);
        if (!direct) ms__load(p->cls, p->dtype, n, buffer, x, stride);
        mark[p->cls](n, j->index + m0, r, direct ? (const void *)x : buffer, j->wide + m0 * 8);
    }
}

void ms__fold_find(const ms_fold_plan *p, const void *wide, int64_t *index)
{
    if (p->outputs == 0 || p->length == 0) return;
    find_job j = { p, wide, index, 1 };
    if (p->columns) {
        int64_t cols = p->kshape[p->nk - 1], weight = p->length * (cols < TILE ? cols : TILE);
        ms__parallel((cols + TILE - 1) / TILE * (p->outputs / cols) * weight, weight, find_columns, &j);
    } else {
        j.group = p->length < 16384 ? (16384 + p->length - 1) / p->length : 1;
        int64_t weight = j.group * p->length;
        ms__parallel((p->outputs + j.group - 1) / j.group * weight, weight, find_rows, &j);
    }
}
