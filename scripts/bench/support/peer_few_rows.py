# SPDX-License-Identifier: MIT
"""scripts/bench/gemm --rows in PyTorch: `peer_few_rows.py COPIES 'TYPE ROWS K N THREADS'...` prints `seconds S CASE`, the
best time of a pass over COPIES weights, for each case."""
import sys
import time

import torch

copies = int(sys.argv[1])
weights = {}
for case in sys.argv[2:]:
    dtype, rows, k, n, threads = case.split()
    rows, k, n = int(rows), int(k), int(n)
    torch.set_num_threads(int(threads))
    if (dtype, k, n) not in weights:
        weights = {(dtype, k, n): (torch.randn(1, n, k) / k**0.5).to(getattr(torch, dtype)).repeat(copies, 1, 1)}
    all_of = weights[dtype, k, n].unbind(0)
    x = torch.randn(rows, k).to(getattr(torch, dtype))
    best = float("inf")
    with torch.inference_mode():
        for _ in range(5):
            start = time.perf_counter()
            for w in all_of:
                torch.nn.functional.linear(x, w)
            best = min(best, time.perf_counter() - start)
    print("seconds", best, case)
