// SPDX-License-Identifier: MIT
// rows/layers/recurrent.c -- rnn, lstm and gru: all steps of a layer in one direction (recurrent.h).
#include "rows/layers/recurrent.h"
#include "cpu/rows/layers.h"
#include "rows/grad.h"

enum {
    X = MS_RECURRENT_X,
    W = MS_RECURRENT_W,
    B = MS_RECURRENT_B,
    H0 = MS_RECURRENT_H0,
    C0 = MS_RECURRENT_C0,
    PROJECT = MS_RECURRENT_PROJECT,
    SIZES = MS_RECURRENT_SIZES,
};

static const char *const names[] = { "input",
                                     "hidden-to-hidden weight",
                                     "hidden-to-hidden bias",
                                     "hidden state h",
                                     "cell state c",
                                     "projection weight",
                                     "batch_sizes" };

static ms_status expect_shape(const ms_call *c, int k, int ndim, const int64_t *shape)
{
    const ms_tensor *t = ms__recurrent_in(c, k);
    if (!t || (t->ndim == ndim && memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) == 0)) return MS_OK;
    return ms__call_fail(c, "the %s has shape %s, expected %s for an input of shape %s", names[k],
                         ms__shape_text(t->ndim, t->shape), ms__shape_text(ndim, shape),
                         ms__shape_text(c->in[X]->ndim, c->in[X]->shape));
}

// Checks dtypes, devices, which inputs may be given, and the numbers of dimensions of x and of the state's weight, from
// whose shapes `check` derives those of the other inputs.
static ms_status check_kinds(const ms_call *c, ms_recurrent_kind kind)
{
    const ms_tensor *x = c->in[X], *sizes = ms__recurrent_in(c, SIZES);
    for (int k = 0; k < c->n_in; k++) {
        const ms_tensor *t = c->in[k];
        if (!t || k == SIZES) continue;
        if (!ms__is_float(t->dtype) || t->dtype != x->dtype || ms__device(t) != ms__device(x))
            return ms__call_fail(c,
                                 "all arguments must have the same floating-point dtype and device, got %s and, as the "
                                 "%s, %s",
                                 ms__tensor_text(x), names[k], ms__tensor_text(t));
    }
    if (kind != MS_LSTM && (ms__recurrent_in(c, C0) || ms__recurrent_in(c, PROJECT)))
        return ms__call_fail(c, "only an LSTM has a %s", names[ms__recurrent_in(c, C0) ? C0 : PROJECT]);
    if (sizes &&
        (sizes->dtype != MS_I64 || sizes->ndim != 1 || ms__device(sizes) != MS_CPU || !ms__is_contiguous(sizes)))
        return ms__call_fail(c, "batch_sizes must be contiguous int64 [steps] on the cpu, got %s",
                             ms__tensor_text(sizes));
    if (x->ndim != (sizes ? 2 : 3))
        return ms__call_fail(c, "the input must have shape %s, got %s",
                             sizes ? "[rows, features]" : "[steps, N, features]", ms__shape_text(x->ndim, x->shape));
    if (c->in[W]->ndim != 2)
        return ms__call_fail(c, "the hidden-to-hidden weight must have shape [features, size of h], got %s",
                             ms__shape_text(c->in[W]->ndim, c->in[W]->shape));
    return MS_OK;
}

static ms_status check_recurrent(ms_call *c, ms_recurrent_kind kind)
{
    const ms_tensor *x = c->in[X], *project = ms__recurrent_in(c, PROJECT);
    ms_steps s = { 0 };
    MS_TRY(check_kinds(c, kind));
    MS_TRY(ms__steps_of(c, x, ms__recurrent_in(c, SIZES), &s));
    int64_t features = x->shape[x->ndim - 1], p = c->in[W]->shape[1], h = project ? features / 4 : p;
    if (features != ms__gates_of(kind) * h)
        return ms__call_fail(
            c, "the input of shape %s must have %d * %lld features, %d for each element of the hidden state",
            ms__shape_text(x->ndim, x->shape), ms__gates_of(kind), (long long)h, ms__gates_of(kind));
    MS_TRY(expect_shape(c, W, 2, (int64_t[]) { features, p }));
    MS_TRY(expect_shape(c, B, 1, &features));
    MS_TRY(expect_shape(c, H0, 2, (int64_t[]) { s.n, p }));
    MS_TRY(expect_shape(c, C0, 2, (int64_t[]) { s.n, h }));
    MS_TRY(expect_shape(c, PROJECT, 2, (int64_t[]) { p, h }));
    bool grad = false;
    for (int k = 0; k < c->n_in; k++) grad |= c->in[k] && c->in[k]->requires_grad;
    grad &= ms__state.grad_mode != 0;
    int64_t shape[3] = { x->shape[0], x->ndim == 3 ? x->shape[1] : p, p };
    int k = 0, device = ms__device(x), last = x->ndim - 1, wide = x->dtype == MS_F64 ? MS_F64 : MS_F32;
    MS_TRY(ms__call_out(c, k++, x->dtype, device, x->ndim, shape));
    MS_TRY(ms__call_out(c, k++, x->dtype, device, 2, (int64_t[]) { s.n, p }));
    if (kind == MS_LSTM) MS_TRY(ms__call_out(c, k++, x->dtype, device, 2, (int64_t[]) { s.n, h }));
    MS_TRY(ms__call_out(c, k++, x->dtype, device, x->ndim, shape));
    shape[last] = h;
    if (kind == MS_LSTM) MS_TRY(ms__call_out(c, k++, wide, device, x->ndim, shape));
    shape[last] = ms__kept_of(kind) * h;
    if (grad) return ms__call_out(c, k, wide, device, x->ndim, shape);
    c->out[k] = NULL;
    c->n_out = k + 1;
    return MS_OK;
}

