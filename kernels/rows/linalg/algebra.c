// SPDX-License-Identifier: MIT
// rows/linalg/algebra.c -- see algebra.h.
#include "rows/linalg/algebra.h"

ms_tensor *ms__hold(ms_algebra *e, ms_tensor *t)
{
    if (t) e->held[e->n++] = t;
    return t;
}

static ms_tensor *call_by_name(ms_algebra *e, const char *op, const ms_op_args *args)
{
    ms_tensor *out = NULL;
    for (int k = 0; k < args->n_in; k++)
        if (!args->in[k]) return NULL;
    if (e->st != MS_OK) return NULL;
    e->st = ms__run_op(ms__op_by_name(op), args, 1, &out);
    return ms__hold(e, e->st == MS_OK ? out : NULL);
}
ms_tensor *ms__a1(ms_algebra *e, const char *op, ms_tensor *a, int n_i, const int64_t *i)
{
    return call_by_name(e, op, &(ms_op_args) { .n_in = 1, .in = &a, .n_i = n_i, .i = i });
}
ms_tensor *ms__a2(ms_algebra *e, const char *op, ms_tensor *a, ms_tensor *b, int n_i, const int64_t *i)
{
    return call_by_name(e, op, &(ms_op_args) { .n_in = 2, .in = (ms_tensor *[]) { a, b }, .n_i = n_i, .i = i });
}

ms_tensor *ms__transposed(ms_algebra *e, ms_tensor *a) { return ms__a1(e, "transpose", a, 2, (int64_t[]) { -1, -2 }); }
ms_tensor *ms__columns(ms_algebra *e, ms_tensor *a, int64_t first, int64_t n)
{
    return ms__a1(e, "narrow", a, 3, (int64_t[]) { -1, first, n });
}
ms_tensor *ms__scaled(ms_algebra *e, ms_tensor *a, double f)
{
    return call_by_name(e, "mul_scalar", &(ms_op_args) { .n_in = 1, .in = &a, .n_f = 1, .f = &f });
}

ms_tensor *ms__identity(ms_algebra *e, const ms_tensor *like)
{
    if (!like || e->st != MS_OK) return NULL;
    int64_t n = like->shape[like->ndim - 1];
    ms_tensor *t = NULL, *same = NULL;
    e->st = ms__tensor_new(&t, like->dtype, ms__device(like), 2, (int64_t[]) { n, n }, "identity");
    if (e->st == MS_OK) e->st = ms__op1(&same, ms__op_by_name("eye_"), t);
    ms__release(same);
    return ms__hold(e, t);
}
ms_tensor *ms__diagonal(ms_algebra *e, ms_tensor *d)
{
    return ms__each(e, ms__identity(e, d), ms__unsqueezed(e, d, -1));
}

ms_status ms__algebra_end(ms_algebra *e, ms_tensor *result, ms_tensor **out)
{
    if (e->st == MS_OK && result) *out = ms__retain(result);
    while (e->n > 0) ms__release(e->held[--e->n]);
    return e->st;
}
