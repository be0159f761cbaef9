#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes recurrent.json: RNN, LSTM, GRU and their cells. Inputs are x, the states, and the weights in the order of the
module's parameters; the output is everything that the module returns, flattened.  usage: make_recurrent.py [OUT_DIR]"""
import os, sys
import torch
from torch import _VF
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from cases import record, wave

H, N, T, I = 3, 2, 5, 4


def weights(gates, layers=1, directions=1, bias=True, project=0):
    out = []
    for layer in range(layers):
        for d in range(directions):
            state = project or H
            size = I if layer == 0 else directions * state
            shapes = [(gates * H, size), (gates * H, state)] + ([(gates * H,), (gates * H,)] if bias else [])
            shapes += [(project, H)] if project else []
            out += [wave(s, 0.3 + 0.7 * (len(out) + k), -0.8, 0.8, 0.77) for k, s in enumerate(shapes)]
    return out


def flat(results):
    return torch.cat([r.reshape(-1) for r in results])


def over(kind, layers=1, directions=1, bias=True, batch_first=False, length=T, project=0):
    """A case of a whole sequence."""
    n = {"lstm": 2}.get(kind, 1)
    x = wave((N, length, I) if batch_first else (length, N, I), 0.2, -1.5, 1.5, 0.37)
    states = [wave((layers * directions, N, H if k else project or H), 0.9 + k, -1, 1, 0.41) for k in range(n)]

    def fn(x, *rest):
        hx = rest[:n] if kind == "lstm" else rest[0]
        return flat(getattr(_VF, kind)(x, hx, list(rest[n:]), bias, layers, 0.0, True, directions == 2, batch_first))

    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    return (fn, [x] + states + weights(gates, layers, directions, bias, project))


def over_packed(kind, lengths, layers=1, directions=1, project=0):
    """A case of sequences of several lengths: padded, packed, and the output padded with 0.5."""
    n, batch = {"lstm": 2}.get(kind, 1), len(lengths)
    x = wave((max(lengths), batch, I), 0.2, -1.5, 1.5, 0.37)
    states = [wave((layers * directions, batch, H if k else project or H), 0.9 + k, -1, 1, 0.41) for k in range(n)]

    def fn(x, *rest):
        p = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
        hx = [h.index_select(1, p.sorted_indices) for h in rest[:n]]
        hx = tuple(hx) if kind == "lstm" else hx[0]
        y, *last = getattr(_VF, kind)(p.data, p.batch_sizes, hx, list(rest[n:]), True, layers, 0.0, True, directions == 2)
        y = PackedSequence(y, p.batch_sizes, p.sorted_indices, p.unsorted_indices)
        return flat([pad_packed_sequence(y, padding_value=0.5)[0]] + [h.index_select(1, p.unsorted_indices) for h in last])

    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    return (fn, [x] + states + weights(gates, layers, directions, True, project))


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
cases["lstm_projected"] = over("lstm", project=2)
cases["lstm_projected_deep"] = over("lstm", layers=2, directions=2, project=2)
for kind in "rnn_tanh rnn_relu lstm gru".split():
    cases[kind + "_packed"] = over_packed(kind, [6, 4, 4, 1])
for kind in "rnn_tanh lstm gru".split():
    cases[kind + "_packed_deep"] = over_packed(kind, [3, 6, 1, 5, 6], layers=2, directions=2)
cases["lstm_packed_projected"] = over_packed("lstm", [3, 6, 1, 5, 6], layers=2, directions=2, project=2)

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "recurrent.json"), cases)
