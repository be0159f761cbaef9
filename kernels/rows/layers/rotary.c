// SPDX-License-Identifier: MIT
// rows/layers/rotary.c -- rotary positions, and RMSNorm followed by them in one pass over queries and keys.
//
// Sizes: x [..., T, D]; cos, sin [T, half] or, for x [B, H, T, D], [B, 1, T, half]; weight [D]. Features i and i + half
// form a pair. cos and sin get no gradient. The gradient turns back; then it is that of rms_norm.
#include "cpu/rows/layers.h"
#include "rows/layers/rotary.h"
#include "rows/ops.h"

enum { X = MS_ROTARY_X, COS, SIN, WEIGHT };

static ms_status check_angles(ms_call *c, int k, const char *name)
{
    const ms_tensor *x = c->in[X], *a = c->in[k];
    if (!a) return ms__call_fail(c, "argument %d, the %s, is missing", k + 1, name);
    int64_t half = a->ndim ? a->shape[a->ndim - 1] : 0, D = x->shape[x->ndim - 1], T = x->shape[x->ndim - 2];
    bool fits = a->ndim == 2 && a->shape[0] == T;
    fits |= a->ndim == 4 && x->ndim == 4 && a->shape[0] == x->shape[0] && a->shape[1] == 1 && a->shape[2] == T;
    if (!fits || half < 1 || 2 * half > D || !ms__same_shape(a, c->in[COS]))
        return ms__call_fail(c,
                             "the %s must be [T, half] or, for 4 dimensions, [B, 1, T, half], with at most %lld pairs "
                             "for the input %s, got %s",
                             name, (long long)(D / 2), ms__shape_text(x->ndim, x->shape),
                             ms__shape_text(a->ndim, a->shape));
    if (a->dtype != MS_F32 && !(a->dtype == MS_F64 && x->dtype == MS_F64))
        return ms__call_fail(c, "the %s must be float32, or float64 for an input of float64, got %s", name,
                             ms__tensor_text(a));
    if (a->requires_grad && ms__state.grad_mode)
        return ms__call_fail(c, "the %s requires a gradient, but gets none; detach() it", name);
    return MS_OK;
}

static ms_status rotary_check(ms_call *c)
{
    const ms_tensor *x = c->in[X];
    if (!ms__is_float(x->dtype) || x->ndim < 2)
        return ms__call_fail(c, "the input must be floating point with 2 dimensions or more, got %s",
                             ms__tensor_text(x));
    MS_TRY(check_angles(c, COS, "cosine"));
    MS_TRY(check_angles(c, SIN, "sine"));
    if (c->n_i < 1) c->i[c->n_i++] = 0;
    return ms__call_out(c, 0, x->dtype, ms__device(x), x->ndim, x->shape);
}

static ms_status rms_norm_rotary_check(ms_call *c)
{
    const ms_tensor *x = c->in[X], *w = c->n_in > WEIGHT ? c->in[WEIGHT] : NULL;
    MS_TRY(rotary_check(c));
    int64_t n = x->shape[x->ndim - 1], stats[] = { n ? x->numel / n : 0, 2 };
    if (!w || w->dtype != x->dtype || w->ndim != 1 || w->shape[0] != n)
        return ms__call_fail(c, "the weight must be %s [%lld], got %s", ms__dtype_name(x->dtype), (long long)n,
                             w ? ms__tensor_text(w) : "none");
    c->out[1] = NULL;
    c->n_out = 2;
    if (!ms__state.grad_mode || (!x->requires_grad && !w->requires_grad)) return MS_OK;
    return ms__call_out(c, 1, x->dtype == MS_F64 ? MS_F64 : MS_F32, ms__device(x), 2, stats);
}

static ms_status turn_back(ms_tensor **out, ms_backward_call *b)
{
    int64_t back = !b->i[0];
    ms_tensor *in[] = { b->gout[0], b->in[COS], b->in[SIN] };
    return ms__run_op(ms__op_by_name("rotary"), &(ms_op_args) { 3, in, 1, &back, 0, NULL }, 1, out);
}

static ms_status rotary_backward(ms_backward_call *b) { return b->gout[0] ? turn_back(&b->gin[X], b) : MS_OK; }

static ms_status rms_norm_rotary_backward(ms_backward_call *b)
{
    ms_tensor *back = NULL, *out[2] = { NULL };
    if (!b->gout[0]) return MS_OK;
    MS_TRY(turn_back(&back, b));
    ms_tensor *in[] = { back, b->in[X], b->in[WEIGHT], b->out[1] };
    int64_t i[] = { 1, b->need[X] | b->need[WEIGHT] << 1 };  // one dimension; the mask (rows/grad.h)
    int n = 0;
    ms_status st = ms__run_op(ms__op_by_name("rms_norm_backward"), &(ms_op_args) { 4, in, 2, i, 1, b->f },
                              b->need[X] + b->need[WEIGHT], out);
    ms__release(back);
    MS_TRY(st);
    if (b->need[X]) b->gin[X] = out[n++];
    if (b->need[WEIGHT]) b->gin[WEIGHT] = out[n];
    return MS_OK;
}

static const ms_op op_rotary =
    MS_ROW("rotary", 3, 3, .takes = "cosines, sines | back?",
           .doc = "Turns pairs of features by angles, given as cosines and sines; back: by the negative angles.",
           .save_in = 1 << COS | 1 << SIN, .check = rotary_check, .run = { [MS_CPU] = ms__cpu_rotary },
           .backward = rotary_backward,
           .samples = "[2,3,5,8] [5,4]c [5,4]c; [2,3,5,8] [2,1,5,4]c [2,1,5,4]c; [2,3,5,9] [5,3]c [5,3]c i=1; "
                      "[5,2] [5,1]c [5,1]c; [2,2,2,3,6] [3,2]c [3,2]c; [0,3,5,8] [5,4]c [5,4]c; "
                      "[3,40,66] [40,33]c [40,33]c");
static const ms_op op_rms_norm_rotary =
    MS_ROW("rms_norm_rotary", 4, 4, .takes = "cosines, sines, weight | back?; eps",
           .doc = "rms_norm over the last dimension, then rotary.", .save_in = 15, .save_out = 2, .n_shown = 1,
           .check = rms_norm_rotary_check, .run = { [MS_CPU] = ms__cpu_rotary }, .backward = rms_norm_rotary_backward,
           .samples = "[2,3,5,8] [5,4]c [5,4]c [8] f=1e-5; [2,3,5,8] [2,1,5,4]c [2,1,5,4]c [8] f=1e-5; "
                      "[4,9] [4,3]c [4,3]c [9] f=1e-3; [0,3,5,8] [5,4]c [5,4]c [8] f=1e-5; "
                      "[3,40,66] [40,33]c [40,33]c [66] f=1e-5");

MS_OPERATORS = { &op_rotary, &op_rms_norm_rotary };
