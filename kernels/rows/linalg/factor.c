// SPDX-License-Identifier: MIT
// rows/linalg/factor.c -- the factorizations: Cholesky, QR, singular values, eigenvalues of symmetric matrices.
// The gradients: Murray, "Differentiation of the Cholesky decomposition" (2016); Roberts and Roberts, "QR and LQ
// decomposition matrix backpropagation algorithms" (2020); Giles (2008) for eigenvalues; Townsend, "Differentiating the
// singular value decomposition" (2016).
#include "cpu/linalg/lapack.h"
#include "rows/grad.h"
#include "rows/linalg/algebra.h"
#include "rows/linalg/linalg.h"

static int64_t rows_of(const ms_meta *m) { return m->shape[m->ndim - 2]; }
static int64_t matrix_columns_of(const ms_meta *m) { return m->shape[m->ndim - 1]; }

static ms_status matrices_out(ms_call *c, int k, int64_t rows, int64_t columns)
{
    const ms_tensor *a = c->in[0];
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, a->shape, sizeof shape);
    shape[a->ndim - 2] = rows, shape[a->ndim - 1] = columns;
    return ms__call_out(c, k, a->dtype, ms__device(a), a->ndim, shape);
}
static ms_status vectors_out(ms_call *c, int k, int64_t n)
{
    const ms_tensor *a = c->in[0];
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, a->shape, sizeof shape);
    shape[a->ndim - 2] = n;
    return ms__call_out(c, k, a->dtype, ms__device(a), a->ndim - 1, shape);
}

// ---- Cholesky -----------------------------------------------------------------------------------

static ms_status cholesky_check(ms_call *c)
{
    MS_TRY(ms__check_matrices(c, 0, "A", true));
    return ms__call_out_like(c, 0, c->in[0]);
}
// With A = L L^T, G the gradient of L, and P the lower triangle of L^T G, its diagonal halved: S = L^-T P L^-1, and the
// gradient of A is (S + S^T) / 2.
static ms_status cholesky_grad(ms_backward_call *b)
{
    ms_algebra e = { 0 };
    bool upper = b->n_i > 0 && b->i[0];
    ms_tensor *l = b->out[0], *g = b->gout[0];
    if (upper) l = ms__transposed(&e, l), g = ms__transposed(&e, g);
    ms_tensor *lt = ms__transposed(&e, l), *p = ms__times(&e, lt, ms__lower(&e, g, 0));
    p = ms__scaled(&e, ms__plus(&e, ms__lower(&e, p, 0), ms__lower(&e, p, -1)), 0.5);
    const int64_t is_upper[] = { 1, 0 };
    ms_tensor *s = ms__a2(&e, "linalg_solve_triangular", lt, p, 2, is_upper);
    s = ms__a2(&e, "linalg_solve_triangular", lt, ms__transposed(&e, s), 2, is_upper);
    return ms__algebra_end(&e, ms__scaled(&e, ms__plus(&e, s, ms__transposed(&e, s)), 0.5), &b->gin[0]);
}

// ---- QR -----------------------------------------------------------------------------------------

