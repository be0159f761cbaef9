# SPDX-License-Identifier: MIT
"""scripts/bench/dispatch's training steps in PyTorch, eager: `peer_dispatch.py STEPS` prints `seconds S`, the time of a
step, for 2 and for 12 layers, after as many steps that warm up."""
import sys
import time

import torch
from torch import nn

steps = int(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(1)
for layers in 2, 12:
    parts = [part for _ in range(layers) for part in (nn.Linear(32, 32), nn.ReLU())][:-1]
    model, x, y = nn.Sequential(*parts), torch.randn(8, 32), torch.randn(8, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        seconds = (time.perf_counter() - start) / steps
    print("seconds", seconds)
