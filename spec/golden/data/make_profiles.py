#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes profiles.json: how often PyTorch's profiler calls on_trace_ready in loops of 0 to 8 steps, for schedules [wait,
warmup, active, repeat, skip_first].  usage: make_profiles.py [OUT_DIR]"""
import itertools, json, os, sys, warnings
import torch
from torch.profiler import ProfilerActivity, profile, schedule

warnings.simplefilter("ignore")
cases = []
for wait, warmup, active, repeat, skip_first in itertools.product((0, 1), (0, 1), (1, 2), (0, 1, 2), (0, 1)):
    counts = []
    for steps in range(9):
        ready = []
        with profile(activities=[ProfilerActivity.CPU], on_trace_ready=ready.append,
                     schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)) as p:
            for _ in range(steps):
                p.step()
        counts.append(len(ready))
    cases.append({"schedule": [wait, warmup, active, repeat, skip_first], "counts": counts})
with open(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "profiles.json"), "w") as f:
    json.dump({"phase": 0, "torch": torch.__version__.split("+")[0], "cases": cases}, f)
    f.write("\n")
