// SPDX-License-Identifier: MIT
// cuda/special/fft.cu -- Fourier transforms (formulas/fft.h): lines are copied to two arrays of real and imaginary
// parts, a kernel makes each pass, with a thread for each butterfly, and the result is copied. Roots are computed in
// double.
#include "cuda/blocks.h"

#define REAL float
#define R(x) x##_f32
#include "formulas/fft.h"
#undef REAL
#undef R
#define REAL double
#define R(x) x##_f64
#include "formulas/fft.h"

static __device__ inline void butterfly(int r, float sign, float *re, float *im, const float *wr, const float *wi)
{
    ms_fft_butterfly_f32(r, sign, re, im, wr, wi);
}
static __device__ inline void butterfly(int r, double sign, double *re, double *im, const double *wr, const double *wi)
{
    ms_fft_butterfly_f64(r, sign, re, im, wr, wi);
}

template <class W> struct pairs {
    W *re, *im;
};
enum fft_what { COMPLEX, REAL_TO_HALF, HALF_TO_REAL };

// A tensor's lines. step: from an element of a line to the next; part: from its real to its imaginary part; stride: the
// strides of the other dimensions.
struct fft_side {
    void *data;
    int64_t step, part, stride[MS_MAX_DIMS];
};
struct fft_job {
    int what, ndim;
    bool weighted, bluestein;
    double scale;
    int64_t n, m, lines, count;  // elements per line: m of the work arrays (above n for Bluestein), count of o
    int64_t shape[MS_MAX_DIMS];
    fft_side x, o;
};
static __device__ inline int64_t begin_of(const fft_job &j, const fft_side &s, int64_t line)
{
    return j.ndim ? offset_of(line, j.ndim, j.shape, s.stride) : 0;
}

// Computes the roots w(n)^k or, if `square` is set, Bluestein's factors c[k] (w, c: formulas/fft.h).
template <class W> __global__ void roots_kernel(pairs<W> to, int64_t n, double sign, bool square)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= n) return;
    const double pi = 3.14159265358979323846;
    double angle = square ? pi * ((double)ms_fft_square(k, n) / (double)n) : 2 * pi * ((double)k / (double)n);
    to.re[k] = (W)cos(angle);
    to.im[k] = (W)(sign * sin(angle));
}
// The array whose transform Bluestein's convolution needs: conj(c), with the negative positions at the end.
template <class W> __global__ void chirp_kernel(pairs<W> to, pairs<W> chirp, int64_t n, int64_t m)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= m) return;
    int64_t from = k < n ? k : m - k;
    to.re[k] = from < n ? chirp.re[from] : 0;
    to.im[k] = from < n ? -chirp.im[from] : 0;
}

template <class W> __global__ void read_kernel(fft_job j, pairs<W> to, pairs<W> chirp)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= j.lines * j.m) return;
    int64_t line = i / j.m, k = i % j.m;
    W re = 0, im = 0;
    if (k < j.n) {
        bool mirrored = j.what == HALF_TO_REAL && k > j.n / 2, twice = ms_fft_twice(k, j.n);
        const W *x = (const W *)j.x.data + begin_of(j, j.x, line) + (mirrored ? j.n - k : k) * j.x.step;
        W w = j.what == HALF_TO_REAL && j.weighted && twice ? (W)0.5 : 1;
        re = w * x[0];
        if (j.what == COMPLEX || (j.what == HALF_TO_REAL && twice)) im = (mirrored ? -w : w) * x[j.x.part];
        if (j.bluestein) {
            W c = chirp.re[k], s = chirp.im[k], a = re;
            re = a * c - im * s;
            im = a * s + im * c;
        }
    }
    to.re[i] = re;
    to.im[i] = im;
}

template <class W> struct fft_pass {
    int64_t n, size, s, unit, lines;
    W sign;
    pairs<W> from, to, roots;
};
template <class W, int RADIX> __global__ void pass_kernel(fft_pass<W> p)
{
    int64_t i = GLOBAL_INDEX, each = p.n / RADIX, m = p.size / RADIX;
    if (i >= p.lines * each) return;
    int64_t line = i / each * p.n, k = i % each / p.s, q = i % p.s;
    W re[RADIX], im[RADIX], wr[RADIX], wi[RADIX];
    UNROLL
    for (int t = 0; t < RADIX; t++) {
        int64_t at = line + q + p.s * (k + m * t);
        re[t] = p.from.re[at], im[t] = p.from.im[at];
        wr[t] = p.roots.re[t * (p.n / RADIX)], wi[t] = p.roots.im[t * (p.n / RADIX)];
    }
    butterfly(RADIX, p.sign, re, im, wr, wi);
    UNROLL
    for (int t = 0; t < RADIX; t++) {
        int64_t at = line + q + p.s * (RADIX * k + t);
        W c = p.roots.re[k * t * p.unit], s = p.roots.im[k * t * p.unit];
        p.to.re[at] = re[t] * c - im[t] * s;
        p.to.im[at] = re[t] * s + im[t] * c;
    }
}

