// SPDX-License-Identifier: MIT
// cpu/rows/rotary.c -- rotary and rms_norm_rotary on the CPU: a row is read once, normalised if there is a weight, and
// turned.
#include "cpu/elementwise/loops.h"
#include "cpu/rows/layers.h"
#include "cpu/rows/rows.h"
#include "rows/layers/rotary.h"

typedef struct rotary {
    ms_rotary_rows q;
    int dtype, angles;  // angles: the dtype of cos and sin
    double eps, sign;   // sign: -1 turns back
    const void *x, *cos, *sin, *w;
    void *out, *stats;  // stats: as those of rms_norm
    char *room;
    size_t room_bytes;  // per thread
} rotary;

#define BODY "cpu/rows/rotary_body.h"
#include "cpu/both_types.h"

ms_status ms__cpu_rotary(ms_call *c)
{
    ms_tensor *x = NULL, *cos = NULL, *sin = NULL, *w = NULL, *out = c->out[0],
              *stats = c->n_out > 1 ? c->out[1] : NULL;
    ms_block *room = NULL;
    rotary p = { .dtype = out->dtype, .sign = c->i[0] ? -1 : 1 };
    ms_status st = ms__rotary_rows(&p.q, &x, c);
    if (st == MS_OK) st = ms__contiguous(&cos, c->in[MS_ROTARY_COS]);
    if (st == MS_OK) st = ms__contiguous(&sin, c->in[MS_ROTARY_SIN]);
    if (st == MS_OK && c->n_in > MS_ROTARY_WEIGHT) st = ms__contiguous(&w, c->in[MS_ROTARY_WEIGHT]);
    p.room_bytes = (size_t)(5 * p.q.n) * (p.dtype == MS_F64 ? 8 : 4);
    if (st == MS_OK && out->numel) st = ms__alloc_scratch(&room, p.room_bytes * (size_t)ms_num_threads(), c->op->name);
    if (st == MS_OK && out->numel) {
        p.angles = cos->dtype;
        p.x = ms__data(x), p.cos = ms__data(cos), p.sin = ms__data(sin), p.out = ms__data(out);
        if (w) p.w = ms__data(w), p.eps = c->f[0];
        p.stats = stats ? ms__data(stats) : NULL;
        p.room = room->data;
        ms__parallel(out->numel, ms__rows_per_block(p.q.n) * p.q.n, p.dtype == MS_F64 ? rotary_f64 : rotary_f32, &p);
        ms__free(room);
    }
    ms__release(w);
    ms__release(sin);
    ms__release(cos);
    ms__release(x);
    return st;
}
