#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes images.json: interpolation, padding, sampling by grids, windows as columns, exchanges of channels and space.
usage: make_images.py [OUT_DIR]"""
import os, sys
import torch
import torch.nn.functional as F
from cases import record, wave


def x(*shape):
    return wave(shape, 0.3, -2, 2, 0.77) + wave(shape, 0, -0.3, 0.3, 2.9)


x1, x2, x3 = x(1, 2, 7), x(1, 2, 4, 5), x(1, 1, 3, 4, 5)
grid = wave((1, 3, 4, 2), 0.4, -1.4, 1.4, 0.83)
grid3 = wave((1, 2, 2, 3, 3), 0.4, -1.4, 1.4, 0.83)
cases = {
    "nearest1d": (lambda x: F.interpolate(x, size=10), [x1]),
    "nearest2d": (lambda x: F.interpolate(x, size=(7, 3)), [x2]),
    "nearest2d_scale": (lambda x: F.interpolate(x, scale_factor=(1.7, 2.3)), [x2]),
    "nearest3d": (lambda x: F.interpolate(x, scale_factor=2), [x3]),
    "nearest_exact": (lambda x: F.interpolate(x, size=(7, 3), mode="nearest-exact"), [x2]),
    "nearest_exact_scale": (lambda x: F.interpolate(x, scale_factor=0.6, mode="nearest-exact"), [x1]),
    "linear": (lambda x: F.interpolate(x, size=11, mode="linear"), [x1]),
    "linear_scale": (lambda x: F.interpolate(x, scale_factor=1.6, mode="linear"), [x1]),
    "linear_recomputed": (lambda x: F.interpolate(x, scale_factor=1.6, mode="linear", recompute_scale_factor=True),
                          [x1]),
    "linear_aligned": (lambda x: F.interpolate(x, size=4, mode="linear", align_corners=True), [x1]),
    "bilinear": (lambda x: F.interpolate(x, size=(9, 3), mode="bilinear"), [x2]),
    "bilinear_scale": (lambda x: F.interpolate(x, scale_factor=(2, 0.7), mode="bilinear"), [x2]),
    "bilinear_aligned": (lambda x: F.interpolate(x, size=(7, 1), mode="bilinear", align_corners=True), [x2]),
    "bicubic": (lambda x: F.interpolate(x, size=(9, 3), mode="bicubic"), [x2]),
    "bicubic_aligned": (lambda x: F.interpolate(x, scale_factor=1.8, mode="bicubic", align_corners=True), [x2]),
    "trilinear": (lambda x: F.interpolate(x, size=(5, 3, 8), mode="trilinear"), [x3]),
    "trilinear_aligned": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=True), [x3]),
    "area": (lambda x: F.interpolate(x, size=(3, 7), mode="area"), [x2]),
    "area3d": (lambda x: F.interpolate(x, scale_factor=0.7, mode="area"), [x3]),
    "bilinear_antialias": (lambda x: F.interpolate(x, size=(3, 7), mode="bilinear", antialias=True), [x(1, 1, 9, 8)]),
    "bicubic_antialias": (lambda x: F.interpolate(x, size=(3, 7), mode="bicubic", antialias=True), [x(1, 1, 9, 8)]),
    "bicubic_antialias_scale": (lambda x: F.interpolate(x, scale_factor=0.4, mode="bicubic", antialias=True,
                                                        align_corners=True), [x(1, 1, 9, 8)]),
    "reflect1d": (lambda x: F.pad(x, (6, 3), mode="reflect"), [x1]),
    "reflect2d": (lambda x: F.pad(x, (1, 4, 3, 0), mode="reflect"), [x2]),
    "reflect3d": (lambda x: F.pad(x, (1, 4, 3, 0, 2, 1), mode="reflect"), [x3]),
    "replicate1d": (lambda x: F.pad(x, (8, 1), mode="replicate"), [x1]),
    "replicate2d": (lambda x: F.pad(x, (1, 6, 3, -1), mode="replicate"), [x2]),
    "replicate3d": (lambda x: F.pad(x, (1, 4, 3, 0, 2, 1), mode="replicate"), [x3]),
    "circular1d": (lambda x: F.pad(x, (7, 3), mode="circular"), [x1]),
    "circular2d": (lambda x: F.pad(x, (1, 5, 4, 0), mode="circular"), [x2]),
    "circular3d": (lambda x: F.pad(x, (1, 4, -1, 0, 2, 1), mode="circular"), [x3]),
    "constant3d": (lambda x: F.pad(x, (1, 0, -1, 2, 0, 1), value=0.5), [x3]),
    "unfold": (lambda x: F.unfold(x, (2, 3), padding=1, stride=(1, 2)), [x2]),
    "unfold_dilated": (lambda x: F.unfold(x, 2, dilation=(3, 2), padding=(1, 0)), [x2]),
    "unfold_alone": (lambda x: F.unfold(x, 2), [x(2, 4, 5)]),
    "fold": (lambda x: F.fold(x, (4, 5), (2, 3), padding=1, stride=(1, 2)), [x(1, 12, 15)]),
    "fold_alone": (lambda x: F.fold(x, 4, 2, stride=2), [x(8, 4)]),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3, 0.5, 0.8, 1.5), [x(2, 5, 2, 3)]),
    "local_response_norm_even": (lambda x: F.local_response_norm(x, 4), [x(2, 5, 3)]),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), [x(1, 2, 4, 6)]),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 3), [x(1, 6, 2, 2)]),
    "affine_grid": (lambda t: F.affine_grid(t, (2, 3, 4, 5), align_corners=False), [x(2, 2, 3)]),
    "affine_grid_aligned": (lambda t: F.affine_grid(t, (2, 3, 4, 1), align_corners=True), [x(2, 2, 3)]),
    "affine_grid3d": (lambda t: F.affine_grid(t, (1, 3, 2, 3, 4), align_corners=False), [x(1, 3, 4)]),
}


def sample(mode, padding, align):
    return lambda x, g: F.grid_sample(x, g, mode=mode, padding_mode=padding, align_corners=align)


for mode in ["bilinear", "nearest", "bicubic"]:
    for padding in ["zeros", "border", "reflection"]:
        for align in [False, True]:
            name = f"grid_{mode}_{padding}" + ("_aligned" if align else "")
            cases[name] = (sample(mode, padding, align), [x(1, 1, 4, 5), grid])
cases["grid3d"] = (sample("bilinear", "zeros", False), [x3, grid3])
cases["grid3d_reflection"] = (sample("bilinear", "reflection", True), [x3, grid3])
cases["grid3d_nearest"] = (sample("nearest", "border", False), [x3, grid3])

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "images.json"), cases)
