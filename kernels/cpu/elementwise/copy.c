// SPDX-License-Identifier: MIT
// cpu/elementwise/copy.c -- copies, casts and fills on the CPU. Contiguous runs are memmoves or plain conversions. A
// transposed source is read in square tiles, so that both sides use whole cache lines.
#include "cpu/cpu.h"
#include "cpu/elementwise/loops.h"
#include "cpu/square.h"

// ---- copies of bytes: equal element sizes, no conversion ----

typedef struct {
    int ndim;
    int64_t shape[MS_MAX_DIMS], to[MS_MAX_DIMS], from[MS_MAX_DIMS];
    char *dst;
    const char *src;
    int size;
} bytes_job;

#define MOVE_ROW(T)                                                \
    {                                                              \
        T *d = (T *)dst;                                           \
        const T *s = (const T *)src;                               \
        if (td == 1 && sd == 0) {                                  \
            T v = *s;                                              \
            for (int64_t k = 0; k < n; k++) d[k] = v;              \
        } else                                                     \
            for (int64_t k = 0; k < n; k++) d[k * td] = s[k * sd]; \
    }
static MS_KERNEL void move_row(int64_t n, int size, char *dst, int64_t td, const char *src, int64_t sd)
{
    if (td == size && sd == size) {
        memmove(dst, src, (size_t)n * (size_t)size);
        return;
    }
    td /= size;
    sd /= size;
    switch (size) {
    case 1: MOVE_ROW(uint8_t) break;
    case 2: MOVE_ROW(uint16_t) break;
    case 4: MOVE_ROW(uint32_t) break;
    default: MOVE_ROW(uint64_t) break;
    }
}

// Transposes a block of rows x cols: dst is contiguous along cols, src along rows. Tiles of a cache line on both sides
// are processed down a column first, so that several cache lines of one source column are read in turn and its page is
// visited once.
#define TURN(T, N, B)                                                                                  \
    for (int64_t c0 = 0; c0 < cols; c0 += B)                                                           \
        for (int64_t r0 = 0; r0 < rows; r0 += B) {                                                     \
            int64_t r1 = r0 + B < rows ? r0 + B : rows, c1 = c0 + B < cols ? c0 + B : cols;            \
            const char *from = src + c0 * sc + r0 * (int64_t)sizeof(T);                                \
            char *to = dst + r0 * dr + c0 * (int64_t)sizeof(T);                                        \
            if (r1 - r0 == B && c1 - c0 == B) {                                                        \
                T tile[B][B], turned[B][B];                                                            \
                for (int c = 0; c < B; c++) {                                                          \
                    __builtin_prefetch(from + (c + B) * sc);                                           \
                    __builtin_prefetch(to + (c + B) * dr, 1);                                          \
                    memcpy(tile[c], from + c * sc, sizeof tile[c]);                                    \
                }                                                                                      \
                for (int r = 0; r < B; r += N)                                                         \
                    for (int c = 0; c < B; c += N) {                                                   \
                        vector_##T v[N];                                                               \
                        for (int k = 0; k < N; k++) memcpy(&v[k], &tile[c + k][r], 16);                \
                        square_##T(v);                                                                 \
                        for (int k = 0; k < N; k++) memcpy(&turned[r + k][c], &v[k], 16);              \
                    }                                                                                  \
                for (int r = 0; r < B; r++) memcpy(to + r * dr, turned[r], sizeof turned[r]);          \
            } else                                                                                     \
                for (int64_t r = 0; r < r1 - r0; r++)                                                  \
                    for (int64_t c = 0; c < c1 - c0; c++)                                              \
                        memcpy(to + r * dr + c * sizeof(T), from + c * sc + r * sizeof(T), sizeof(T)); \
        }
typedef struct {
    int64_t rows, cols;
    char *dst;
    int64_t dr;  // bytes between rows of dst
    const char *src;
    int64_t sc;  // bytes between columns of src
} tile_job;
static MS_KERNEL void turn_tile(int size, const tile_job *t)
{
    int64_t rows = t->rows, cols = t->cols, dr = t->dr, sc = t->sc;
    char *dst = t->dst;
    const char *src = t->src;
    switch (size) {
    case 1: TURN(uint8_t, 16, 16) break;
    case 2: TURN(uint16_t, 8, 16) break;
    case 4: TURN(uint32_t, 4, 16) break;
    default: TURN(uint64_t, 2, 8) break;
    }
}

