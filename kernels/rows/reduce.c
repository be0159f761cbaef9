// SPDX-License-Identifier: MIT
// rows/reduce.c -- the reductions. Integers of most operators: keepdim, then the dimensions; without dimensions, all
// are reduced.
#include "cpu/cpu.h"
#include "rows/grad.h"

static int reduced_shape(const ms_tensor *x, unsigned mask, bool keepdim, int64_t *shape)
{
    int n = 0;
    for (int d = 0; d < x->ndim; d++) {
        if (!(mask >> d & 1)) shape[n++] = x->shape[d];
        else if (keepdim) shape[n++] = 1;
    }
    return n;
}

// Checks the dimensions, i[first_dim] and the following, and allocates out[0] for these and keepdim (i[0]).
static ms_status reduce_out(ms_call *c, int first_dim, int dtype)
{
    const ms_tensor *x = c->in[0];
    int n = c->n_i - first_dim;
    unsigned mask = 0;
    for (int k = 0; k < n; k++) {
        int d;
        MS_TRY(ms__call_dim(c, c->i[first_dim + k], x->ndim, &d));
        if (mask >> d & 1) return ms__call_fail(c, "dimension %d is named twice", d + 1);
        mask |= 1u << d;
        if (x->ndim == 0) c->n_i = first_dim;  // a 0-dim tensor accepts dimensions 0 and -1 and ignores them
    }
    mask = ms__reduced_dims(x, c->n_i - first_dim, c->i + first_dim);
    int64_t shape[MS_MAX_DIMS];
    int ndim = reduced_shape(x, mask, c->n_i > 0 && c->i[0], shape);
    return ms__call_out(c, 0, dtype, ms__device(x), ndim, shape);
}

static ms_status need_real(const ms_call *c)
{
    return ms__is_float(c->in[0]->dtype)
               ? MS_OK
               : ms__call_fail(c, "needs a floating-point dtype, got %s; cast it first", ms__tensor_text(c->in[0]));
}

static ms_status check_sum(ms_call *c)
{
    return reduce_out(c, 1, ms__is_float(c->in[0]->dtype) ? c->in[0]->dtype : MS_I64);
}
static ms_status check_mean(ms_call *c)
{
    MS_TRY(need_real(c));
    return reduce_out(c, 1, c->in[0]->dtype);
}

// Expands t, which has one value per output, to the input's shape as a view. t may or may not have the reduced
// dimensions.
static ms_tensor *spread(const ms_tensor *t, const ms_meta *m, unsigned mask)
{
    int64_t stride[MS_MAX_DIMS];
    bool kept = t->ndim == m->ndim;
    for (int d = 0, k = 0; d < m->ndim; d++) {
        bool reduced = mask >> d & 1;
        stride[d] = reduced ? 0 : t->stride[k];
        if (kept || !reduced) k++;
    }
    return ms__tensor_view(t, m->ndim, m->shape, stride, t->offset);
}
static unsigned reduced_mask_of(const ms_backward_call *b, int first_dim)
{
    ms_tensor x = { .ndim = b->in_meta[0].ndim };
    return ms__reduced_dims(&x, b->n_i - first_dim, b->i + first_dim);
}
static ms_status sum_backward(ms_backward_call *b)
{
    b->gin[0] = spread(b->gout[0], &b->in_meta[0], reduced_mask_of(b, 1));
    return MS_OK;
}
static double length_of(const ms_meta *m, unsigned mask)
{
    double n = 1;
    for (int d = 0; d < m->ndim; d++)
        if (mask >> d & 1) n *= (double)m->shape[d];
    return n;
}
static ms_status mean_backward(ms_backward_call *b)
{
    unsigned mask = reduced_mask_of(b, 1);
    ms_tensor *scaled;
    MS_TRY(ms__op1f(&scaled, &ms__op_div_scalar, b->gout[0], length_of(&b->in_meta[0], mask)));
    b->gin[0] = spread(scaled, &b->in_meta[0], mask);
    ms__release(scaled);
    return MS_OK;
}

static ms_status check_reduce_like_second(ms_call *c) { return ms__call_out_like(c, 0, c->in[1]); }
static const ms_op prod_backward_row =
    MS_ROW("prod_backward", 2, 2, .check = check_reduce_like_second, .run = { [MS_CPU] = ms__cpu_prod_backward });

