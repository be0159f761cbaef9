#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes gguf.json: a small GGUF file made by PyPI's gguf 0.19, in hexadecimal, with values of each type and a tensor of each kind.  usage: make_gguf.py [OUT_DIR]"""
import json, os, sys, tempfile
import gguf
import numpy as np

numbers = []  # the generator of make_hf.py: values(2, 256)
x = 1000 * 2 + 1
for _ in range(4 * 64):
    x = x * 16807 % 2147483647
    numbers.append(2 * x / 2147483647 - 1)
tensor = np.array(numbers, dtype=np.float64).astype(np.float32).reshape(4, 64)
tensor[1, :32] = 0
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "a.gguf")
    w = gguf.GGUFWriter(path, "llama")
    w.add_uint32("llama.block_count", 3)
    w.add_float32("llama.rope.freq_base", 0.1)
    w.add_bool("llama.flag", True)
    w.add_string("general.name", "né")
    w.add_array("tokenizer.ggml.tokens", ["a", "", "bc"])
    w.add_array("tokenizer.ggml.token_type", [1, -3, 1])
    w.add_tensor("plain", tensor[0, :5].copy())
    w.add_tensor("half", tensor[:, :3].astype(np.float16))
    T = gguf.GGMLQuantizationType
    w.add_tensor("brain", gguf.quants.quantize(tensor[:2], T.BF16), raw_dtype=T.BF16)
    w.add_tensor("q8", gguf.quants.quantize(tensor, T.Q8_0), raw_dtype=T.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    data = open(path, "rb").read()
    dequantized = gguf.quants.dequantize(gguf.quants.quantize(tensor, T.Q8_0), T.Q8_0)
out = os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)), "gguf.json")
with open(out, "w") as f:
    json.dump({"file": data.hex(), "q8": [float("%.9g" % v) for v in dequantized.flatten()]}, f, separators=(",", ":"))
    f.write("\n")