static void bytes_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const bytes_job *j = arg;
    int inner = j->ndim - 1;
    // first and last are multiples of n, the length of a row. Rows are numbered in row-major order of the outer
    // dimensions.
    int64_t n = j->shape[inner], index[MS_MAX_DIMS], rest = first / n;
    char *d = j->dst;
    const char *s = j->src;
    for (int i = inner - 1; i >= 0; i--) {
        index[i] = rest % j->shape[i];
        rest /= j->shape[i];
        d += index[i] * j->to[i];
        s += index[i] * j->from[i];
    }
    for (int64_t k = first / n; k < last / n; k++) {
        move_row(n, j->size, d, j->to[inner], s, j->from[inner]);
        for (int i = inner - 1; i >= 0; i--) {
            d += j->to[i];
            s += j->from[i];
            if (++index[i] < j->shape[i]) break;
            d -= j->shape[i] * j->to[i];
            s -= j->shape[i] * j->from[i];
            index[i] = 0;
        }
    }
}

typedef struct {
    const bytes_job *job;
    int64_t strips, strip;
} turn_job;
static void turn_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const turn_job *t = arg;
    const bytes_job *j = t->job;
    int inner = j->ndim - 1;
    int64_t weight = t->strip * j->shape[inner];
    for (int64_t k = first / weight; k < last / weight; k++) {
        int64_t rest = k / t->strips, r0 = k % t->strips * t->strip, rows = j->shape[inner - 1] - r0;
        char *d = j->dst + r0 * j->to[inner - 1];
        const char *s = j->src + r0 * j->from[inner - 1];
        for (int i = inner - 2; i >= 0; i--) {
            int64_t at = rest % j->shape[i];
            rest /= j->shape[i];
            d += at * j->to[i];
            s += at * j->from[i];
        }
        turn_tile(j->size, &(tile_job) { rows < t->strip ? rows : t->strip, j->shape[inner], d, j->to[inner - 1], s,
                                         j->from[inner] });
    }
}

static void copy_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const bytes_job *j = arg;
    memmove(j->dst + first, j->src + first, (size_t)(last - first));
}

// Sorts dimensions by the destination's strides, so that dimensions contiguous on both sides become adjacent and can be
// merged.
static void by_stride(bytes_job *j)
{
    for (int d = 1; d < j->ndim; d++)
        for (int e = d; e > 0 && j->to[e - 1] < j->to[e]; e--) {
            int64_t shape = j->shape[e], to = j->to[e], from = j->from[e];
            j->shape[e] = j->shape[e - 1], j->to[e] = j->to[e - 1], j->from[e] = j->from[e - 1];
            j->shape[e - 1] = shape, j->to[e - 1] = to, j->from[e - 1] = from;
        }
}

