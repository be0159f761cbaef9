# SPDX-License-Identifier: MIT
"""scripts/bench/resnet's step in PyTorch: `peer_resnet.py BATCH SIDE THREADS` prints `seconds S`, the median of 3 steps
after one that warms up. The model is torchvision's ResNet-18, written here so that torchvision need not be installed."""
import statistics
import sys
import time

import torch
from torch import nn
import torch.nn.functional as F

batch, side, threads = map(int, sys.argv[1:4])
torch.set_num_threads(threads)
torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self, size_in, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(size_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride > 1 or size_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(size_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


sizes = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2),
         (512, 512, 1))
stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
model = nn.Sequential(*stem, *(Block(a, b, s) for a, b, s in sizes), *head)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
x, ids = torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
seconds = []
for _ in range(4):
    start = time.perf_counter()
    F.cross_entropy(model(x), ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - start)
print("seconds", statistics.median(seconds[1:]))
