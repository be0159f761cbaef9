// SPDX-License-Identifier: MIT
// cpu/spatial/pooling_body.h -- rows and planes of pooling in one type: REAL, R(name).

// Whether c, at position ca of its plane, becomes the maximum of a window in place of y at ya: if it is larger, or
// equal and before it; or NaN, of which the last one counts.
MS_INLINE int R(beats)(REAL c, int32_t ca, REAL y, int32_t ya)
{
    return (c > y) | ((c == y) & (ca < ya)) | ((c != c) & ((y == y) | (ca > ya)));
}

// Combines a row of the input, the first of its window or a later one, with the columns. start: its place in its plane.
MS_INLINE void R(down)(const pool_job *j, REAL *restrict v, int32_t *restrict va, const REAL *plane, int64_t start,
                       bool first)
{
    const REAL *restrict x = plane + start;
    int64_t n = j->p.w[2].in;
    int32_t from = (int32_t)start;
    if (first && j->at)
        for (int64_t i = 0; i < n; i++) v[i] = x[i], va[i] = from + (int32_t)i;
    else if (first)
        for (int64_t i = 0; i < n; i++) v[i] = x[i];
    else if (j->at)
        for (int64_t i = 0; i < n; i++) {
            int larger = (x[i] > v[i]) | (x[i] != x[i]);
            v[i] = larger ? x[i] : v[i];
            va[i] = larger ? from + (int32_t)i : va[i];
        }
    else
        for (int64_t i = 0; i < n; i++) v[i] += x[i];
}

// Sorts the columns into `stride` phases of `each` columns: column i * stride + p becomes element i of phase p, so that
// element k of neighbouring windows lies in neighbouring elements.
MS_INLINE void R(split)(int64_t stride, int64_t each, const REAL *restrict v, REAL *restrict phase)
{
    if (stride == 2)
        for (int64_t i = 0; i < each; i++) phase[i] = v[2 * i], phase[each + i] = v[2 * i + 1];
    else
        for (int64_t p = 0; p < stride; p++)
            for (int64_t i = 0; i < each; i++) phase[p * each + i] = v[i * stride + p];
}
MS_INLINE void R(split_places)(int64_t stride, int64_t each, const int32_t *restrict va, int32_t *restrict phase)
{
    if (stride == 2)
        for (int64_t i = 0; i < each; i++) phase[i] = va[2 * i], phase[each + i] = va[2 * i + 1];
    else
        for (int64_t p = 0; p < stride; p++)
            for (int64_t i = 0; i < each; i++) phase[p * each + i] = va[i * stride + p];
}

// Combines the columns of each window of a row, in phases: 16 windows at a time.
MS_INLINE void R(across)(const ms_window *w, int64_t each, const REAL *restrict v, const int32_t *restrict va,
                         REAL *restrict y, int32_t *restrict ya)
{
    int64_t n = w->out, end = w->kernel * w->dilation, step = w->dilation, stride = w->stride;
    for (int64_t o = 0; o < n; o += 16) {
        REAL best[16];
        int32_t place[16];
        MS_LANES(16, l) best[l] = v[o + l];
        if (ya) {
            MS_LANES(16, l) place[l] = va[o + l];
            for (int64_t k = step; k < end; k += step) {
                const REAL *c = v + k % stride * each + k / stride + o;
                const int32_t *ca = va + (c - v);
                MS_LANES(16, l)
                {
                    int beats = R(beats)(c[l], ca[l], best[l], place[l]);
                    best[l] = beats ? c[l] : best[l];
                    place[l] = beats ? ca[l] : place[l];
                }
            }
            MS_LANES(16, l) ya[o + l] = place[l];
        } else
            for (int64_t k = step; k < end; k += step) {
                const REAL *c = v + k % stride * each + k / stride + o;
                MS_LANES(16, l) best[l] += c[l];
            }
        MS_LANES(16, l) y[o + l] = best[l];
    }
}
// The same for windows of different sizes, or that reach far beyond the input.
MS_INLINE void R(across_any)(const ms_window *w, const REAL *v, const int32_t *va, REAL *y, int32_t *ya)
{
    for (int64_t o = 0; o < w->out; o++) {
        int64_t i = ms_window_first(w, o), end = ms_window_end(w, o);
        y[o] = ya ? -(REAL)INFINITY : 0;
        if (ya) ya[o] = NOWHERE;
        for (; i < end; i += w->dilation) {
            if (!ya) y[o] += v[i];
            else if (R(beats)(v[i], va[i], y[o], ya[o])) y[o] = v[i], ya[o] = va[i];
        }
    }
}