static ms_status check_recurrent_backward(ms_call *c, ms_recurrent_kind kind)
{
    const ms_tensor *hs = c->in[MS_RECURRENT_BACK_HS], *cs = c->in[MS_RECURRENT_BACK_CS],
                    *w = c->in[MS_RECURRENT_BACK_W];
    int64_t n = c->i[2], mask = c->i[3], p = w->shape[1], h = cs ? cs->shape[cs->ndim - 1] : p, shape[3];
    int dtype = hs->dtype, device = ms__device(hs), k = 0;
    memcpy(shape, hs->shape, sizeof shape);
    shape[hs->ndim - 1] = ms__gates_of(kind) * h;
    if (mask >> X & 1) MS_TRY(ms__call_out(c, k++, dtype, device, hs->ndim, shape));
    if (mask >> W & 1) MS_TRY(ms__call_out_like(c, k++, w));
    if (mask >> B & 1) MS_TRY(ms__call_out(c, k++, dtype, device, 1, w->shape));
    if (mask >> H0 & 1) MS_TRY(ms__call_out(c, k++, dtype, device, 2, (int64_t[]) { n, p }));
    if (mask >> C0 & 1) MS_TRY(ms__call_out(c, k++, dtype, device, 2, (int64_t[]) { n, h }));
    if (mask >> PROJECT & 1) MS_TRY(ms__call_out(c, k++, dtype, device, 2, (int64_t[]) { p, h }));
    return MS_OK;
}

static ms_status recurrent_grad(ms_backward_call *b, ms_recurrent_kind kind, const ms_op *op)
{
    ms_tensor *const none = NULL, *in[MS_RECURRENT_BACK_IN] = {
        [MS_RECURRENT_DY] = b->gout[MS_RECURRENT_Y],
        [MS_RECURRENT_DH] = b->gout[MS_RECURRENT_HN],
        [MS_RECURRENT_DC] = kind == MS_LSTM ? b->gout[MS_RECURRENT_CN] : none,
        [MS_RECURRENT_BACK_W] = b->in[W],
        [MS_RECURRENT_BACK_PROJECT] = b->n_in > PROJECT ? b->in[PROJECT] : none,
        [MS_RECURRENT_BACK_SIZES] = b->n_in > SIZES ? b->in[SIZES] : none,
        [MS_RECURRENT_BACK_HS] = ms__recurrent_out(kind, b->out, MS_RECURRENT_HS),
        [MS_RECURRENT_BACK_CS] = ms__recurrent_out(kind, b->out, MS_RECURRENT_CS),
        [MS_RECURRENT_BACK_GATES] = ms__recurrent_out(kind, b->out, MS_RECURRENT_GATES),
    };
    int64_t i[4] = { b->n_i > 0 && b->i[0], b->n_i > 1 && b->i[1], b->out_meta[MS_RECURRENT_HN].shape[0], 0 };
    ms_tensor *out[SIZES] = { NULL };
    int n_out = 0, o = 0;
    for (int k = 0; k < SIZES && k < b->n_in; k++)
        if (b->need[k]) i[3] |= (int64_t)1 << k, n_out++;
    if (!n_out || (!in[MS_RECURRENT_DY] && !in[MS_RECURRENT_DH] && !in[MS_RECURRENT_DC])) return MS_OK;
    MS_TRY(ms__run_op(op, &(ms_op_args) { MS_RECURRENT_BACK_IN, in, 4, i, 0, NULL }, n_out, out));
    for (int k = 0; k < SIZES && k < b->n_in; k++)
        if (i[3] >> k & 1) b->gin[k] = out[o++];
    return MS_OK;
}

