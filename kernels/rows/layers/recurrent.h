// SPDX-License-Identifier: MIT
// rows/layers/recurrent.h -- the steps of a layer of RNN, LSTM or GRU in one direction, for the CPU and the GPU.
//
// Step t has a row for each sequence that is longer than t, the longest sequence first; the steps lie one after the
// other, as in a packed sequence. A dense input [T, N, ...] has N rows in each step. Forward is a series of passes from
// one step to the next: the state after a step is stored as the state before the next one, in that step's rows. A
// sequence that ends with a step leaves its state in h_n; one that begins with the next step has h_0 there. The first
// pass has no step before it and the last none after it. Backward makes the same passes in the opposite order.
#ifndef MS_ROWS_RECURRENT_H
#define MS_ROWS_RECURRENT_H

#include "ops/op.h"

// Each kind has its own operators: rnn, lstm, gru, and their gradients.
typedef enum { MS_RNN, MS_LSTM, MS_GRU } ms_recurrent_kind;

// Inputs of the operators; those from MS_RECURRENT_B on may be absent. X: the product of the input with its weight,
// with the bias, [T, N, gates * H], or packed [rows, gates * H]; W, B: weight [gates * H, P] and bias [gates * H] of
// the state; H0 [N, P], C0 [N, H]; PROJECT [P, H]; SIZES: int64 on the CPU, the number of rows of each step, for a
// packed X. H: the hidden size; P, the size of the state, is H without a projection. Integers: whether the last step
// comes first; RNN: whether relu replaces tanh.
enum {
    MS_RECURRENT_X,
    MS_RECURRENT_W,
    MS_RECURRENT_B,
    MS_RECURRENT_H0,
    MS_RECURRENT_C0,
    MS_RECURRENT_PROJECT,
    MS_RECURRENT_SIZES,
    MS_RECURRENT_IN
};
static inline ms_tensor *ms__recurrent_in(const ms_call *c, int k) { return k < c->n_in ? c->in[k] : NULL; }

// Outputs: y, like X with P features, and the states after the last step of each sequence, h [N, P] and c [N, H]
// (LSTM). The others are for backward: the states before each step, HS [rows, P] and CS [rows, H] (LSTM); if the call
// is recorded, the gates [rows, 4 * H]. GRU's four are reset, update, candidate, and the candidate's sum over the
// state; RNN has one, the new state, [rows, H]. CS and the gates are float32 with half types: 1 - gate has few correct
// bits if the gate was rounded.
enum { MS_RECURRENT_Y, MS_RECURRENT_HN, MS_RECURRENT_CN, MS_RECURRENT_HS, MS_RECURRENT_CS, MS_RECURRENT_GATES };
static inline ms_tensor *ms__recurrent_out(ms_recurrent_kind kind, ms_tensor *const *out, int k)
{
    if (kind == MS_LSTM) return out[k];
    if (k == MS_RECURRENT_CN || k == MS_RECURRENT_CS) return NULL;
    return out[k <= MS_RECURRENT_HN ? k : k == MS_RECURRENT_HS ? 2 : 3];
}

// Inputs of the gradients. The first three are the gradients of y, h and c; DY, DH or DC may be absent. HS, CS and
// GATES are outputs of the forward. Integers: whether the last step comes first; whether relu replaces tanh; N; the
// mask (rows/grad.h).
enum {
    MS_RECURRENT_DY,
    MS_RECURRENT_DH,
    MS_RECURRENT_DC,
    MS_RECURRENT_BACK_W,
    MS_RECURRENT_BACK_PROJECT,
    MS_RECURRENT_BACK_SIZES,
    MS_RECURRENT_BACK_HS,
    MS_RECURRENT_BACK_CS,
    MS_RECURRENT_BACK_GATES,
    MS_RECURRENT_BACK_IN
};

static inline int ms__gates_of(ms_recurrent_kind kind) { return kind == MS_LSTM ? 4 : kind == MS_GRU ? 3 : 1; }
static inline int ms__kept_of(ms_recurrent_kind kind) { return kind == MS_RNN ? 1 : 4; }  // gates kept for backward

// The steps of a call. sizes is NULL if all have n rows.
typedef struct ms_steps {
    int64_t t, n, rows;  // number of steps, of sequences, and of rows of all steps
    const int64_t *sizes;
    bool reversed;
} ms_steps;

// Rows [at, at + n) of step t. n is 0 before the first step and after the last.
typedef struct ms_step {
    int64_t t, at, n;
} ms_step;

static inline int64_t ms__step_size(const ms_steps *s, int64_t t) { return s->sizes ? s->sizes[t] : s->n; }

// The first step in the layer's direction or, if back is set, in the opposite one.
static inline ms_step ms__first_step(const ms_steps *s, bool back)
{
    int64_t t = s->reversed == back ? 0 : s->t - 1, n = ms__step_size(s, t);
    ms_step first = { t, t ? s->rows - n : 0, n };
    return first;
}
static inline ms_step ms__next_step(const ms_steps *s, ms_step now, bool back)
{
    int64_t t = now.t + (s->reversed == back ? 1 : -1);
    ms_step next = { t, 0, 0 };
    if (t < 0 || t == s->t) return next;
    next.n = ms__step_size(s, t);
    next.at = t > now.t ? now.at + now.n : now.at - next.n;
    return next;
}

// Finds the steps of x [T, N, features], or of a packed x [rows, features] with sizes. Sizes are checked at every call,
// because a captured step repeats calls with other sizes.
static inline ms_status ms__steps_of(const ms_call *c, const ms_tensor *x, const ms_tensor *sizes, ms_steps *out)
{
    ms_steps s = { x->shape[0], 0, 0, NULL, c->n_i > 0 && c->i[0] != 0 };
    if (!sizes) {
        s.n = x->shape[1];
        s.rows = s.t * s.n;
    } else {
        s.t = sizes->numel;
        s.rows = x->shape[0];
        s.sizes = (const int64_t *)ms__data(sizes);
        s.n = s.t ? s.sizes[0] : 0;
        int64_t sum = 0;
        for (int64_t t = 0; t < s.t; t++) {
            int64_t n = s.sizes[t];
            if (n < 1 || (t && n > s.sizes[t - 1]))
                return ms__call_fail(c,
                                     t ? "batch_sizes[%lld] is %lld, expected from 1 to the size before it, %lld"
                                       : "batch_sizes[%lld] is %lld, expected 1 or more",
                                     (long long)t + 1, (long long)n, (long long)s.sizes[t ? t - 1 : 0]);
            sum += n;
        }
        if (sum != s.rows)
            return ms__call_fail(c, "the sum of batch_sizes is %lld, but the packed input %s has %lld row%s",
                                 (long long)sum, ms__shape_text(x->ndim, x->shape), (long long)s.rows,
                                 s.rows == 1 ? "" : "s");
    }
    if (s.t == 0) return ms__call_fail(c, "the input %s has no steps", ms__shape_text(x->ndim, x->shape));
    *out = s;
    return MS_OK;
}

#endif
