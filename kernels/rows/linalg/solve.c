// SPDX-License-Identifier: MIT
// rows/linalg/solve.c -- inverses, linear systems, determinants and least squares. The gradients are those
// of Giles, "An extended collection of matrix derivative results for forward and reverse mode algorithmic
// differentiation" (2008); that of the pseudoinverse is Golub and Pereyra's (1973).
#include "cpu/linalg/lapack.h"
#include "rows/grad.h"
#include "rows/linalg/algebra.h"
#include "rows/linalg/linalg.h"

ms_status ms__check_matrices(const ms_call *c, int k, const char *what, bool square)
{
    const ms_tensor *t = c->in[k];
    if (ms__is_half(t->dtype))
        return ms__fail(MS_EUNSUPPORTED, "%s: %s is %s, expected float32 or float64: LAPACK has no half types; cast it",
                        ms__op_title(c->op->name), what, ms__tensor_text(t));
    if (t->dtype != MS_F32 && t->dtype != MS_F64)
        return ms__call_fail(c, "%s is %s, expected float32 or float64", what, ms__tensor_text(t));
    if (t->ndim < 2)
        return ms__call_fail(c, "%s is %s, expected a matrix or a batch of matrices: at least 2 dimensions", what,
                             ms__tensor_text(t));
    if (square && t->shape[t->ndim - 1] != t->shape[t->ndim - 2])
        return ms__call_fail(c, "%s is %s, expected square matrices: the last two dimensions equal", what,
                             ms__tensor_text(t));
    return MS_OK;
}

// Checks that in[1] has matrices of as many rows as in[0]'s, in the same batch.
static ms_status check_right_side(const ms_call *c)
{
    const ms_tensor *a = c->in[0], *b = c->in[1];
    if (b->dtype != a->dtype)
        return ms__call_fail(c, "the right side is %s, expected the matrices' dtype, %s", ms__tensor_text(b),
                             ms__dtype_name(a->dtype));
    bool fits = a->ndim == b->ndim;
    for (int d = 0; fits && d < a->ndim - 1; d++) fits = a->shape[d] == b->shape[d];
    if (!fits)
        return ms__call_fail(c,
                             "the right side has shape %s, expected the matrices' shape %s but for the last dimension",
                             ms__shape_text(b->ndim, b->shape), ms__shape_text(a->ndim, a->shape));
    return MS_OK;
}

// ---- inverses and linear systems ----------------------------------------------------------------

static ms_status inv_check(ms_call *c)
{
    MS_TRY(ms__check_matrices(c, 0, "A", true));
    return ms__call_out_like(c, 0, c->in[0]);
}
// With Y the inverse of A and G the gradient of Y, the gradient of A is -Y^T G Y^T.
static ms_status inv_grad(ms_backward_call *b)
{
    ms_algebra e = { 0 };
    ms_tensor *yt = ms__transposed(&e, b->out[0]);
    ms_tensor *g = ms__times(&e, ms__times(&e, yt, b->gout[0]), yt);
    return ms__algebra_end(&e, ms__scaled(&e, g, -1), &b->gin[0]);
}

static ms_status solve_check(ms_call *c)
{
    MS_TRY(ms__check_matrices(c, 0, "A", true));
    MS_TRY(check_right_side(c));
    return ms__call_out_like(c, 0, c->in[1]);
}
// With A X = B and G the gradient of X, the gradient of B is H, where A^T H = G; that of A is -H X^T.
static ms_status solve_grad(ms_backward_call *b)
{
    ms_algebra e = { 0 };
    ms_tensor *h = ms__a2(&e, "linalg_solve", ms__transposed(&e, b->in[0]), b->gout[0], 0, NULL);
    if (b->need[1] && h) b->gin[1] = ms__retain(h);
    ms_tensor *g = b->need[0] ? ms__times(&e, h, ms__transposed(&e, b->out[0])) : NULL;
    return ms__algebra_end(&e, ms__scaled(&e, g, -1), &b->gin[0]);
}

