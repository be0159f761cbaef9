#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes recurrent.json: RNN, LSTM, GRU and their cells. Inputs are x, the states, and the weights in the order of the
module's parameters; the output is everything that the module returns, flattened.  usage: make_recurrent.py [OUT_DIR]"""
import os, sys
import torch
from torch import _VF
from cases import record, wave

H, N, T, I = 3, 2, 5, 4


def weights(gates, layers=1, directions=1, bias=True):
    out = []
    for layer in range(layers):
        for d in range(directions):
            size = I if layer == 0 else directions * H
            shapes = [(gates * H, size), (gates * H, H)] + ([(gates * H,), (gates * H,)] if bias else [])
            out += [wave(s, 0.3 + 0.7 * (len(out) + k), -0.8, 0.8, 0.77) for k, s in enumerate(shapes)]
    return out


def flat(results):
    return torch.cat([r.reshape(-1) for r in results])


def over(kind, layers=1, directions=1, bias=True, batch_first=False, length=T):
    """A case of a whole sequence."""
    n = {"lstm": 2}.get(kind, 1)
    x = wave((N, length, I) if batch_first else (length, N, I), 0.2, -1.5, 1.5, 0.37)
    states = [wave((layers * directions, N, H), 0.9 + k, -1, 1, 0.41) for k in range(n)]

    def fn(x, *rest):
        hx = rest[:n] if kind == "lstm" else rest[0]
        return flat(getattr(_VF, kind)(x, hx, list(rest[n:]), bias, layers, 0.0, True, directions == 2, batch_first))

    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    return (fn, [x] + states + weights(gates, layers, directions, bias))


def cell(kind):
    n = 2 if kind == "lstm_cell" else 1
    states = [wave((N, H), 0.9 + k, -1, 1, 0.41) for k in range(n)]

    def fn(x, *rest):
        out = getattr(_VF, kind)(x, rest[:2] if n == 2 else rest[0], *rest[n:])
        return flat(out if n == 2 else [out])

    gates = {"lstm_cell": 4, "gru_cell": 3}.get(kind, 1)
    return (fn, [wave((N, I), 0.2, -1.5, 1.5, 0.37)] + states + weights(gates))


cases = {}
for kind in "rnn_tanh rnn_relu lstm gru".split():
    cases[kind] = over(kind)
    cases[kind + "_cell"] = cell(kind + "_cell")
for kind in "rnn_tanh lstm gru".split():
    cases[kind + "_deep"] = over(kind, layers=2, directions=2)
cases["lstm_batch_first"] = over("lstm", bias=False, batch_first=True)
cases["gru_long"] = over("gru", length=45)

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "recurrent.json"), cases)
