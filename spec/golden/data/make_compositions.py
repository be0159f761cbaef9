#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes compositions.json: tensor functions that Moonshard composes from other operators.  usage: make_compositions.py [OUT_DIR]"""
import os, sys
import torch
from cases import record, wave

x, square, cube = wave((3, 5), 0.3, -2.2, 2.2, 0.7), wave((3, 3), 0.2, -2, 2, 0.7), wave((2, 3, 4), 0.1, -2, 2, 0.7)
v, w = wave((4,), 0.5, -1, 1, 0.9), wave((3,), 1.5, -1, 1, 0.9)
v2, other = wave((4,), 0.9, -1, 1, 0.4), wave((2, 4, 5), 0.7, -1, 1, 0.3)
einsums = [("matmul", "ij,jk->ik", [square, x]), ("batch", "bij,bjk->bik", [cube, other]), ("implicit", "kj,ki", [square, x]),
           ("trace", "ii", [square]), ("diagonal", "ii->i", [square]), ("outer", "i,j->ji", [v, w]),
           ("sum", "bij->j", [cube]), ("dots", "...ij,...jk->...ki", [cube, other]), ("dots_broadcast", "...j,jk", [cube, other[0]]),
           ("three", "bij,bjk,k->bi", [cube, other, x[0]]), ("lone", "ij,kl->il", [square, x]), ("elements", "ij,ij->ij", [square, square + 1]),
           ("bilinear", "bn,anm,bm->ba", [wave((2, 3), 0.3), wave((5, 3, 4), 0.1, freq=0.7), wave((2, 4), 0.6)])]
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
    "outer": (torch.outer, [v, w]),
    "dot": (torch.dot, [v, v2]),
    "mv": (torch.mv, [square, w]),
    "addmm": (lambda t, a, b: torch.addmm(t, a, b, beta=0.7, alpha=-1.3), [x[0], square, x]),
    "baddbmm": (lambda t, a: torch.baddbmm(t, a, a.transpose(1, 2), beta=0.5), [square, cube]),
    "kron": (torch.kron, [square, x]),
    "kron_vector": (torch.kron, [cube, w]),
    "tensordot": (torch.tensordot, [cube, wave((3, 4, 2), 0.8, -1, 1, 0.5)]),
    "tensordot_lists": (lambda a, b: torch.tensordot(a, b, ([0, 2], [2, 1])), [cube, wave((3, 4, 2), 0.8, -1, 1, 0.5)]),
    "tensordot_none": (lambda a, b: torch.tensordot(a, b, 0), [v, w]),
    "cdist": (torch.cdist, [square, wave((2, 4, 3), 0.8, -1, 1, 0.5)]),
    "cdist_1": (lambda a, b: torch.cdist(a, b, 1.0), [square, wave((4, 3), 0.8, -1, 1, 0.5)]),
    "cdist_inf": (lambda a, b: torch.cdist(a, b, float("inf")), [square, wave((4, 3), 0.8, -1, 1, 0.5)]),
    "cross": (torch.cross, [cube, wave((2, 3, 4), 0.8, -1, 1, 0.5)]),
    "cross_last": (lambda a, b: torch.cross(a, b, -1), [square, wave((3, 3), 0.8, -1, 1, 0.5)]),
    "amax": (lambda t: torch.amax(t, (0, 2)), [cube]),
    "amax_ties": (lambda t: torch.amax(t.round(), 1) + torch.amax(t * 0, 1), [cube]),
    "amin": (lambda t: torch.amin(t, 1, keepdim=True), [cube]),
    "aminmax": (lambda t: torch.sub(*torch.aminmax(t, dim=1)), [cube]),
    "count_nonzero": (lambda t: torch.count_nonzero(t.round(), 1), [cube]),
    "nansum": (lambda t: torch.nansum(torch.where(t > 1, float("nan"), t), 1), [cube]),
    "nanmean": (lambda t: torch.nanmean(torch.where(t > 1, float("nan"), t), 1, keepdim=True), [cube]),
    "diff": (torch.diff, [x]),
    "diff_twice": (lambda t, u: torch.diff(t, 2, 0, prepend=u, append=u * 2), [square, square[:1]]),
    "histc": (lambda t: torch.histc(t.detach(), 7), [cube]),
    "histc_limits": (lambda t: torch.histc(t.detach(), 5, -1, 1.5), [cube]),
    "bincount": (lambda t: torch.bincount(torch.tensor([1, 4, 1, 0]), t.detach(), 7), [v]),
    "linspace": (lambda t: t * torch.linspace(-3, 7, 4), [v]),
    "logspace": (lambda t: t * torch.logspace(-1, 2, 4, 2), [v]),
    "trace": (torch.trace, [square]),
    "diag_embed": (lambda t: torch.diag_embed(t, 1), [x]),
    "diag_embed_dims": (lambda t: torch.diag_embed(t, -2, 0, 2), [x]),
    "fill_diagonal": (lambda t: (t * 1).fill_diagonal_(0.5), [x]),
    "fill_diagonal_wrap": (lambda t: (t * 1).fill_diagonal_(0.5, wrap=True), [wave((7, 2), 0.4)]),
    "dist": (lambda a, b: torch.dist(a, b, 3), [v, v2]),
    "renorm": (lambda t: torch.renorm(t, 2, 0, 2.5), [x]),
    "block_diag": (lambda a, b, c: torch.block_diag(a, b, c), [square, v, torch.tensor(2.0)]),
    "dstack": (lambda a, b: torch.dstack((a, b)), [v, v2]),
    "tril_indices": (lambda t: torch.tril_indices(3, 5, 1) * 1.0, [v]),
    "triu_indices": (lambda t: torch.triu_indices(3, 5, -1) * 1.0, [v]),
    "broadcast_tensors": (lambda a, b: torch.mul(*torch.broadcast_tensors(a, b)), [square[:, :1], w]),
    **{"einsum_" + name: (lambda *a, e=e: torch.einsum(e, *a), args) for name, e, args in einsums},
}

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "compositions.json"), cases)
