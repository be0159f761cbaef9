# SPDX-License-Identifier: MIT
"""scripts/bench/attention's cases in PyTorch: `attention_peer.py SECONDS CACHES DTYPE,B,H,K,T,S,D,KIND ...` prints
`seconds A B` for each case: the median times of forward, and of forward with backward (decode: 0)."""
import math
import sys
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.set_flush_denormal(True)
torch.manual_seed(1)
seconds, caches = float(sys.argv[1]), float(sys.argv[2])


def median(n, fn):
    times, start = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        t = time.perf_counter()
        fn(len(times) % n)
        times.append(time.perf_counter() - t)
    return sorted(times)[len(times) // 2]


for case in sys.argv[3:]:
    dtype, *sizes, kind = case.split(",")
    B, H, K, T, S, D = map(int, sizes)
    dtype = getattr(torch, dtype)
    q = torch.randn(B, H, T, D).to(dtype)
    if kind == "decode":
        n = math.ceil(caches / (2 * B * K * S * D * dtype.itemsize))
        kv = [torch.randn(2, B, K, S, D).to(dtype) for _ in range(n)]
        with torch.inference_mode():
            print("seconds", median(n, lambda i: F.scaled_dot_product_attention(q, *kv[i], enable_gqa=K < H)), 0)
        continue
    x = [t.requires_grad_() for t in (q, torch.randn(B, K, S, D).to(dtype), torch.randn(B, K, S, D).to(dtype))]
    mask = torch.rand(T, S) < 0.7 if kind == "bool" else torch.randn(T, S).to(dtype) if kind == "float" else None
    gradient = torch.ones_like(q)

    def forward():
        return F.scaled_dot_product_attention(*x, attn_mask=mask, is_causal=kind == "causal")

    def without_graph(_):
        with torch.inference_mode():
            forward()

    print("seconds", median(1, without_graph), median(1, lambda _: torch.autograd.grad(forward(), x, gradient)))
