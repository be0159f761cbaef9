// SPDX-License-Identifier: MIT
// rows/copy.c -- the operators that copy, cast and fill.
#include "cpu/cpu.h"
#include "device/device.h"
#include "rows/grad.h"

static ms_status check_copy_(ms_call *c)
{
    const ms_tensor *d = c->in[0], *s = c->in[1];
    int lead = d->ndim - s->ndim;
    bool fits = lead >= 0;
    for (int k = 0; fits && k < s->ndim; k++) fits = s->shape[k] == d->shape[k + lead] || s->shape[k] == 1;
    if (!fits) return ms__call_fail(c, "%s does not broadcast to %s", ms__tensor_text(s), ms__tensor_text(d));
    if (ms__device(s) == MS_META && ms__device(d) != MS_META && d->numel > 0)
        return ms__call_fail(c, "%s has no values to copy into %s", ms__tensor_text(s), ms__tensor_text(d));
    return ms__write_in_place(c);
}
static ms_status copy_backward(ms_backward_call *b)
{
    if (b->need[0]) MS_TRY(ms__zero_gradient(b));
    if (b->need[1]) MS_TRY(ms__grad_to(&b->gin[1], ms__retain(b->gout[0]), &b->in_meta[1]));
    return MS_OK;
}

static ms_status check_cast(ms_call *c)
{
    if (c->i[0] < 0 || c->i[0] >= MS_DTYPES)
        return ms__call_fail(c, "the dtype is %lld, expected 0 to %d", (long long)c->i[0], MS_DTYPES - 1);
    const ms_tensor *x = c->in[0];
    return ms__call_out(c, 0, (int)c->i[0], ms__device(x), x->ndim, x->shape);
}
static ms_status cast_backward(ms_backward_call *b)
{
    return ms__grad_to(&b->gin[0], ms__retain(b->gout[0]), &b->in_meta[0]);
}

static ms_status check_clone(ms_call *c) { return ms__call_out_like(c, 0, c->in[0]); }
static ms_tensor *same_view(const ms_tensor *x) { return ms__tensor_view(x, x->ndim, x->shape, x->stride, x->offset); }
static ms_status check_contiguous(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    if (ms__is_contiguous(x)) return ms__call_view(c, 0, same_view(x));
    return ms__call_out_like(c, 0, x);
}
static ms_status check_to_device(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int device = (int)c->i[0], from = ms__device(x);
    if (device == from) return ms__call_view(c, 0, same_view(x));
    if ((from & 0xff) == MS_META) return ms__call_fail(c, "%s has no data to move; use to_empty", ms__tensor_text(x));
    if (ms__is_cuda(device)) MS_TRY(ms__cuda_need(device, ms__op_title(c->op->name)));
    return ms__call_out(c, 0, x->dtype, device, x->ndim, x->shape);
}

ms_status ms__check_value(ms_call *c)
{
    const ms_tensor *t = c->in[0];
    if (!ms__is_float(t->dtype) && t->dtype != MS_BOOL && c->f[0] != __builtin_floor(c->f[0]))
        return ms__call_fail(c, "%.15g is not a whole number, but the tensor is %s", c->f[0], ms__tensor_text(t));
    if (!ms__holds(t->dtype, c->f[0]))
        return ms__call_fail(c, "%.17g is out of range for %s", c->f[0], ms__tensor_text(t));
    return MS_OK;
}
static ms_status check_fill_(ms_call *c)
{
    MS_TRY(ms__check_value(c));
    return ms__write_in_place(c);
}
static ms_status check_zero_(ms_call *c)
{
    c->n_f = 0;
    return ms__write_in_place(c);
}
static ms_status check_arange_(ms_call *c)
{
    if (c->in[0]->ndim != 1) return ms__call_fail(c, "fills a 1-d tensor, got %s", ms__tensor_text(c->in[0]));
    double last = c->f[0] + (double)(c->in[0]->numel - 1) * c->f[1];
    if (c->in[0]->numel > 0 && !ms__is_float(c->in[0]->dtype) &&
        !(ms__holds(c->in[0]->dtype, __builtin_trunc(c->f[0])) && ms__holds(c->in[0]->dtype, __builtin_trunc(last))))
        return ms__call_fail(c, "%.17g to %.17g is out of range for %s", c->f[0], last, ms__tensor_text(c->in[0]));
    ms__call_inplace(c, 0, 0);
    return MS_OK;
}
static ms_status check_eye_(ms_call *c)
{
    if (c->in[0]->ndim != 2) return ms__call_fail(c, "expected a 2-d tensor, got %s", ms__tensor_text(c->in[0]));
    return ms__write_in_place(c);
}

