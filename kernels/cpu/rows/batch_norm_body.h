// SPDX-License-Identifier: MIT
// cpu/rows/batch_norm_body.h -- batch_norm and its gradient; batch_norm.c includes it once per accumulation type. A
// tensor [N, C, S] is processed one channel at a time; a channel's elements lie in runs of S, those of adjacent
// channels that share their statistics in longer ones. A tensor [N, C] is processed one block of rows at a time. A run
// is summed in REAL; runs and rows are added in double, in order.

// ---- a channel, in runs ---------------------------------------------------------------------------

// The sum of g (x - m).
MS_INLINE REAL R(row_dot_from)(const REAL *g, const REAL *x, REAL m, int64_t n)
{
    REAL s[16] = { 0 };
    int64_t j = 0;
    for (; j + 16 <= n; j += 16) MS_LANES(16, l) s[l] += g[j + l] * (x[j + l] - m);
    for (int64_t l = 0; j + l < n; l++) s[l] += g[j + l] * (x[j + l] - m);
    return R(ms__fold)(s);
}

static MS_KERNEL void R(channels)(const bn *p, int64_t group)
{
    int64_t N = p->n, S = p->s, step = p->c * S, first = group * p->share, run = S * p->share;
    const REAL *x = (const REAL *)p->x + first * S;
    double count = (double)(N * run);
    if (p->training) {
        double total = 0, spread = 0;
        for (int64_t n = 0; n < N; n++) total += R(ms__row_sum)(x + n * step, run);
        p->mean[group] = total / count;
        for (int64_t n = 0; n < N; n++) spread += R(ms__row_spread)(x + n * step, (REAL)p->mean[group], run);
        p->var[group] = spread / count;
    }
    if (!p->y) return;
    REAL mean = (REAL)p->mean[group];
    for (int64_t c = first; c < first + p->share; c++, x += S) {
        REAL *y = (REAL *)p->y + c * S, shift = (REAL)(p->b ? p->b[c] : 0),
             scale = (REAL)ms_bn_scale(p->var[group], p->eps, p->w ? p->w[c] : 1);
        for (int64_t n = 0; n < N; n++)
            for (int64_t j = 0; j < S; j++) y[n * step + j] = (x[n * step + j] - mean) * scale + shift;
    }
}

static MS_KERNEL void R(channels_backward)(const bn *p, int64_t group)
{
    int64_t N = p->n, S = p->s, step = p->c * S, first = group * p->share, end = first + p->share;
    REAL mean = (REAL)p->mean[group];
    ms_bn_sums sums;
    for (int64_t c = first; c < end; c++) {
        const REAL *x = (const REAL *)p->x + c * S, *g = p->g ? (const REAL *)p->g + c * S : NULL;
        p->db[c] = p->dw[c] = 0;
        for (int64_t n = 0; g && n < N; n++) {
            p->db[c] += R(ms__row_sum)(g + n * step, S);
            p->dw[c] += R(row_dot_from)(g + n * step, x + n * step, mean, S);
        }
    }
    add_channels(p, group, &sums);
    for (int64_t c = first; c < end; c++) {
        const REAL *x = (const REAL *)p->x + c * S, *g = p->g ? (const REAL *)p->g + c * S : NULL;
        REAL *dx = p->y ? (REAL *)p->y + c * S : NULL;
        double k[3];
        finish_channel(p, c, &sums, k);
        REAL kg = (REAL)k[0], a = (REAL)k[1], d = (REAL)k[2];
        for (int64_t n = 0; dx && n < N; n++) {
            const REAL *xn = x + n * step, *gn = g + n * step;
            if (g)
                for (int64_t j = 0; j < S; j++) dx[n * step + j] = kg * gn[j] + a * (xn[j] - mean) + d;
            else
                for (int64_t j = 0; j < S; j++) dx[n * step + j] = a * (xn[j] - mean) + d;
        }
    }
}

// ---- rows -----------------------------------------------------------------------------------------

