// batch_norm_body.h -- batch_norm and its gradient over a range of channels, included once per
// accumulation type by batch_norm.c. Sums of one run of a channel are made in REAL, runs are added in double,
// in order: bits depend on the shape only.

// sum of g (x - m)
MS_INLINE REAL R(row_dot_from)(const REAL *g, const REAL *x, REAL m, int64_t n)
{
    R(ms_lanes) s = { 0 };
    int64_t j = 0;
    for (; j + 16 <= n; j += 16) s += *(const R(ms_lanes) *)(g + j) * (*(const R(ms_lanes) *)(x + j) - m);
    for (int64_t l = 0; j + l < n; l++) s[l] += g[j + l] * (x[j + l] - m);
    return R(ms__fold)(&s);
}

static MS_KERNEL void R(batch_norm)(const bn *p, int64_t first, int64_t last)
{
    int64_t N = p->n, C = p->c, S = p->s;
    const REAL *x = p->x;
    REAL *y = p->y;
    double count = (double)(N * S), sum[CHANNELS] = { 0 };
    if (p->training) {
        if (S == 1) {
            for (int64_t n = 0; n < N; n++)
                for (int64_t c = first; c < last; c++) sum[c - first] += x[n * C + c];
            for (int64_t c = first; c < last; c++) p->mean[c] = sum[c - first] / count, sum[c - first] = 0;
            for (int64_t n = 0; n < N; n++)
                for (int64_t c = first; c < last; c++) {
                    double d = x[n * C + c] - p->mean[c];
                    sum[c - first] += d * d;
                }
            for (int64_t c = first; c < last; c++) p->var[c] = sum[c - first] / count;
        } else {
            for (int64_t c = first; c < last; c++) {
                double total = 0, spread = 0;
                for (int64_t n = 0; n < N; n++) total += R(ms__row_sum)(x + (n * C + c) * S, S);
                p->mean[c] = total / count;
                for (int64_t n = 0; n < N; n++) spread += R(ms__row_spread)(x + (n * C + c) * S, (REAL)p->mean[c], S);
                p->var[c] = spread / count;
            }
        }
    }
    REAL mean[CHANNELS], scale[CHANNELS], shift[CHANNELS];
    for (int64_t c = first; c < last; c++) {
        mean[c - first] = (REAL)p->mean[c];
        scale[c - first] = (REAL)((p->w ? p->w[c] : 1) / sqrt(p->var[c] + p->eps));
        shift[c - first] = (REAL)(p->b ? p->b[c] : 0);
    }
    for (int64_t n = 0; n < N; n++) {
        if (S == 1) {
            for (int64_t c = first, k = 0; c < last; c++, k++) y[n * C + c] = (x[n * C + c] - mean[k]) * scale[k] + shift[k];
            continue;
        }
        for (int64_t c = first, k = 0; c < last; c++, k++) {
            const REAL *from = x + (n * C + c) * S;
            REAL *to = y + (n * C + c) * S, m = mean[k], a = scale[k], d = shift[k];
            for (int64_t j = 0; j < S; j++) to[j] = (from[j] - m) * a + d;
        }
    }
}

// With h = (x - mean) rstd, k = weight rstd, n numbers a channel: dw = sum g h, db = sum g,
// dx = k (g - db / n - h dw / n) in training, k g outside of it, written as k g + a (x - mean) + d;
// what arrives at the mean and the variance themselves joins a and d.
static MS_KERNEL void R(batch_norm_backward)(const bn *p, int64_t first, int64_t last)
{
    int64_t N = p->n, C = p->c, S = p->s;
    const REAL *x = p->x, *g = p->g;
    REAL *dx = p->y;
    double count = (double)(N * S), sg[CHANNELS] = { 0 }, sgx[CHANNELS] = { 0 };
    REAL mean[CHANNELS], kg[CHANNELS], a[CHANNELS], d[CHANNELS];
    for (int64_t c = first; c < last; c++) mean[c - first] = (REAL)p->mean[c];
    for (int64_t n = 0; g && n < N; n++) {
        if (S == 1) {
            for (int64_t c = first, k = 0; c < last; c++, k++) {
                sg[k] += g[n * C + c];
                sgx[k] += (double)g[n * C + c] * (x[n * C + c] - mean[k]);
            }
            continue;
        }
        for (int64_t c = first, k = 0; c < last; c++, k++) {
            sg[k] += R(ms__row_sum)(g + (n * C + c) * S, S);
            sgx[k] += R(row_dot_from)(g + (n * C + c) * S, x + (n * C + c) * S, mean[k], S);
        }
    }
    for (int64_t c = first, k = 0; c < last; c++, k++) {
        double rstd = 1 / sqrt(p->var[c] + p->eps), w = p->w ? p->w[c] : 1;
        if (p->dw) p->dw[c] = sgx[k] * rstd;
        if (p->db) p->db[c] = sg[k];
        if (p->dmean) p->dmean[c] = -w * rstd * sg[k];
        if (p->dvar) p->dvar[c] = -0.5 * w * rstd * rstd * rstd * sgx[k];
        kg[k] = (REAL)(w * rstd);
        a[k] = (REAL)(p->training ? (-w * rstd * rstd * rstd * sgx[k] + (p->gvar ? 2 * p->gvar[c] : 0)) / count : 0);
        d[k] = (REAL)(p->training ? (-w * rstd * sg[k] + (p->gmean ? p->gmean[c] : 0)) / count : 0);
    }
    for (int64_t n = 0; dx && n < N; n++) {
        if (S == 1 && g) {
            for (int64_t c = first, k = 0; c < last; c++, k++) dx[n * C + c] = kg[k] * g[n * C + c] + a[k] * (x[n * C + c] - mean[k]) + d[k];
            continue;
        }
        for (int64_t c = first, k = 0; c < last; c++, k++) {
            int64_t at = (n * C + c) * S;
            REAL m = mean[k], s = kg[k], r = a[k], t = d[k];
            if (g) for (int64_t j = 0; j < S; j++) dx[at + j] = s * g[at + j] + r * (x[at + j] - m) + t;
            else for (int64_t j = 0; j < S; j++) dx[at + j] = r * (x[at + j] - m) + t;
        }
    }
}