static void copy_bytes(bytes_job *j)
{
    int nd = 0;
    int64_t numel = 1;
    by_stride(j);
    for (int d = 0; d < j->ndim; d++) {
        int64_t size = j->shape[d];
        numel *= size;
        if (size == 1) continue;
        if (nd > 0 && j->to[nd - 1] == j->to[d] * size && j->from[nd - 1] == j->from[d] * size) {
            j->shape[nd - 1] *= size;
            j->to[nd - 1] = j->to[d];
            j->from[nd - 1] = j->from[d];
            continue;
        }
        j->shape[nd] = size;
        j->to[nd] = j->to[d];
        j->from[nd++] = j->from[d];
    }
    if (numel == 0) return;
    if (nd == 0) {
        memmove(j->dst, j->src, (size_t)j->size);
        return;
    }
    j->ndim = nd;
    int inner = nd - 1;
    if (nd == 1 && j->to[0] == j->size && j->from[0] == j->size) {
        int64_t n = numel * j->size;
        // If the ranges overlap, one memmove must copy all bytes.
        bool apart = j->dst + n <= j->src || j->src + n <= j->dst;
        if (n < 131072 || !apart) memmove(j->dst, j->src, (size_t)n);
        else ms__parallel(n, 1 << 20, copy_range, j);
        return;
    }
    // The innermost dimension is contiguous only in the destination: if another one is contiguous in the source, and
    // both have at least 8 elements, transpose blocks.
    if (nd > 1 && j->to[inner] == j->size && j->from[inner] != j->size) {
        int other = -1;
        for (int d = 0; d < inner; d++)
            if (j->from[d] == j->size) other = d;
        if (other >= 0 && j->shape[other] >= 8 && j->shape[inner] >= 8) {
            int64_t s = j->shape[other], t = j->to[other], f = j->from[other];
            for (int d = other; d < inner - 1; d++) {
                j->shape[d] = j->shape[d + 1];
                j->to[d] = j->to[d + 1];
                j->from[d] = j->from[d + 1];
            }
            j->shape[inner - 1] = s;
            j->to[inner - 1] = t;
            j->from[inner - 1] = f;
            turn_job job = { .job = j, .strip = 128 };
            job.strips = (s + job.strip - 1) / job.strip;
            int64_t units = numel / (s * j->shape[inner]) * job.strips;
            int64_t weight = job.strip * j->shape[inner];
            ms__parallel(units * weight, (1 + 16384 / weight) * weight, turn_range, &job);
            return;
        }
    }
    // A short last dimension makes many short rows: swap it with one that is more than four times as long, if any is.
    if (nd > 1 && j->shape[inner] < 8) {
        int best = inner;
        for (int d = 0; d < inner; d++)
            if (j->shape[d] > 4 * j->shape[best]) best = d;
        int64_t s = j->shape[best], t = j->to[best], f = j->from[best];
        j->shape[best] = j->shape[inner];
        j->to[best] = j->to[inner];
        j->from[best] = j->from[inner];
        j->shape[inner] = s;
        j->to[inner] = t;
        j->from[inner] = f;
    }
    int64_t rows = numel / j->shape[inner];
    ms__parallel(rows * j->shape[inner], (1 + 16384 / j->shape[inner]) * j->shape[inner], bytes_range, j);
}

// ---- casts ----

void ms__cpu_copy_tensor(ms_tensor *dst, const ms_tensor *src)
{
    if (dst->numel == 0) return;
    if (dst->dtype == src->dtype) {
        if (dst->numel == src->numel && ms__is_contiguous(dst) && ms__is_contiguous(src) && ms__nbytes(dst) < 131072) {
            memmove(ms__data(dst), ms__data(src), ms__nbytes(dst));
            return;
        }
        int size = ms__dtype_size(dst->dtype), lead = dst->ndim - src->ndim;
        bytes_job j = { .ndim = dst->ndim, .dst = ms__data(dst), .src = ms__data(src), .size = size };
        for (int d = 0; d < dst->ndim; d++) {
            j.shape[d] = dst->shape[d];
            j.to[d] = dst->stride[d] * size;
            j.from[d] =
                d < lead || (src->shape[d - lead] == 1 && dst->shape[d] != 1) ? 0 : src->stride[d - lead] * size;
        }
        copy_bytes(&j);
        return;
    }
    // Converts through the destination's computing type; conversion to bool uses the source's.
    uint8_t cls = (uint8_t)ms__class_of(dst->dtype == MS_BOOL ? src->dtype : dst->dtype);
    ms__loop(2, (ms_tensor *[]) { dst, (ms_tensor *)src }, (uint8_t[]) { cls, cls }, NULL, NULL);
}

