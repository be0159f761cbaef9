// SPDX-License-Identifier: MIT
// cpu/product/column_sum.c -- sums of a matrix's columns: the gradient of a bias.
#include "cpu/product/product.h"
#include "cpu/rows/rows.h"

// Each block of 64 rows is summed into a partial row; the partial rows are added in order.
enum { SUM_ROWS = 64, SUM_COLS = 512 };

typedef struct colsum {
    int dtype;
    void *out;
    const void *x;
    int64_t m, n, rs;
} colsum;

static MS_KERNEL void add_rows_f32(float *restrict s, const float *restrict x, int64_t rows, int64_t n, int64_t rs)
{
    for (; rows >= 4; rows -= 4, x += 4 * rs)
        for (int64_t j = 0; j < n; j++) s[j] = s[j] + x[j] + x[rs + j] + x[2 * rs + j] + x[3 * rs + j];
    for (; rows > 0; rows--, x += rs)
        for (int64_t j = 0; j < n; j++) s[j] += x[j];
}

static MS_KERNEL void add_rows_f64(double *restrict s, const double *restrict x, int64_t rows, int64_t n, int64_t rs)
{
    for (; rows >= 4; rows -= 4, x += 4 * rs)
        for (int64_t j = 0; j < n; j++) s[j] = s[j] + x[j] + x[rs + j] + x[2 * rs + j] + x[3 * rs + j];
    for (; rows > 0; rows--, x += rs)
        for (int64_t j = 0; j < n; j++) s[j] += x[j];
}

static void colsum_task(void *arg, int64_t block, int64_t end, int64_t unused)
{
    const colsum *w = arg;
    int64_t j0 = block * SUM_COLS, n = w->n - j0 < SUM_COLS ? w->n - j0 : SUM_COLS;
    (void)end, (void)unused;
    if (w->dtype == MS_F64) {
        double total[SUM_COLS], s[SUM_COLS];  // only the n elements that are used are cleared
        memset(total, 0, (size_t)n * sizeof *total);
        for (int64_t i = 0; i < w->m; i += SUM_ROWS) {
            memset(s, 0, (size_t)n * sizeof *s);
            add_rows_f64(s, (const double *)w->x + i * w->rs + j0, w->m - i < SUM_ROWS ? w->m - i : SUM_ROWS, n, w->rs);
            for (int64_t j = 0; j < n; j++) total[j] += s[j];
        }
        memcpy((double *)w->out + j0, total, (size_t)n * sizeof(double));
        return;
    }
    float total[SUM_COLS], s[SUM_COLS], t[SUM_COLS];
    memset(total, 0, (size_t)n * sizeof *total);
    for (int64_t i = 0; i < w->m; i += SUM_ROWS) {
        memset(s, 0, (size_t)n * sizeof *s);
        int64_t rows = w->m - i < SUM_ROWS ? w->m - i : SUM_ROWS;
        if (w->dtype == MS_F32) add_rows_f32(s, (const float *)w->x + i * w->rs + j0, rows, n, w->rs);
        else
            for (int64_t r = 0; r < rows; r++)
                add_rows_f32(s, ms__row_in(w->dtype, w->x, (i + r) * w->rs + j0, 1, n, t), 1, n, 0);
        for (int64_t j = 0; j < n; j++) total[j] += s[j];
    }
    if (w->dtype == MS_F32) memcpy((float *)w->out + j0, total, (size_t)n * sizeof(float));
    else ms__row_out(w->dtype, w->out, j0, 1, n, total);
}

// As colsum_task for a single block of rows in float32, without partial sums in memory.
static MS_KERNEL void few_rows_f32(float *out, const float *x, int64_t m, int64_t n, int64_t rs)
{
    int64_t j = 0;
    for (; j + 32 <= n; j += 32) {
        float t[32] = { 0 };
        for (int64_t i = 0; i < m; i++)
            for (int l = 0; l < 32; l++) t[l] += x[i * rs + j + l];
        for (int l = 0; l < 32; l++) out[j + l] = t[l];
    }
    for (; j < n; j++) {
        float t = 0;
        for (int64_t i = 0; i < m; i++) t += x[i * rs + j];
        out[j] = t;
    }
}

void ms__column_sum(int dtype, void *out, const void *x, int64_t m, int64_t n, int64_t rs)
{
    colsum w = { dtype, out, x, m, n, rs };
    if (dtype == MS_F32 && m <= SUM_ROWS && m * n < 1 << 12) {
        few_rows_f32(out, x, m, n, rs);
        return;
    }
    int64_t blocks = (n + SUM_COLS - 1) / SUM_COLS;
    if (m * n < 1 << 15)
        for (int64_t b = 0; b < blocks; b++) colsum_task(&w, b, b + 1, b);
    else ms__parallel_tasks(blocks, colsum_task, &w);
}
