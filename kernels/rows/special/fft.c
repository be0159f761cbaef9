// SPDX-License-Identifier: MIT
// rows/special/fft.c -- Fourier transforms along a dimension. Complex numbers are pairs (real, imaginary) in
// the last dimension. fft_real stores only the first n / 2 + 1 elements of the transform of n real numbers, because the
// rest are their conjugates; fft_half transforms such a half to n real numbers. A transform is a symmetric matrix times
// a factor, so its gradient is the transform in the other direction with the same factor. Where a
// conjugate is not stored, fft_half counts an element twice, so its gradient is fft_real with such elements doubled;
// fft_real counts it once, so its gradient is fft_half with such elements halved.
#include "cpu/special/special.h"
#include "rows/grad.h"

static ms_status check_fft_integers(ms_call *c, bool pairs)
{
    const ms_tensor *x = c->in[0];
    if (ms__is_half(x->dtype))
        return ms__fail(MS_EUNSUPPORTED, "%s: the input is %s, expected float32 or float64; cast it",
                        ms__op_title(c->op->name), ms__tensor_text(x));
    if (x->dtype != MS_F32 && x->dtype != MS_F64)
        return ms__call_fail(c, "the input is %s, expected float32 or float64", ms__tensor_text(x));
    if (pairs && (x->ndim < 2 || x->shape[x->ndim - 1] != 2))
        return ms__call_fail(c, "the input is %s, expected complex numbers: pairs in a last dimension of 2",
                             ms__tensor_text(x));
    int d;
    if (!pairs && x->ndim < 1) return ms__call_fail(c, "%s has no dimension to transform", ms__tensor_text(x));
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim - pairs, &d));
    c->i[0] = d;
    if (x->shape[d] > INT32_MAX / 4)
        return ms__call_fail(c, "dimension %d of %s has more than %d elements", d + 1, ms__tensor_text(x),
                             INT32_MAX / 4);
    return MS_OK;
}

static ms_status complex_check(ms_call *c)
{
    MS_TRY(check_fft_integers(c, true));
    if (c->in[0]->shape[c->i[0]] == 0)
        return ms__call_fail(c, "dimension %lld of %s has no elements", (long long)c->i[0] + 1,
                             ms__tensor_text(c->in[0]));
    return ms__call_out_like(c, 0, c->in[0]);
}
static ms_status real_check(ms_call *c)
{
    MS_TRY(check_fft_integers(c, false));
    const ms_tensor *x = c->in[0];
    int64_t shape[MS_MAX_DIMS], n = x->shape[c->i[0]];
    if (n == 0)
        return ms__call_fail(c, "dimension %lld of %s has no elements", (long long)c->i[0] + 1, ms__tensor_text(x));
    if (x->ndim == MS_MAX_DIMS)
        return ms__call_fail(c, "%s has %d dimensions, expected at most %d", ms__tensor_text(x), MS_MAX_DIMS,
                             MS_MAX_DIMS - 1);
    memcpy(shape, x->shape, sizeof shape);
    shape[c->i[0]] = n / 2 + 1;
    shape[x->ndim] = 2;
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim + 1, shape);
}
static ms_status half_check(ms_call *c)
{
    MS_TRY(check_fft_integers(c, true));
    const ms_tensor *x = c->in[0];
    int64_t shape[MS_MAX_DIMS], n = c->i[1];
    if (n < 1) return ms__call_fail(c, "the length is %lld, expected 1 or more", (long long)n);
    if (x->shape[c->i[0]] != n / 2 + 1)
        return ms__call_fail(c,
                             "dimension %lld of %s has size %lld, expected %lld: half of the length %lld, rounded "
                             "down, + 1",
                             (long long)c->i[0] + 1, ms__tensor_text(x), (long long)x->shape[c->i[0]],
                             (long long)(n / 2 + 1), (long long)n);
    memcpy(shape, x->shape, sizeof shape);
    shape[c->i[0]] = n;
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim - 1, shape);
}

static ms_status call_fft_grad(ms_backward_call *b, const char *op, int n_i, const int64_t *i)
{
    return ms__run_op(ms__op_by_name(op), &(ms_op_args) { 1, &b->gout[0], n_i, i, 1, b->f }, 1, b->gin);
}
static ms_status complex_grad(ms_backward_call *b)
{
    return call_fft_grad(b, "fft_complex", 2, (int64_t[]) { b->i[0], !b->i[1] });
}
static ms_status real_grad(ms_backward_call *b)
{
    bool doubled = b->n_i > 1 && b->i[1];
    int64_t d = b->i[0] < 0 ? b->i[0] + b->in_meta[0].ndim : b->i[0];
    return call_fft_grad(b, "fft_half", 3, (int64_t[]) { d, b->in_meta[0].shape[d], !doubled });
}
static ms_status half_grad(ms_backward_call *b)
{
    bool halved = b->n_i > 2 && b->i[2];
    int64_t d = b->i[0] < 0 ? b->i[0] + b->in_meta[0].ndim - 1 : b->i[0];
    return call_fft_grad(b, "fft_real", 2, (int64_t[]) { d, !halved });
}

#define ROW(NAME, TAKES, SAMPLES, DOC)                                                                      \
    static const ms_op NAME##_row = MS_ROW("fft_" #NAME, 1, 1, .flags = MS_OP_DIFFERENTIABLE | MS_OP_WIDE,  \
                                           .check = NAME##_check, .run = { [MS_CPU] = ms__cpu_fft_##NAME }, \
                                           .backward = NAME##_grad, .takes = TAKES, .samples = SAMPLES, .doc = DOC);
// clang-format off
ROW(complex, "dim, inverse; scale", "[8,2] i=0,0 f=1;[3,5,2] i=1,1 f=0.5;[6,4,2] i=0,0 f=1;[17,2] i=0,0 f=1;[30,2] i=-1,1 f=0.25;[2,19,3,2] i=1,1 f=1;[1,2] i=0,0 f=1", "The Fourier transform of complex numbers, pairs in the last dimension.")
ROW(real,    "dim, doubled?; scale", "[8] i=0 f=1;[3,5] i=-1 f=0.5;[6,4] i=0 f=1;[23] i=0 f=1;[7,3] i=0,1 f=1;[8] i=0,1 f=1;[1] i=0 f=1", "The first half of the Fourier transform of real numbers; doubled: elements whose conjugates are left out count twice.")
ROW(half,    "dim, length, halved?; scale", "[5,2] i=0,8 f=1;[3,3,2] i=1,5 f=0.5;[4,4,2] i=0,6 f=1;[12,2] i=0,23 f=1;[4,3,2] i=0,7,1 f=1;[5,2] i=-1,8,1 f=1;[1,2] i=0,1 f=1", "The inverse of fft_real, to this length; halved: elements whose conjugates are left out count half.")
// clang-format on

MS_OPERATORS = { &complex_row, &real_row, &half_row };
