// SPDX-License-Identifier: MIT
// cpu/special/fft_body.h -- part of fft.c, included for float and double.

// Complex numbers as two arrays.
typedef struct {
    REAL *re, *im;
} R(pairs);

// All that the transforms of a call share (w, c: formulas/fft.h). roots: w(n)^k. For Bluestein's algorithm plan and
// roots are those of the convolution, chirp is c[j], and spectrum the transform of conj(c).
typedef struct {
    const fft_call *f;
    ms_fft_plan plan;
    bool bluestein;
    REAL sign;
    R(pairs) roots, chirp, spectrum;
    REAL *scratch;  // four arrays of `each` elements for each thread
    int64_t lanes, each;
} R(shared);

// One pass over s interleaved transforms of `size` elements. unit: distance of the powers of w(size) in roots; n:
// number of roots.
typedef struct {
    int64_t size, s, unit;
    REAL sign;
    R(pairs) from, to, roots;
    int64_t n;
} R(pass);

#define PASS(RADIX)                                                                                                   \
    static MS_KERNEL void R(pass_##RADIX)(R(pass) p)                                                                  \
    {                                                                                                                 \
        int64_t m = p.size / RADIX, s = p.s;                                                                          \
        REAL rr[RADIX], ri[RADIX];                                                                                    \
        for (int t = 0; t < RADIX; t++) rr[t] = p.roots.re[t * (p.n / RADIX)], ri[t] = p.roots.im[t * (p.n / RADIX)]; \
        for (int64_t k = 0; k < m; k++) {                                                                             \
            REAL wr[RADIX], wi[RADIX];                                                                                \
            for (int t = 0; t < RADIX; t++) wr[t] = p.roots.re[k * t * p.unit], wi[t] = p.roots.im[k * t * p.unit];   \
            const REAL *restrict ar = p.from.re + s * k, *restrict ai = p.from.im + s * k;                            \
            REAL *restrict br = p.to.re + s * RADIX * k, *restrict bi = p.to.im + s * RADIX * k;                      \
            _Pragma("GCC ivdep") for (int64_t q = 0; q < s; q++)                                                      \
            {                                                                                                         \
                REAL re[RADIX], im[RADIX];                                                                            \
                for (int t = 0; t < RADIX; t++) re[t] = ar[q + s * m * t], im[t] = ai[q + s * m * t];                 \
                R(ms_fft_butterfly)(RADIX, p.sign, re, im, rr, ri);                                                   \
                br[q] = re[0], bi[q] = im[0];                                                                         \
                for (int t = 1; t < RADIX; t++) {                                                                     \
                    br[q + s * t] = re[t] * wr[t] - im[t] * wi[t];                                                    \
                    bi[q + s * t] = re[t] * wi[t] + im[t] * wr[t];                                                    \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }
PASS(2)
PASS(3)
PASS(4)
PASS(5)
PASS(7)
PASS(11)
PASS(13)
#undef PASS

// Transforms `lanes` interleaved lines of plan->n elements in a, with b for intermediate results. Returns a or b: the
// one that has the result.
static R(pairs) R(passes)(const ms_fft_plan *plan, R(pairs) roots, REAL sign, int64_t lanes, R(pairs) a, R(pairs) b)
{
    R(pass) p = { .size = plan->n, .s = lanes, .unit = 1, .sign = sign, .roots = roots, .n = plan->n };
    for (int k = 0; k < plan->passes; k++) {
        p.from = a, p.to = b;
        switch (plan->radix[k]) {
        case 2: R(pass_2)(p); break;
        case 3: R(pass_3)(p); break;
        case 4: R(pass_4)(p); break;
        case 5: R(pass_5)(p); break;
        case 7: R(pass_7)(p); break;
        case 11: R(pass_11)(p); break;
        default: R(pass_13)(p); break;
        }
        p.size /= plan->radix[k], p.s *= plan->radix[k], p.unit *= plan->radix[k];
        R(pairs) t = a;
        a = b;
        b = t;
    }
    return a;
}

static void R(fill_roots)(R(pairs) to, int64_t n, REAL sign)
{
    for (int64_t k = 0; k < n; k++) {
        double angle = 2 * M_PI * ((double)k / (double)n);
        to.re[k] = (REAL)cos(angle);
        to.im[k] = sign * (REAL)sin(angle);
    }
}
static void R(fill_chirp)(R(pairs) to, int64_t n, REAL sign)
{
    for (int64_t k = 0; k < n; k++) {
        double angle = M_PI * ((double)ms_fft_square(k, n) / (double)n);
        to.re[k] = (REAL)cos(angle);
        to.im[k] = sign * (REAL)sin(angle);
    }
}

// a[k] = a[k] b[k] for `lanes` interleaved lines a of n elements.
static void R(multiply)(int64_t n, int64_t lanes, R(pairs) a, R(pairs) b)
{
    for (int64_t k = 0; k < n; k++) {
        REAL c = b.re[k], s = b.im[k];
        for (int64_t q = k * lanes; q < (k + 1) * lanes; q++) {
            REAL re = a.re[q], im = a.im[q];
            a.re[q] = re * c - im * s;
            a.im[q] = re * s + im * c;
        }
    }
}

static R(pairs) R(transform_lines)(const R(shared) * g, R(pairs) a, R(pairs) b)
{
    int64_t n = g->f->n, m = g->plan.n, lanes = g->lanes;
    if (!g->bluestein) return R(passes)(&g->plan, g->roots, g->sign, lanes, a, b);
    R(multiply)(n, lanes, a, g->chirp);
    memset(a.re + n * lanes, 0, (size_t)((m - n) * lanes) * sizeof *a.re);
    memset(a.im + n * lanes, 0, (size_t)((m - n) * lanes) * sizeof *a.im);
    R(pairs) c = R(passes)(&g->plan, g->roots, -1, lanes, a, b), d = c.re == a.re ? b : a;
    R(multiply)(m, lanes, c, g->spectrum);
    // The inverse transform is the conjugate of the transform of the conjugate.
    for (int64_t k = 0; k < m * lanes; k++) c.im[k] = -c.im[k];
    c = R(passes)(&g->plan, g->roots, -1, lanes, c, d);
    for (int64_t k = 0; k < n * lanes; k++) c.im[k] = -c.im[k];
    R(multiply)(n, lanes, c, g->chirp);
    return c;
}

// Copies `count` lines from `first` on to lanes 0 .. count - 1 of a, TILE elements of each at a time: lines and lanes
// are then read and written whole cache lines at a time.
static MS_KERNEL void R(read_lines)(const R(shared) * g, int64_t first, int64_t count, R(pairs) a)
{
    const fft_call *f = g->f;
    int64_t n = f->n, lanes = g->lanes, stored = f->what == HALF_TO_REAL ? n / 2 + 1 : n;
    bool pairs = f->what != REAL_TO_HALF;
    place p[MOST_LANES];
    for (int64_t q = 0; q < count; q++) p[q] = fft_line_of(f->x, f->d, pairs, first + q);
    for (int64_t from = 0; from < stored; from += TILE)
        for (int64_t q = 0; q < count; q++) {
            const REAL *restrict x = (const REAL *)ms__data(f->x) + p[q].at;
            REAL *restrict re = a.re + q, *restrict im = a.im + q;
            int64_t end = from + TILE < stored ? from + TILE : stored, step = p[q].step, part = p[q].part;
            for (int64_t k = from; k < end; k++) re[k * lanes] = x[k * step];
            for (int64_t k = from; k < end; k++) im[k * lanes] = pairs ? x[k * step + part] : 0;
        }
    // The second half is the conjugate of the first.
    for (int64_t k = 0; f->what == HALF_TO_REAL && k < stored; k++) {
        bool twice = ms_fft_twice(k, n);
        REAL w = twice && f->weighted ? (REAL)0.5 : 1;
        REAL *re = a.re + k * lanes, *im = a.im + k * lanes;
        for (int64_t q = 0; q < lanes; q++) re[q] *= w, im[q] = twice ? w * im[q] : 0;
        for (int64_t q = 0; twice && q < lanes; q++)
            a.re[(n - k) * lanes + q] = re[q], a.im[(n - k) * lanes + q] = -im[q];
    }
}
static MS_KERNEL void R(write_lines)(const R(shared) * g, int64_t first, int64_t count, R(pairs) a)
{
    const fft_call *f = g->f;
    int64_t lanes = g->lanes, n = f->o->shape[f->d];
    bool pairs = f->what != HALF_TO_REAL;
    REAL scale = (REAL)(g->bluestein ? f->scale / (double)g->plan.n : f->scale);
    place p[MOST_LANES];
    for (int64_t q = 0; q < count; q++) p[q] = fft_line_of(f->o, f->d, pairs, first + q);
    for (int64_t k = 0; f->what == REAL_TO_HALF && f->weighted && k < n; k++)
        for (int64_t q = 0; ms_fft_twice(k, f->n) && q < lanes; q++) a.re[k * lanes + q] *= 2, a.im[k * lanes + q] *= 2;
    for (int64_t from = 0; from < n; from += TILE)
        for (int64_t q = 0; q < count; q++) {
            REAL *restrict o = (REAL *)ms__data(f->o) + p[q].at;
            const REAL *restrict re = a.re + q, *restrict im = a.im + q;
            int64_t end = from + TILE < n ? from + TILE : n, step = p[q].step, part = p[q].part;
            for (int64_t k = from; k < end; k++) o[k * step] = scale * re[k * lanes];
            for (int64_t k = from; pairs && k < end; k++) o[k * step + part] = scale * im[k * lanes];
        }
}

static void R(group)(void *arg, int64_t begin, int64_t end, int64_t number)
{
    (void)begin;
    (void)end;
    const R(shared) *g = arg;
    int64_t first = number * g->lanes, left = g->f->lines - first, lanes = left < g->lanes ? left : g->lanes;
    REAL *at = g->scratch + ms__thread_num() * 4 * g->each;
    R(pairs) a = { at, at + g->each }, b = { at + 2 * g->each, at + 3 * g->each };
    // The last group may have fewer lines: its other lanes transform zeros.
    if (lanes < g->lanes) memset(at, 0, (size_t)(2 * g->each) * sizeof *at);
    R(read_lines)(g, first, lanes, a);
    R(pairs) r = R(transform_lines)(g, a, b);
    R(write_lines)(g, first, lanes, r);
}

static ms_status R(transform_all)(const ms_call *c, const fft_call *f)
{
    R(shared) g = { .f = f, .sign = f->inverse ? 1 : -1 };
    g.bluestein = !ms_fft_factor(&g.plan, f->n);
    if (g.bluestein) ms_fft_factor(&g.plan, ms_fft_padded(f->n));
    int64_t m = g.plan.n, most = LANE_ELEMENTS / m, threads = ms_num_threads();
    g.lanes = most < 1 ? 1 : most > MOST_LANES ? MOST_LANES : most;
    if (g.lanes > f->lines) g.lanes = f->lines;
    // Powers of two would put the same element of all four arrays into one set of the cache.
    g.each = (m * g.lanes + 15) / 16 * 16 + 80;
    int64_t count = 2 * m + (g.bluestein ? 2 * f->n + 4 * m : 0) + threads * 4 * g.each + 16;
    REAL *at = malloc((size_t)count * sizeof *at);
    if (!at)
        return ms__no_memory((size_t)count * sizeof *at, ms__op_title(c->op->name), "a transform of %lld elements",
                             (long long)f->n);
    REAL *start = at;
    g.roots = (R(pairs)) { at, at + m };
    at += 2 * m;
    if (g.bluestein) {
        g.chirp = (R(pairs)) { at, at + f->n };
        at += 2 * f->n;
        R(pairs) b = { at, at + m }, other = { at + 2 * m, at + 3 * m };
        at += 4 * m;
        R(fill_roots)(g.roots, m, -1);
        R(fill_chirp)(g.chirp, f->n, g.sign);
        memset(b.re, 0, (size_t)(2 * m) * sizeof *b.re);
        for (int64_t k = 0; k < f->n; k++) {
            int64_t mirror = k ? m - k : 0;
            b.re[k] = b.re[mirror] = g.chirp.re[k];
            b.im[k] = b.im[mirror] = -g.chirp.im[k];
        }
        g.spectrum = R(passes)(&g.plan, g.roots, -1, 1, b, other);
    } else R(fill_roots)(g.roots, m, g.sign);
    g.scratch = (REAL *)(((uintptr_t)at + 63) / 64 * 64);
    int64_t groups = (f->lines + g.lanes - 1) / g.lanes, weight = 8 * g.each;
    ms__parallel(groups * weight, weight, R(group), &g);
    free(start);
    return MS_OK;
}
