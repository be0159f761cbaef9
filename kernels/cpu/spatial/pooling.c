// SPDX-License-Identifier: MIT
// cpu/spatial/pooling.c -- max_pool and avg_pool on the CPU. Threads divide the rows of the output, in backward the
// planes of the input. For a row of outputs, the rows of the input that its windows contain are first combined into one
// row, the columns, and then the columns of each window. The columns lie in a buffer with room for the padding around
// them, so that loops vectorise. Half types are computed in float32. Sums run over the elements of a column, then over
// columns; in backward in row-major order over the windows that contain an element.
#include <math.h>
#include "cpu/cpu.h"
#include "cpu/rows/layers.h"
#include "cpu/rows/rows.h"
#include "cpu/rows/work.h"
#include "cpu/spatial/reach.h"
#include "rows/spatial/pooling.h"

typedef struct {
    ms_pooling p;
    int dtype;
    const void *x;  // input; in backward, the gradient of the output
    void *y;        // output; in backward, the gradient of the input
    int64_t *at;    // positions; NULL for means
    int64_t cost;   // of a row of outputs; in backward, of a plane
    // For each thread: `length` columns, the same in phases of `each`, `rounded` outputs, and the positions of these;
    // in backward, a row of gradients. each: 0 if the columns have no room for the padding.
    char *room;
    int64_t room_bytes, length, each, rounded;
} pool_job;

enum { NOWHERE = INT32_MAX };  // the position of the maximum of no elements

// Calls the macro RUN(s) with a constant where the stride s is 1 or 2.
#define WITH_STRIDE(s, RUN) \
    switch (s) {            \
    case 1: RUN(1); break;  \
    case 2: RUN(2); break;  \
    default: RUN(s);        \
    }

#define REAL float
#define R(x) x##_f32
#include "cpu/spatial/pooling_body.h"
#undef REAL
#undef R
#define REAL double
#define R(x) x##_f64
#include "cpu/spatial/pooling_body.h"

// Runs fn over `tasks` tasks in parallel. cost: of each, in elements.
static void run_pool_tasks(pool_job *j, int64_t tasks, int64_t cost, ms_range_fn fn)
{
    j->cost = cost > 0 ? cost : 1;
    ms__parallel(tasks * j->cost, (j->cost < 16384 ? 16384 / j->cost : 1) * j->cost, fn, j);
}

static int64_t window_size(const ms_pooling *p)
{
    int64_t size = 1;
    for (int d = 0; d < 3; d++) size *= p->w[d].kernel ? p->w[d].kernel : p->w[d].in / (p->w[d].out + 1) + 1;
    return size;
}

static ms_status pool_forward(ms_call *c, bool largest)
{
    ms_tensor *x = NULL, *y = NULL, *o = c->out[0];
    ms_block *room = NULL;
    int dtype = o->dtype == MS_F64 ? MS_F64 : MS_F32, dims = (int)c->i[MS_POOLING_DIMS];
    if (o->numel == 0) return MS_OK;
    ms_status st = ms__as_dtype(&x, c->in[0], dtype);
    if (!st) st = ms__work_on(&y, o, dtype, c->op->name);
    pool_job j = { .p = ms__pooling_of(1, c->in[0]->shape + o->ndim - dims, c->i), .dtype = dtype };
    j.p.planes = o->numel / j.p.out;
    const ms_window *w = &j.p.w[2];
    int64_t row = w->out, reach;
    j.rounded = (row + 15) / 16 * 16;
    j.length = w->in;
    // The columns that the windows reach. Too many: windows that are far larger than the input.
    if (w->kernel && !__builtin_mul_overflow(w->kernel - 1, w->dilation, &reach) && reach < 2 * w->in + 1024) {
        int64_t each = j.rounded + reach / w->stride + 1;
        if (each * w->stride < 2 * w->in + 1024) j.each = each;
        if (j.each) j.length = each * w->stride > w->pad + w->in ? each * w->stride : w->pad + w->in;
    }
    j.room_bytes = (2 * (j.length + j.rounded) * (dtype == MS_F64 ? 12 : 8) + 63) / 64 * 64;
    if (!st) st = ms__alloc_scratch(&room, (size_t)(j.room_bytes * ms_num_threads()), c->op->name);
    if (!st) {
        j.x = ms__data(x), j.y = ms__data(y), j.room = room->data;
        j.at = largest ? ms__data(c->out[1]) : NULL;
        run_pool_tasks(&j, o->numel / row, row * window_size(&j.p), dtype == MS_F64 ? rows_f64 : rows_f32);
    }
    if (room) ms__free(room);
    ms__release(x);
    return ms__put_back(o, y, st);
}
ms_status ms__cpu_max_pool(ms_call *c) { return pool_forward(c, true); }
ms_status ms__cpu_avg_pool(ms_call *c) { return pool_forward(c, false); }

static ms_status pool_backward(ms_call *c, bool largest)
{
    ms_tensor *g = NULL, *at = NULL, *dx = NULL, *o = c->out[0];
    ms_block *room = NULL;
    int dtype = o->dtype == MS_F64 ? MS_F64 : MS_F32, dims = (int)c->i[MS_POOLING_DIMS];
    if (o->numel == 0) return MS_OK;
    ms_status st = ms__as_dtype(&g, c->in[0], dtype);
    if (!st && largest) st = ms__contiguous(&at, c->in[1]);
    if (!st) st = ms__work_on(&dx, o, dtype, c->op->name);
    pool_job j = { .p = ms__pooling_of(1, o->shape + o->ndim - dims, c->i), .dtype = dtype };
    j.p.planes = o->numel / j.p.in;
    j.room_bytes = 2 * j.p.w[2].out * (int64_t)sizeof(double);
    if (!st && !largest) st = ms__alloc_scratch(&room, (size_t)(j.room_bytes * ms_num_threads() + 1), c->op->name);
    if (!st) {
        j.x = ms__data(g), j.y = ms__data(dx), j.at = at ? ms__data(at) : NULL, j.room = room ? room->data : NULL;
        run_pool_tasks(&j, j.p.planes, j.p.in + j.p.out * (largest ? 1 : window_size(&j.p)),
                       dtype == MS_F64 ? planes_f64 : planes_f32);
    }
    if (room) ms__free(room);
    ms__release(at);
    ms__release(g);
    return ms__put_back(o, dx, st);
}
ms_status ms__cpu_max_pool_backward(ms_call *c) { return pool_backward(c, true); }
ms_status ms__cpu_avg_pool_backward(ms_call *c) { return pool_backward(c, false); }