static ms_status solve_triangular_check(ms_call *c) { return solve_check(c); }
// As solve_grad, but only the elements of A's triangle have a gradient.
static ms_status solve_triangular_grad(ms_backward_call *b)
{
    bool upper = b->i[0], ones = b->i[1];
    ms_algebra e = { 0 };
    ms_tensor *h = ms__a2(&e, "linalg_solve_triangular", ms__transposed(&e, b->in[0]), b->gout[0], 2,
                          (int64_t[]) { !upper, ones });
    if (b->need[1] && h) b->gin[1] = ms__retain(h);
    ms_tensor *g = b->need[0] ? ms__scaled(&e, ms__times(&e, h, ms__transposed(&e, b->out[0])), -1) : NULL;
    g = upper ? ms__upper(&e, g, ones) : ms__lower(&e, g, -ones);
    return ms__algebra_end(&e, g, &b->gin[0]);
}

// ---- determinants -------------------------------------------------------------------------------

static ms_status det_check(ms_call *c)
{
    const ms_tensor *a = c->in[0];
    MS_TRY(ms__check_matrices(c, 0, "A", true));
    return ms__call_out(c, 0, a->dtype, ms__device(a), a->ndim - 2, a->shape);
}
static ms_status slogdet_check(ms_call *c)
{
    const ms_tensor *a = c->in[0];
    MS_TRY(det_check(c));
    return ms__call_out(c, 1, a->dtype, ms__device(a), a->ndim - 2, a->shape);
}
static ms_status like_first(ms_call *c) { return ms__call_out_like(c, 0, c->in[0]); }
static const ms_op det_backward_row =
    MS_ROW("linalg_det_backward", 2, 2, .check = like_first,
           .run = { [MS_CPU] = ms__linalg_det_backward, [MS_CUDA] = ms__linalg_det_backward });
static ms_status det_grad(ms_backward_call *b) { return ms__op2(b->gin, &det_backward_row, b->in[0], b->gout[0]); }
// G is the gradient of the logarithm; that of A is G A^-T. The sign has no gradient.
static ms_status slogdet_grad(ms_backward_call *b)
{
    ms_algebra e = { 0 };
    if (!b->gout[1]) return ms__zero_gradient(b);
    ms_tensor *inverse = ms__a1(&e, "linalg_inv", b->in[0], 0, NULL);
    ms_tensor *g = ms__unsqueezed(&e, ms__unsqueezed(&e, b->gout[1], -1), -1);
    return ms__algebra_end(&e, ms__each(&e, ms__transposed(&e, inverse), g), &b->gin[0]);
}

// ---- pseudoinverse and least squares --------------------------------------------------------------

static ms_status pinv_check(ms_call *c)
{
    const ms_tensor *a = c->in[0];
    MS_TRY(ms__check_matrices(c, 0, "A", false));
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, a->shape, sizeof shape);
    shape[a->ndim - 2] = a->shape[a->ndim - 1], shape[a->ndim - 1] = a->shape[a->ndim - 2];
    return ms__call_out(c, 0, a->dtype, ms__device(a), a->ndim, shape);
}
// With P the pseudoinverse of A and G the gradient of P, the gradient of A is
// -P^T G P^T + (I - A P) G^T P P^T + P^T P G^T (I - P A).
static ms_tensor *pinv_formula(ms_algebra *e, ms_tensor *a, ms_tensor *p, ms_tensor *g)
{
    ms_tensor *pt = ms__transposed(e, p), *gt = ms__transposed(e, g);
    ms_tensor *first = ms__times(e, ms__times(e, pt, g), pt);
    ms_tensor *left = ms__times(e, ms__times(e, gt, p), pt), *right = ms__times(e, pt, ms__times(e, p, gt));
    left = ms__minus(e, left, ms__times(e, a, ms__times(e, p, left)));
    right = ms__minus(e, right, ms__times(e, ms__times(e, right, p), a));
    return ms__minus(e, ms__plus(e, left, right), first);
}
static ms_status pinv_grad(ms_backward_call *b)
{
    ms_algebra e = { 0 };
    return ms__algebra_end(&e, pinv_formula(&e, b->in[0], b->out[0], b->gout[0]), &b->gin[0]);
}

