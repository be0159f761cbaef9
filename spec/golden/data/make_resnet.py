#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes resnet.json: the logits of torchvision's ResNet-18 and ResNet-50 in float64, in training, and then in evaluation with the
statistics of that batch. Weights and pictures are remainders, which look random, of squares of their position.  usage: make_resnet.py [OUT_DIR]"""
import json, os, sys
import torch
from torchvision.models import resnet18, resnet50

torch.set_default_dtype(torch.float64)


def noise(n, k):
    """n numbers from -0.5 to 0.5; every step but the last is exact."""
    i = torch.arange(n, dtype=torch.float64)
    return (i * i * 17 + i * 7919 + 101 * k).remainder(10007) / 10007 - 0.5


def fill(model):
    """Parameter k of named_parameters: c + a noise(k), with He's variance where it is a matrix."""
    with torch.no_grad():
        for k, (name, p) in enumerate(model.named_parameters()):
            c, a = (0.0, (24 * p.shape[0] / p.numel()) ** 0.5) if p.dim() > 1 else (float(name.endswith("weight")), 0.1)
            p.copy_((c + a * noise(p.numel(), k)).reshape(p.shape))
    return model


out = {}
for name, make in (("18", resnet18), ("50", resnet50)):
    model = fill(make(num_classes=10)).train()
    x = 4 * noise(3 * 3 * 64 * 64, 999).reshape(3, 3, 64, 64)
    with torch.no_grad():
        y = model(x)
        z = model.eval()(x)
    out[name] = {"parameters": [n for n, _ in model.named_parameters()], "buffers": [n for n, _ in model.named_buffers()],
                 "training": y.reshape(-1).tolist(), "evaluation": z.reshape(-1).tolist(),
                 "variance": model.layer4[-1].bn2.running_var[:16].tolist()}
with open(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)), "resnet.json"), "w") as f:
    json.dump({"torch": torch.__version__.split("+")[0], "cases": out}, f, separators=(",", ":"))
    f.write("\n")
