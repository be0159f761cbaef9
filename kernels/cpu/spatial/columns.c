// SPDX-License-Identifier: MIT
// cpu/spatial/columns.c -- im2col and col2im on the CPU. Threads divide the matrix's rows (im2col) or the images'
// planes (col2im). col2im adds in the order of the kernel's elements, half types in float32.
#include "cpu/cpu.h"
#include "cpu/rows/layers.h"
#include "cpu/rows/rows.h"
#include "cpu/rows/work.h"
#include "cpu/spatial/reach.h"
#include "rows/spatial/columns.h"

typedef struct {
    ms_columns v;
    int64_t cost;  // of a row of columns, or of a plane
    size_t size;   // of an element in bytes
    int dtype;
    const char *x;
    char *y;
} job;

#define COPY(T, n, to, from, step) \
    for (int64_t e__ = 0; e__ < (n); e__++) ((T *)(to))[e__] = ((const T *)(from))[e__ * (step)]

// Writes a row of the columns: element (ky, kx) of all windows of a plane.
static void unfold_row(const job *j, int64_t row)
{
    const ms_window *h = &j->v.h, *w = &j->v.w;
    int64_t kx = row % w->kernel, ky = row / w->kernel % h->kernel, plane = row / w->kernel / h->kernel;
    const char *image = j->x + (size_t)(plane * h->in * w->in) * j->size;
    char *to = j->y + (size_t)(row * h->out * w->out) * j->size;
    ms_reach r = ms__reach_of(w, kx);
    for (int64_t oh = 0; oh < h->out; oh++, to += (size_t)w->out * j->size) {
        int64_t y = oh * h->stride - h->pad + ky * h->dilation;
        memset(to, 0, (size_t)w->out * j->size);
        if (y < 0 || y >= h->in || r.first == r.last) continue;
        const char *from = image + (size_t)(y * w->in + r.first * w->stride + r.shift) * j->size;
        char *at = to + (size_t)r.first * j->size;
        int64_t n = r.last - r.first;
        if (w->stride == 1) memcpy(at, from, (size_t)n * j->size);
        else if (j->size == 8) COPY(uint64_t, n, at, from, w->stride);
        else if (j->size == 4) COPY(uint32_t, n, at, from, w->stride);
        else COPY(uint16_t, n, at, from, w->stride);
    }
}
static void unfold_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    const job *j = arg;
    (void)block;
    for (int64_t row = first / j->cost; row < last / j->cost; row++) unfold_row(j, row);
}

#define FOLD(REAL, name)                                                                                      \
    static MS_KERNEL void name(const job *j, int64_t plane)                                                   \
    {                                                                                                         \
        const ms_window *h = &j->v.h, *w = &j->v.w;                                                           \
        REAL *restrict image = (REAL *)j->y + plane * h->in * w->in;                                          \
        const REAL *restrict from = (const REAL *)j->x + plane * h->kernel * w->kernel * h->out * w->out;     \
        for (int64_t i = 0; i < h->in * w->in; i++) image[i] = 0;                                             \
        for (int64_t ky = 0; ky < h->kernel; ky++)                                                            \
            for (int64_t kx = 0; kx < w->kernel; kx++) {                                                      \
                ms_reach r = ms__reach_of(w, kx);                                                             \
                for (int64_t oh = 0; oh < h->out; oh++, from += w->out) {                                     \
                    int64_t y = oh * h->stride - h->pad + ky * h->dilation, s = w->stride;                    \
                    if (y < 0 || y >= h->in) continue;                                                        \
                    for (int64_t o = r.first; o < r.last; o++) image[y * w->in + o * s + r.shift] += from[o]; \
                }                                                                                             \
            }                                                                                                 \
    }
FOLD(float, fold_f32)
FOLD(double, fold_f64)

static void fold_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    const job *j = arg;
    (void)block;
    for (int64_t plane = first / j->cost; plane < last / j->cost; plane++) {
        if (j->dtype == MS_F64) fold_f64(j, plane);
        else fold_f32(j, plane);
    }
}

ms_status ms__cpu_im2col(ms_call *c)
{
    ms_tensor *x, *o = c->out[0];
    if (o->numel == 0) return MS_OK;
    MS_TRY(ms__contiguous(&x, c->in[0]));
    job j = { ms__columns_of(x->shape[0] * x->shape[1], c->i, x->shape[2], x->shape[3]),
              o->shape[2],
              (size_t)ms__dtype_size(o->dtype),
              o->dtype,
              ms__data(x),
              ms__data(o) };
    ms__parallel(o->numel, (j.cost < 8192 ? 8192 / j.cost : 1) * j.cost, unfold_range, &j);
    ms__release(x);
    return MS_OK;
}

ms_status ms__cpu_col2im(ms_call *c)
{
    ms_tensor *x = NULL, *y = NULL, *o = c->out[0];
    int dtype = o->dtype == MS_F64 ? MS_F64 : MS_F32;
    if (o->numel == 0) return MS_OK;
    ms_status st = ms__as_dtype(&x, c->in[0], dtype);
    if (!st) st = ms__work_on(&y, o, dtype, c->op->name);
    if (!st) {
        job j = { ms__columns_of(o->shape[0] * o->shape[1], c->i, o->shape[2], o->shape[3]),
                  o->shape[2] * o->shape[3] + x->shape[2] * c->i[MS_COLUMNS_KERNEL] * c->i[MS_COLUMNS_KERNEL + 1],
                  0,
                  dtype,
                  ms__data(x),
                  ms__data(y) };
        ms__parallel(j.v.planes * j.cost, (j.cost < 8192 ? 8192 / j.cost : 1) * j.cost, fold_range, &j);
    }
    ms__release(x);
    return ms__put_back(o, y, st);
}