static ms_status prod_grad(ms_backward_call *b)
{
    ms_tensor *g = spread(b->gout[0], &b->in_meta[0], reduced_mask_of(b, 1));
    ms_status st =
        ms__run_op(&prod_backward_row, &(ms_op_args) { 2, (ms_tensor *[]) { g, b->in[0] }, .n_i = b->n_i, .i = b->i },
                   1, b->gin);
    ms__release(g);
    return st;
}

// The gradient is scale * g (x - mean). scale is 2 / (n - correction) for var, 1 / ((n - correction) std) for std, with
// n: the number of elements that a result combines.
static ms_status deviation_backward(ms_backward_call *b, bool root)
{
    const ms_meta *m = &b->in_meta[0];
    unsigned mask = reduced_mask_of(b, 1);
    double divisor = length_of(m, mask) - (b->n_f > 0 ? b->f[0] : 1);
    int64_t dims[MS_MAX_DIMS + 1] = { 1 };
    int n = 1;
    for (int d = 0; d < m->ndim; d++)
        if (mask >> d & 1) dims[n++] = d;
    ms_tensor *mean = NULL, *away = NULL, *scale = NULL, *scale2 = NULL, *flat = NULL, *wide = NULL;
    ms_status st = ms__run_op(&ms__op_mean, &(ms_op_args) { 1, b->in, .n_i = n, .i = dims }, 1, &mean);
    if (!st) st = ms__op2(&away, &ms__op_sub, b->in[0], mean);
    if (!st) st = ms__op1f(&scale, &ms__op_mul_scalar, b->gout[0], (root ? 1 : 2) / divisor);
    if (!st && root) {  // if all elements are equal, std is 0 and so is the gradient, as in PyTorch
        st = ms__op2(&scale2, &ms__op_div, scale, b->out[0]);
        ms__release(scale);
        scale = NULL;
        if (!st) st = ms__op1f(&flat, ms__op_by_name("eq_scalar"), b->out[0], 0);
        if (!st)
            st = ms__run_op(ms__op_by_name("masked_fill"),
                            &(ms_op_args) { 2, (ms_tensor *[]) { scale2, flat }, .n_f = 1, .f = (double[]) { 0 } }, 1,
                            &scale);
        ms__release(flat);
        ms__release(scale2);
    }
    if (!st) {
        wide = spread(scale, m, mask);
        st = ms__op2(&b->gin[0], &ms__op_mul, away, wide);
    }
    ms__release(wide);
    ms__release(scale);
    ms__release(away);
    ms__release(mean);
    return st;
}
static ms_status var_grad(ms_backward_call *b) { return deviation_backward(b, false); }
static ms_status std_grad(ms_backward_call *b) { return deviation_backward(b, true); }

// Divides the gradient equally among the elements whose value in `of` equals the result.
static ms_status ties_backward(ms_backward_call *b, ms_tensor *of, unsigned mask, ms_tensor **out)
{
    const ms_meta *m = &b->in_meta[0];
    ms_tensor *best = spread(b->out[0], m, mask), *g = NULL, *same = NULL, *ones = NULL, *count = NULL, *part = NULL;
    int64_t dims[MS_MAX_DIMS + 1] = { b->gout[0]->ndim == m->ndim };
    int n = 1;
    for (int d = 0; d < m->ndim; d++)
        if (mask >> d & 1) dims[n++] = d;
    ms_status st = ms__op2(&same, ms__op_by_name("eq"), of, best);
    if (!st)
        st = ms__run_op(&ms__op_cast, &(ms_op_args) { 1, &same, .n_i = 1, .i = (int64_t[]) { m->dtype } }, 1, &ones);
    if (!st) st = ms__run_op(&ms__op_sum, &(ms_op_args) { 1, &ones, .n_i = n, .i = dims }, 1, &count);
    if (!st) st = ms__op2(&part, &ms__op_div, b->gout[0], count);
    if (!st) {
        g = spread(part, m, mask);
        st = ms__op2(out, &ms__op_mul, g, ones);
    }
    ms__release(g);
    ms__release(part);
    ms__release(count);
    ms__release(ones);
    ms__release(same);
    ms__release(best);
    return st;
}
static ms_status extreme_all_grad(ms_backward_call *b)
{
    return ties_backward(b, b->in[0], reduced_mask_of(b, b->n_i), &b->gin[0]);
}

