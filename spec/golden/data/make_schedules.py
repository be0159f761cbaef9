#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes schedules.json: learning rates and momenta of 40 steps of PyTorch's schedules.  usage: make_schedules.py [OUT_DIR]"""
import json, os, sys
import torch
from torch.optim import lr_scheduler as S
from torch.optim.swa_utils import SWALR


def losses(t):
    return [5, 4, 4, 4, 3.9999, 3, 3, 3, 3.1, 3, 3, 2.9, 2.9, 2.9, 2.9, 2.9][min(t, 15)]


schedules = {
    "step": lambda o: S.StepLR(o, 7, 0.5), "multistep": lambda o: S.MultiStepLR(o, [3, 8, 8, 20], 0.3),
    "exponential": lambda o: S.ExponentialLR(o, 0.9), "polynomial": lambda o: S.PolynomialLR(o, 12, 1.5),
    "restarts": lambda o: S.CosineAnnealingWarmRestarts(o, 6, 1, 0.01), "restarts_longer": lambda o: S.CosineAnnealingWarmRestarts(o, 4, 2, 0.01),
    "one_cycle": lambda o: S.OneCycleLR(o, 0.7, total_steps=40), "one_cycle_linear": lambda o: S.OneCycleLR(o, 0.7, epochs=8, steps_per_epoch=5, anneal_strategy="linear", pct_start=0.4),
    "one_cycle_three": lambda o: S.OneCycleLR(o, 0.7, total_steps=40, three_phase=True),
    "cyclic": lambda o: S.CyclicLR(o, 0.01, 0.3, 5, 8), "cyclic_halved": lambda o: S.CyclicLR(o, 0.01, 0.3, 4, mode="triangular2"),
    "cyclic_range": lambda o: S.CyclicLR(o, 0.01, 0.3, 4, mode="exp_range", gamma=0.97),
    "multiplicative": lambda o: S.MultiplicativeLR(o, lambda t: 0.95 if t % 2 else 0.9),
    "plateau": lambda o: S.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=2, min_lr=0.01),
    "plateau_max": lambda o: S.ReduceLROnPlateau(o, "max", factor=0.3, patience=2, threshold=0.05, threshold_mode="abs"),
    "sequential": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.25, 1, 4), S.ExponentialLR(o, 0.9), S.StepLR(o, 5, 0.5)], [4, 15]),
    "cosine": lambda o: S.CosineAnnealingLR(o, 39, 0.02), "linear": lambda o: S.LinearLR(o, 0.25, 0.75, 10),
    "constant": lambda o: S.ConstantLR(o, 0.5, 6), "lambda": lambda o: S.LambdaLR(o, lambda t: 0.9 ** t),
    "swa": lambda o: SWALR(o, 0.05, 8), "swa_linear": lambda o: SWALR(o, 0.05, 8, "linear"),
    "chained": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 6), S.ExponentialLR(o, 0.95)]),
}
out = {}
for name, make in schedules.items():
    o = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2, momentum=0.9)
    s, lrs, momenta = make(o), [], []
    for t in range(40):
        lrs.append(o.param_groups[0]["lr"])
        momenta.append(o.param_groups[0]["momentum"])
        o.step()
        if t < 39:
            s.step(*([losses(t)] if "plateau" in name else []))
    out[name] = {"lr": lrs, "momentum": momenta}
with open(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "schedules.json"), "w") as f:
    json.dump({"phase": 0, "torch": torch.__version__.split("+")[0], "cases": out}, f)
    f.write("\n")
