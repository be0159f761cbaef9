# SPDX-License-Identifier: MIT
"""scripts/bench/recurrent's cases in PyTorch: `peer_recurrent.py THREADS STEPS LAYER,LAYERS,UNITS,T,N ...` prints a line
`seconds S ...` for the steps of each case, after two that warm up."""
import sys
import time

import torch

torch.set_num_threads(int(sys.argv[1]))
torch.set_flush_denormal(True)
torch.manual_seed(1)
for case in sys.argv[3:]:
    kind, *sizes = case.split(",")
    layers, units, T, N = map(int, sizes)
    model, x = getattr(torch.nn, kind)(units, units, layers), torch.randn(T, N, units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    times = []
    for _ in range(2 + int(sys.argv[2])):
        start = time.perf_counter()
        y, _ = model(x)
        y.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    print("seconds", *times[2:])