static ms_status lstsq_check(ms_call *c)
{
    const ms_tensor *a = c->in[0];
    MS_TRY(ms__check_matrices(c, 0, "A", false));
    MS_TRY(check_right_side(c));
    int64_t shape[MS_MAX_DIMS], m = a->shape[a->ndim - 2], n = a->shape[a->ndim - 1];
    memcpy(shape, c->in[1]->shape, sizeof shape);
    shape[a->ndim - 2] = n;
    MS_TRY(ms__call_out(c, 0, a->dtype, ms__device(a), a->ndim, shape));
    MS_TRY(ms__call_out(c, 1, MS_I64, ms__device(a), a->ndim - 2, shape));
    shape[a->ndim - 2] = m < n ? m : n;
    return ms__call_out(c, 2, a->dtype, ms__device(a), a->ndim - 1, shape);
}
// The solution is P B, with P the pseudoinverse of A.
static ms_status lstsq_grad(ms_backward_call *b)
{
    ms_algebra e = { 0 };
    ms_tensor *a = b->in[0], *p = NULL, *g = b->gout[0];
    if (!g) return MS_OK;
    e.st = ms__run_op(ms__op_by_name("linalg_pinv"), &(ms_op_args) { 1, &a, .n_f = 2, .f = (double[]) { 0, b->f[0] } },
                      1, &p);
    ms__hold(&e, e.st == MS_OK ? p : NULL);
    ms_tensor *right = b->need[1] ? ms__times(&e, ms__transposed(&e, p), g) : NULL;
    if (right) b->gin[1] = ms__retain(right);
    ms_tensor *of_p = b->need[0] ? ms__times(&e, g, ms__transposed(&e, b->in[1])) : NULL;
    return ms__algebra_end(&e, of_p ? pinv_formula(&e, a, p, of_p) : NULL, &b->gin[0]);
}

static const ms_op inv_row =
    MS_LINALG_ROW(inv, 1, 1, 0, 1, "[3,3];[2,3,3]s;[1,1]", NULL, "The inverse of each matrix.");
static const ms_op solve_row =
    MS_LINALG_ROW(solve, 2, 2, 1, 1, "[3,3] [3,2];[2,2,2] [2,2,3];[3,3]s [3,1]", NULL, "The solution of A X = B.");
static const ms_op triangular_row =
    MS_LINALG_ROW(solve_triangular, 2, 2, 1, 1, "[3,3]+ [3,2] i=0,0;[2,3,3]+ [2,3,2] i=1,0;[3,3] [3,2] i=1,1",
                  "upper, unit", "The solution of A X = B for a triangular A; unit: its diagonal is 1.");
static const ms_op det_row =
    MS_LINALG_ROW(det, 1, 1, 1, 0, "[3,3];[2,4,4];[1,1]", NULL, "The determinant of each matrix.");
static const ms_op slogdet_row =
    MS_LINALG_ROW(slogdet, 1, 1, 1, 0, "[3,3];[2,3,3]s", NULL,
                  "The sign of each determinant, and the logarithm of its absolute value.");
static const ms_op pinv_row = MS_LINALG_ROW(
    pinv, 1, 1, 1, 1, "[4,2] f=0,1e-9;[2,3] f=0,1e-9;[2,3,3]s f=0,1e-9", "; absolute, relative",
    "The pseudoinverse of each matrix; absolute, relative: limits below which singular values count as 0.");
static const ms_op lstsq_row =
    MS_LINALG_ROW(lstsq, 2, 2, 3, 0, "[4,2] [4,3] i=0 f=1e-9;[2,3] [2,1] i=0 f=1e-9;[2,3,3]s [2,3,2] i=0 f=1e-9",
                  "driver; relative",
                  "Least squares: the solution, the rank and the singular values. driver: 0 gelsy, 1 gelsd; relative: "
                  "the limit below which singular values count as 0.");

MS_OPERATORS = { &inv_row, &solve_row, &triangular_row, &det_row, &slogdet_row, &pinv_row, &lstsq_row };
