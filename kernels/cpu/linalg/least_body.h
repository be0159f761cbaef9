// SPDX-License-Identifier: MIT
// cpu/linalg/least_body.h -- part of linalg.c, included for float and double: pinv, det_backward and lstsq.

// Scales row k of a decomposition's vt by factor[k].
static void N(scale_rows)(N(singular_values) * v, const REAL *factor)
{
    for (int64_t j = 0; j < v->n; j++)
        for (int64_t k = 0; k < v->k; k++) v->vt[j * v->k + k] *= factor[k];
}

// Numbers: an absolute limit; a limit as a factor of the largest singular value. Values up to the larger count as 0.
static ms_status N(pinv)(const linalg_call *l)
{
    N(singular_values) v = { .job = "S" };
    rooms r = { 0 };
    N(singular_rooms)(l, &v, &r);
    REAL *x = room(&r, (int64_t)v.m * v.n, sizeof *x), one = 1, zero = 0;
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch && v.k > 0; b++) {
        ms_status st = N(singular_of)(l, &v, b);
        if (st != MS_OK) return end(&r, st);
        REAL relative = (REAL)l->c->f[1] * v.s[0], limit = (REAL)l->c->f[0];
        if (relative > limit) limit = relative;
        for (int k = 0; k < v.k; k++) v.s[k] = v.s[k] > limit ? 1 / v.s[k] : 0;
        N(scale_rows)(&v, v.s);
        LIB(l)->gemm("T", "T", &v.n, &v.m, &v.k, &one, v.vt, &v.k, v.u, &v.m, &zero, x, &v.n, 1, 1);
        N(store)(l->out[0], b, x, v.n);
    }
    return end(&r, MS_OK);
}

// in[1]: the gradients of the determinants. The gradient of a determinant is the matrix of cofactors, which exists for
// singular matrices, too: with A = U S Vt it is det(U) det(Vt) U C Vt, where C is diagonal and C[k][k] the product of
// all singular values but number k.
static ms_status N(det_backward)(const linalg_call *l)
{
    N(singular_values) v = { .job = "S" };
    rooms r = { 0 };
    int n = l->n;
    N(singular_rooms)(l, &v, &r);
    REAL *x = room(&r, (int64_t)n * n, sizeof *x), zero = 0;
    int *pivots = room(&r, n, sizeof *pivots);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch && n > 0; b++) {
        ms_status st = N(singular_of)(l, &v, b);
        if (st != MS_OK) return end(&r, st);
        size_t bytes = (size_t)n * (size_t)n * sizeof *x;
        memcpy(x, v.u, bytes);
        int sign = N(factor)(l, n, x, pivots);
        memcpy(x, v.vt, bytes);
        sign *= N(factor)(l, n, x, pivots);
        // others[k] is det(U) det(Vt), which is `sign`, times the product of all singular values but number k.
        REAL *others = x, before = (REAL)sign, after = 1;
        for (int k = 0; k < n; k++) others[k] = before, before *= v.s[k];
        for (int k = n - 1; k >= 0; k--) others[k] *= after, after *= v.s[k];
        N(scale_rows)(&v, others);
        REAL g = ((const REAL *)ms__data(l->in[1]))[item_at(l->in[1], b, 0)];
        LIB(l)->gemm("N", "N", &n, &n, &n, &g, v.u, &n, v.vt, &n, &zero, x, &n, 1, 1);
        N(store)(l->out[0], b, x, n);
    }
    return end(&r, MS_OK);
}

typedef struct {
    int m, n, k, rows, small, work;
    REAL *a, *x, *s, *w;
    int *numbers;
} N(least);

static int N(least_call)(const linalg_call *l, N(least) * q, int *rank)
{
    REAL limit = (REAL)l->c->f[0];
    int info = 0;
    if (l->c->i[0])
        LIB(l)->gelsd(&q->m, &q->n, &q->k, q->a, &q->m, q->x, &q->rows, q->s, &limit, rank, q->w, &q->work, q->numbers,
                      &info);
    else {
        for (int j = 0; j < q->n; j++) q->numbers[j] = 0;  // 0: LAPACK may permute the column
        LIB(l)->gelsy(&q->m, &q->n, &q->k, q->a, &q->m, q->x, &q->rows, q->numbers, &limit, rank, q->w, &q->work,
                      &info);
    }
    return info;
}

// Integer: the LAPACK driver (least_call). Number: the limit of singular values, relative to the largest. out: the
// solution, the rank, the singular values (0 from gelsy).
static ms_status N(lstsq)(const linalg_call *l)
{
    N(least) q = { .m = l->m, .n = l->n, .k = (int)l->in[1]->shape[l->in[1]->ndim - 1], .work = -1 };
    q.rows = q.m > q.n ? q.m : q.n;
    q.small = q.m < q.n ? q.m : q.n;
    int rank = 0, levels = 2;
    for (int n = q.small; n > 1; n /= 2) levels++;
    rooms r = { 0 };
    REAL best[1] = { 0 };
    q.a = room(&r, (int64_t)q.m * q.n, sizeof *q.a);
    q.x = room(&r, (int64_t)q.rows * q.k, sizeof *q.x);
    q.s = room(&r, q.small, sizeof *q.s);
    q.numbers = room(&r, (3 * levels + 11) * (int64_t)q.small + q.n, sizeof *q.numbers);
    if (r.missing) return no_room(l, &r);
    q.w = best;
    bool any = q.small > 0 && q.k > 0;
    if (any) N(least_call)(l, &q, &rank);
    q.work = N(work_size)(best[0]);
    q.w = room(&r, q.work, sizeof *q.w);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch; b++) {
        memset(q.x, 0, (size_t)q.rows * (size_t)q.k * sizeof *q.x);
        memset(q.s, 0, (size_t)q.small * sizeof *q.s);
        rank = 0;
        if (any) {
            N(load)(l->in[0], b, q.a);
            N(load_to)(l->in[1], b, q.x, q.rows);
            if (!N(finite)((int64_t)q.m * q.n, q.a)) return end(&r, not_finite(l, b));
            int info = N(least_call)(l, &q, &rank);
            if (info > 0) return end(&r, not_converged(l, b, info));
        }
        N(store)(l->out[0], b, q.x, q.rows);
        ((int64_t *)ms__data(l->out[1]))[b] = rank;
        memcpy(N(vector)(l->out[2], b, q.small), q.s, (size_t)q.small * sizeof *q.s);
    }
    return end(&r, MS_OK);
}
