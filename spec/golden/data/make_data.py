#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes data.json: torchvision's transforms and PyTorch's DistributedSampler.  usage: make_data.py [OUT_DIR]

Image (c, h, w) has at position k (row by row) the value (37 k mod 251), divided by the case's scale."""
import json, os, sys
import torch
from torch.utils.data import DistributedSampler
from torchvision.transforms import InterpolationMode, v2


def image(*shape):
    return (torch.arange(torch.tensor(shape).prod().item()) * 37 % 251).to(torch.uint8).reshape(shape)


cases = []


def add(name, arguments, fn, x, scale=1):
    y = fn(x / scale if scale != 1 else x)
    cases.append({"name": name, "arguments": arguments, "shape": list(x.shape), "dtype": str(x.dtype)[6:],
                  "scale": scale, "out_shape": list(y.shape), "out": y.double().reshape(-1).tolist()})


small = image(3, 5, 7)
for x in (small.float(), small):
    for size in ((3, 4), (8, 9), (2, 7)):
        add("Resize", [list(size)], v2.Resize(size), x)
        add("Resize", [list(size), {"interpolation": "nearest"}], v2.Resize(size, InterpolationMode.NEAREST), x)
        if x.is_floating_point():
            add("Resize", [list(size), {"antialias": False}], v2.Resize(size, antialias=False), x)
    add("Resize", [4], v2.Resize(4), x)
add("Resize", [3], v2.Resize(3), image(1, 9, 4).float())
for size in ((2, 2), (3, 4), (4, 5), (5, 6), (9, 8), (6, 3)):
    add("CenterCrop", [list(size)], v2.CenterCrop(size), small)
add("CenterCrop", [4], v2.CenterCrop(4), image(1, 11, 12))
for padding in ([2], [1, 2], [1, 2, 3, 4]):
    add("Pad", [padding, {"fill": 7}], v2.Pad(padding, fill=7), small)
add("Grayscale", [], v2.Grayscale(), small.float())
add("Grayscale", [3], v2.Grayscale(3), small.float())
mean, std = [0.5, 10, 100], [2, 4, 0.5]
add("Normalize", [mean, std], v2.Normalize(mean, std), small.float())
add("ToTensor", [], v2.ToDtype(torch.float32, scale=True), small)
for hue in (-0.5, -0.13, 0, 0.25, 0.4):
    add("ColorJitter", [{"hue": [hue, hue]}], v2.ColorJitter(hue=(hue, hue)), small.float(), 255)
    add("ColorJitter", [{"hue": [hue, hue]}], v2.ColorJitter(hue=(hue, hue)), small)
grey = image(1, 3, 4)
add("ColorJitter", [{"hue": 0.5}], v2.ColorJitter(hue=0.5), grey)
for how, mode in (("nearest", InterpolationMode.NEAREST), ("bilinear", InterpolationMode.BILINEAR)):
    for x in (small.float(), small, image(2, 8, 3).float()):
        add("RandomRotation", [[25, 25], {"interpolation": how}], v2.RandomRotation((25, 25), mode), x)
        for angle, scale, shear in ((20, 1, None), (0, 1, (15, 15)), (0, 0.8, (15, 15, -20, -20)),
                                    (-35, 1.3, (-10, -10, 30, 30))):
            given = {"scale": [scale, scale], "shear": shear, "interpolation": how, "fill": 9}
            add("RandomAffine", [[angle, angle], {k: v for k, v in given.items() if v is not None}],
                v2.RandomAffine((angle, angle), scale=(scale, scale), shear=shear, interpolation=mode, fill=9), x)

samplers = []
for n in (1, 2, 7, 10, 12):
    for world in (1, 2, 3, 4):
        for drop_last in (False, True):
            samplers.append({"items": n, "num_replicas": world, "drop_last": drop_last,
                             "ranks": [list(DistributedSampler(range(n), world, r, shuffle=False, drop_last=drop_last))
                                       for r in range(world)]})

folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(folder, "data.json"), "w") as f:
    json.dump({"torch": torch.__version__, "transforms": cases, "samplers": samplers}, f)
    f.write("\n")
