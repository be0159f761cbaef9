// SPDX-License-Identifier: MIT
// cpu/rows/norm_body.h -- softmax, log_softmax, layer_norm, rms_norm and their gradients over blocks of rows; norm.c
// includes it once per accumulation type.

static MS_KERNEL void R(softmax)(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const soft *w = arg;
    int64_t n = w->r.n, stride = w->r.stride;
    REAL *room = (REAL *)(w->room + w->room_bytes * (size_t)ms__thread_num());
    for (int64_t row = first / n; row < last / n; row++) {
        int64_t at = ms__row_start(&w->r, row);
        const REAL *x = ROW_IN(w->dtype, w->x, at, stride, n, room);
        REAL *y = ROW_AT(w->dtype, w->out, at, stride, room), m = R(ms__row_max)(x, n);
        if (m == -(REAL)INFINITY) m = 0;  // a row whose elements are all -inf gives NaN (0 / 0), as in PyTorch
        if (w->log) {
            REAL *e = room + n;
            REAL shift = m + LOG(R(ms__row_exp)(e, x, m, n));
            for (int64_t j = 0; j < n; j++) y[j] = x[j] - shift;
        } else {
            REAL scale = 1 / R(ms__row_exp)(y, x, m, n);
            for (int64_t j = 0; j < n; j++) y[j] *= scale;
        }
        ROW_OUT(w->dtype, w->out, at, stride, n, y);
    }
}

// softmax: dx = y (g - sum g y); log_softmax: dx = g - exp(y) sum g
static MS_KERNEL void R(softmax_backward)(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const soft *w = arg;
    int64_t n = w->r.n, stride = w->r.stride;
    REAL *room = (REAL *)(w->room + w->room_bytes * (size_t)ms__thread_num());
    for (int64_t row = first / n; row < last / n; row++) {
        int64_t at = ms__row_start(&w->r, row);
        const REAL *y = ROW_IN(w->dtype, w->x, at, stride, n, room),
                   *g = ROW_IN(w->dtype, w->g, at, stride, n, room + n);
        REAL *dx = ROW_AT(w->dtype, w->out, at, stride, room + 2 * n);
        REAL s = w->log ? R(ms__row_sum)(g, n) : R(ms__row_dot)(g, y, n);
#define NEXT(j) R(ms__fetch)(y + n + j), R(ms__fetch)(g + n + j)
#define SOFT(j) y[j] * (g[j] - s)
#define LOG_SOFT(j) g[j] - R(ms__soft_exp)(y[j]) * s
        if (w->log) MS_ROW_SET(n, dx, LOG_SOFT, NEXT)
        else MS_ROW_SET(n, dx, SOFT, NEXT)
#undef NEXT
#undef SOFT
#undef LOG_SOFT
        ROW_OUT(w->dtype, w->out, at, stride, n, dx);
    }
}

// The same along another dimension than the last: STRIP adjacent rows at a time, whose elements are read together. A
// row is added in blocks of 64 elements.
typedef struct R(strip) {
    int64_t at, width, n, stride;  // the first element, the number of rows, and their elements
    REAL *room;
} R(strip);
static R(strip) R(strip_of)(const soft *w, int64_t task)
{
    int64_t n = w->r.n, stride = w->r.stride, strips = (stride + STRIP - 1) / STRIP, c0 = task % strips * STRIP;
    return (R(strip)) { task / strips * stride * n + c0, stride - c0 < STRIP ? stride - c0 : STRIP, n, stride,
                        (REAL *)(w->room + w->room_bytes * (size_t)ms__thread_num()) };
}
// Element j of the strip's rows; for half types, in room.
#define ELEMENTS(from, j, room) ROW_IN(w->dtype, from, s.at + (j)*s.stride, 1, s.width, room)
#define RESULTS(j, room) ROW_AT(w->dtype, w->out, s.at + (j)*s.stride, 1, room)
#define STORE(j, row) ROW_OUT(w->dtype, w->out, s.at + (j)*s.stride, 1, s.width, row)
#define EACH for (int64_t l = 0; l < s.width; l++)

