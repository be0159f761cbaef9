#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes to hub.json, for each configuration of a published model in it, the number of parameters that transformers 5.24 counts.  usage: make_hub.py [OUT_DIR]"""
import json, os, sys, tempfile
import torch
import transformers as T

path = os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)), "hub.json")
T.utils.logging.set_verbosity_error()
cases = json.load(open(path))
for name, case in cases.items():
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        json.dump(case["config"], open(os.path.join(folder, "config.json"), "w"))
        cls = getattr(T, case["config"]["architectures"][0])
        case["parameters"] = sum(p.numel() for p in cls(T.AutoConfig.from_pretrained(folder)).parameters())
with open(path, "w") as f:
    f.write("{\n" + ",\n".join(json.dumps(name) + ": " + json.dumps(case, separators=(",", ":")) for name, case in cases.items()) + "\n}\n")
