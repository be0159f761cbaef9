# SPDX-License-Identifier: MIT
"""scripts/bench/loader's cases in PyTorch: `peer_loader.py ITEMS` prints `seconds S` for an epoch of each, after one that
warms up."""
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)
count = int(sys.argv[1])
x, y = torch.rand(count, 784), torch.randint(0, 10, (count,))


class Items(Dataset):
    def __len__(self):
        return count

    def __getitem__(self, i):
        return x[i], y[i]


for data, workers in ((TensorDataset(x, y), 0), (Items(), 0), (Items(), 2)):
    loader = DataLoader(data, batch_size=128, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(2):
        start = time.perf_counter()
        for _batch in loader:
            pass
        seconds = time.perf_counter() - start
    print("seconds", seconds)