static MS_KERNEL void R(softmax_strips)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const soft *w = arg;
    (void)block;
    for (int64_t task = first / w->cost; task < last / w->cost; task++) {
        const R(strip) s = R(strip_of)(w, task);
        REAL most[STRIP], sum[STRIP], part[STRIP];
        EACH most[l] = -(REAL)INFINITY, sum[l] = 0;
        for (int64_t j = 0; j < s.n; j++) {
            const REAL *restrict x = ELEMENTS(w->x, j, s.room);
            EACH most[l] = x[l] > most[l] ? x[l] : most[l];
        }
        EACH most[l] = most[l] == -(REAL)INFINITY ? 0 : most[l];
        for (int64_t j = 0; j < s.n; j++) {
            const REAL *restrict x = ELEMENTS(w->x, j, s.room);
            if (j % 64 == 0) EACH part[l] = 0;
            EACH part[l] += R(ms__soft_exp)(x[l] - most[l]);
            if (j % 64 == 63 || j == s.n - 1) EACH sum[l] += part[l];
        }
        EACH sum[l] = w->log ? most[l] + LOG(sum[l]) : 1 / sum[l];
        for (int64_t j = 0; j < s.n; j++) {
            const REAL *x = ELEMENTS(w->x, j, s.room);
            REAL *y = RESULTS(j, s.room);
            if (w->log) EACH y[l] = x[l] - sum[l];
            else EACH y[l] = R(ms__soft_exp)(x[l] - most[l]) * sum[l];
            STORE(j, y);
        }
    }
}

static MS_KERNEL void R(softmax_backward_strips)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const soft *w = arg;
    (void)block;
    for (int64_t task = first / w->cost; task < last / w->cost; task++) {
        const R(strip) s = R(strip_of)(w, task);
        REAL sum[STRIP], part[STRIP];
        EACH sum[l] = 0;
        for (int64_t j = 0; j < s.n; j++) {
            const REAL *restrict y = ELEMENTS(w->x, j, s.room), *restrict g = ELEMENTS(w->g, j, s.room + STRIP);
            if (j % 64 == 0) EACH part[l] = 0;
            if (w->log) EACH part[l] += g[l];
            else EACH part[l] += g[l] * y[l];
            if (j % 64 == 63 || j == s.n - 1) EACH sum[l] += part[l];
        }
        for (int64_t j = 0; j < s.n; j++) {
            const REAL *y = ELEMENTS(w->x, j, s.room), *g = ELEMENTS(w->g, j, s.room + STRIP);
            REAL *dx = RESULTS(j, s.room + 2 * STRIP);
            if (w->log) EACH dx[l] = g[l] - R(ms__soft_exp)(y[l]) * sum[l];
            else EACH dx[l] = y[l] * (g[l] - sum[l]);
            STORE(j, dx);
        }
    }
}
#undef ELEMENTS
#undef RESULTS
#undef STORE
#undef EACH

// Stores x + r of a row, rounded, in p->sum.
static MS_KERNEL void R(add_row)(const norm *p, int64_t at, REAL *room)
{
    int64_t n = p->n;
    const REAL *x = ROW_IN(p->dtype, p->x, at, 1, n, room), *r = ROW_IN(p->dtype, p->r, at, 1, n, room + n);
    REAL *sum = ROW_AT(p->dtype, p->sum, at, 1, room);
    for (int64_t j = 0; j < n; j++) sum[j] = x[j] + r[j];
    ROW_OUT(p->dtype, p->sum, at, 1, n, sum);
}

// y = (x - mean) * rstd * weight + bias. For rms_norm, mean = 0 and there is no bias.
static MS_KERNEL void R(norm)(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const norm *p = arg;
    int64_t n = p->n;
    REAL *room = (REAL *)(p->room + p->room_bytes * (size_t)ms__thread_num());
    const REAL *w = p->w ? ROW_IN(p->dtype, p->w, 0, 1, n, room + n) : NULL,
               *b = p->b ? ROW_IN(p->dtype, p->b, 0, 1, n, room + 2 * n) : NULL;
    for (int64_t row = first / n; row < last / n; row++) {
        if (p->r) R(add_row)(p, row * n, room + 3 * n);
        const REAL *x = ROW_IN(p->dtype, p->r ? p->sum : p->x, row * n, 1, n, room);
        REAL *y = ROW_AT(p->dtype, p->out, row * n, 1, room);
        REAL mean = p->rms ? 0 : R(ms__row_sum)(x, n) / (REAL)n;
        REAL rstd = 1 / SQRT(R(ms__row_spread)(x, mean, n) / (REAL)n + (REAL)p->eps);
        if (p->stats) ((REAL *)p->stats)[2 * row] = mean, ((REAL *)p->stats)[2 * row + 1] = rstd;
        // With a residual, what the next row reads from memory is its two summands.
        const REAL *own = p->r ? (const REAL *)p->x + row * n : x, *other = p->r ? (const REAL *)p->r + row * n : NULL;
#define NEXT(j) R(ms__fetch)(own + n + j), other ? R(ms__fetch)(other + n + j) : (void)0
#define PLAIN(j) (x[j] - mean) * rstd
#define BIASED(j) PLAIN(j) + b[j]
#define WEIGHTED(j) PLAIN(j) * w[j]
#define BOTH_OF(j) PLAIN(j) * w[j] + b[j]
        if (w && b) MS_ROW_SET(n, y, BOTH_OF, NEXT)
        else if (w) MS_ROW_SET(n, y, WEIGHTED, NEXT)
        else if (b) MS_ROW_SET(n, y, BIASED, NEXT)
        else MS_ROW_SET(n, y, PLAIN, NEXT)
#undef NEXT
#undef PLAIN
#undef BIASED
#undef WEIGHTED
#undef BOTH_OF
        ROW_OUT(p->dtype, p->out, row * n, 1, n, y);
    }
}

