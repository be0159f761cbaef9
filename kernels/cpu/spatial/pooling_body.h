// SPDX-License-Identifier: MIT
// cpu/spatial/pooling_body.h -- rows and planes of pooling in one type: REAL, R(name).

// Replaces each y[o], for o < n, by x[o * s] if that is larger, NaN, or the first element of its window (at[o] < 0),
// and stores its position in at[o]. position: that of x[0] in its plane.
MS_INLINE void R(take)(int64_t n, REAL *restrict y, int32_t *restrict at, const REAL *restrict x, int64_t s,
                       int32_t position)
{
    for (int64_t o = 0; o < n; o++) {
        REAL v = x[o * s];
        int larger = (v > y[o]) | (v != v) | (at[o] < 0);
        y[o] = larger ? v : y[o];
        at[o] = larger ? position + (int32_t)(o * s) : at[o];
    }
}
MS_INLINE void R(add)(int64_t n, REAL *restrict y, const REAL *restrict x, int64_t s)
{
    for (int64_t o = 0; o < n; o++) y[o] += x[o * s];
}
MS_INLINE void R(add_back)(int64_t n, REAL *restrict dx, const REAL *restrict g, int64_t s)
{
    for (int64_t o = 0; o < n; o++) dx[o * s] += g[o];
}

// Combines a row of the input, `start` elements from the beginning of its plane, with a row of outputs: with maxima,
// and their positions in `at`, or, if `at` is NULL, with sums.
static MS_KERNEL void R(row_from)(const ms_window *w, const REAL *plane, int64_t start, REAL *y, int32_t *at)
{
    const REAL *x = plane + start;
    for (int64_t o = 0; w->kernel == 0 && o < w->out; o++)
        for (int64_t i = ms_window_first(w, o), end = ms_window_end(w, o); i < end; i++) {
            if (at) R(take)(1, y + o, at + o, x + i, 1, (int32_t)(start + i));
            else y[o] += x[i];
        }
    for (int64_t k = 0; k < w->kernel; k++) {
        ms_reach r = ms__reach_of(w, k);
        int64_t n = r.last - r.first, from = r.first * w->stride + r.shift, first = r.first;
        if (n == 0) continue;
#define TAKE(s) R(take)(n, y + first, at + first, x + from, s, (int32_t)(start + from))
#define ADD(s) R(add)(n, y + first, x + from, s)
        if (at) WITH_STRIDE(w->stride, TAKE)
        else WITH_STRIDE(w->stride, ADD)
#undef TAKE
#undef ADD
    }
}

// The divisor of a window's mean. rest: the window's size in depth times that in height, as R(rest) counts them.
MS_INLINE REAL R(divisor)(const ms_pooling *p, int64_t rest, int64_t o)
{
    int padding = p->count_padding != 0;
    return (REAL)(p->divisor ? p->divisor : rest * ms_window_count(&p->w[2], o, padding));
}
MS_INLINE int64_t R(rest)(const ms_pooling *p, int64_t d, int64_t h)
{
    int padding = p->count_padding != 0;
    return ms_window_count(&p->w[0], d, padding) * ms_window_count(&p->w[1], h, padding);
}

static void R(rows)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const pool_job *j = arg;
    const ms_window *depth = &j->p.w[0], *height = &j->p.w[1], *width = &j->p.w[2];
    int32_t *at = j->at ? j->room + ms__thread_num() * width->out : NULL;
    (void)block;
    for (int64_t row = first / j->cost; row < last / j->cost; row++) {
        int64_t oh = row % height->out, od = row / height->out % depth->out, plane = row / height->out / depth->out;
        const REAL *x = (const REAL *)j->x + plane * j->p.in;
        REAL *y = (REAL *)j->y + row * width->out;
        for (int64_t o = 0; o < width->out; o++) y[o] = at ? -(REAL)INFINITY : 0;
        for (int64_t o = 0; at && o < width->out; o++) at[o] = -1;
        for (int64_t d = ms_window_first(depth, od); d < ms_window_end(depth, od); d += depth->dilation)
            for (int64_t h = ms_window_first(height, oh); h < ms_window_end(height, oh); h += height->dilation)
                R(row_from)(width, x, (d * height->in + h) * width->in, y, at);
        if (at) {
            for (int64_t o = 0; o < width->out; o++) j->at[row * width->out + o] = at[o];
        } else {
            int64_t rest = R(rest)(&j->p, od, oh);
            for (int64_t o = 0; o < width->out; o++) y[o] /= R(divisor)(&j->p, rest, o);
        }
    }
}

// Adds the gradients g of a row of outputs to dx, a row of the input's gradient; each sum is in the outputs' order.
static MS_KERNEL void R(row_back)(const ms_window *w, REAL *dx, const REAL *g)
{
    for (int64_t o = 0; w->kernel == 0 && o < w->out; o++)
        for (int64_t i = ms_window_first(w, o), end = ms_window_end(w, o); i < end; i++) dx[i] += g[o];
    for (int64_t k = w->kernel - 1; k >= 0; k--) {
        ms_reach r = ms__reach_of(w, k);
        int64_t n = r.last - r.first;
        if (n == 0) continue;
#define ADD(s) R(add_back)(n, dx + r.first * w->stride + r.shift, g + r.first, s)
        WITH_STRIDE(w->stride, ADD)
#undef ADD
    }
}

// Computes the gradient of planes of the input.
static void R(planes)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const pool_job *j = arg;
    const ms_window *depth = &j->p.w[0], *height = &j->p.w[1], *width = &j->p.w[2];
    REAL *part = j->room ? (REAL *)((double *)j->room + ms__thread_num() * width->out) : NULL;
    (void)block;
    for (int64_t plane = first / j->cost; plane < last / j->cost; plane++) {
        const REAL *g = (const REAL *)j->x + plane * j->p.out;
        REAL *dx = (REAL *)j->y + plane * j->p.in;
        for (int64_t i = 0; i < j->p.in; i++) dx[i] = 0;
        if (j->at) {
            const int64_t *at = j->at + plane * j->p.out;
            for (int64_t o = 0; o < j->p.out; o++)
                if (at[o] >= 0 && at[o] < j->p.in) dx[at[o]] += g[o];
            continue;
        }
        for (int64_t od = 0; od < depth->out; od++)
            for (int64_t oh = 0; oh < height->out; oh++, g += width->out) {
                int64_t rest = R(rest)(&j->p, od, oh);
                for (int64_t o = 0; o < width->out; o++) part[o] = g[o] / R(divisor)(&j->p, rest, o);
                for (int64_t d = ms_window_first(depth, od); d < ms_window_end(depth, od); d++)
                    for (int64_t h = ms_window_first(height, oh); h < ms_window_end(height, oh); h++)
                        R(row_back)(width, dx + (d * height->in + h) * width->in, part);
            }
    }
}
