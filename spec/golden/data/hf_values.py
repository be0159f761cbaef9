# SPDX-License-Identifier: MIT
"""The values of small models' tensors, which follow from their place among the sorted names; spec/support/hf_folders.lua has the same."""
import torch


def values(k, n):
    """n numbers in (-1, 1), by the generator of Park and Miller; its products are exact as doubles, too."""
    x, list_ = 1000 * k + 1, []
    for _ in range(n):
        x = x * 16807 % 2147483647
        list_.append(2 * x / 2147483647 - 1)
    return torch.tensor(list_, dtype=torch.float64)


def filled(name, k, shape, scales=()):
    """scales: pairs of a part of matrices' names and a factor."""
    u = values(k, torch.Size(shape).numel()).reshape(shape)
    factor = 0.35
    for part, by in scales: factor *= by if part in name else 1
    if len(shape) > 1: return (factor * u).float()
    return ((1 if name.endswith("weight") else 0) + 0.2 * u).float()
