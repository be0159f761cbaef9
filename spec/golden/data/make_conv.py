#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes conv.json: convolutions over 1 to 3 dimensions, transposed ones, and the padding modes of layers.
usage: make_conv.py [OUT_DIR]"""
import os, sys
import torch
import torch.nn.functional as F
from torch import nn
from cases import record, wave


def x(*shape):
    return wave(shape, 0.3, -2, 2, 0.7)


def w(*shape):
    return wave(shape, 0.2, freq=0.9)


def b(n):
    return wave((n,), 0.9)


cases = {
    "conv1d": (F.conv1d, [x(2, 3, 7), w(4, 3, 3), b(4)]),
    "conv1d_groups": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1, dilation=2, groups=2), [x(2, 4, 9), w(6, 2, 3), b(6)]),
    "conv1d_same": (lambda x, w: F.conv1d(x, w, padding="same", dilation=3), [x(2, 3, 8), w(2, 3, 4)]),
    "conv1d_unbatched": (lambda x, w: F.conv1d(x, w, padding=2), [x(3, 5), w(2, 3, 3)]),
    "conv2d_groups": (lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2),
                      [x(2, 4, 7, 6), w(6, 2, 3, 2), b(6)]),
    "conv2d_far": (lambda x, w, b: F.conv2d(x, w, b, stride=3, padding=4), [x(1, 4, 7, 8), w(2, 4, 3, 2), b(2)]),
    "conv2d_depth": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=4), [x(2, 4, 7, 5), w(8, 1, 3, 2), b(8)]),
    "conv2d_same": (lambda x, w: F.conv2d(x, w, padding="same", dilation=(1, 3)), [x(1, 3, 7, 8), w(2, 3, 3, 2)]),
    "conv2d_valid": (lambda x, w: F.conv2d(x, w, padding="valid"), [x(3, 4, 5), w(2, 3, 3, 2)]),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, padding=1), [x(1, 2, 3, 4, 3), w(3, 2, 2, 3, 2), b(3)]),
    "conv3d_groups": (lambda x, w: F.conv3d(x, w, stride=(2, 1, 2), padding=(1, 0, 1), dilation=(1, 2, 1), groups=2),
                      [x(1, 4, 4, 3, 5), w(2, 2, 2, 2, 3)]),
    "conv3d_same": (lambda x, w: F.conv3d(x, w, padding="same"), [x(1, 2, 3, 2, 4), w(1, 2, 2, 3, 2)]),
    "conv_transpose1d": (F.conv_transpose1d, [x(2, 3, 4), w(3, 4, 3), b(4)]),
    "conv_transpose1d_groups": (lambda x, w, b: F.conv_transpose1d(x, w, b, stride=3, padding=1, output_padding=2, groups=2, dilation=2),
                                [x(2, 4, 3), w(4, 3, 3), b(6)]),
    "conv_transpose2d": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
                         [x(2, 3, 3, 4), w(3, 2, 3, 3), b(2)]),
    "conv_transpose2d_pairs": (lambda x, w: F.conv_transpose2d(x, w, stride=(1, 3), padding=(0, 1), output_padding=(0, 2), dilation=(2, 1)),
                               [x(1, 2, 3, 3), w(2, 3, 2, 3)]),
    "conv_transpose2d_unbatched": (lambda x, w, b: F.conv_transpose2d(x, w, b, groups=2), [x(4, 3, 2), w(4, 1, 2, 2), b(2)]),
    "conv_transpose3d": (lambda x, w, b: F.conv_transpose3d(x, w, b, stride=(2, 1, 2), padding=(1, 0, 1), output_padding=(1, 0, 0)),
                         [x(1, 2, 2, 3, 2), w(2, 2, 3, 2, 2), b(2)]),
}


def layer(kind, size_in, size_out, kernel, **options):
    m = kind(size_in, size_out, kernel, **options)
    with torch.no_grad():
        m.weight.copy_(w(*m.weight.shape))
        m.bias.copy_(b(size_out))
    return m.requires_grad_(False)


for mode in ("reflect", "replicate", "circular"):
    cases["layer1d_" + mode] = (layer(nn.Conv1d, 2, 3, 3, padding=2, padding_mode=mode), [x(2, 2, 5)])
    cases["layer2d_" + mode] = (layer(nn.Conv2d, 2, 3, (3, 2), padding=(1, 2), stride=2, padding_mode=mode), [x(2, 2, 4, 5)])
    cases["layer2d_same_" + mode] = (layer(nn.Conv2d, 2, 1, (2, 3), padding="same", padding_mode=mode), [x(2, 4, 3)])
    if mode != "reflect" or hasattr(nn, "ReflectionPad3d"):
        cases["layer3d_" + mode] = (layer(nn.Conv3d, 1, 2, 2, padding=1, padding_mode=mode), [x(1, 1, 2, 3, 2)])
cases["output_size"] = (lambda x: layer(nn.ConvTranspose2d, 2, 3, 3, stride=2, padding=1)(x, output_size=(6, 7)), [x(1, 2, 3, 4)])

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "conv.json"), cases)