// Computes the lowest and the highest position, in elements, of a view's elements in its storage.
static void span(const ms_tensor *t, int64_t *low, int64_t *high)
{
    *low = *high = t->offset;
    for (int d = 0; d < t->ndim; d++) *(t->stride[d] < 0 ? low : high) += (t->shape[d] - 1) * t->stride[d];
}
ms_status ms__cpu_apart(ms_tensor **use, const ms_tensor *o, ms_tensor *x)
{
    int64_t a, b, c, d;
    *use = ms__retain(x);
    if (MS_LIKELY(x->storage != o->storage) || x->numel == 0 || o->numel == 0) return MS_OK;
    if (x->offset == o->offset && x->ndim == o->ndim && memcmp(x->shape, o->shape, (size_t)x->ndim * 8) == 0 &&
        memcmp(x->stride, o->stride, (size_t)x->ndim * 8) == 0)
        return MS_OK;
    span(o, &a, &b);
    span(x, &c, &d);
    int64_t m = ms__dtype_size(o->dtype), n = ms__dtype_size(x->dtype);
    if ((b + 1) * m <= c * n || (d + 1) * n <= a * m) return MS_OK;
    ms__release(x);
    *use = NULL;
    MS_TRY(ms__tensor_like(use, x, "copy"));
    return ms__copy_data(*use, x);
}

ms_status ms__cpu_copy_(ms_call *c)
{
    ms_tensor *src;
    MS_TRY(ms__cpu_apart(&src, c->out[0], c->in[1]));
    ms_status st = ms__copy_data(c->out[0], src);
    ms__release(src);
    return st;
}
ms_status ms__cpu_copy(ms_call *c)
{
    return c->out[0]->storage != c->in[0]->storage ? ms__copy_data(c->out[0], c->in[0]) : MS_OK;
}

// ---- fills ----

#define FILL(S, T)                                                             \
    static MS_KERNEL void fill_##S(int64_t n, void *const *x, const double *p) \
    {                                                                          \
        T *o = x[0], v = (T)p[0];                                              \
        for (int64_t k = 0; k < n; k++) o[k] = v;                              \
    }
// clang-format off
FILL(f32, float)
FILL(f64, double)
FILL(i64, int64_t)
FILL(u8, uint8_t)
// clang-format on

void ms__cpu_fill_tensor(ms_tensor *t, double value)
{
    static const ms_loop_fn fns[MS_CLASSES] = { fill_f32, fill_f64, fill_i64, fill_u8 };
    if (t->numel == 0) return;
    if (value == 0 && !__builtin_signbit(value) && ms__nbytes(t) < 131072 && ms__is_contiguous(t)) {
        memset(ms__data(t), 0, ms__nbytes(t));
        return;
    }
    double v = t->dtype == MS_BOOL ? value != 0 : value;
    uint8_t cls = (uint8_t)ms__class_of(t->dtype);
    ms__loop(1, &t, &cls, fns[cls], &v);
}

ms_status ms__cpu_fill(ms_call *c) { return ms__fill_data(c->out[0], c->n_f ? c->f[0] : 0); }

// Stores first + k * step in element k of a 1-d tensor.
ms_status ms__cpu_arange(ms_call *c)
{
    ms_tensor *t = c->out[0];
    double first = c->f[0], step = c->f[1], value[64];
    int64_t whole[64];
    int size = ms__dtype_size(t->dtype);
    char *at = ms__data(t);
    bool real = ms__is_float(t->dtype);
    for (int64_t k = 0; k < t->numel; k += 64) {
        int64_t n = t->numel - k < 64 ? t->numel - k : 64;
        for (int64_t j = 0; j < n; j++) {
            value[j] = first + (double)(k + j) * step;
            whole[j] = (int64_t)first + (k + j) * (int64_t)step;
        }
        // Where dtype and step are integers, int64 arithmetic is exact beyond 2^53.
        if (real || step != (double)(int64_t)step)
            ms__store(MS_C_F64, t->dtype, n, at + k * t->stride[0] * size, t->stride[0] * size, value);
        else ms__store(MS_C_I64, t->dtype, n, at + k * t->stride[0] * size, t->stride[0] * size, whole);
    }
    return MS_OK;
}

ms_status ms__cpu_eye(ms_call *c)
{
    ms_tensor *t = c->out[0];
    MS_TRY(ms__fill_data(t, 0));
    int64_t n = t->shape[0] < t->shape[1] ? t->shape[0] : t->shape[1], stride = t->stride[0] + t->stride[1];
    ms_tensor *diagonal = ms__tensor_view(t, 1, &n, &stride, t->offset);
    ms_status st = ms__fill_data(diagonal, 1);
    ms__release(diagonal);
    return st;
}
