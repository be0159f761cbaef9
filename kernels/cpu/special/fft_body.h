// SPDX-License-Identifier: MIT
// cpu/special/fft_body.h -- part of fft.c, included for float and double.

// Complex numbers as two arrays.
typedef struct {
    REAL *re, *im;
} R(pairs);

// Where the elements of a line are: `step` apart. im: NULL if all are real.
typedef struct {
    REAL *re, *im;
    int64_t step;
} R(place);

// Transforms of n elements of LANES interleaved lines. roots: w(n)^k (w: formulas/fft.h).
typedef struct {
    ms_fft_plan plan;
    R(pairs) roots;
} R(lanes);

// All that the transforms of a call share. n: complex elements of a line; m: those that passes transform, n or more for
// Bluestein's algorithm, for which chirp is c[j] (formulas/fft.h) and spectrum the transform of conj(c). whole: of
// lines as lanes. columns, rows: of a line as a matrix, and turns: the roots between both. halves: w(2 n)^k. sign: of
// passes.
typedef struct {
    const fft_call *f;
    int64_t n, m;
    bool as_lanes, bluestein;
    REAL sign;
    R(lanes) whole, columns, rows;
    R(pairs) turns, halves, chirp, spectrum;
    REAL *scratch;
    int64_t each, lines;  // elements of scratch of a thread; lines of a task
} R(shared);

// The scratch of a thread.
typedef struct {
    R(pairs) a, b, turned, c, d, half, line;
} R(work);

// ---- passes over interleaved lines ----

// One pass over s interleaved transforms of `size` elements, s a multiple of LANES. unit: distance of the powers of
// w(size) in roots; n: number of roots.
typedef struct {
    int64_t size, s, unit;
    REAL sign;
    R(pairs) from, to, roots;
    int64_t n;
} R(pass);

