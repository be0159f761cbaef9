// SPDX-License-Identifier: MIT
// formulas/recurrent.h -- a time step of one hidden unit of RNN, LSTM and GRU, forward and backward. C and nvcc include
// it once per type, with REAL and R(name) defined. Functions ending in _step turn sums of products into gates, in
// place, and return the unit's new state; those ending in _back turn gates into the gradients of those sums, in place.
// dh: the gradient of the new state.
#include "formulas/math32.h"

MS_FN REAL R(ms_gate)(REAL x) { return 1 / (1 + R(ms_exp)(-x)); }

// RNN (Elman 1990).
MS_FN REAL R(ms_rnn_step)(REAL x, int relu) { return relu ? (x < 0 ? 0 : x) : R(ms_tanh)(x); }
MS_FN REAL R(ms_rnn_back)(REAL h, int relu, REAL dh) { return relu ? (h <= 0 ? 0 : dh) : dh * (1 - h * h); }

// LSTM (Hochreiter & Schmidhuber 1997; Gers et al. 2000). i, f, g, o: input gate, forget gate, candidate, output gate.
// c: the cell, first before the step and then after it.
MS_FN REAL R(ms_lstm_step)(REAL *i, REAL *f, REAL *g, REAL *o, REAL *c)
{
    *i = R(ms_gate)(*i);
    *f = R(ms_gate)(*f);
    *g = R(ms_tanh)(*g);
    *o = R(ms_gate)(*o);
    *c = *f * *c + *i * *g;
    return *o * R(ms_tanh)(*c);
}
// The first of two functions for the backward of an LSTM's step. c: the cell after the step. dc: the gradient of that
// cell; the part that comes through the new state is added to it. Returns the new state, which the gradient of a
// projection needs.
MS_FN REAL R(ms_lstm_back)(REAL *o, REAL c, REAL dh, REAL *dc)
{
    REAL t = R(ms_tanh)(c), h = *o * t;
    *dc += dh * *o * (1 - t * t);
    *o = dh * t * *o * (1 - *o);
    return h;
}
// To be called after ms_lstm_back. c: the cell before the step. dc: on entry the gradient of the cell after the step,
// on return that of the cell before it.
MS_FN void R(ms_lstm_cell_back)(REAL *i, REAL *f, REAL *g, REAL c, REAL *dc)
{
    REAL d = *dc, in = *i;
    *dc = d * *f;
    *i = d * *g * in * (1 - in);
    *f = d * c * *f * (1 - *f);
    *g = d * in * (1 - *g * *g);
}

// GRU (Cho et al. 2014), with the reset gate applied after the product of state and weights. r, z, n: reset gate,
// update gate, candidate; n is passed as the candidate's sum over the input alone. hn: the candidate's sum over the
// state. h: the state before the step.
MS_FN REAL R(ms_gru_step)(REAL *r, REAL *z, REAL *n, REAL hn, REAL h)
{
    *r = R(ms_gate)(*r);
    *z = R(ms_gate)(*z);
    *n = R(ms_tanh)(*n + *r * hn);
    return *n + *z * (h - *n);
}
// Returns the part of the gradient of h, the state before the step, that does not pass through a sum of products.
MS_FN REAL R(ms_gru_back)(REAL *r, REAL *z, REAL *n, REAL *hn, REAL h, REAL dh)
{
    REAL direct = dh * *z, dn = dh * (1 - *z) * (1 - *n * *n), reset = *r;
    *z = dh * (h - *n) * *z * (1 - *z);
    *r = dn * *hn * reset * (1 - reset);
    *hn = dn * reset;
    *n = dn;
    return direct;
}
