// SPDX-License-Identifier: MIT
// cpu/index/embedding.c -- looks up rows of a table. Backward groups the positions by id (a stable counting sort) and
// adds the gradients of each id in order, so that no two threads write the same row and a sum of half types is rounded
// once. If the table has a gradient already, these sums are added to it in place; the result is bitwise the same as
// adding a separate gradient.
#include "cpu/rows/layers.h"
#include "cpu/rows/rows.h"

typedef struct table {
    const void *from;
    void *to;
    const int64_t *ids;  // converted to int64
    const int64_t *start, *order;
    int64_t n, rows, width, padding;  // padding: the id without a gradient; -1 if there is none
    int dtype;
    bool more;  // add to the gradient in `to`
} table;

// *out: the ids as int64, after a range check. Their memory belongs to *block if they were int32, otherwise to *held,
// which is t or a contiguous copy of it.
static ms_status read_ids(ms_call *c, ms_tensor *t, int64_t rows, ms_tensor **held, ms_block **block,
                          const int64_t **out)
{
    MS_TRY(ms__contiguous(held, t));
    const int64_t *ids = ms__data(*held);
    if (t->dtype == MS_I32) {
        MS_TRY(ms__alloc_scratch(block, (size_t)t->numel * sizeof(int64_t), c->op->name));
        int64_t *wide = (*block)->data;
        for (int64_t k = 0; k < t->numel; k++) wide[k] = ((const int32_t *)ms__data(*held))[k];
        ids = wide;
    }
    for (int64_t k = 0; k < t->numel; k++)
        if (MS_UNLIKELY(ids[k] < 0 || ids[k] >= rows))
            return ms__call_fail(c,
                                 "id %lld (element %lld) is out of range, expected 0 or more and below the weight's "
                                 "%lld row%s",
                                 (long long)ids[k], (long long)k + 1, (long long)rows, rows == 1 ? "" : "s");
    *out = ids;
    return MS_OK;
}

static void gather_rows(void *arg, int64_t first, int64_t last, int64_t block)
{
    const table *t = arg;
    size_t row = (size_t)t->width * (size_t)ms__dtype_size(t->dtype);
    (void)block;
    for (int64_t k = first / t->width; k < last / t->width; k++)
        memcpy((char *)t->to + (size_t)k * row, (const char *)t->from + (size_t)t->ids[k] * row, row);
}

ms_status ms__cpu_embedding(ms_call *c)
{
    ms_tensor *w = NULL, *held = NULL;
    ms_block *block = NULL;
    table t = { .dtype = c->in[0]->dtype, .width = c->in[0]->shape[1] };
    ms_status st = ms__contiguous(&w, c->in[0]);
    if (st == MS_OK) st = read_ids(c, c->in[1], w->shape[0], &held, &block, &t.ids);
    if (st == MS_OK && c->out[0]->numel) {
        t.from = ms__data(w);
        t.to = ms__data(c->out[0]);
        ms__parallel(c->out[0]->numel, ms__rows_per_block(t.width) * t.width, gather_rows, &t);
    }
    if (block) ms__free(block);
    ms__release(held);
    ms__release(w);
    return st;
}

static MS_KERNEL void add_row_f32(float *s, const float *x, int64_t n)
{
    for (int64_t j = 0; j < n; j++) s[j] += x[j];
}
static MS_KERNEL void add_row_f64(double *s, const double *x, int64_t n)
{
    for (int64_t j = 0; j < n; j++) s[j] += x[j];
}

enum { PART = 1024 };  // elements of a row that are summed at a time

// Writes columns [j, j + n) of the sum of one id's gradients to the id's row, or adds them if t->more is set.
static void scatter_f64(const table *t, int64_t row, int64_t from, int64_t to, int64_t j, int64_t n)
{
    double *out = (double *)t->to + row * t->width + j, s[PART] = { 0 };
    for (int64_t k = from; k < to; k++) add_row_f64(s, (const double *)t->from + t->order[k] * t->width + j, n);
    if (t->more) add_row_f64(out, s, n);
    else memcpy(out, s, (size_t)n * sizeof *s);
}

static void scatter_f32(const table *t, int64_t row, int64_t from, int64_t to, int64_t j, int64_t n)
{
    float s[PART] = { 0 }, x[PART];
    int64_t at = row * t->width + j;
    for (int64_t k = from; k < to; k++)
        add_row_f32(s, ms__row_in(t->dtype, t->from, t->order[k] * t->width + j, 1, n, x), n);
    if (t->more) {
        ms_bf16 half[PART];  // float16 or bfloat16: the sum is rounded before it is added, as a separate gradient is
        if (ms__is_half(t->dtype)) {
            ms__row_out(t->dtype, half, 0, 1, n, s);
            ms__row_in(t->dtype, half, 0, 1, n, s);
        }
        add_row_f32(s, ms__row_in(t->dtype, t->to, at, 1, n, x), n);
    }
    if (t->dtype == MS_F32) memcpy((float *)t->to + at, s, (size_t)n * sizeof *s);
    else ms__row_out(t->dtype, t->to, at, 1, n, s);
}

static void scatter(void *arg, int64_t first, int64_t last, int64_t block)
{
    const table *t = arg;
    int64_t width = t->width;
    (void)block;
    for (int64_t row = first / width; row < last / width; row++) {
        int64_t from = t->start[row], to = row == t->padding ? from : t->start[row + 1];
        if (from == to) {
            size_t bytes = (size_t)(width * ms__dtype_size(t->dtype));
            if (!t->more) memset((char *)t->to + (size_t)row * bytes, 0, bytes);
            continue;
        }
        for (int64_t j = 0; j < width; j += PART) {
            int64_t n = width - j < PART ? width - j : PART;
            if (t->dtype == MS_F64) scatter_f64(t, row, from, to, j, n);
            else scatter_f32(t, row, from, to, j, n);
        }
    }
}

ms_status ms__cpu_embedding_backward(ms_call *c)
{
    ms_tensor *g = NULL, *held = NULL, *ids = c->in[1], *out = c->out[0];
    ms_block *block = NULL, *sorted = NULL;
    table t = {
        .dtype = out->dtype, .width = out->shape[1], .rows = out->shape[0], .padding = c->i[0], .more = c->n_in == 3
    };
    ms_status st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK) st = read_ids(c, ids, t.rows, &held, &block, &t.ids);
    if (st == MS_OK) st = ms__alloc_scratch(&sorted, (size_t)(t.rows + 2 + ids->numel) * sizeof(int64_t), c->op->name);
    if (st == MS_OK && out->numel) {
        // start[row + 1] is where the row's next entry goes during the sort, and the row's end afterwards.
        int64_t *start = sorted->data, *order = start + t.rows + 2;
        memset(start, 0, (size_t)(t.rows + 2) * sizeof *start);
        for (int64_t k = 0; k < ids->numel; k++) start[t.ids[k] + 2]++;
        for (int64_t r = 1; r < t.rows; r++) start[r + 1] += start[r];
        for (int64_t k = 0; k < ids->numel; k++) order[start[t.ids[k] + 1]++] = k;
        t.start = start;
        t.order = order;
        t.from = ms__data(g);
        t.to = ms__data(out);
        ms__parallel(out->numel, ms__rows_per_block(t.width) * t.width, scatter, &t);
    }
    if (sorted) ms__free(sorted);
    if (block) ms__free(block);
    ms__release(held);
    ms__release(g);
    return st;
}
