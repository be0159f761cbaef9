// SPDX-License-Identifier: MIT
// cpu/rows/batch_norm.c -- batch_norm on the CPU. Statistics and weights are double, elements float32 or float64 (of
// half types, a float32 copy is made, and the result is converted back).
//
// Sizes: N batch, C channels, S product of the remaining dimensions. With S > 1 a task is one channel, which is read
// several times, but from memory only once if it fits in the second-level cache. So is a group of adjacent channels
// that share their statistics (share > 1; also with S = 1). Otherwise, with S = 1 a task is a block of rows; the block
// size depends only on the shape, and results of blocks are combined in order.
#include "cpu/rows/rows.h"
#include "formulas/batch_norm.h"
#include "rows/grad.h"
#include "rows/ops.h"
#include "cpu/rows/layers.h"
#include "cpu/rows/work.h"

typedef struct bn {
    int dtype;  // the dtype of REAL
    bool training;
    int64_t n, c, s, share, rows;  // sizes; channels that share statistics; number of rows in a block
    double eps;
    const void *x, *g;
    void *y;                                    // the output, dx in backward; NULL if it is not needed
    void *coefficients;                         // as REAL: 3 or 4 arrays with a number per channel; used where S = 1
    double *parts;                              // where S = 1: per block, the 2 C results of rows_stats or rows_sums
    double *w, *b, *mean, *var, *gmean, *gvar;  // one number per channel; w, b, gmean, gvar may be NULL
    double *dw, *db, *dmean, *dvar;
    void (*channels)(const struct bn *, int64_t);  // computes the channels of one mean; used where S or share > 1
} bn;

// db and dw hold the sums of g and of g (x - mean) of each channel: sets *s for those that have mean `group`.
MS_INLINE void add_channels(const bn *p, int64_t group, ms_bn_sums *s)
{
    *s = (ms_bn_sums) { .var = p->var[group], .eps = p->eps, .count = (double)(p->n * p->s * p->share) };
    s->training = p->training;
    s->gmean = p->gmean ? p->gmean[group] : 0;
    s->gvar = p->gvar ? p->gvar[group] : 0;
    for (int64_t c = group * p->share; c < (group + 1) * p->share; c++) {
        double w = p->w ? p->w[c] : 1;
        s->wsg += w * p->db[c], s->wsgx += w * p->dw[c];
    }
}
// From these, computes channel c's dw, db, dmean and dvar, and the three factors k of its dx, which multiply g, x -
// mean and 1.
MS_INLINE void finish_channel(const bn *p, int64_t c, const ms_bn_sums *group, double *k)
{
    ms_bn_sums s = *group;
    s.w = p->w ? p->w[c] : 1;
    s.sg = p->db[c], s.sgx = p->dw[c];
    ms_bn_channel q = ms_bn_finish(&s);
    p->dw[c] = q.dw, p->db[c] = q.db, p->dmean[c] = q.dmean, p->dvar[c] = q.dvar;
    k[0] = q.of_g, k[1] = q.of_x, k[2] = q.alone;
}

#define REAL float
#define R(x) x##_f32
#include "cpu/rows/batch_norm_body.h"
#undef REAL
#undef R
#define REAL double
#define R(x) x##_f64
#include "cpu/rows/batch_norm_body.h"

#define BOTH(p, name) ((p)->dtype == MS_F64 ? name##_f64 : name##_f32)

static void channels_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    const bn *p = arg;
    int64_t each = p->n * p->s * p->share;
    (void)block;
    for (int64_t k = first / each; k < last / each; k++) p->channels(p, k);
}

static void by_channel(bn *p, void (*channels)(const bn *, int64_t))
{
    p->channels = channels;
    ms__parallel(p->c * p->n * p->s, p->n * p->s * p->share, channels_range, p);
}
static bool in_rows(const bn *p) { return p->s == 1 && p->share == 1; }

static int64_t batch_blocks_of(const bn *p) { return (p->n + p->rows - 1) / p->rows; }

// Combines the means and squared deviations of blocks of rows (Chan, Golub and LeVeque 1979).
static void add_stats(const bn *p)
{
    double count = 0;
    memset(p->mean, 0, (size_t)p->c * sizeof *p->mean);
    memset(p->var, 0, (size_t)p->c * sizeof *p->var);
    for (int64_t k = 0; k < batch_blocks_of(p); k++) {
        const double *part = p->parts + 2 * p->c * k;
        double n = (double)(p->n - k * p->rows < p->rows ? p->n - k * p->rows : p->rows), share = n / (count + n);
        for (int64_t c = 0; c < p->c; c++) {
            double d = part[c] - p->mean[c];
            p->var[c] += part[p->c + c] + d * d * count * share;
            p->mean[c] += d * share;
        }
        count += n;
    }
    for (int64_t c = 0; c < p->c; c++) p->var[c] /= count;
}

