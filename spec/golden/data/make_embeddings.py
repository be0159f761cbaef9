#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes embeddings.json: bags of rows, and rotary position embeddings, which PyTorch does not have: they are computed here
as products of complex numbers.  usage: make_embeddings.py [OUT_DIR]"""
import os, sys
import torch
import torch.nn.functional as F
from cases import record, wave

ids = torch.tensor([[0, 3, 3, 1], [2, 2, 4, 0], [3, 3, 3, 3]])
w, factors = wave((6, 3), 0.3, -2, 2, 0.7), wave((3, 4), 0.2, -1, 1, 0.9)
cases = {}
for mode in "sum mean max".split():
    cases[mode] = (lambda w, mode=mode: F.embedding_bag(ids, w, mode=mode), [w])
    cases[mode + "_padding"] = (lambda w, mode=mode: F.embedding_bag(ids, w, mode=mode, padding_idx=3), [w])
cases["weighted"] = (lambda w, f: F.embedding_bag(ids, w, mode="sum", per_sample_weights=f), [w, factors])


def rotary(x, base=10000.0, offset=0, interleaved=False):
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(x.shape[-2]) + offset, rates).double()
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles))
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)


x = wave((2, 2, 5, 6), 0.3, -2, 2, 0.7)
cases["rotary"] = (rotary, [x])
cases["rotary_interleaved"] = (lambda x: rotary(x, 500.0, 3, True), [x])

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "embeddings.json"), cases)