// Integers: whether Q is square.
static ms_status qr_check(ms_call *c)
{
    MS_TRY(ms__check_matrices(c, 0, "A", false));
    const ms_tensor *a = c->in[0];
    int64_t m = a->shape[a->ndim - 2], n = a->shape[a->ndim - 1], k = c->n_i > 0 && c->i[0] ? m : m < n ? m : n;
    MS_TRY(matrices_out(c, 0, m, k));
    return matrices_out(c, 1, k, n);
}
// The gradient of a square or tall A = Q R: (GQ + Q C) R^-T, where C is the lower triangle of R GR^T - GQ^T Q,
// mirrored, and GQ and GR are the gradients of Q and R.
static ms_tensor *qr_formula(ms_algebra *e, ms_tensor *q, ms_tensor *r, ms_tensor *gq, ms_tensor *gr)
{
    ms_tensor *m = gr ? ms__times(e, r, ms__transposed(e, gr)) : NULL;
    if (gq) {
        ms_tensor *inner = ms__times(e, ms__transposed(e, gq), q);
        m = m ? ms__minus(e, m, inner) : ms__scaled(e, inner, -1);
    }
    ms_tensor *c = ms__plus(e, ms__lower(e, m, 0), ms__transposed(e, ms__lower(e, m, -1)));
    ms_tensor *g = ms__times(e, q, c);
    if (gq) g = ms__plus(e, gq, g);
    // X R^T = g is solved as R X^T = g^T.
    return ms__transposed(e, ms__a2(e, "linalg_solve_triangular", r, ms__transposed(e, g), 2, (int64_t[]) { 1, 0 }));
}
static ms_status qr_grad(ms_backward_call *b)
{
    int64_t m = rows_of(&b->in_meta[0]), n = matrix_columns_of(&b->in_meta[0]);
    ms_tensor *q = b->out[0], *r = b->out[1], *gq = b->gout[0], *gr = b->gout[1];
    if (m == 0 || n == 0) return ms__zero_gradient(b);
    if (b->n_i > 0 && b->i[0] && m > n)
        return ms__fail(MS_EUNSUPPORTED,
                        "linalg.qr: mode 'complete' has no gradient for matrices of more rows than "
                        "columns (%lld x %lld), because Q's last columns are arbitrary",
                        (long long)m, (long long)n);
    ms_algebra e = { 0 };
    if (m >= n) return ms__algebra_end(&e, qr_formula(&e, q, r, gq, gr), &b->gin[0]);
    // A wide A = [X Y], with X = Q U and Y = Q V, R = [U V] and V's gradient GV: Q's gradient also gets Y GV^T, and
    // Y's is Q GV.
    ms_tensor *u = ms__columns(&e, r, 0, m), *gu = gr ? ms__columns(&e, gr, 0, m) : NULL;
    ms_tensor *gv = gr ? ms__columns(&e, gr, m, n - m) : NULL, *y = ms__times(&e, q, ms__columns(&e, r, m, n - m));
    if (gv) {
        ms_tensor *more = ms__times(&e, y, ms__transposed(&e, gv));
        gq = gq ? ms__plus(&e, gq, more) : more;
    }
    ms_tensor *left = qr_formula(&e, q, u, gq, gu);
    ms_tensor *right = gv ? ms__times(&e, q, gv) : ms__scaled(&e, y, 0);
    return ms__algebra_end(&e, ms__a2(&e, "cat", left, right, 1, (int64_t[]) { -1 }), &b->gin[0]);
}

// ---- eigenvalues --------------------------------------------------------------------------------

// Integers: whether the upper triangle is read.
static ms_status eigh_check(ms_call *c)
{
    MS_TRY(ms__check_matrices(c, 0, "A", true));
    MS_TRY(vectors_out(c, 0, c->in[0]->shape[c->in[0]->ndim - 1]));
    return ms__call_out_like(c, 1, c->in[0]);
}
// Differences of all pairs: element (i, j) is v[j] - v[i]; 1 on the diagonal.
static ms_tensor *differences(ms_algebra *e, ms_tensor *v)
{
    return ms__plus(e, ms__minus(e, ms__unsqueezed(e, v, -2), ms__unsqueezed(e, v, -1)), ms__identity(e, v));
}
static ms_tensor *skew(ms_algebra *e, ms_tensor *m) { return ms__minus(e, m, ms__transposed(e, m)); }
// The gradient of A is V (diag(Gw) + skew(V^T GV) / 2D) V^T, where Gw and GV are the gradients of the eigenvalues and
// of V, and D has the eigenvalues' differences. It is symmetric, although only one triangle of A is read: as in
// PyTorch.
static ms_status eigh_grad(ms_backward_call *b)
{
    ms_algebra e = { 0 };
    ms_tensor *w = b->out[0], *v = b->out[1], *vt = ms__transposed(&e, v), *inner = NULL;
    if (b->gout[1]) {
        inner = ms__scaled(&e, skew(&e, ms__times(&e, vt, b->gout[1])), 0.5);
        inner = ms__over(&e, inner, differences(&e, w));
    }
    if (b->gout[0]) {
        ms_tensor *of_values = ms__diagonal(&e, b->gout[0]);
        inner = inner ? ms__plus(&e, inner, of_values) : of_values;
    }
    return ms__algebra_end(&e, ms__times(&e, ms__times(&e, v, inner), vt), &b->gin[0]);
}

// ---- singular values ----------------------------------------------------------------------------