static ms_status extreme_dims_grad(ms_backward_call *b)
{
    return ties_backward(b, b->in[0], reduced_mask_of(b, 1), &b->gin[0]);
}

static ms_status norm_grad(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    unsigned mask = reduced_mask_of(b, 1);
    double p = b->f[0];
    if (p == 0) return ms__zero_gradient(b);
    if (__builtin_isinf(p)) {
        ms_tensor *size = NULL, *g = NULL, *sign = NULL;
        ms_status st = ms__op1(&size, ms__op_by_name("abs"), b->in[0]);
        if (!st) st = ties_backward(b, size, mask, &g);
        if (!st) st = ms__op1(&sign, ms__op_by_name("sign"), b->in[0]);
        if (!st) st = ms__op2(&b->gin[0], &ms__op_mul, g, sign);
        ms__release(sign);
        ms__release(g);
        ms__release(size);
        return st;
    }
    ms_tensor *g = spread(b->gout[0], m, mask), *norm = spread(b->out[0], m, mask);
    ms_status st = ms__run_op(&ms__op_norm_backward,
                              &(ms_op_args) { 3, (ms_tensor *[]) { g, b->in[0], norm }, .n_f = 1, .f = &p }, 1, b->gin);
    ms__release(norm);
    ms__release(g);
    return st;
}

static unsigned backward_dim(const ms_backward_call *b)
{
    ms_tensor x = { .ndim = b->in_meta[0].ndim };
    return x.ndim == 0 ? 0 : ms__reduced_dims(&x, 1, b->i);
}
static ms_status logsumexp_grad(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    ms_tensor *g = spread(b->gout[0], m, backward_dim(b)), *y = spread(b->out[0], m, backward_dim(b));
    ms_status st = ms__op3(&b->gin[0], &ms__op_logsumexp_backward, g, b->in[0], y);
    ms__release(y);
    ms__release(g);
    return st;
}

static ms_status cumsum_grad(ms_backward_call *b);

// ---- further checks ----

static ms_status check_real_dims(ms_call *c)
{
    MS_TRY(need_real(c));
    return reduce_out(c, 1, c->in[0]->dtype);
}
static ms_status check_reduced_truth(ms_call *c) { return reduce_out(c, 1, MS_BOOL); }
static ms_status check_var(ms_call *c)
{
    MS_TRY(need_real(c));
    return reduce_out(c, 1, c->in[0]->dtype);
}
static ms_status check_norm(ms_call *c)
{
    MS_TRY(check_real_dims(c));
    const ms_tensor *x = c->in[0];
    if (__builtin_isinf(c->f[0]) && x->numel == 0 && c->out[0]->numel > 0)
        return ms__call_fail(c, "%s has no elements along the given dimensions, expected at least one",
                             ms__tensor_text(x));
    return MS_OK;
}
static ms_status not_empty(const ms_call *c, int64_t n)
{
    return n == 0
               ? ms__call_fail(c, "%s has no elements to choose from, expected at least one", ms__tensor_text(c->in[0]))
               : MS_OK;
}
static ms_status check_extreme_all(ms_call *c)
{
    MS_TRY(not_empty(c, c->in[0]->numel));
    c->n_i = 0;
    return ms__call_out(c, 0, c->in[0]->dtype, ms__device(c->in[0]), 0, NULL);
}
static ms_status check_extreme_dims(ms_call *c)
{
    MS_TRY(reduce_out(c, 1, c->in[0]->dtype));
    return c->out[0]->numel > 0 ? not_empty(c, c->in[0]->numel) : MS_OK;
}
// Integers: dimension, keepdim.
static ms_status one_dim_shape(ms_call *c, int *ndim, int64_t *shape)
{
    const ms_tensor *x = c->in[0];
    int d;
    MS_TRY(ms__call_last_dim(c, &d));
    *ndim = reduced_shape(x, x->ndim ? 1u << d : 0, c->n_i > 1 && c->i[1], shape);
    return MS_OK;
}
static ms_status check_extreme(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(one_dim_shape(c, &ndim, shape));
    if (x->ndim) MS_TRY(not_empty(c, x->shape[c->i[0] < 0 ? c->i[0] + x->ndim : c->i[0]]));
    MS_TRY(ms__call_out(c, 0, x->dtype, ms__device(x), ndim, shape));
    return ms__call_out(c, 1, MS_I64, ms__device(x), ndim, shape);
}
static ms_status check_argument(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int64_t shape[MS_MAX_DIMS];
    int ndim = 0;
    if (c->n_i == 0) MS_TRY(not_empty(c, x->numel));
    else {
        MS_TRY(one_dim_shape(c, &ndim, shape));
        if (x->ndim) MS_TRY(not_empty(c, x->shape[c->i[0] < 0 ? c->i[0] + x->ndim : c->i[0]]));
    }
    return ms__call_out(c, 0, MS_I64, ms__device(x), ndim, shape);
}
static ms_status check_logsumexp(ms_call *c)
{
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(need_real(c));
    MS_TRY(one_dim_shape(c, &ndim, shape));
    return ms__call_out(c, 0, c->in[0]->dtype, ms__device(c->in[0]), ndim, shape);
}
static ms_status check_cumsum(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    MS_TRY(ms__call_last_dim(c, &d));
    return ms__call_out(c, 0, ms__is_float(x->dtype) ? x->dtype : MS_I64, ms__device(x), x->ndim, x->shape);
}

