// batch_norm.c -- batch_norm on the CPU: a task has some channels, whose statistics and weights it holds in
// double; elements are worked on in float32 or float64 (half types are converted on the way in and out).
//
// Sizes: N batch, C channels, S the rest (1 for [N, C]).
#include <math.h>
#include "rows.h"
#include "../grad.h"
#include "../ops.h"
#include "layers.h"

enum { CHANNELS = 32 };             // of a task

typedef struct bn {
    int         dtype;              // REAL's
    bool        training;
    int64_t     n, c, s, group;     // sizes; channels a task
    double      eps;
    const void *x, *g;
    void       *y;                  // or dx; NULL when nobody wants it
    double     *w, *b, *mean, *var, *gmean, *gvar;          // by channel; w, b, gmean, gvar may be NULL
    double     *dw, *db, *dmean, *dvar;
} bn;

#define REAL float
#define R(x) x##_f32
#include "batch_norm_body.h"
#undef REAL
#undef R
#define REAL double
#define R(x) x##_f64
#include "batch_norm_body.h"

static void forward(void *arg, int64_t first, int64_t last, int64_t block)
{
    const bn *p = arg;
    int64_t each = p->n * p->s;
    (void)block;
    for (int64_t c = first / each; c < last / each; c += p->group) {
        int64_t end = c + p->group < last / each ? c + p->group : last / each;
        if (p->dtype == MS_F64) batch_norm_f64(p, c, end);
        else batch_norm_f32(p, c, end);
    }
}

static void backward(void *arg, int64_t first, int64_t last, int64_t block)
{
    const bn *p = arg;
    int64_t each = p->n * p->s;
    (void)block;
    for (int64_t c = first / each; c < last / each; c += p->group) {
        int64_t end = c + p->group < last / each ? c + p->group : last / each;
        if (p->dtype == MS_F64) batch_norm_backward_f64(p, c, end);
        else batch_norm_backward_f32(p, c, end);
    }
}

static void sizes(bn *p, const ms_tensor *x)
{
    p->n = x->shape[0];
    p->c = x->shape[1];
    p->s = 1;
    for (int d = 2; d < x->ndim; d++) p->s *= x->shape[d];
    p->group = p->s == 1 ? CHANNELS : 1;
    p->dtype = x->dtype == MS_F64 ? MS_F64 : MS_F32;
}

// t as contiguous numbers of that dtype: itself (retained) or a copy.
static ms_status as_dtype(ms_tensor **out, ms_tensor *t, int dtype)
{
    if (t->dtype == dtype) return ms__contiguous(out, t);
    return ms__run_op(&ms__op_cast, 1, &t, 1, (int64_t[]){ dtype }, 0, NULL, 1, out);
}