// With h = (x - mean) * rstd and q = g * w: dx = rstd (q - mean(q) - h mean(q h)); rms_norm omits mean(q). dw = sum of
// g h over rows, db = sum of g. Two passes over a row, which compute h and q each time: the first adds q and q h, in
// 32 lanes, and g h and g to a block's partial sums, sums[0 .. n) and sums[n .. 2 n). m: the mean, rstd, and
// gets mean(q) and mean(q h).
MS_INLINE void R(norm_sums)(const REAL *restrict x, const REAL *restrict g, const REAL *restrict w, int64_t n,
                            REAL *restrict sums, REAL *m)
{
    REAL a[32] = { 0 }, b[32] = { 0 }, mean = m[0], rstd = m[1];
    int64_t j = 0;
#define TERM(at, l)                                                \
    REAL h = (x[at] - mean) * rstd, q = w ? g[at] * w[at] : g[at]; \
    a[l] += q;                                                     \
    b[l] += q * h;                                                 \
    if (sums) sums[at] += g[at] * h, sums[n + at] += g[at];
    for (; j + 32 <= n; j += 32) MS_LANES(32, l)
        {
            TERM(j + l, l)
        }
    for (; j + 16 <= n; j += 16) MS_LANES(16, l)
        {
            TERM(j + l, l)
        }
    for (int64_t l = 0; j + l < n; l++) { TERM(j + l, l) }
#undef TERM
    MS_LANES(16, l) a[l] += a[l + 16];
    MS_LANES(16, l) b[l] += b[l + 16];
    m[2] = R(ms__fold)(a) / (REAL)n;
    m[3] = R(ms__fold)(b) / (REAL)n;
}

static MS_KERNEL void R(norm_backward)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const norm *p = arg;
    int64_t n = p->n;
    REAL *room = (REAL *)(p->room + p->room_bytes * (size_t)ms__thread_num());
    REAL *sums = p->sums ? (REAL *)(p->sums + p->sums_bytes * (size_t)block) : NULL;
    const REAL *w = p->w ? ROW_IN(p->dtype, p->w, 0, 1, n, room) : NULL;
    if (sums) memset(sums, 0, 2 * (size_t)n * sizeof *sums);
    for (int64_t row = first / n; row < last / n; row++) {
        const REAL *x = ROW_IN(p->dtype, p->x, row * n, 1, n, room + n),
                   *g = ROW_IN(p->dtype, p->g, row * n, 1, n, room + 2 * n);
        REAL mean = ((const REAL *)p->stats)[2 * row], rstd = ((const REAL *)p->stats)[2 * row + 1];
        REAL m[] = { mean, rstd, 0, 0 };
        if (w && sums) R(norm_sums)(x, g, w, n, sums, m);
        else R(norm_sums)(x, g, w, n, sums, m);
        if (!p->out) continue;
        REAL mq = p->rms ? 0 : m[2], mh = m[3];
        REAL *dx = ROW_AT(p->dtype, p->out, row * n, 1, room + 3 * n);
#define NEXT(j) R(ms__fetch)(x + n + j), R(ms__fetch)(g + n + j)
#define PLAIN(j) rstd *(g[j] - mq - (x[j] - mean) * rstd * mh)
#define WEIGHTED(j) rstd *(g[j] * w[j] - mq - (x[j] - mean) * rstd * mh)
        if (w) MS_ROW_SET(n, dx, WEIGHTED, NEXT)
        else MS_ROW_SET(n, dx, PLAIN, NEXT)
#undef NEXT
#undef PLAIN
#undef WEIGHTED
        ROW_OUT(p->dtype, p->out, row * n, 1, n, dx);
    }
}