static void set_coefficient(const bn *p, int k, int64_t c, double v)
{
    if (p->dtype == MS_F64) ((double *)p->coefficients)[k * p->c + c] = v;
    else ((float *)p->coefficients)[k * p->c + c] = (float)v;
}

static void by_rows(bn *p)
{
    int64_t all = p->n * p->c, block = p->rows * p->c;
    if (p->training) {
        ms__parallel(all, block, BOTH(p, rows_stats), p);
        add_stats(p);
    }
    if (!p->y) return;
    for (int64_t c = 0; c < p->c; c++) {
        set_coefficient(p, 0, c, p->mean[c]);
        set_coefficient(p, 1, c, ms_bn_scale(p->var[c], p->eps, p->w ? p->w[c] : 1));
        set_coefficient(p, 2, c, p->b ? p->b[c] : 0);
    }
    ms__parallel(all, block, BOTH(p, rows), p);
}

static void by_rows_backward(bn *p)
{
    int64_t all = p->n * p->c, block = p->rows * p->c;
    for (int64_t c = 0; c < p->c; c++) set_coefficient(p, 0, c, p->mean[c]);
    if (p->g) ms__parallel(all, block, BOTH(p, rows_sums), p);
    double *sums = p->parts;
    if (!p->g) memset(sums, 0, (size_t)(2 * p->c) * sizeof *sums);
    for (int64_t j = 1; p->g && j < batch_blocks_of(p); j++)
        for (int64_t c = 0; c < 2 * p->c; c++) sums[c] += p->parts[2 * p->c * j + c];
    for (int64_t c = 0; c < p->c; c++) {
        double k[3];
        ms_bn_sums s;
        p->db[c] = sums[c], p->dw[c] = sums[p->c + c];
        add_channels(p, c, &s);
        finish_channel(p, c, &s, k);
        for (int i = 0; i < 3; i++) set_coefficient(p, i + 1, c, k[i]);
    }
    if (p->y) ms__parallel(all, block, BOTH(p, rows_backward), p);
}

static void batch_norm_sizes(bn *p, const ms_tensor *x, int64_t share)
{
    p->share = share;
    p->n = x->shape[0];
    p->c = x->shape[1];
    p->s = 1;
    for (int d = 2; d < x->ndim; d++) p->s *= x->shape[d];
    p->rows = p->c && 32768 / p->c > 64 ? 32768 / p->c : 64;
    p->dtype = x->dtype == MS_F64 ? MS_F64 : MS_F32;
}

// Allocates the arrays with one number per channel, the coefficients and the results of blocks.
static ms_status room_for_channels(ms_block **room, bn *p, int by_channel_arrays, const char *what)
{
    int64_t parts = in_rows(p) ? 2 * p->c * batch_blocks_of(p) : 0;
    MS_TRY(ms__alloc_scratch(room, (size_t)((by_channel_arrays + 4) * p->c + parts) * sizeof(double), what));
    double *at = (*room)->data;
    p->coefficients = at + by_channel_arrays * p->c;
    p->parts = at + (by_channel_arrays + 4) * p->c;
    return MS_OK;
}

// Converts a tensor of one number per channel to doubles in `room`. *out is NULL for an absent tensor.
static ms_status read_channels(double **out, double *room, ms_tensor *t)
{
    *out = NULL;
    if (!t) return MS_OK;
    ms_tensor *wide;
    MS_TRY(ms__as_dtype(&wide, t, MS_F64));
    memcpy(room, ms__data(wide), ms__nbytes(wide));
    ms__release(wide);
    *out = room;
    return MS_OK;
}

static void put_channels(ms_tensor *out, const double *from)
{
    if (!out) return;
    for (int64_t c = 0; c < out->numel; c++) {
        if (out->dtype == MS_F64) ((double *)ms__data(out))[c] = from[c];
        else ((float *)ms__data(out))[c] = (float)from[c];
    }
}

