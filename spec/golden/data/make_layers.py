#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes layers.json: normalisation over groups and instances, padding, pixel shuffling, bilinear forms.
usage: make_layers.py [OUT_DIR]"""
import os, sys
import torch
import torch.nn.functional as F
from cases import record, wave

x4, x3 = wave((2, 6, 3, 4), 0.3, -2, 2, 0.7), wave((2, 4, 5), 0.3, -2, 2, 0.7)
w6, b6 = wave((6,), 0.1, 0.5, 1.5, 0.9), wave((6,), 0.8, -1, 1, 0.9)
mean, var = wave((4,), 0.1, -0.5, 0.5, 0.9), wave((4,), 0.8, 0.5, 1.5, 0.9)
cases = {
    "group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b), [x4, w6, b6]),
    "group_norm_plain": (lambda x: F.group_norm(x, 2, eps=1e-3), [x3]),
    "group_norm_vectors": (lambda x, w, b: F.group_norm(x, 2, w, b), [wave((3, 6), 0.3, -2, 2, 0.7), w6, b6]),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [x4, w6, b6]),
    "instance_norm_plain": (F.instance_norm, [x3]),
    "instance_norm_running": (lambda x: F.instance_norm(x, mean.clone(), var.clone(), use_input_stats=False), [x3]),
    "rms_norm_sizes": (lambda x, w: F.rms_norm(x, (3, 4), w, eps=1e-5), [x4, wave((3, 4), 0.1, 0.5, 1.5, 0.9)]),
    "rms_norm_plain": (lambda x: F.rms_norm(x, (4, 5)), [x3]),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3), value=0.5), [x3]),
    "pad_negative": (lambda x: F.pad(x, (-1, 2, 1, -2)), [x3]),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [wave((2, 8, 2, 3), 0.3, -2, 2, 0.7)]),
    "bilinear": (F.bilinear, [wave((4, 3), 0.3), wave((4, 2), 0.7), wave((5, 3, 2), 0.2), wave((5,), 0.9)]),
    "bilinear_batches": (F.bilinear, [wave((2, 4, 3), 0.3), wave((2, 4, 2), 0.7), wave((5, 3, 2), 0.2)]),
}


def tracked():
    m, v = mean.clone(), var.clone()
    F.instance_norm(x3, m, v, momentum=0.3)
    return torch.cat([m, v])


cases["instance_norm_tracked"] = (lambda x: tracked(), [x3])

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "layers.json"), cases)
