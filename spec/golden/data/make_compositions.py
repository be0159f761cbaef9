#!/usr/bin/env python3
"""Writes compositions.json: tensor functions that are made of others.  usage: make_compositions.py [OUT_DIR]"""
import os, sys
import torch
from cases import record, wave

x, square, cube = wave((3, 5), 0.3, -2.2, 2.2, 0.7), wave((3, 3), 0.2, -2, 2, 0.7), wave((2, 3, 4), 0.1, -2, 2, 0.7)
v, w = wave((4,), 0.5, -1, 1, 0.9), wave((3,), 1.5, -1, 1, 0.9)
counts = torch.tensor([2, 0, 3])
cases = {
    "flip": (lambda t: torch.flip(t, (0, -1)), [cube]),
    "roll": (lambda t: torch.roll(t, 4), [x]),
    "roll_dims": (lambda t: torch.roll(t, (1, -2), (0, 1)), [x]),
    "rot90": (torch.rot90, [x]),
    "rot90_back": (lambda t: torch.rot90(t, -1, (1, 2)), [cube]),
    "rot90_twice": (lambda t: torch.rot90(t, 2, (0, 2)), [cube]),
    "movedim": (lambda t: torch.movedim(t, (0, 1), (-1, 0)), [cube]),
    "swapaxes": (lambda t: torch.swapaxes(t, 0, 2), [cube]),
    "unflatten": (lambda t: t.unflatten(1, (-1, 5, 1)), [x]),
    "hstack": (lambda a, b: torch.hstack((a, b)), [x, square]),
    "hstack_vectors": (lambda a, b: torch.hstack((a, b)), [v, w]),
    "vstack": (lambda a, b: torch.vstack((a, b)), [square, w]),
    "tensor_split": (lambda t: torch.cat([p * (k + 1) for k, p in enumerate(t.tensor_split(3, 1))], 1), [x]),
    "tensor_split_at": (lambda t: torch.cat([p * (k + 1) for k, p in enumerate(t.tensor_split((1, -2), 1))], 1), [x]),
    "broadcast_to": (lambda t: t.broadcast_to(2, 3, 4), [v]),
    "meshgrid": (lambda a, b: torch.mul(*torch.meshgrid(a, b * b, indexing="ij")), [v, w]),
    "meshgrid_xy": (lambda a, b: torch.mul(*torch.meshgrid(a, b * b, indexing="xy")), [v, w]),
    "diag": (torch.diag, [v]),
    "diag_above": (lambda t: torch.diag(t, 2), [v]),
    "diag_below": (lambda t: torch.diag(t, -1), [v]),
    "diag_of_matrix": (lambda t: torch.diag(t, 1), [x]),
    "diagonal": (lambda t: torch.diagonal(t, 1, 2, 0), [cube]),
    "diagonal_below": (lambda t: torch.diagonal(t, -1, 1, 2), [cube]),
    "repeat_interleave": (lambda t: t.repeat_interleave(2), [x]),
    "repeat_interleave_rows": (lambda t: t.repeat_interleave(counts, 0), [x]),
    "take_along_dim": (lambda t: torch.take_along_dim(t, torch.tensor([[4, 0, 0]]), 1), [x]),
}

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "compositions.json"), cases)
