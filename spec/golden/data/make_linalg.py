#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes linalg.json: torch.linalg. Vectors whose sign is arbitrary are compared by their absolute values.
usage: make_linalg.py [OUT_DIR]"""
import os, sys
import torch
from torch import linalg as L
from cases import record, wave

inf = float("inf")


def rough(shape, offset, size, freq):           # matrices of sines alone have rank 2
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return size * torch.sin(freq * i + 0.37 * i * i + offset).reshape(shape)


square = rough((3, 3), 0.3, 2, 1.7)
batch = rough((2, 3, 3), 0.8, 2, 2.3)
tall, wide = rough((4, 3), 0.2, 2, 1.9), rough((2, 2, 4), 1.1, 2, 1.3)
right, vector, rows = wave((3, 2), 0.4), wave((3,), 0.6, -1, 1, 0.9), wave((4, 2), 0.1, -1, 1, 0.7)
definite = (lambda t: t @ t.mT + 2 * torch.eye(3))(batch)
singular = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.5, -1.0]])
deficient = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
symmetric = lambda t: t + t.mT


def pair(fn):                                   # results as one vector, without their signs
    return lambda *a: torch.cat([r.abs().reshape(-1) for r in fn(*a)])


def signed(fn):                                 # results as one vector
    return lambda *a: torch.cat([r.reshape(-1).double() for r in fn(*a)])


def least(a, b):
    """The solution, the rank, and the number of residuals."""
    r = L.lstsq(a.detach(), b.detach(), rcond=1e-6, driver="gelsd")
    return torch.cat([r.solution.reshape(-1), r.rank.double().reshape(-1), torch.tensor([float(r.residuals.numel())])])


cases = {
    "inv": (L.inv, [batch]),
    "solve": (L.solve, [batch, right]),
    "solve_vector": (L.solve, [square, vector]),
    "solve_vectors": (L.solve, [batch, wave((2, 3), 0.5)]),
    "solve_right": (lambda a, b: L.solve(a, b, left=False), [square, wave((2, 3), 0.5)]),
    "triangular": (lambda a, b: L.solve_triangular(a, b, upper=False), [square, right]),
    "triangular_upper": (lambda a, b: L.solve_triangular(a, b, upper=True), [batch, right]),
    "triangular_right": (lambda a, b: L.solve_triangular(a, b, upper=True, left=False), [square, wave((2, 3), 0.5)]),
    "triangular_ones": (lambda a, b: L.solve_triangular(a, b, upper=False, unitriangular=True), [square, right]),
    "det": (L.det, [batch]),
    "slogdet": (signed(L.slogdet), [batch]),
    "cholesky": (L.cholesky, [definite]),
    "cholesky_upper": (lambda t: L.cholesky(t, upper=True), [definite]),
    "qr": (pair(L.qr), [tall]),
    "qr_square": (pair(L.qr), [batch]),
    "qr_wide": (pair(L.qr), [wide]),
    "qr_complete": (lambda t: L.qr(t, mode="complete")[1].abs(), [wide]),
    "svd": (pair(lambda t: L.svd(t, full_matrices=False)), [tall]),
    "svd_wide": (pair(lambda t: L.svd(t, full_matrices=False)), [wide]),
    "svd_full": (pair(L.svd), [batch]),
    "svdvals": (L.svdvals, [wide]),
    "eigh": (pair(lambda t: L.eigh(symmetric(t))), [batch]),
    "eigh_upper": (pair(lambda t: L.eigh(symmetric(t), UPLO="U")), [square]),
    "eigvalsh": (L.eigvalsh, [definite]),
    "pinv": (L.pinv, [tall]),
    "pinv_wide": (L.pinv, [wide]),
    "pinv_deficient": (lambda t: L.pinv(t.detach(), rtol=1e-6), [deficient]),
    "lstsq": (lambda a, b: L.lstsq(a, b).solution, [tall, rows]),
    "lstsq_values": (lambda a, b: L.lstsq(a, b, driver="gelsd").solution, [tall, rows]),
    "lstsq_rest": (signed(lambda a, b: L.lstsq(a, b, driver="gelsd")[1:]), [tall.clone(), rows]),
    "lstsq_deficient": (least, [deficient, wave((deficient.shape[-2], 2), 0.2)]),
    "lstsq_wide": (lambda a, b: L.lstsq(a, b).solution, [wide, wave((2, 2, 3), 0.2)]),
    "norm": (L.norm, [batch]),
    "norm_nuclear": (lambda t: L.norm(t, "nuc", dim=(0, 2)), [batch]),
    "norm_vector": (lambda t: L.norm(t, 3, dim=1, keepdim=True), [batch]),
    **{"vector_norm_" + n: (lambda t, p=p: L.vector_norm(t, p, dim=-1), [square]) for n, p in
       (("1", 1), ("half", 0.5), ("inf", inf), ("minf", -inf), ("m2", -2))},
    "vector_norm_0": (lambda t: L.vector_norm(t.detach(), 0, dim=-1), [square]),
    **{"matrix_norm_" + n: (lambda t, p=p: L.matrix_norm(t, p), [batch]) for n, p in
       (("fro", "fro"), ("nuc", "nuc"), ("1", 1), ("m1", -1), ("2", 2), ("m2", -2), ("inf", inf), ("minf", -inf))},
    "matrix_norm_keep": (lambda t: L.matrix_norm(t, 2, dim=(0, 1), keepdim=True), [batch]),
    "matrix_power": (lambda t: L.matrix_power(t, 5), [square]),
    "matrix_power_inverse": (lambda t: L.matrix_power(t, -2), [batch]),
    "matrix_power_0": (lambda t: L.matrix_power(t, 0) + 0 * t, [batch]),
    "matrix_exp": (L.matrix_exp, [batch]),
    "cond": (L.cond, [batch]),
    "cond_1": (lambda t: L.matrix_norm(t, 1) * L.matrix_norm(L.inv(t), 1), [batch]),
    "matrix_rank": (L.matrix_rank, [torch.stack((singular, square))]),
    "multi_dot": (lambda *a: L.multi_dot(a), [vector, square, right]),
    "vecdot": (lambda a, b: L.vecdot(a, b, dim=0), [square, square.mT.contiguous()]),
    "cross": (L.cross, [batch, square[None]]),
    "logdet": (torch.logdet, [definite]),
    "svd_method": (pair(lambda t: t.svd()), [tall]),
    "cholesky_solve": (lambda b, f: torch.cholesky_solve(b, f.tril()), [right, square.tril() + 3 * torch.eye(3)]),
    "cholesky_inverse": (lambda f: torch.cholesky_inverse(f.tril()), [square.tril() + 3 * torch.eye(3)]),
}
out = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
record(os.path.join(out, "linalg.json"), cases)