// One number a channel, as doubles in `room`; NULL for an absent tensor.
static ms_status channels(double **out, double *room, ms_tensor *t)
{
    *out = NULL;
    if (!t) return MS_OK;
    ms_tensor *wide;
    MS_TRY(as_dtype(&wide, t, MS_F64));
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

// Where to write elements of `out`: itself, or a tensor of the working dtype that put_back copies and releases.
static ms_status work_on(ms_tensor **work, ms_tensor *out, int dtype)
{
    *work = NULL;
    if (!out) return MS_OK;
    if (out->dtype == dtype) {
        *work = ms__retain(out);
        return MS_OK;
    }
    return ms__tensor_new(work, dtype, ms__device(out), out->ndim, out->shape, "batch_norm");
}

static ms_status put_back(ms_tensor *out, ms_tensor *work, ms_status st)
{
    if (st == MS_OK && work && work != out) st = ms__copy(out, work);
    ms__release(work);
    return st;
}

ms_status ms__cpu_batch_norm(ms_call *c)
{
    bn p = { .training = c->i[0] != 0, .eps = c->f[0] };
    ms_tensor *x = NULL, *y = NULL;
    ms_block *room = NULL;
    sizes(&p, c->in[0]);
    if (c->out[0]->numel == 0) {                            // a batch of nothing: statistics of 0
        for (int k = 1; k < c->n_out; k++) MS_TRY(ms__zero(c->out[k]));
        return MS_OK;
    }
    MS_TRY(ms__alloc(&room, MS_CPU, (size_t)(4 * p.c) * sizeof(double), c->op->name));
    double *at = room->data;
    ms_status st = as_dtype(&x, c->in[0], p.dtype);
    if (st == MS_OK) st = work_on(&y, c->out[0], p.dtype);
    if (st == MS_OK) st = channels(&p.w, at, c->n_in > 1 ? c->in[1] : NULL);
    if (st == MS_OK) st = channels(&p.b, at + p.c, c->n_in > 2 ? c->in[2] : NULL);
    if (st == MS_OK && !p.training) st = channels(&p.mean, at + 2 * p.c, c->in[3]);
    if (st == MS_OK && !p.training) st = channels(&p.var, at + 3 * p.c, c->in[4]);
    if (st == MS_OK) {
        if (p.training) p.mean = at + 2 * p.c, p.var = at + 3 * p.c;
        p.x = ms__data(x);
        p.y = ms__data(y);
        ms__parallel(x->numel, p.group * p.n * p.s, forward, &p);
        if (p.training) {
            put_channels(c->out[1], p.mean);
            put_channels(c->out[2], p.var);
        }
    }
    st = put_back(c->out[0], y, st);
    ms__release(x);
    ms__free(room);
    return st;
}

// (gradient?, x, weight?, mean, var, gradient of mean?, gradient of var?) -> dx, dw, db, dmean, dvar as the mask asks
ms_status ms__cpu_batch_norm_backward(ms_call *c)
{
    bn p = { .training = c->i[0] != 0, .eps = c->f[0] };
    ms_tensor *g = NULL, *x = NULL, *y = NULL, *dx = ms__grad_out(c, 0);
    ms_block *room = NULL;
    sizes(&p, c->in[1]);
    if (c->in[1]->numel == 0) {
        for (int k = 0; k < c->n_out; k++) MS_TRY(ms__zero(c->out[k]));
        return MS_OK;
    }
    MS_TRY(ms__alloc(&room, MS_CPU, (size_t)(9 * p.c) * sizeof(double), c->op->name));
    double *at = room->data;
    ms_status st = as_dtype(&x, c->in[1], p.dtype);
    if (st == MS_OK && c->in[0]) st = as_dtype(&g, c->in[0], p.dtype);
    if (st == MS_OK) st = work_on(&y, dx, p.dtype);
    if (st == MS_OK) st = channels(&p.w, at, c->in[2]);
    if (st == MS_OK) st = channels(&p.mean, at + p.c, c->in[3]);
    if (st == MS_OK) st = channels(&p.var, at + 2 * p.c, c->in[4]);
    if (st == MS_OK) st = channels(&p.gmean, at + 3 * p.c, c->in[5]);
    if (st == MS_OK) st = channels(&p.gvar, at + 4 * p.c, c->in[6]);
    if (st == MS_OK) {
        p.x = ms__data(x);
        p.g = g ? ms__data(g) : NULL;
        p.y = y ? ms__data(y) : NULL;
        p.dw = at + 5 * p.c, p.db = at + 6 * p.c, p.dmean = at + 7 * p.c, p.dvar = at + 8 * p.c;
        ms__parallel(x->numel, p.group * p.n * p.s, backward, &p);
        put_channels(ms__grad_out(c, 1), p.dw);
        put_channels(ms__grad_out(c, 2), p.db);
        put_channels(ms__grad_out(c, 3), p.dmean);
        put_channels(ms__grad_out(c, 4), p.dvar);
    }
    st = put_back(dx, y, st);
    ms__release(g);
    ms__release(x);
    ms__free(room);
    return st;
}
