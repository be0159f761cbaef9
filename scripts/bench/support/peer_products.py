# SPDX-License-Identifier: MIT
"""scripts/bench/gemm in PyTorch: `peer_products.py COPIES TYPE,M,K,N,LAYOUT,THREADS...` prints `seconds S CASE` for each
case: the best time of a pass over COPIES right operands, out of at least 5 passes and half a second. LAYOUT: NN, NT
(the right operand is transposed: N x K), TN (the left one: K x M). One copy, and float32: the output is allocated
before. TYPE int8: the right operand is int8 with a scale for each row (NT), and the left one bfloat16."""
import sys
import time

import torch

copies = int(sys.argv[1])
operands = {}
torch.manual_seed(1)
for case in sys.argv[2:]:
    dtype, m, k, n, layout, threads = case.split(",")
    m, k, n = int(m), int(k), int(n)
    kind = torch.bfloat16 if dtype == "int8" else getattr(torch, dtype)
    torch.set_num_threads(int(threads))
    key = dtype, k, n, layout
    if key not in operands:
        shape = (1, n, k) if layout == "NT" else (1, k, n)
        one = torch.randn(shape) / k**0.5
        one = (one * 127 * k**0.5 / 6).clamp(-127, 127).to(torch.int8) if dtype == "int8" else one.to(kind)
        operands = {key: one.repeat(copies, 1, 1)}
    rights = [b.mT if layout == "NT" and dtype != "int8" else b for b in operands[key].unbind(0)]
    scale = torch.rand(n).to(kind)
    x = torch.randn(k, m).to(kind).mT if layout == "TN" else torch.randn(m, k).to(kind)
    out = torch.empty(m, n, dtype=kind)
    best, passes, begun = float("inf"), 0, time.perf_counter()
    with torch.inference_mode():
        while passes < 5 or time.perf_counter() - begun < 0.5:
            start = time.perf_counter()
            for b in rights:
                if dtype == "int8":
                    torch._weight_int8pack_mm(x, b, scale)
                else:
                    torch.matmul(x, b, out=out)
            best = min(best, time.perf_counter() - start)
            passes += 1
    print("seconds", best, case)