// Integers: whether U and V are square. out: U, S, V transposed.
static ms_status svd_check(ms_call *c)
{
    MS_TRY(ms__check_matrices(c, 0, "A", false));
    const ms_tensor *a = c->in[0];
    int64_t m = a->shape[a->ndim - 2], n = a->shape[a->ndim - 1], k = m < n ? m : n;
    bool full = c->n_i > 0 && c->i[0];
    MS_TRY(matrices_out(c, 0, m, full ? m : k));
    MS_TRY(vectors_out(c, 1, k));
    return matrices_out(c, 2, full ? n : k, n);
}
// x - basis basis^T x: the part of x outside of the space of the basis's columns.
static ms_tensor *outside(ms_algebra *e, ms_tensor *basis, ms_tensor *x)
{
    return ms__minus(e, x, ms__times(e, basis, ms__times(e, ms__transposed(e, basis), x)));
}
// GU, GS and GV are the gradients of U, S and V, E[i][j] the differences of the squares of S; division by E is
// elementwise. The gradient of A is U ((skew(U^T GU) / E) diag(S) + diag(S) (skew(V^T GV) / E) + diag(GS)) V^T. A tall
// A adds (I - U U^T) GU diag(1 / S) V^T, a wide one U diag(1 / S) GV^T (I - V V^T).
static ms_status svd_grad(ms_backward_call *b)
{
    int64_t m = rows_of(&b->in_meta[0]), n = matrix_columns_of(&b->in_meta[0]), k = m < n ? m : n;
    ms_tensor *gu = b->gout[0], *gs = b->gout[1], *gvt = b->gout[2];
    if (b->n_i > 0 && b->i[0] && m != n && (gu || gvt))
        return ms__fail(MS_EUNSUPPORTED,
                        "linalg.svd: with full_matrices U and V have no gradient for matrices that are "
                        "not square (%lld x %lld), because their last columns are arbitrary; pass "
                        "full_matrices = false",
                        (long long)m, (long long)n);
    ms_algebra e = { 0 };
    ms_tensor *u = ms__columns(&e, b->out[0], 0, k), *s = b->out[1];
    ms_tensor *v = ms__columns(&e, ms__transposed(&e, b->out[2]), 0, k), *inner = NULL;
    ms_tensor *row = ms__unsqueezed(&e, s, -2), *column = ms__unsqueezed(&e, s, -1), *squares = NULL;
    ms_tensor *gv = gvt ? ms__transposed(&e, gvt) : NULL;
    if (gu || gv) squares = differences(&e, ms__each(&e, s, s));
    if (gu) inner = ms__each(&e, ms__over(&e, skew(&e, ms__times(&e, ms__transposed(&e, u), gu)), squares), row);
    if (gv) {
        ms_tensor *of_v = ms__over(&e, skew(&e, ms__times(&e, ms__transposed(&e, v), gv)), squares);
        of_v = ms__each(&e, column, of_v);
        inner = inner ? ms__plus(&e, inner, of_v) : of_v;
    }
    if (gs) {
        ms_tensor *of_s = ms__diagonal(&e, gs);
        inner = inner ? ms__plus(&e, inner, of_s) : of_s;
    }
    ms_tensor *g = ms__times(&e, ms__times(&e, u, inner), ms__transposed(&e, v));
    if (gu && m > k) g = ms__plus(&e, g, ms__times(&e, ms__over(&e, outside(&e, u, gu), row), ms__transposed(&e, v)));
    if (gv && n > k) {
        ms_tensor *more = ms__transposed(&e, ms__over(&e, outside(&e, v, gv), row));
        g = ms__plus(&e, g, ms__times(&e, u, more));
    }
    return ms__algebra_end(&e, g, &b->gin[0]);
}

static const ms_op cholesky_row =
    MS_LINALG_ROW(cholesky, 1, 1, 0, 1, "[3,3]s;[2,4,4]s i=1;[1,1]+", "upper?", "The Cholesky factor of each matrix.");
static const ms_op qr_row =
    MS_LINALG_ROW(qr, 1, 1, 0, 3, "[4,3];[3,3];[2,3,4];[2,3] i=1", "full?", "The QR decomposition of each matrix.");
static const ms_op svd_row = MS_LINALG_ROW(svd, 1, 1, 0, 7, "[4,3];[3,3] i=1;[2,2,3]", "full?",
                                           "The singular value decomposition of each matrix.");
static const ms_op eigh_row = MS_LINALG_ROW(eigh, 1, 1, 0, 3, "[3,3]s;[2,3,3]s i=1;[1,1]", "upper?",
                                            "The eigenvalues and eigenvectors of each symmetric matrix.");

MS_OPERATORS = { &cholesky_row, &qr_row, &svd_row, &eigh_row };
