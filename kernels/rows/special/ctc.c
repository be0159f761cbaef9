// SPDX-License-Identifier: MIT
// rows/special/ctc.c -- the CTC loss (formulas/ctc.h). The gradient is exact for any log probabilities;
// PyTorch's adds their exponentials, which make no difference if log_softmax has computed the log probabilities.
#include "cpu/special/special.h"
#include "rows/grad.h"

// Inputs: log probabilities [T, N, C]; targets [N, S], or all of them one after the other; the lengths [N] of inputs
// and of targets. c->i: the blank class, zero_infinity, the length of the longest target.
static ms_status check_ctc(ms_call *c)
{
    const ms_tensor *x = c->in[0], *y = c->in[1];
    if (ms__is_half(x->dtype))
        return ms__fail(MS_EUNSUPPORTED, "ctc_loss: log probabilities are %s, expected float32 or float64; cast them",
                        ms__tensor_text(x));
    if ((x->dtype != MS_F32 && x->dtype != MS_F64) || x->ndim != 3)
        return ms__call_fail(c, "log probabilities are %s, expected float32 or float64 [times, samples, classes]",
                             ms__tensor_text(x));
    int64_t n = x->shape[1];
    if (y->dtype != MS_I64 || y->ndim < 1 || y->ndim > 2 || (y->ndim == 2 && y->shape[0] != n))
        return ms__call_fail(
            c, "targets are %s, expected int64 [%lld, length of the longest target], or all targets in one dimension",
            ms__tensor_text(y), (long long)n);
    for (int k = 2; k < 4; k++) {
        const ms_tensor *t = c->in[k];
        if (t->dtype != MS_I64 || t->ndim != 1 || t->shape[0] != n)
            return ms__call_fail(c, "%s lengths are %s, expected int64 [%lld]", k == 2 ? "input" : "target",
                                 ms__tensor_text(t), (long long)n);
    }
    int64_t room = y->ndim == 2 ? y->shape[1] : y->numel;
    if (c->i[0] < 0 || c->i[0] >= x->shape[2])
        return ms__call_fail(c, "the blank is %lld, expected 0 to %lld", (long long)c->i[0],
                             (long long)x->shape[2] - 1);
    if (c->i[2] < 0 || c->i[2] > room)
        return ms__call_fail(c, "the length of the longest target is %lld, expected 0 to %lld", (long long)c->i[2],
                             (long long)room);
    MS_TRY(ms__call_out(c, 0, x->dtype, ms__device(x), 1, &n));
    return ms__call_out(c, 1, MS_F64, ms__device(x), 3, (int64_t[]) { n, x->shape[0], 2 * c->i[2] + 1 });
}

static ms_status check_ctc_backward(ms_call *c)
{
    return ms__call_out(c, 0, c->in[1]->dtype, ms__device(c->in[1]), 3, c->in[1]->shape);
}
static const ms_op ctc_loss_backward_row =
    MS_ROW("ctc_loss_backward", 6, 6, .check = check_ctc_backward, .run = { [MS_CPU] = ms__cpu_ctc_loss_backward });
static ms_status ctc_grad(ms_backward_call *b)
{
    if (!b->gout[0]) return MS_OK;
    ms_tensor *in[] = { b->gout[0], b->in[0], b->in[1], b->in[2], b->in[3], b->out[1] };
    return ms__run_op(&ctc_loss_backward_row, &(ms_op_args) { 6, in, .n_i = b->n_i, .i = b->i }, 1, b->gin);
}

static const ms_op ctc_loss_row =
    MS_ROW("ctc_loss", 4, 4, .takes = "blank, zero_infinity, longest",
           .doc = "The CTC loss of each sequence; longest: the length of the longest target.",
           .flags = MS_OP_DIFFERENTIABLE | MS_OP_WIDE, .save_in = 15, .save_out = 2, .n_shown = 1, .check = check_ctc,
           .run = { [MS_CPU] = ms__cpu_ctc_loss }, .backward = ctc_grad,
           .samples = "[4,3,5] [3,2]i4 [3]i5 [3]i3 i=4,1,2;[6,4,3] [4,2]i2 [4]i7 [4]i3 i=2,1,2;[5,2,4] [4]i3 [2]i6 "
                      "[2]i3 i=3,1,2;[3,1,2] [1,1]i1 [1]i4 [1]i2 i=1,1,1");

MS_OPERATORS = { &ctc_loss_row };