// The gradient of a value goes to the position at which it was found.
static ms_status reduced_extreme_grad(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    if (!b->gout[0]) return MS_OK;
    if (m->ndim == 0) {
        b->gin[0] = ms__retain(b->gout[0]);
        return MS_OK;
    }
    int d = (int)(b->i[0] < 0 ? b->i[0] + m->ndim : b->i[0]);
    int64_t shape[MS_MAX_DIMS];
    memcpy(shape, m->shape, sizeof shape);
    shape[d] = 1;
    ms_tensor *zeros, *index = NULL, *g = NULL;
    MS_TRY(ms__zeros_of(&zeros, m));
    ms_status st = ms__reshape(&index, b->out[1], m->ndim, shape);
    if (!st) st = ms__reshape(&g, b->gout[0], m->ndim, shape);
    if (!st)
        st = ms__run_op(ms__op_by_name("scatter_"),
                        &(ms_op_args) { 3, (ms_tensor *[]) { zeros, index, g }, .n_i = 1, .i = (int64_t[]) { d } }, 1,
                        b->gin);
    ms__release(g);
    ms__release(index);
    ms__release(zeros);
    return st;
}

#define D MS_OP_DIFFERENTIABLE
#define W (MS_OP_DIFFERENTIABLE | MS_OP_WIDE)
#define M MS_OP_METHOD
#define DIMS "[3,4];[2,3,4] i=0,1;[2,3,4] i=1,0,2;[2,3,4] i=0,-1"
#define ROW(NAME, CHECK, BACKWARD, IN, OUT, FLAGS, TAKES, SAMPLES, DOC)                                             \
    const ms_op ms__op_##NAME = MS_ROW(#NAME, 1, 1, .flags = FLAGS, .save_in = IN, .save_out = OUT, .check = CHECK, \
                                       .run = { [MS_CPU] = ms__cpu_##NAME }, .backward = BACKWARD, .takes = TAKES,  \
                                       .samples = SAMPLES, .doc = DOC);
