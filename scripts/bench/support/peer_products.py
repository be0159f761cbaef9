# SPDX-License-Identifier: MIT
"""scripts/bench/gemm in PyTorch: `peer_products.py COPIES TYPE,M,K,N,LAYOUT,THREADS...` prints `seconds S CASE` for each
case: the best time of a pass over COPIES right operands, out of at least 5 passes and half a second. LAYOUT: NN, NT
(the right operand is transposed: N x K), TN (the left one: K x M). One copy, and float32: the output is allocated
before."""
import sys
import time

import torch

copies = int(sys.argv[1])
operands = {}
torch.manual_seed(1)
for case in sys.argv[2:]:
    dtype, m, k, n, layout, threads = case.split(",")
    m, k, n = int(m), int(k), int(n)
    kind = getattr(torch, dtype)
    torch.set_num_threads(int(threads))
    key = dtype, k, n, layout
    if key not in operands:
        shape = (1, n, k) if layout == "NT" else (1, k, n)
        operands = {key: (torch.randn(shape) / k**0.5).to(kind).repeat(copies, 1, 1)}
    rights = [b.mT if layout == "NT" else b for b in operands[key].unbind(0)]
    x = torch.randn(k, m).to(kind).mT if layout == "TN" else torch.randn(m, k).to(kind)
    out = torch.empty(m, n, dtype=kind)
    best, passes, begun = float("inf"), 0, time.perf_counter()
    with torch.inference_mode():
        while passes < 5 or time.perf_counter() - begun < 0.5:
            start = time.perf_counter()
            for b in rights:
                torch.matmul(x, b, out=out)
            best = min(best, time.perf_counter() - start)
            passes += 1
    print("seconds", best, case)
