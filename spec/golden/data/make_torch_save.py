#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes torch_save.json: files of torch.save, in base64, for spec/tools/convert_spec.lua.
usage: make_torch_save.py [OUT_DIR]"""
import base64, io, json, os, sys
import torch

x = torch.arange(6.).reshape(2, 3)
value = {"model": {"w": x.t(), "half": x.bfloat16(), "n": torch.tensor(3), "empty": torch.zeros(0, 2),
                   "part": torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1)[1:3],
                   "row": torch.nn.Parameter(x[:1].expand(2, 3))},
         "list": [torch.tensor([True, False]), 5], "epoch": 7, "type": torch.float32}


def saved(value, new):
    f = io.BytesIO()
    torch.save(value, f, _use_new_zipfile_serialization=new)
    return base64.b64encode(f.getvalue()).decode()


files = {"zip": saved(value, True), "before_1.6": saved(value, False),
         "complex": saved({"z": torch.ones(1, dtype=torch.complex64)}, True),
         "uint16": saved([torch.ones(1, dtype=torch.uint16)], True),
         "module": saved(torch.nn.ReLU(), True)}
folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(folder, "torch_save.json"), "w") as out:
    json.dump({"torch": torch.__version__, "files": files}, out)
    out.write("\n")
