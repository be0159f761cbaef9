// SPDX-License-Identifier: MIT
// cpu/special/fft.c -- Fourier transforms on the CPU (formulas/fft.h). Passes run over LANES interleaved lines, real
// and imaginary parts in separate arrays: inner loops are over adjacent elements. The lanes are columns, then rows of
// one line as a matrix (Bailey, "FFTs in external or hierarchical memory", 1990), so that all stays in the first cache;
// of short lines, and along a dimension before the last, they are lines. Bits do not depend on the number of threads.
#include <math.h>

#include "cpu/cpu.h"
#include "cpu/special/special.h"
#include "cpu/square.h"

// A loop whose iterations are independent. The compiler unrolls short ones early unless told not to, and then does not
// vectorise them.
#define VECTORIZED _Pragma("GCC ivdep") _Pragma("GCC unroll 1")

enum { LANES = 16, MOST_AS_LANES = 4096, TASK_ELEMENTS = 4096 };

// What a line is before and after its transform.
typedef enum { COMPLEX, REAL_TO_HALF, HALF_TO_REAL } transform;

// A call of a transform of lines of n elements along dimension d.
typedef struct {
    const ms_tensor *x;
    ms_tensor *o;
    int d;
    transform what;
    bool inverse, weighted;  // weighted: elements whose conjugate is not stored are written doubled, read halved
    double scale;
    int64_t n, lines;
} fft_call;

static int64_t longer(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The beginning of a block of LANES of n elements. The last one has elements of the one before instead of too few.
static int64_t block_at(int64_t block, int64_t n) { return block * LANES < n - LANES ? block * LANES : n - LANES; }

// Whether neighbours in memory belong to different lines.
static bool lines_are_columns(const fft_call *f)
{
    int last = f->x->ndim - 1 - (f->what != REAL_TO_HALF);
    return f->d != last && f->x->stride[last] < f->x->stride[f->d];
}

#define REAL float
#define R(x) x##_f32
#define VECTOR vector_uint32_t
#define SQUARE_OF square_uint32_t
#include "formulas/fft.h"

// Factors m into the sides of the matrix whose passes read the fewest elements. False if no matrix has LANES rows and
// columns.
static bool choose_matrix(int64_t m, ms_fft_plan *columns, ms_fft_plan *rows)
{
    int64_t best = INT64_MAX;
    for (int64_t a = LANES; a * a <= m; a++) {
        ms_fft_plan p, q;
        if (m % a || !ms_fft_factor(&p, a) || !ms_fft_factor(&q, m / a)) continue;
        int64_t reads = p.passes * a * padded(m / a) + q.passes * m / a * padded(a);
        if (reads > best) continue;
        best = reads;
        *columns = p, *rows = q;
    }
    return best < INT64_MAX;
}

#include "cpu/special/fft_body.h"
#undef REAL
#undef R
#undef VECTOR
#undef SQUARE_OF
#define REAL double
#define R(x) x##_f64
#define VECTOR vector_uint64_t
#define SQUARE_OF square_uint64_t
#include "formulas/fft.h"
#include "cpu/special/fft_body.h"

static ms_status run_transform(const ms_call *c, fft_call f)
{
    f.x = c->in[0], f.o = c->out[0];
    if (f.o->numel == 0) return MS_OK;
    bool halved = f.what != COMPLEX && f.n % 2 == 0;
    if (halved && f.weighted == (f.what == HALF_TO_REAL)) f.scale /= 2;
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
