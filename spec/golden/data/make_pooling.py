#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes pooling.json: pooling over windows of one to three dimensions. usage: make_pooling.py [OUT_DIR]"""
import os, sys
import torch
import torch.nn.functional as F
from cases import record, wave


def x(*shape):  # no two elements are equal, and their order in a window changes
    return wave(shape, 0.3, -2, 2, 0.77) + wave(shape, 0, -0.3, 0.3, 2.9)


x1, x2, x3 = x(2, 2, 11), x(1, 2, 7, 8), x(1, 1, 5, 6, 7)
cases = {
    "max_pool1d": (lambda x: F.max_pool1d(x, 3, 2, 1), [x1]),
    "max_pool1d_ceil_dilated": (lambda x: F.max_pool1d(x, 3, 2, 1, 2, ceil_mode=True), [x1]),
    "max_pool1d_alone": (lambda x: F.max_pool1d(x, 2), [x(3, 7)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), [x2]),
    "max_pool2d_2x2": (lambda x: F.max_pool2d(x, 2), [x2]),
    "max_pool2d_ceil": (lambda x: F.max_pool2d(x, (2, 3), (3, 2), (1, 1), ceil_mode=True), [x2]),
    "max_pool2d_dilated": (lambda x: F.max_pool2d(x, (3, 2), (1, 2), (1, 0), (2, 3)), [x2]),
    "max_pool3d": (lambda x: F.max_pool3d(x, (2, 3, 2), (1, 2, 3), (1, 1, 0)), [x3]),
    "max_pool3d_ceil": (lambda x: F.max_pool3d(x, 2, 2, 1, ceil_mode=True), [x3]),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 2, 1), [x1]),
    "avg_pool1d_ceil": (lambda x: F.avg_pool1d(x, 4, 3, 2, ceil_mode=True, count_include_pad=False), [x1]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), [x2]),
    "avg_pool2d_uncounted": (lambda x: F.avg_pool2d(x, (2, 3), (3, 2), (1, 1), count_include_pad=False), [x2]),
    "avg_pool2d_ceil": (lambda x: F.avg_pool2d(x, (2, 3), (3, 2), (1, 1), ceil_mode=True), [x2]),
    "avg_pool2d_divisor": (lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=7), [x2]),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, (2, 3, 2), (1, 2, 3), (1, 1, 0)), [x3]),
    "avg_pool3d_ceil": (lambda x: F.avg_pool3d(x, 2, 2, 1, ceil_mode=True, count_include_pad=False), [x3]),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 4), [x1]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), [x2]),
    "adaptive_avg_pool2d_one": (lambda x: F.adaptive_avg_pool2d(x, 1), [x2]),
    "adaptive_avg_pool2d_larger": (lambda x: F.adaptive_avg_pool2d(x, (9, None)), [x2]),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 4, 3)), [x3]),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x, 4), [x1]),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (3, 5)), [x2]),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, (2, 4, 3)), [x3]),
    "lp_pool1d": (lambda x: F.lp_pool1d(x, 2, 3, 2), [x1]),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 3, (2, 3), 2, ceil_mode=True), [x2.abs()]),
    "lp_pool3d": (lambda x: F.lp_pool3d(x, 2, 2), [x3]),
    "indices": (lambda x: torch.cat([i.flatten() for i in [
        F.max_pool2d(x, 3, 2, 1, return_indices=True)[1], F.adaptive_max_pool2d(x, (3, 5), return_indices=True)[1],
        F.max_pool2d(x, (3, 2), (1, 2), (1, 0), (2, 3), return_indices=True)[1]]]), [x2]),
    "indices3d": (lambda x: F.max_pool3d(x, 2, 2, 1, ceil_mode=True, return_indices=True)[1], [x3]),
}


def unpool(pool, back, *args, **more):
    def run(x):
        y, at = pool(x, *args, return_indices=True)
        return back(y * y, at, *args, **more)
    return run


cases["max_unpool1d"] = (unpool(F.max_pool1d, F.max_unpool1d, 2), [x1])
cases["max_unpool2d"] = (unpool(F.max_pool2d, F.max_unpool2d, 2, output_size=(7, 8)), [x2])
cases["max_unpool3d"] = (unpool(F.max_pool3d, F.max_unpool3d, (1, 2, 2), output_size=(5, 6, 7)), [x3])

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "pooling.json"), cases)
