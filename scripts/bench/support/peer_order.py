# SPDX-License-Identifier: MIT
"""scripts/bench/order's cases in PyTorch: `peer_order.py N THREADS` prints `seconds S` for a call of each, after two that
warm up."""
import sys
import time

import torch

n = int(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
torch.manual_seed(1)
floats, whole = torch.randn(n), torch.randint(0, n, (n,))
double, rows = floats.double(), floats.reshape(-1, 1000)
for call in (lambda: floats.sort(), lambda: double.sort(), lambda: whole.sort(), lambda: rows.sort(1),
             lambda: floats.topk(10), lambda: floats.topk(1000), lambda: rows.topk(10, 1)):
    for _ in range(3):
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
    print("seconds", seconds)
