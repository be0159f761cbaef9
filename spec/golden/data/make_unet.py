#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes unet.json: logits of small U-Nets in float64, in evaluation and in training. usage: make_unet.py [OUT_DIR]"""
import json, math, os, sys
import torch
from torch import nn
import torch.nn.functional as F
from cases import wave


def stage(size_in, size_out):
    layers = []
    for n in (size_in, size_out):
        layers += [nn.Conv2d(n, size_out, 3, padding=1, bias=False), nn.BatchNorm2d(size_out), nn.ReLU()]
    return nn.Sequential(*layers)


def doubling(how, size_in, size_out):
    if how == "transposed":
        return nn.ConvTranspose2d(size_in, size_out, 2, stride=2)
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(size_in, size_out, 1))


class UNet(nn.Module):
    def __init__(self, channels, classes, widths, how):
        super().__init__()
        pairs = list(zip(widths, widths[1:]))
        self.enter = stage(channels, widths[0])
        self.down = nn.ModuleList([stage(a, b) for a, b in pairs])
        self.up = nn.ModuleList([doubling(how, b, a) for a, b in reversed(pairs)])
        self.join = nn.ModuleList([stage(2 * a, a) for a, _ in reversed(pairs)])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        seen = [self.enter(x)]
        for down in self.down:
            seen.append(down(F.max_pool2d(seen[-1], 2)))
        y = seen.pop()
        for up, join in zip(self.up, self.join):
            y, skip = up(y), seen.pop()
            h, w = skip.shape[2] - y.shape[2], skip.shape[3] - y.shape[3]
            y = join(torch.cat([skip, F.pad(y, (w // 2, w - w // 2, h // 2, h - h // 2))], 1))
        return self.head(y)


def fill(model):
    with torch.no_grad():
        for k, (name, p) in enumerate(model.named_parameters()):
            norm = p.dim() == 1 and name.endswith("weight")
            a = 1 / math.sqrt(p.numel() / p.shape[0]) if p.dim() > 1 else 0.1
            c = 1.0 if norm else 0.0
            p.copy_(wave(tuple(p.shape), 1.3 * k + 0.5, c - a, c + a, 0.37))
    return model


out = {}
for how in ("transposed", "bilinear"):
    model, x = fill(UNet(2, 3, [4, 6, 8], how)), wave((2, 2, 13, 10), 0.2)
    with torch.no_grad():
        outputs = [model.eval()(x), model.train()(x)]
    out[how] = {"names": [n for n, _ in model.named_parameters()], "outputs": [y.reshape(-1).tolist() for y in outputs]}
with open(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)), "unet.json"), "w") as f:
    json.dump({"phase": 0, "torch": torch.__version__.split("+")[0], "cases": out}, f, separators=(",", ":"))
    f.write("\n")