//  name       check              backward          saves  flags samples
// clang-format off
ROW(sum,       check_sum,         sum_backward,     0, 0,  W | M,    "keepdim?, dim...", DIMS, "Sum over dimensions. Integers and bools add up to int64.")
ROW(mean,      check_mean,        mean_backward,    0, 0,  D | M,    "keepdim?, dim...", DIMS, "Mean over dimensions. Errors: a dtype that is not floating point.")
ROW(prod,      check_sum,         prod_grad,        1, 0,  W | M,    "keepdim?, dim...", DIMS, "Product over dimensions. Integers and bools multiply to int64.")
ROW(all,       check_reduced_truth,       NULL,             0, 0,  M,    "keepdim?, dim...", "[3,4]b;[2,3,4]b i=0,1;[3,4]i2 i=1,0", "Whether all elements are true (not 0): a bool tensor.")
ROW(any,       check_reduced_truth,       NULL,             0, 0,  M,    "keepdim?, dim...", "[3,4]b;[2,3,4]b i=0,1;[3,4]i2 i=1,0", "Whether at least one element is true (not 0): a bool tensor.")
ROW(var,       check_var,         var_grad,         1, 0,  D | M,    "keepdim?, dim...; correction=1", "[3,4];[2,3,4] i=0,1;[2,3,4] i=1,0,2 f=0;[2,3,4] i=0,1 f=0.5", "Variance over dimensions: the sum of the squared distances from the mean, divided by n - correction. correction: subtracted from the number of elements")
ROW(std,       check_var,         std_grad,         1, 1,  D | M,    "keepdim?, dim...; correction=1", "[3,4];[2,3,4] i=0,1;[2,3,4] i=1,0,2 f=0;[2,3,4] i=0,1 f=0.5", "Standard deviation over dimensions, the square root of var. correction: as for var")
ROW(norm,      check_norm,        norm_grad,        1, 1,  W,    "keepdim?, dim...; p", "[3,4] f=2;[2,3,4] f=2 i=0,1;[2,3,4] f=1 i=1,0,2;[2,3,4] f=3 i=0,-1;[3,4] f=inf;[2,3,4] f=inf i=0,1;[3,4] f=-inf;[3,4] f=0", "The p-norm over the dimensions (none given: over all).")
ROW(max_all,   check_extreme_all, extreme_all_grad, 1, 1,  D,    NULL, "[3,4];[2,3,4]", "The largest element.")
ROW(min_all,   check_extreme_all, extreme_all_grad, 1, 1,  D,    NULL, "[3,4];[2,3,4]", "The smallest element.")
ROW(amax,      check_extreme_dims, extreme_dims_grad, 1, 1, D | M,   "keepdim?, dim...", DIMS, "The largest elements along dimensions. Elements that are equally large share the gradient.")
ROW(amin,      check_extreme_dims, extreme_dims_grad, 1, 1, D | M,   "keepdim?, dim...", DIMS, "The smallest elements along dimensions. Elements that are equally small share the gradient.")
ROW(max,       check_extreme,     reduced_extreme_grad,     0, 2,  D,    "dim, keepdim?", "[3,4] i=0;[2,3,4] i=-1,1;[2,3,4] i=1,0", "The largest element along a dimension, and its position.")
ROW(min,       check_extreme,     reduced_extreme_grad,     0, 2,  D,    "dim, keepdim?", "[3,4] i=0;[2,3,4] i=-1,1;[2,3,4] i=1,0", "The smallest element along a dimension, and its position.")
ROW(argmax,    check_argument,    NULL,             0, 0,  0,    "dim=all, keepdim?", "[3,4];[3,4] i=0;[2,3,4] i=-1,1", "The position of the largest element along a dimension, or of all.")
ROW(argmin,    check_argument,    NULL,             0, 0,  0,    "dim=all, keepdim?", "[3,4];[3,4] i=0;[2,3,4] i=-1,1", "The position of the smallest element along a dimension, or of all.")
ROW(logsumexp, check_logsumexp,   logsumexp_grad,   1, 1,  W | M,    "dim=-1, keepdim?", "[3,4] i=0;[2,3,4] i=-1,1;[2,3,4] i=1,0", "`log(sum(exp(t)))` along a dimension, computed without overflow.")
ROW(cumsum,    check_cumsum,      cumsum_grad,      0, 0,  W | M,    "dim=-1", "[3,4] i=0;[2,3,4] i=-1;[2,3,4] i=1", "Running sums along a dimension.")
// clang-format on

// An element is part of its own and all later sums, so its gradient is the sum of their gradients: a running sum from
// the end.
static ms_status cumsum_grad(ms_backward_call *b)
{
    return ms__run_op(&ms__op_cumsum, &(ms_op_args) { 1, b->gout, .n_i = 2, .i = (int64_t[]) { b->i[0], 1 } }, 1,
                      b->gin);
}

MS_OPERATORS = { &ms__op_sum,    &ms__op_mean,   &ms__op_prod,      &ms__op_all,     &ms__op_any,  &ms__op_var,
                 &ms__op_std,    &ms__op_norm,   &ms__op_max_all,   &ms__op_min_all, &ms__op_max,  &ms__op_min,
                 &ms__op_argmax, &ms__op_argmin, &ms__op_logsumexp, &ms__op_cumsum,  &ms__op_amax, &ms__op_amin };