// a = conj(a b), for each line; m is a power of two from WIDE on (ms_fft_padded), and the arrays are aligned. A thread
// computes WIDE elements.
template <class W> __global__ void product_kernel(pairs<W> a, pairs<W> b, int64_t m, int64_t lines)
{
    int64_t i = GLOBAL_INDEX * WIDE, k = i & (m - 1);
    if (i >= m * lines) return;
    W re[WIDE], im[WIDE], c[WIDE], s[WIDE];
    load_wide(a.re + i, re);
    load_wide(a.im + i, im);
    load_wide(b.re + k, c);
    load_wide(b.im + k, s);
    UNROLL
    for (int e = 0; e < WIDE; e++) {
        W x = re[e];
        re[e] = x * c[e] - im[e] * s[e];
        im[e] = -(x * s[e] + im[e] * c[e]);
    }
    store_wide(a.re + i, re);
    store_wide(a.im + i, im);
}

template <class W> __global__ void write_kernel(fft_job j, pairs<W> from, pairs<W> chirp)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= j.lines * j.count) return;
    int64_t line = i / j.count, k = i % j.count;
    W re = from.re[line * j.m + k], im = from.im[line * j.m + k],
      w = (W)(j.bluestein ? j.scale / (double)j.m : j.scale);
    if (j.bluestein) {  // `from` has the conjugate of the convolution
        W c = chirp.re[k], s = chirp.im[k], a = re, b = -im;
        re = a * c - b * s;
        im = a * s + b * c;
    }
    if (j.what == REAL_TO_HALF && j.weighted && ms_fft_twice(k, j.n)) w = 2 * w;
    W *o = (W *)j.o.data + begin_of(j, j.o, line) + k * j.o.step;
    o[0] = w * re;
    if (j.what != HALF_TO_REAL) o[j.o.part] = w * im;
}

template <class W> static ms_status launch_pass(const char *what, int index, int radix, const fft_pass<W> &p)
{
    grid g = grid_of(p.lines * (p.n / radix));
    switch (radix) {
    case 2: return launch(what, index, pass_kernel<W, 2>, g.blocks, g.threads, p);
    case 3: return launch(what, index, pass_kernel<W, 3>, g.blocks, g.threads, p);
    case 4: return launch(what, index, pass_kernel<W, 4>, g.blocks, g.threads, p);
    case 5: return launch(what, index, pass_kernel<W, 5>, g.blocks, g.threads, p);
    case 7: return launch(what, index, pass_kernel<W, 7>, g.blocks, g.threads, p);
    case 11: return launch(what, index, pass_kernel<W, 11>, g.blocks, g.threads, p);
    default: return launch(what, index, pass_kernel<W, 13>, g.blocks, g.threads, p);
    }
}
template <class W> struct fft_arrays {
    pairs<W> a, b;
};
// Transforms p.lines lines of both->a, with both->b for intermediate results; afterwards both->a is the result.
template <class W>
static ms_status passes(const char *what, int index, const ms_fft_plan &plan, fft_pass<W> p, fft_arrays<W> *both)
{
    p.n = p.size = plan.n, p.s = p.unit = 1;
    for (int k = 0; k < plan.passes; k++) {
        p.from = both->a, p.to = both->b;
        MS_TRY(launch_pass(what, index, plan.radix[k], p));
        p.size /= plan.radix[k], p.s *= plan.radix[k], p.unit *= plan.radix[k];
        both->a = p.to, both->b = p.from;
    }
    return MS_OK;
}

template <class W> static pairs<W> take(W *&at, int64_t n)
{
    pairs<W> p = { at, at + n };
    at += 2 * n;
    return p;
}