// Computes a block's mean of every channel and the sum of squared deviations from it; add_stats combines the blocks.
// Processes four rows at a time, so that the sums are read and written less often.
static MS_KERNEL void R(rows_stats)(void *arg, int64_t from, int64_t to, int64_t block)
{
    const bn *p = arg;
    int64_t C = p->c, first = from / C, last = to / C, n = first;
    double *restrict mean = p->parts + 2 * C * block, *restrict spread = mean + C;
    const REAL *x = (const REAL *)p->x + first * C;
    memset(mean, 0, (size_t)C * sizeof *mean);
    memset(spread, 0, (size_t)C * sizeof *spread);
    for (; n + 4 <= last; n += 4, x += 4 * C)
        for (int64_t c = 0; c < C; c++) mean[c] += ((double)x[c] + x[C + c]) + ((double)x[2 * C + c] + x[3 * C + c]);
    for (; n < last; n++, x += C)
        for (int64_t c = 0; c < C; c++) mean[c] += x[c];
    for (int64_t c = 0; c < C; c++) mean[c] /= (double)(last - first);
    x = (const REAL *)p->x + first * C;
    for (n = first; n + 4 <= last; n += 4, x += 4 * C)
        for (int64_t c = 0; c < C; c++) {
            double m = mean[c], d0 = x[c] - m, d1 = x[C + c] - m, d2 = x[2 * C + c] - m, d3 = x[3 * C + c] - m;
            spread[c] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);
        }
    for (; n < last; n++, x += C)
        for (int64_t c = 0; c < C; c++) spread[c] += (x[c] - mean[c]) * (x[c] - mean[c]);
}

// Computes rows of y. The coefficients of each channel are its mean, scale and shift.
static MS_KERNEL void R(rows)(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const bn *p = arg;
    const REAL *x = p->x, *mean = p->coefficients, *scale = mean + p->c, *shift = scale + p->c;
    REAL *y = p->y;
    int64_t C = p->c;
    for (int64_t n = first / C; n < last / C; n++)
        for (int64_t c = 0; c < C; c++) y[n * C + c] = (x[n * C + c] - mean[c]) * scale[c] + shift[c];
}

// Computes a block's sums of g and of g (x - mean), per channel.
static MS_KERNEL void R(rows_sums)(void *arg, int64_t from, int64_t to, int64_t block)
{
    const bn *p = arg;
    int64_t C = p->c, first = from / C, last = to / C, n = first;
    double *restrict sg = p->parts + 2 * C * block, *restrict sgx = sg + C;
    const REAL *x = (const REAL *)p->x + first * C, *g = (const REAL *)p->g + first * C, *mean = p->coefficients;
    memset(sg, 0, (size_t)C * sizeof *sg);
    memset(sgx, 0, (size_t)C * sizeof *sgx);
    for (; n + 2 <= last; n += 2, x += 2 * C, g += 2 * C)
        for (int64_t c = 0; c < C; c++) {
            double a = g[c], b = g[C + c];
            sg[c] += a + b;
            sgx[c] += a * (x[c] - mean[c]) + b * (x[C + c] - mean[c]);
        }
    for (; n < last; n++, x += C, g += C)
        for (int64_t c = 0; c < C; c++) {
            sg[c] += g[c];
            sgx[c] += (double)g[c] * (x[c] - mean[c]);
        }
}

// Computes rows of dx. The coefficients of each channel are its mean and the three factors of ms_bn_finish.
static MS_KERNEL void R(rows_backward)(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const bn *p = arg;
    const REAL *x = p->x, *g = p->g, *mean = p->coefficients, *kg = mean + p->c, *a = kg + p->c, *d = a + p->c;
    REAL *dx = p->y;
    int64_t C = p->c;
    for (int64_t n = first / C; n < last / C; n++) {
        if (g)
            for (int64_t c = 0; c < C; c++)
                dx[n * C + c] = kg[c] * g[n * C + c] + a[c] * (x[n * C + c] - mean[c]) + d[c];
        else
            for (int64_t c = 0; c < C; c++) dx[n * C + c] = a[c] * (x[n * C + c] - mean[c]) + d[c];
    }
}
