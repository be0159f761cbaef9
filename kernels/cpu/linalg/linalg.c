// SPDX-License-Identifier: MIT
// cpu/linalg/linalg.c -- kernels of ms.linalg: for each matrix of a batch they make a column-major copy, call LAPACK
// and copy the result. Tensors of a GPU are copied to the CPU and back. OpenBLAS and the reference LAPACK (lapack.c)
// run on one thread here, so the bits of a result do not depend on the number of threads.
#include <float.h>
#include <math.h>
#include <stdio.h>
#include "cpu/cpu.h"
#include "cpu/linalg/lapack.h"

// A call with its tensors on the CPU. m, n: rows and columns of in[0]'s matrices.
typedef struct {
    const ms_call *c;
    const ms_lapack *lib;
    ms_tensor *in[2], *out[4];
    int64_t batch;  // number of matrices
    int m, n;
    const char *who;
} linalg_call;

// ---- memory -----------------------------------------------------------------------------------

// The scratch buffers of a call, which end() frees.
enum { MOST_ROOMS = 8 };
typedef struct {
    void *at[MOST_ROOMS];
    int n;
    size_t missing;  // total bytes of the buffers that could not be allocated
} rooms;

static void *room(rooms *r, int64_t count, size_t size)
{
    size_t bytes = (size_t)(count > 0 ? count : 1) * size;
    void *p = malloc(bytes);
    if (!p) r->missing += bytes;
    r->at[r->n++] = p;
    return p;
}
static ms_status end(rooms *r, ms_status st)
{
    for (int k = 0; k < r->n; k++) free(r->at[k]);
    return st;
}
static ms_status no_room(const linalg_call *l, rooms *r)
{
    return end(r, ms__no_memory(r->missing, l->who, "a matrix of %d x %d", l->m, l->n));
}

// ---- places and texts -------------------------------------------------------------------------

// The offset, from t's first element, of item b: the last `inner` dimensions make an item.
static int64_t item_at(const ms_tensor *t, int64_t b, int inner)
{
    int64_t at = 0;
    for (int d = t->ndim - inner - 1; d >= 0; d--) {
        at += b % t->shape[d] * t->stride[d];
        b /= t->shape[d];
    }
    return at;
}

// "the matrix" or, in a batch, "matrix 3 of the batch", counted from 1.
static const char *matrix_text(const linalg_call *l, int64_t b)
{
    static __thread char text[64];
    if (l->in[0]->ndim == 2) return "the matrix";
    snprintf(text, sizeof text, "matrix %lld of the batch", (long long)b + 1);
    return text;
}
static ms_status singular(const linalg_call *l, int64_t b, int pivot)
{
    return ms__fail(MS_EINVAL, "%s: %s is singular: pivot %d is 0; expected a matrix with an inverse", l->who,
                    matrix_text(l, b), pivot);
}
static ms_status not_finite(const linalg_call *l, int64_t b)
{
    return ms__fail(MS_EINVAL, "%s: %s has values that are inf or nan, expected finite ones", l->who,
                    matrix_text(l, b));
}
static ms_status not_converged(const linalg_call *l, int64_t b, int info)
{
    return ms__fail(MS_EINVAL, "%s: LAPACK did not converge for %s (code %d)", l->who, matrix_text(l, b), info);
}

#define REAL float
#define N(name) name##_f32
#define LIB(l) (&(l)->lib->f32)
#define EPSILON FLT_EPSILON
#include "cpu/linalg/linalg_body.h"
#include "cpu/linalg/least_body.h"
#undef REAL
#undef N
#undef LIB
#undef EPSILON
#define REAL double
#define N(name) name##_f64
#define LIB(l) (&(l)->lib->f64)
#define EPSILON DBL_EPSILON
#include "cpu/linalg/linalg_body.h"
#include "cpu/linalg/least_body.h"

// ---- calls ------------------------------------------------------------------------------------

typedef ms_status (*kernel)(const linalg_call *l);

static ms_status run_by_dtype(ms_call *c, kernel f32, kernel f64)
{
    linalg_call l = { .c = c, .batch = 1, .who = ms__op_title(c->op->name) };
    const ms_tensor *x = c->in[0];
    char who[64];
    snprintf(who, sizeof who, "%s", l.who);
    l.who = who;
    MS_TRY(ms__lapack(&l.lib, who));
    for (int d = 0; d < x->ndim; d++)
        if (x->shape[d] > INT32_MAX / 64)
            return ms__fail(MS_EUNSUPPORTED, "%s: %s has a dimension of more than %d elements", who, ms__tensor_text(x),
                            INT32_MAX / 64);
    for (int d = 0; d < x->ndim - 2; d++) l.batch *= x->shape[d];
    l.m = (int)x->shape[x->ndim - 2];
    l.n = (int)x->shape[x->ndim - 1];
    bool there = ms__is_cuda(ms__device(x));
    ms_status st = MS_OK;
    for (int k = 0; k < c->n_in && st == MS_OK; k++) {
        if (there) st = ms__on_cpu(&l.in[k], c->in[k], who);
        else l.in[k] = ms__retain(c->in[k]);
    }
    for (int k = 0; k < c->n_out && st == MS_OK; k++) {
        const ms_tensor *o = c->out[k];
        if (there) st = ms__tensor_new(&l.out[k], o->dtype, MS_CPU, o->ndim, o->shape, who);
        else l.out[k] = ms__retain(c->out[k]);
    }
    if (st == MS_OK) st = x->dtype == MS_F32 ? f32(&l) : f64(&l);
    for (int k = 0; k < c->n_out && st == MS_OK && there; k++) st = ms__copy(c->out[k], l.out[k]);
    for (int k = 0; k < c->n_in; k++) ms__release(l.in[k]);
    for (int k = 0; k < c->n_out; k++) ms__release(l.out[k]);
    return st;
}

#define KERNEL(NAME) \
    ms_status ms__linalg_##NAME(ms_call *c) { return run_by_dtype(c, NAME##_f32, NAME##_f64); }
MS_LINALG(KERNEL)