template <class W> static ms_status transform(const ms_call *c, fft_job j, bool inverse)
{
    const char *what = c->op->name;
    int index = index_of(c->out[0]);
    ms_fft_plan plan;
    j.bluestein = !ms_fft_factor(&plan, j.n);
    if (j.bluestein) ms_fft_factor(&plan, ms_fft_padded(j.n));
    j.m = plan.n;
    double sign = inverse ? 1 : -1;
    scratch memory;
    int64_t all = j.m * j.lines, count = 4 * all + 2 * j.m + (j.bluestein ? 2 * j.n + 4 * j.m : 0);
    MS_TRY(memory.alloc(c, ms__device(c->out[0]), count * (int64_t)sizeof(W)));
    W *at = (W *)memory.data;
    fft_arrays<W> lines = { take(at, all), take(at, all) };
    fft_pass<W> p = {};
    p.roots = take(at, j.m), p.lines = 1, p.sign = (W)(j.bluestein ? -1 : sign);
    grid of_m = grid_of(j.m), of_all = grid_of(all), of_out = grid_of(j.lines * j.count);
    MS_TRY(launch(what, index, roots_kernel<W>, of_m.blocks, of_m.threads, p.roots, j.m, j.bluestein ? -1.0 : sign,
                  false));
    pairs<W> chirp = {};
    fft_arrays<W> spectrum = {};
    if (j.bluestein) {
        spectrum.a = take(at, j.m), spectrum.b = take(at, j.m), chirp = take(at, j.n);
        grid of_n = grid_of(j.n);
        MS_TRY(launch(what, index, roots_kernel<W>, of_n.blocks, of_n.threads, chirp, j.n, sign, true));
        MS_TRY(launch(what, index, chirp_kernel<W>, of_m.blocks, of_m.threads, spectrum.a, chirp, j.n, j.m));
        MS_TRY(passes(what, index, plan, p, &spectrum));
    }
    p.lines = j.lines;
    MS_TRY(launch(what, index, read_kernel<W>, of_all.blocks, of_all.threads, j, lines.a, chirp));
    MS_TRY(passes(what, index, plan, p, &lines));
    if (j.bluestein) {
        grid of_packs = grid_of(j.m / WIDE * j.lines);
        MS_TRY(launch(what, index, product_kernel<W>, of_packs.blocks, of_packs.threads, lines.a, spectrum.a, j.m,
                      j.lines));
        MS_TRY(passes(what, index, plan, p, &lines));
    }
    return launch(what, index, write_kernel<W>, of_out.blocks, of_out.threads, j, lines.a, chirp);
}

static fft_side side_of(const ms_tensor *t, int d, bool has_pairs)
{
    fft_side s = {};
    s.data = ms__data(t), s.step = t->stride[d], s.part = has_pairs ? t->stride[t->ndim - 1] : 0;
    for (int k = 0, n = 0; k < t->ndim - has_pairs; k++)
        if (k != d) s.stride[n++] = t->stride[k];
    return s;
}
static ms_status run_cuda_transform(const ms_call *c, fft_what what, bool inverse)
{
    const ms_tensor *x = c->in[0], *o = c->out[0];
    int d = (int)c->i[0];
    if (o->numel == 0) return MS_OK;
    fft_job j = {};
    j.what = what, j.scale = c->f[0], j.n = what == HALF_TO_REAL ? c->i[1] : x->shape[d], j.count = o->shape[d];
    j.lines = o->numel / o->shape[d] / (what == HALF_TO_REAL ? 1 : 2);
    j.weighted = what == REAL_TO_HALF ? c->n_i > 1 && c->i[1] : what == HALF_TO_REAL && c->n_i > 2 && c->i[2];
    for (int k = 0; k < o->ndim - (what != HALF_TO_REAL); k++)
        if (k != d) j.shape[j.ndim++] = o->shape[k];
    j.x = side_of(x, d, what != REAL_TO_HALF), j.o = side_of(o, d, what != HALF_TO_REAL);
    return x->dtype == MS_F64 ? transform<double>(c, j, inverse) : transform<float>(c, j, inverse);
}
static ms_status run_complex(ms_call *c) { return run_cuda_transform(c, COMPLEX, c->i[1]); }
static ms_status run_real(ms_call *c) { return run_cuda_transform(c, REAL_TO_HALF, false); }
static ms_status run_half(ms_call *c) { return run_cuda_transform(c, HALF_TO_REAL, true); }

extern const ms_cuda_kernel ms__cuda_fft[];
const ms_cuda_kernel ms__cuda_fft[] = {
    { "fft_complex", run_complex }, { "fft_real", run_real }, { "fft_half", run_half }, { NULL, NULL }
};