ms_status ms__cpu_batch_norm(ms_call *c)
{
    bn p = { .training = c->i[0] != 0, .eps = c->f[0] };
    ms_tensor *x = NULL, *y = NULL;
    ms_block *room = NULL;
    batch_norm_sizes(&p, c->in[0], c->n_i > 1 ? c->i[1] : 1);
    if (c->out[0]->numel == 0) {  // an empty batch: statistics of 0
        for (int k = 1; k < c->n_out; k++) MS_TRY(ms__zero(c->out[k]));
        return MS_OK;
    }
    MS_TRY(room_for_channels(&room, &p, 4, c->op->name));
    double *at = room->data;
    ms_status st = ms__as_dtype(&x, c->in[0], p.dtype);
    if (st == MS_OK) st = ms__work_on(&y, c->out[0], p.dtype, c->op->name);
    if (st == MS_OK) st = read_channels(&p.w, at, c->n_in > 1 ? c->in[1] : NULL);
    if (st == MS_OK) st = read_channels(&p.b, at + p.c, c->n_in > 2 ? c->in[2] : NULL);
    if (st == MS_OK && !p.training) st = read_channels(&p.mean, at + 2 * p.c, c->in[3]);
    if (st == MS_OK && !p.training) st = read_channels(&p.var, at + 3 * p.c, c->in[4]);
    if (st == MS_OK) {
        if (p.training) p.mean = at + 2 * p.c, p.var = at + 3 * p.c;
        p.x = ms__data(x);
        p.y = ms__data(y);
        if (in_rows(&p)) by_rows(&p);
        else by_channel(&p, BOTH(&p, channels));
        if (p.training) {
            put_channels(c->out[1], p.mean);
            put_channels(c->out[2], p.var);
        }
    }
    st = ms__put_back(c->out[0], y, st);
    ms__release(x);
    ms__free(room);
    return st;
}

ms_status ms__cpu_batch_norm_stats(ms_call *c)
{
    bn p = { .training = true };
    ms_tensor *x = NULL;
    ms_block *room = NULL;
    batch_norm_sizes(&p, c->in[0], 1);
    if (c->in[0]->numel == 0) {
        MS_TRY(ms__zero(c->out[0]));
        return ms__zero(c->out[1]);
    }
    MS_TRY(room_for_channels(&room, &p, 2, c->op->name));
    ms_status st = ms__as_dtype(&x, c->in[0], p.dtype);
    if (st == MS_OK) {
        p.mean = room->data, p.var = p.mean + p.c;
        p.x = ms__data(x);
        if (in_rows(&p)) by_rows(&p);
        else by_channel(&p, BOTH(&p, channels));
        put_channels(c->out[0], p.mean);
        put_channels(c->out[1], p.var);
    }
    ms__release(x);
    ms__free(room);
    return st;
}

// Inputs: gradient (optional), x, weight (optional), mean, var, and optionally the gradients of mean and of var.
// Outputs: those of dx, dw, db, dmean, dvar that the mask (rows/grad.h) selects.
ms_status ms__cpu_batch_norm_backward(ms_call *c)
{
    bn p = { .training = c->i[0] != 0, .eps = c->f[0] };
    ms_tensor *g = NULL, *x = NULL, *y = NULL, *dx = ms__grad_out(c, 0);
    ms_block *room = NULL;
    batch_norm_sizes(&p, c->in[1], c->i[1]);
    if (c->in[1]->numel == 0) {
        for (int k = 0; k < c->n_out; k++) MS_TRY(ms__zero(c->out[k]));
        return MS_OK;
    }
    MS_TRY(room_for_channels(&room, &p, 9, c->op->name));
    double *at = room->data;
    ms_status st = ms__as_dtype(&x, c->in[1], p.dtype);
    if (st == MS_OK && c->in[0]) st = ms__as_dtype(&g, c->in[0], p.dtype);
    if (st == MS_OK) st = ms__work_on(&y, dx, p.dtype, c->op->name);
    if (st == MS_OK) st = read_channels(&p.w, at, c->in[2]);
    if (st == MS_OK) st = read_channels(&p.mean, at + p.c, c->in[3]);
    if (st == MS_OK) st = read_channels(&p.var, at + 2 * p.c, c->in[4]);
    if (st == MS_OK) st = read_channels(&p.gmean, at + 3 * p.c, c->in[5]);
    if (st == MS_OK) st = read_channels(&p.gvar, at + 4 * p.c, c->in[6]);
    if (st == MS_OK) {
        p.x = ms__data(x);
        p.g = g ? ms__data(g) : NULL;
        p.y = y ? ms__data(y) : NULL;
        p.dw = at + 5 * p.c, p.db = at + 6 * p.c, p.dmean = at + 7 * p.c, p.dvar = at + 8 * p.c;
        if (in_rows(&p)) by_rows_backward(&p);
        else by_channel(&p, BOTH(&p, channels_backward));
        put_channels(ms__grad_out(c, 1), p.dw);
        put_channels(ms__grad_out(c, 2), p.db);
        put_channels(ms__grad_out(c, 3), p.dmean);
        put_channels(ms__grad_out(c, 4), p.dvar);
    }
    st = ms__put_back(dx, y, st);
    ms__release(g);
    ms__release(x);
    ms__free(room);
    return st;
}
