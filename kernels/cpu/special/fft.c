// SPDX-License-Identifier: MIT
// cpu/special/fft.c -- Fourier transforms on the CPU (formulas/fft.h). A task transforms a few lines at once,
// interleaved: the passes treat the lines as one more factor, so that inner loops run over adjacent elements. The real
// and the imaginary parts are in separate arrays. Bits do not depend on the number of threads.
#include <math.h>

#include "cpu/cpu.h"
#include "cpu/special/special.h"
#include "cpu/order/order.h"

enum { MOST_LANES = 16, LANE_ELEMENTS = 1 << 15, TILE = 16 };

// What a line is before and after its transform.
typedef enum { COMPLEX, REAL_TO_HALF, HALF_TO_REAL } transform;

// A call of a transform. n: the length of the transforms.
typedef struct {
    const ms_tensor *x;
    ms_tensor *o;
    int d;
    transform what;
    bool inverse, weighted;  // weighted: elements whose conjugate is not stored are written doubled, read halved
    double scale;
    int64_t n, lines;
} fft_call;

// Line `number` of t along dimension d: its first element, the distance between elements, and that from the real to the
// imaginary part of one, counted in elements of t. pairs: whether t has complex numbers.
typedef struct {
    int64_t at, step, part;
} place;
static place fft_line_of(const ms_tensor *t, int d, bool pairs, int64_t number)
{
    int last = t->ndim - 1 - pairs;
    place p = { 0, t->stride[d], pairs ? t->stride[t->ndim - 1] : 0 };
    for (int k = last; k >= 0; k--) {
        if (k == d) continue;
        p.at += number % t->shape[k] * t->stride[k];
        number /= t->shape[k];
    }
    return p;
}

#define REAL float
#define R(x) x##_f32
#include "formulas/fft.h"
#include "cpu/special/fft_body.h"
#undef REAL
#undef R
#define REAL double
#define R(x) x##_f64
#include "formulas/fft.h"
#include "cpu/special/fft_body.h"

static ms_status run_transform(const ms_call *c, fft_call f)
{
    f.x = c->in[0], f.o = c->out[0];
    if (f.o->numel == 0) return MS_OK;
    f.lines = f.o->numel / f.o->shape[f.d] / (f.what == HALF_TO_REAL ? 1 : 2);
    return f.x->dtype == MS_F64 ? transform_all_f64(c, &f) : transform_all_f32(c, &f);
}

ms_status ms__cpu_fft_complex(ms_call *c)
{
    int d = (int)c->i[0];
    return run_transform(c,
                         (fft_call) {
                             .d = d, .what = COMPLEX, .inverse = c->i[1], .scale = c->f[0], .n = c->in[0]->shape[d] });
}
ms_status ms__cpu_fft_real(ms_call *c)
{
    int d = (int)c->i[0];
    return run_transform(c, (fft_call) { .d = d,
                                         .what = REAL_TO_HALF,
                                         .weighted = c->n_i > 1 && c->i[1],
                                         .scale = c->f[0],
                                         .n = c->in[0]->shape[d] });
}
ms_status ms__cpu_fft_half(ms_call *c)
{
    return run_transform(c, (fft_call) { .d = (int)c->i[0],
                                         .what = HALF_TO_REAL,
                                         .inverse = true,
                                         .weighted = c->n_i > 2 && c->i[2],
                                         .scale = c->f[0],
                                         .n = c->i[1] });
}