#define KIND(name, KIND)                                                                                 \
    static ms_status name##_check(ms_call *c) { return check_recurrent(c, KIND); }                       \
    static ms_status name##_backward_check(ms_call *c) { return check_recurrent_backward(c, KIND); }     \
    static const ms_op op_##name##_backward =                                                            \
        MS_ROW(#name "_backward", MS_RECURRENT_BACK_IN, MS_RECURRENT_BACK_IN, .flags = MS_OP_ANY_DEVICE, \
               .check = name##_backward_check, .run = { [MS_CPU] = ms__cpu_##name##_backward });         \
    static ms_status name##_backward(ms_backward_call *b) { return recurrent_grad(b, KIND, &op_##name##_backward); }
KIND(rnn, MS_RNN)
KIND(lstm, MS_LSTM)
KIND(gru, MS_GRU)

#define RECURRENT_INPUTS "weight_hh, bias_hh?, h?, c?, weight_hr?, batch_sizes? | "
enum { SAVED_IN = 1 << W | 1 << PROJECT | 1 << SIZES };

static const ms_op op_rnn =
    MS_ROW("rnn", 2, MS_RECURRENT_IN, .takes = RECURRENT_INPUTS "reverse?, relu?",
           .doc = "All steps of an RNN layer in one direction.", .flags = MS_OP_LOW | MS_OP_ANY_DEVICE,
           .save_in = SAVED_IN, .save_out = 4 | 8, .n_shown = 2, .check = rnn_check, .run = { [MS_CPU] = ms__cpu_rnn },
           .backward = rnn_backward,
           .samples = "[5,2,3] [3,3]u [3] [2,3] i=0,0; [5,2,3] [3,3]u [3] [2,3] i=1,0; [5,2,3] [3,3]u i=0,1; "
                      "[1,2,3] [3,3]u [3] [2,3] i=0,0; [4,0,3] [3,3]u [3] i=0,0; [5,37,3] [3,3]u - [37,3] i=1,0");
static const ms_op op_lstm =
    MS_ROW("lstm", 2, MS_RECURRENT_IN, .takes = RECURRENT_INPUTS "reverse?",
           .doc = "All steps of an LSTM layer in one direction.", .flags = MS_OP_LOW | MS_OP_ANY_DEVICE,
           .save_in = SAVED_IN, .save_out = 8 | 16 | 32, .n_shown = 3, .check = lstm_check,
           .run = { [MS_CPU] = ms__cpu_lstm }, .backward = lstm_backward,
           .samples =
               "[5,2,12] [12,3]u [12] [2,3] [2,3] i=0; [5,2,12] [12,3]u [12] [2,3] [2,3] i=1; [5,2,12] [12,3]u i=0; "
               "[1,2,12] [12,3]u [12] [2,3] [2,3] i=0; [4,0,12] [12,3]u [12] i=0; "
               "[3,9,72] [72,18]u [72] [9,18] [9,18] i=0; [5,37,24] [24,6]u - [37,6] - i=1; "
               "[5,2,12] [12,2]u [12] [2,2] [2,3] [2,3]u i=0; [5,37,24] [24,5]u [24] [37,5] [37,6] [5,6]u i=1");
static const ms_op op_gru =
    MS_ROW("gru", 2, MS_RECURRENT_IN, .takes = RECURRENT_INPUTS "reverse?",
           .doc = "All steps of a GRU layer in one direction.", .flags = MS_OP_LOW | MS_OP_ANY_DEVICE,
           .save_in = SAVED_IN, .save_out = 4 | 8, .n_shown = 2, .check = gru_check, .run = { [MS_CPU] = ms__cpu_gru },
           .backward = gru_backward,
           .samples = "[5,2,9] [9,3]u [9] [2,3] i=0; [5,2,9] [9,3]u [9] [2,3] i=1; [5,2,9] [9,3]u i=0; "
                      "[1,2,9] [9,3]u [9] [2,3] i=0; [4,0,9] [9,3]u [9] i=0; [3,9,54] [54,18]u [54] [9,18] i=0; "
                      "[5,37,18] [18,6]u - [37,6] i=1");

MS_OPERATORS = { &op_rnn, &op_rnn_backward, &op_lstm, &op_lstm_backward, &op_gru, &op_gru_backward };