#define PASS(RADIX)                                                                                                   \
    static MS_KERNEL void R(pass_##RADIX)(const R(pass) * given)                                                      \
    {                                                                                                                 \
        const R(pass) p = *given;                                                                                     \
        int64_t m = p.size / RADIX, s = p.s;                                                                          \
        REAL rr[RADIX], ri[RADIX];                                                                                    \
        for (int t = 0; t < RADIX; t++) rr[t] = p.roots.re[t * (p.n / RADIX)], ri[t] = p.roots.im[t * (p.n / RADIX)]; \
        for (int64_t k = 0; k < m; k++) {                                                                             \
            REAL wr[RADIX], wi[RADIX];                                                                                \
            for (int t = 0; t < RADIX; t++) wr[t] = p.roots.re[k * t * p.unit], wi[t] = p.roots.im[k * t * p.unit];   \
            const REAL *restrict ar = p.from.re + s * k, *restrict ai = p.from.im + s * k;                            \
            REAL *restrict br = p.to.re + s * RADIX * k, *restrict bi = p.to.im + s * RADIX * k;                      \
            for (int64_t q0 = 0; q0 < s; q0 += LANES) VECTORIZED for (int64_t q = q0; q < q0 + LANES; q++)            \
                {                                                                                                     \
                    REAL re[RADIX], im[RADIX];                                                                        \
                    for (int t = 0; t < RADIX; t++) re[t] = ar[q + s * m * t], im[t] = ai[q + s * m * t];             \
                    R(ms_fft_butterfly)(RADIX, p.sign, re, im, rr, ri);                                               \
                    br[q] = re[0], bi[q] = im[0];                                                                     \
                    for (int t = 1; t < RADIX; t++) {                                                                 \
                        br[q + s * t] = re[t] * wr[t] - im[t] * wi[t];                                                \
                        bi[q + s * t] = re[t] * wi[t] + im[t] * wr[t];                                                \
                    }                                                                                                 \
                }                                                                                                     \
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

// Transforms LANES interleaved lines in a, with b for intermediate results. Returns a or b: the one that has the
// result.
static R(pairs) R(transform_lanes)(const R(lanes) * l, REAL sign, R(pairs) a, R(pairs) b)
{
    const ms_fft_plan *plan = &l->plan;
    R(pass) p = { .size = plan->n, .s = LANES, .unit = 1, .sign = sign, .roots = l->roots, .n = plan->n };
    for (int k = 0; k < plan->passes; k++) {
        p.from = a, p.to = b;
        switch (plan->radix[k]) {
        case 2: R(pass_2)(&p); break;
        case 3: R(pass_3)(&p); break;
        case 4: R(pass_4)(&p); break;
        case 5: R(pass_5)(&p); break;
        case 7: R(pass_7)(&p); break;
        case 11: R(pass_11)(&p); break;
        default: R(pass_13)(&p); break;
        }
        p.size /= plan->radix[k], p.s *= plan->radix[k], p.unit *= plan->radix[k];
        R(pairs) t = a;
        a = b;
        b = t;
    }
    return a;
}

// ---- tables ----

// w(n)^k, or its conjugate: where n has a factor 4, an eighth of the circle, mirrored and turned by quarters.
static void R(fill_roots)(R(pairs) to, int64_t n, REAL sign)
{
    int64_t quarter = n % 4 == 0 ? n / 4 : n, last = quarter < n ? n / 8 : n - 1;
    for (int64_t k = 0; k <= last; k++) {
        double angle = 2 * M_PI * ((double)k / (double)n);
        REAL c = (REAL)cos(angle), s = (REAL)sin(angle), mirrored_c = s, mirrored_s = c;
        for (int64_t first = 0; first < n; first += quarter) {
            to.re[first + k] = c, to.im[first + k] = sign * s;
            int64_t mirror = first + quarter - k;
            if (mirror < n && quarter < n) to.re[mirror] = mirrored_c, to.im[mirror] = sign * mirrored_s;
            REAL t = c, u = mirrored_c;
            c = -s, s = t;
            mirrored_c = -mirrored_s, mirrored_s = u;
        }
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

// w(rows columns)^(k q) for each row k and column q of each block of LANES columns; roots: w^j.
static void R(fill_turns)(R(pairs) to, int64_t rows, int64_t columns, R(pairs) roots)
{
    for (int64_t block = 0; block * LANES < columns; block++)
        for (int64_t k = 0; k < rows; k++)
            for (int64_t q = 0; q < LANES; q++) {
                int64_t from = k * (block_at(block, columns) + q);
                *to.re++ = roots.re[from], *to.im++ = roots.im[from];
            }
}

// ---- rows of at most LANES elements, and squares of them ----

static inline __attribute__((always_inline)) R(place) R(element)(R(place) p, int64_t k)
{
    return (R(place)) { p.re + k * p.step, p.im ? p.im + k * p.step : NULL, p.step };
}
static inline __attribute__((always_inline)) void R(read_row)(REAL *restrict re, REAL *restrict im, R(place) p)
{
    if (p.im == p.re + 1 && p.step == 2)
        VECTORIZED for (int q = 0; q < LANES; q++) re[q] = p.re[2 * q], im[q] = p.re[2 * q + 1];
    else if (p.im && p.step == 1) VECTORIZED for (int q = 0; q < LANES; q++) re[q] = p.re[q], im[q] = p.im[q];
    else
        for (int q = 0; q < LANES; q++) re[q] = p.re[q * p.step], im[q] = p.im ? p.im[q * p.step] : 0;
}
static inline __attribute__((always_inline)) void R(write_row)(R(place) p, int64_t count, REAL scale,
                                                               const REAL *restrict re, const REAL *restrict im)
{
    if (count == LANES && p.im == p.re + 1 && p.step == 2)
        VECTORIZED for (int q = 0; q < LANES; q++) p.re[2 * q] = scale * re[q], p.re[2 * q + 1] = scale * im[q];
    else if (count == LANES && p.im && p.step == 1)
        VECTORIZED for (int q = 0; q < LANES; q++) p.re[q] = scale * re[q], p.im[q] = scale * im[q];
    else VECTORIZED for (int64_t q = 0; q < count; q++)
        {
            p.re[q * p.step] = scale * re[q];
            if (p.im) p.im[q * p.step] = scale * im[q];
        }
}
// Transposes LANES x LANES elements.
static inline __attribute__((always_inline)) void R(turn)(const REAL *from, int64_t from_step, REAL *to,
                                                          int64_t to_step)
{
    enum { N = 16 / sizeof(REAL) };
    for (int r = 0; r < LANES; r += N)
        for (int c = 0; c < LANES; c += N) {
            VECTOR v[N];
            for (int k = 0; k < N; k++) memcpy(&v[k], from + (c + k) * from_step + r, sizeof v[k]);
            SQUARE_OF(v);
            for (int k = 0; k < N; k++) memcpy(to + (r + k) * to_step + c, &v[k], sizeof v[k]);
        }
}

static MS_KERNEL void R(read_line)(R(pairs) to, const R(place) * line, int64_t n)
{
    R(place) p = *line;
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) R(read_row)(to.re + k, to.im + k, R(element)(p, k));
    for (; k < n; k++) to.re[k] = p.re[k * p.step], to.im[k] = p.im ? p.im[k * p.step] : 0;
}
static MS_KERNEL void R(write_line)(const R(place) * line, int64_t n, REAL scale, R(pairs) from)
{
    R(place) p = *line;
    for (int64_t k = 0; k < n; k += LANES)
        R(write_row)(R(element)(p, k), n - k < LANES ? n - k : LANES, scale, from.re + k, from.im + k);
}

// ---- a line as a matrix ----

// Element j of the line is in row j / columns. Its transform is that of the columns, times roots, then that of the
// rows, and element k of it is in column k / rows of the result.
static MS_KERNEL void R(read_columns)(const R(shared) * g, const R(place) * line, int64_t first, R(pairs) to)
{
    R(place) p = *line;
    int64_t rows = g->columns.plan.n, columns = g->rows.plan.n;
    for (int64_t k = 0; k < rows; k++)
        R(read_row)(to.re + k * LANES, to.im + k * LANES, R(element)(p, k * columns + first));
}
// Multiplies a block of columns by roots and transposes it: rows of the result are lanes of the next transforms.
static MS_KERNEL void R(turn_columns)(const R(shared) * g, R(pairs) from, int64_t block, R(pairs) to)
{
    int64_t rows = g->columns.plan.n, columns = g->rows.plan.n, first = block_at(block, columns);
    const REAL *wr = g->turns.re + block * LANES * rows, *wi = g->turns.im + block * LANES * rows;
    for (int64_t of_rows = 0; of_rows * LANES < rows; of_rows++) {
        REAL re[LANES * LANES], im[LANES * LANES];
        int64_t at = block_at(of_rows, rows) * LANES, to_row = (of_rows * columns + first) * LANES;
        for (int64_t i = 0; i < LANES * LANES; i++) {
            re[i] = from.re[at + i] * wr[at + i] - from.im[at + i] * wi[at + i];
            im[i] = from.re[at + i] * wi[at + i] + from.im[at + i] * wr[at + i];
        }
        R(turn)(re, LANES, to.re + to_row, LANES);
        R(turn)(im, LANES, to.im + to_row, LANES);
    }
}
static MS_KERNEL void R(write_columns)(const R(shared) * g, const R(place) * line, int64_t first, REAL scale,
                                       R(pairs) from)
{
    R(place) p = *line;
    int64_t rows = g->columns.plan.n, columns = g->rows.plan.n;
    for (int64_t k = 0; k < columns; k++)
        R(write_row)(R(element)(p, first + k * rows), LANES, scale, from.re + k * LANES, from.im + k * LANES);
}
static void R(transform_matrix)(const R(shared) * g, const R(work) * w, const R(place) * from, const R(place) * to,
                                REAL scale)
{
    int64_t rows = g->columns.plan.n, columns = g->rows.plan.n;
    for (int64_t block = 0; block * LANES < columns; block++) {
        R(read_columns)(g, from, block_at(block, columns), w->a);
        R(turn_columns)(g, R(transform_lanes)(&g->columns, g->sign, w->a, w->b), block, w->turned);
    }
    for (int64_t block = 0; block * LANES < rows; block++) {
        R(pairs) a = { w->turned.re + block * columns * LANES, w->turned.im + block * columns * LANES };
        R(write_columns)(g, to, block_at(block, rows), scale, R(transform_lanes)(&g->rows, g->sign, a, w->b));
    }
}
static R(place) R(line_in)(R(pairs) p) { return (R(place)) { p.re, p.im, 1 }; }

// ---- Bluestein's algorithm ----

// a[k] = a[k] b[k]; sign -1: the conjugate of that.
static MS_KERNEL void R(multiply)(int64_t n, R(pairs) a, R(pairs) b, REAL sign)
{
    VECTORIZED for (int64_t k = 0; k < n; k++)
    {
        REAL re = a.re[k], im = a.im[k];
        a.re[k] = re * b.re[k] - im * b.im[k];
        a.im[k] = sign * (re * b.im[k] + im * b.re[k]);
    }
}
static void R(transform_line)(const R(shared) * g, const R(work) * w, const R(place) * from, const R(place) * to,
                              REAL scale)
{
    if (!g->bluestein) {
        R(transform_matrix)(g, w, from, to, scale);
        return;
    }
    int64_t n = g->n, m = g->m;
    R(pairs) c = w->c, d = w->d;
    R(place) c_line = R(line_in)(c), d_line = R(line_in)(d);
    R(read_line)(c, from, n);
    R(multiply)(n, c, g->chirp, 1);
    memset(c.re + n, 0, (size_t)(m - n) * sizeof *c.re);
    memset(c.im + n, 0, (size_t)(m - n) * sizeof *c.im);
    R(transform_matrix)(g, w, &c_line, &d_line, 1);
    // The inverse transform is the conjugate of the transform of the conjugate.
    R(multiply)(m, d, g->spectrum, -1);
    R(transform_matrix)(g, w, &d_line, &c_line, 1);
    for (int64_t k = 0; k < n; k++) c.im[k] = -c.im[k];
    R(multiply)(n, c, g->chirp, 1);
    R(write_line)(to, n, scale / (REAL)m, c);
}

// ---- real lines ----

// A line of real numbers of even length 2 m is read as m complex numbers z: elements 2 k are the real parts, 2 k + 1
// the imaginary ones. With E and O the transforms of both, Z = E + i O, and X[k] = E[k] + w(2 m)^k O[k] is the line's
// transform. These functions compute elements k, at i, and m - k, at j, of 2 X from those of Z, and of 2 Z from those
// of X. c + i s: w(2 m)^k, or its conjugate. Weights and fft_call.scale account for the 2.
static inline __attribute__((always_inline)) void R(half_of)(R(pairs) x, R(pairs) z, int64_t i, int64_t j, REAL c,
                                                             REAL s)
{
    REAL even_re = z.re[i] + z.re[j], even_im = z.im[i] - z.im[j];
    REAL odd_re = z.im[i] + z.im[j], odd_im = z.re[j] - z.re[i];
    REAL re = odd_re * c - odd_im * s, im = odd_re * s + odd_im * c;
    x.re[i] = even_re + re, x.im[i] = im + even_im;
    x.re[j] = even_re - re, x.im[j] = im - even_im;
}
static inline __attribute__((always_inline)) void R(whole_of)(R(pairs) z, R(pairs) x, int64_t i, int64_t j, REAL c,
                                                              REAL s)
{
    REAL even_re = x.re[i] + x.re[j], even_im = x.im[i] - x.im[j];
    REAL re = x.re[i] - x.re[j], im = x.im[i] + x.im[j];
    REAL odd_re = re * c - im * s, odd_im = re * s + im * c;
    z.re[i] = even_re - odd_im, z.im[i] = odd_re + even_im;
    z.re[j] = even_re + odd_im, z.im[j] = odd_re - even_im;
}
#define FOR_PAIRS(CALL, TO, FROM)                                                                                \
    if (lanes == 1) {                                                                                            \
        VECTORIZED for (int64_t k = 1; k <= m / 2; k++) R(CALL)(TO, FROM, k, m - k, halves.re[k], halves.im[k]); \
    } else                                                                                                       \
        for (int64_t k = 1; k <= m / 2; k++) {                                                                   \
            int64_t i = k * LANES, j = (m - k) * LANES;                                                          \
            VECTORIZED for (int64_t q = 0; q < LANES; q++)                                                       \
                R(CALL)(TO, FROM, i + q, j + q, halves.re[k], halves.im[k]);                                     \
        }
// The first half x of the transform of `lanes` real lines, from z.
static MS_KERNEL void R(fold)(const fft_call *f, R(pairs) halves, int64_t lanes, R(pairs) x, R(pairs) z)
{
    int64_t m = f->n / 2;
    if (f->n % 2 == 0) {
        REAL ends = f->weighted ? 1 : 2;
        for (int64_t q = 0; q < lanes; q++) {
            x.re[q] = ends * (z.re[q] + z.im[q]), x.re[m * lanes + q] = ends * (z.re[q] - z.im[q]);
            x.im[q] = x.im[m * lanes + q] = 0;
        }
        FOR_PAIRS(half_of, x, z)
    } else
        for (int64_t i = 0; i < (m + 1) * lanes; i++) {
            REAL weight = f->weighted && i >= lanes ? 2 : 1;
            x.re[i] = weight * z.re[i], x.im[i] = weight * z.im[i];
        }
}
// The reverse: z, whose transform has the real numbers, from half a transform x.
static MS_KERNEL void R(unfold)(const fft_call *f, R(pairs) halves, int64_t lanes, R(pairs) z, R(pairs) x)
{
    int64_t m = f->n / 2;
    if (f->n % 2 == 0) {
        REAL ends = f->weighted ? 2 : 1;
        for (int64_t q = 0; q < lanes; q++) {
            z.re[q] = ends * (x.re[q] + x.re[m * lanes + q]);
            z.im[q] = ends * (x.re[q] - x.re[m * lanes + q]);
        }
        FOR_PAIRS(whole_of, z, x)
        return;
    }
    REAL weight = f->weighted ? (REAL)0.5 : 1;
    for (int64_t q = 0; q < lanes; q++) z.re[q] = x.re[q], z.im[q] = 0;
    for (int64_t k = 1; k <= m; k++)
        for (int64_t q = 0; q < lanes; q++) {
            int64_t i = k * lanes + q, j = (f->n - k) * lanes + q;
            z.re[i] = z.re[j] = weight * x.re[i];
            z.im[i] = weight * x.im[i];
            z.im[j] = -z.im[i];
        }
}
#undef FOR_PAIRS

// ---- lines ----

// Line `number` of t, and `count` - 1 lines after it at a distance.
typedef struct {
    R(place) first;
    int64_t count, distance;
} R(lines);
static R(lines) R(lines_of)(const fft_call *f, const ms_tensor *t, bool complex, int64_t number)
{
    REAL *at = (REAL *)ms__data(t);
    int last = t->ndim - 1 - complex, inner = last - (last == f->d);
    R(lines) l = { .count = 1 };
    if (inner >= 0) l.count = t->shape[inner] - number % t->shape[inner], l.distance = t->stride[inner];
    for (int k = last; k >= 0; k--) {
        if (k == f->d) continue;
        at += number % t->shape[k] * t->stride[k];
        number /= t->shape[k];
    }
    int64_t step = t->stride[f->d];
    if (complex) l.first = (R(place)) { at, at + t->stride[t->ndim - 1], step };
    else l.first = f->n % 2 ? (R(place)) { at, NULL, step } : (R(place)) { at, at + step, 2 * step };
    return l;
}

static void R(one_line)(const R(shared) * g, const R(work) * w, int64_t number)
{
    const fft_call *f = g->f;
    R(place) from = R(lines_of)(f, f->x, f->what != REAL_TO_HALF, number).first;
    R(place) to = R(lines_of)(f, f->o, f->what != HALF_TO_REAL, number).first, line = R(line_in)(w->line);
    REAL scale = (REAL)f->scale;
    if (f->what == COMPLEX) R(transform_line)(g, w, &from, &to, scale);
    else if (f->what == REAL_TO_HALF) {
        R(transform_line)(g, w, &from, &line, 1);
        R(fold)(f, g->halves, 1, w->half, w->line);
        R(write_line)(&to, f->n / 2 + 1, scale, w->half);
    } else {
        R(read_line)(w->half, &from, f->n / 2 + 1);
        R(unfold)(f, g->halves, 1, w->line, w->half);
        R(transform_line)(g, w, &line, &to, scale);
    }
}

// Reads n elements of each line into lanes. Of contiguous lines, half a square of complex numbers is transposed at a
// time.
static MS_KERNEL void R(read_lanes)(const R(lines) * l, int64_t n, R(pairs) to)
{
    R(place) p = l->first;
    int64_t k = 0, half = LANES / 2;
    if (l->count == LANES && p.im == p.re + 1 && p.step == 2)
        for (; k + half <= n; k += half) {
            REAL square[LANES * LANES];
            R(turn)(p.re + 2 * k, l->distance, square, LANES);
            for (int64_t i = 0; i < half; i++) VECTORIZED for (int q = 0; q < LANES; q++)
                {
                    to.re[(k + i) * LANES + q] = square[2 * i * LANES + q];
                    to.im[(k + i) * LANES + q] = square[(2 * i + 1) * LANES + q];
                }
        }
    for (; k < n; k++) {
        R(place) row = R(element)(p, k);
        REAL *re = to.re + k * LANES, *im = to.im + k * LANES;
        row.step = l->distance;
        if (l->count == LANES) R(read_row)(re, im, row);
        else
            for (int64_t q = 0; q < l->count; q++) {
                re[q] = row.re[q * row.step];
                im[q] = row.im ? row.im[q * row.step] : 0;
            }
    }
}
static MS_KERNEL void R(write_lanes)(const R(lines) * l, int64_t n, REAL scale, R(pairs) from)
{
    R(place) p = l->first;
    int64_t k = 0, half = LANES / 2;
    if (l->count == LANES && p.im == p.re + 1 && p.step == 2)
        for (; k + half <= n; k += half) {
            REAL square[LANES * LANES];
            for (int64_t i = 0; i < half; i++) VECTORIZED for (int q = 0; q < LANES; q++)
                {
                    square[2 * i * LANES + q] = scale * from.re[(k + i) * LANES + q];
                    square[(2 * i + 1) * LANES + q] = scale * from.im[(k + i) * LANES + q];
                }
            R(turn)(square, LANES, p.re + 2 * k, l->distance);
        }
    for (; k < n; k++) {
        R(place) row = R(element)(p, k);
        row.step = l->distance;
        R(write_row)(row, l->count, scale, from.re + k * LANES, from.im + k * LANES);
    }
}
// Lines that are not at equal distances are read and written in parts. Lanes without a line transform zeros.
static void R(lines_as_lanes)(const R(shared) * g, const R(work) * w, int64_t first, int64_t count)
{
    const fft_call *f = g->f;
    int64_t half = f->n / 2 + 1, stored = f->what == HALF_TO_REAL ? half : g->n;
    R(pairs) a = w->a, b = w->b, read = f->what == HALF_TO_REAL ? b : a;
    for (int64_t i = 0; count < LANES && i < stored * LANES; i++) read.re[i] = read.im[i] = 0;
    for (int64_t q = 0; q < count;) {
        R(lines) l = R(lines_of)(f, f->x, f->what != REAL_TO_HALF, first + q);
        if (l.count > count - q) l.count = count - q;
        R(read_lanes)(&l, stored, (R(pairs)) { read.re + q, read.im + q });
        q += l.count;
    }
    if (f->what == HALF_TO_REAL) R(unfold)(f, g->halves, LANES, a, b);
    R(pairs) r = R(transform_lanes)(&g->whole, g->sign, a, b);
    if (f->what == REAL_TO_HALF) {
        R(pairs) x = r.re == a.re ? b : a;
        R(fold)(f, g->halves, LANES, x, r);
        r = x;
    }
    for (int64_t q = 0; q < count;) {
        R(lines) l = R(lines_of)(f, f->o, f->what != HALF_TO_REAL, first + q);
        if (l.count > count - q) l.count = count - q;
        R(write_lanes)(&l, f->what == REAL_TO_HALF ? half : g->n, (REAL)f->scale, (R(pairs)) { r.re + q, r.im + q });
        q += l.count;
    }
}

// ---- memory ----

// Two arrays of n elements from base[*used] on; base: NULL to count. Arrays of a power of two alone would have the same
// element of all in one set of the cache, and loads would wait for stores to equal low bits of an address.
static R(pairs) R(take)(REAL *base, int64_t *used, int64_t n)
{
    int64_t each = padded(n) + 17 * LANES, at = *used;
    *used += 2 * each;
    return base ? (R(pairs)) { base + at, base + at + each } : (R(pairs)) { NULL, NULL };
}
static int64_t R(take_work)(const R(shared) * g, REAL *base, R(work) * w)
{
    int64_t used = 0, n = g->f->n, rows = g->columns.plan.n, columns = g->rows.plan.n;
    int64_t lane = g->as_lanes ? g->m + 1 : longer(rows, columns);
    bool folds = g->f->what != COMPLEX && !g->as_lanes;
    w->a = R(take)(base, &used, lane * LANES);
    w->b = R(take)(base, &used, lane * LANES);
    w->turned = R(take)(base, &used, g->as_lanes ? 0 : padded(rows) * columns);
    w->c = R(take)(base, &used, g->bluestein ? g->m : 0);
    w->d = R(take)(base, &used, g->bluestein ? g->m : 0);
    w->half = R(take)(base, &used, folds ? n / 2 + 1 : 0);
    w->line = R(take)(base, &used, folds ? n : 0);
    return used;
}
static int64_t R(take_tables)(R(shared) * g, REAL *base)
{
    int64_t used = 0, m = g->m, rows = g->columns.plan.n, columns = g->rows.plan.n;
    g->whole.roots = R(take)(base, &used, m);
    g->columns.roots = R(take)(base, &used, rows);
    g->rows.roots = R(take)(base, &used, columns);
    g->turns = R(take)(base, &used, rows * padded(columns));
    g->halves = R(take)(base, &used, g->f->what != COMPLEX && g->f->n % 2 == 0 ? 2 * g->n : 0);
    g->chirp = R(take)(base, &used, g->bluestein ? g->n : 0);
    g->spectrum = R(take)(base, &used, g->bluestein ? m : 0);
    return used;
}

static void R(fill_tables)(R(shared) * g, const R(work) * w)
{
    int64_t n = g->n, m = g->m;
    REAL sign = g->f->inverse ? 1 : -1;
    R(fill_roots)(g->whole.roots, m, g->sign);
    if (g->f->what != COMPLEX && g->f->n % 2 == 0) R(fill_roots)(g->halves, 2 * n, sign);
    if (g->as_lanes) return;
    R(fill_roots)(g->columns.roots, g->columns.plan.n, g->sign);
    R(fill_roots)(g->rows.roots, g->rows.plan.n, g->sign);
    R(fill_turns)(g->turns, g->columns.plan.n, g->rows.plan.n, g->whole.roots);
    if (!g->bluestein) return;
    R(fill_chirp)(g->chirp, n, sign);
    memset(w->c.re, 0, (size_t)m * sizeof *w->c.re);
    memset(w->c.im, 0, (size_t)m * sizeof *w->c.im);
    for (int64_t k = 0; k < n; k++) {
        int64_t mirror = k ? m - k : 0;
        w->c.re[k] = w->c.re[mirror] = g->chirp.re[k];
        w->c.im[k] = w->c.im[mirror] = -g->chirp.im[k];
    }
    R(place) from = R(line_in)(w->c), to = R(line_in)(g->spectrum);
    R(transform_matrix)(g, w, &from, &to, 1);
}

static void R(range)(void *arg, int64_t begin, int64_t end, int64_t block)
{
    (void)begin;
    (void)end;
    const R(shared) *g = arg;
    int64_t first = block * g->lines, left = g->f->lines - first, count = left < g->lines ? left : g->lines;
    R(work) w;
    R(take_work)(g, g->scratch + ms__thread_num() * g->each, &w);
    for (int64_t k = 0; k < count; k += g->as_lanes ? LANES : 1)
        if (g->as_lanes) R(lines_as_lanes)(g, &w, first + k, count - k < LANES ? count - k : LANES);
        else R(one_line)(g, &w, first + k);
}

static ms_status R(transform_all)(const ms_call *c, const fft_call *f)
{
    bool halved = f->what != COMPLEX && f->n % 2 == 0;
    R(shared) g = { .f = f, .n = halved ? f->n / 2 : f->n };
    g.m = g.n;
    g.bluestein = !ms_fft_factor(&g.whole.plan, g.n);
    if (g.bluestein) ms_fft_factor(&g.whole.plan, g.m = longer(ms_fft_padded(g.n), LANES * LANES));
    g.sign = f->inverse && !g.bluestein ? 1 : -1;
    g.as_lanes = !choose_matrix(g.m, &g.columns.plan, &g.rows.plan) || (g.m <= MOST_AS_LANES && lines_are_columns(f));
    if (g.bluestein) g.as_lanes = false;
    g.lines = g.as_lanes ? padded(1 + TASK_ELEMENTS / g.m) : 1 + TASK_ELEMENTS / g.m;
    R(work) w;
    g.each = R(take_work)(&g, NULL, &w);
    int64_t tables = R(take_tables)(&g, NULL), count = tables + ms_num_threads() * g.each + LANES;
    REAL *at = malloc((size_t)count * sizeof *at);
    if (!at)
        return ms__no_memory((size_t)count * sizeof *at, ms__op_title(c->op->name), "a transform of %lld elements",
                             (long long)f->n);
    REAL *start = (REAL *)(((uintptr_t)at + 63) / 64 * 64);
    R(take_tables)(&g, start);
    g.scratch = start + tables;
    R(take_work)(&g, g.scratch, &w);
    R(fill_tables)(&g, &w);
    int64_t blocks = (f->lines + g.lines - 1) / g.lines, weight = 8 * g.lines * g.m;
    ms__parallel(blocks * weight, weight, R(range), &g);
    free(at);
    return MS_OK;
}