MS_INLINE void R(add_back)(int64_t n, REAL *restrict dx, const REAL *restrict g, int64_t s)
{
    for (int64_t o = 0; o < n; o++) dx[o * s] += g[o];
}

// The divisor of a window's mean is R(rest) of its place in depth and height times its number in `counts`.
MS_INLINE void R(count)(const ms_pooling *p, REAL *counts)
{
    const ms_window *w = &p->w[2];
    for (int64_t o = 0; o < w->out; o++)
        counts[o] = (REAL)(p->divisor ? p->divisor : ms_window_count(w, o, p->count_padding != 0));
}
MS_INLINE REAL R(rest)(const ms_pooling *p, int64_t d, int64_t h)
{
    int padding = p->count_padding != 0;
    if (p->divisor) return 1;
    return (REAL)(ms_window_count(&p->w[0], d, padding) * ms_window_count(&p->w[1], h, padding));
}

static MS_KERNEL void R(rows)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const pool_job *j = arg;
    const ms_window *depth = &j->p.w[0], *height = &j->p.w[1], *width = &j->p.w[2];
    int64_t n = width->out, length = j->length, each = j->each, stride = width->stride;
    REAL *v = (REAL *)(j->room + j->room_bytes * ms__thread_num()), *phase = stride > 1 && each ? v + length : v,
         *part = v + 2 * length, *counts = part + j->rounded;
    int32_t *va = (int32_t *)(counts + j->rounded), *places = va + (phase - v), *ya = j->at ? va + 2 * length : NULL;
    int64_t margin = each ? width->pad : 0;
    (void)block;
    for (int64_t i = 0; i < length; i++) v[i] = ya ? -(REAL)INFINITY : 0, va[i] = NOWHERE;
    if (!ya) R(count)(&j->p, counts);
    for (int64_t row = first / j->cost; row < last / j->cost; row++) {
        int64_t oh = row % height->out, od = row / height->out % depth->out, plane = row / height->out / depth->out;
        const REAL *x = (const REAL *)j->x + plane * j->p.in;
        REAL *restrict y = (REAL *)j->y + row * n;
        bool begun = false;
        for (int64_t d = ms_window_first(depth, od); d < ms_window_end(depth, od); d += depth->dilation)
            for (int64_t h = ms_window_first(height, oh); h < ms_window_end(height, oh); h += height->dilation) {
                R(down)(j, v + margin, va + margin, x, (d * height->in + h) * width->in, !begun);
                begun = true;
            }
        for (int64_t i = margin; !begun && i < margin + width->in; i++)
            v[i] = ya ? -(REAL)INFINITY : 0, va[i] = NOWHERE;
        if (phase != v) {
            R(split)(stride, each, v, phase);
            if (ya) R(split_places)(stride, each, va, places);
        }
        if (each) R(across)(width, each, phase, places, part, ya);
        else R(across_any)(width, v, va, part, ya);
        if (ya) {
            int64_t *restrict at = j->at + row * n;
            for (int64_t o = 0; o < n; o++) at[o] = ya[o] == NOWHERE ? -1 : ya[o];
            for (int64_t o = 0; o < n; o++) y[o] = part[o];
        } else {
            REAL rest = R(rest)(&j->p, od, oh);
            for (int64_t o = 0; o < n; o++) y[o] = part[o] / (rest * counts[o]);
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
    REAL *part = j->room ? (REAL *)(j->room + j->room_bytes * ms__thread_num()) : NULL, *counts = part + width->out;
    (void)block;
    if (!j->at) R(count)(&j->p, counts);
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
                REAL rest = R(rest)(&j->p, od, oh);
                for (int64_t o = 0; o < width->out; o++) part[o] = g[o] / (rest * counts[o]);
                for (int64_t d = ms_window_first(depth, od); d < ms_window_end(depth, od); d++)
                    for (int64_t h = ms_window_first(height, oh); h < ms_window_end(height, oh); h++)
                        R(row_back)(width, dx + (d * height->in + h) * width->in, part);
            }
    }
}