// The kernel on a GPU: the CPU's function for copies and fills, which work on every device; NULL where the CUDA plugin
// has its own kernel.
#define BOTH_copy_ ms__cpu_copy_
#define BOTH_copy ms__cpu_copy
#define BOTH_fill ms__cpu_fill
#define BOTH_eye ms__cpu_eye
#define BOTH_arange NULL
#define D MS_OP_DIFFERENTIABLE
#define M MS_OP_METHOD
#define ROW(NAME, N, CHECK, KERNEL, BACKWARD, FLAGS, TAKES, SAMPLES, DOC)                                 \
    const ms_op ms__op_##NAME = MS_ROW(#NAME, N, N, .flags = FLAGS, .check = CHECK,                       \
                                       .run = { [MS_CPU] = ms__cpu_##KERNEL, [MS_CUDA] = BOTH_##KERNEL }, \
                                       .backward = BACKWARD, .takes = TAKES, .samples = SAMPLES, .doc = DOC);
// clang-format off
ROW(copy_,      2, check_copy_,      copy_,  copy_backward, D | M | MS_OP_INPLACE | MS_OP_ANY_DEVICE, "source |", "[3,4] [3,4];[3,4] [4];[2,3,4] [3,1]", "Copies source into t, converted to t's dtype, also between devices. Errors: a shape that does not broadcast to t's shape. source: broadcasts to t's shape, of any dtype and device")
ROW(cast,       1, check_cast,       copy,   cast_backward, D, "dtype", "[3,4] i=1;[3,4] i=0", "t in another dtype.")
ROW(clone,      1, check_clone,      copy,   cast_backward, D | M, NULL, "[3,4];[2,3,5]", "A copy with its own storage; gradients flow through it.")
ROW(contiguous, 1, check_contiguous, copy,   cast_backward, D, NULL, "[3,4];[2,3,5]", "A copy whose elements lie row by row in memory.")
ROW(to_device,  1, check_to_device,  copy,   cast_backward, D, "device", "[3,4] i=0", "t on another device.")
ROW(fill_,      1, check_fill_,      fill,   ms__zero_gradient, D | MS_OP_INPLACE, "; value", "[3,4] f=1.5", "Sets every element to the value.")
ROW(zero_,      1, check_zero_,      fill,   ms__zero_gradient, D | M | MS_OP_INPLACE, NULL, "[3,4]", "Sets every element to 0.")
ROW(arange_,    1, check_arange_,    arange, ms__zero_gradient, D | MS_OP_INPLACE, "; first, step", "[7] f=1,0.5", "Fills t with first, first + step, and so on.")
ROW(eye_,       1, check_eye_,       eye,    ms__zero_gradient, D | MS_OP_INPLACE, NULL, "[3,4];[4,3]", "Fills a matrix with 1 on its diagonal and 0 elsewhere.")
// clang-format on

MS_OPERATORS = { &ms__op_copy_, &ms__op_cast,  &ms__op_clone,   &ms__op_contiguous, &ms__op_to_device,
                 &ms__op_fill_, &ms__op_zero_, &ms__op_arange_, &ms__op_eye_ };
