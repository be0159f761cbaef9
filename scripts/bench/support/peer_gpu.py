# SPDX-License-Identifier: MIT
"""The cases of gpu.lua in PyTorch on one GPU, under the same names, for scripts/gpu_check. Each result is a line, and a
line of JSON appended to the file $MOONSHARD_RATES. A case that PyTorch cannot run is reported and left out."""
import argparse
import json
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

parser = argparse.ArgumentParser()
parser.add_argument("--group", required=True)
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()
quick, device = options.quick, "cuda" if torch.cuda.is_available() else "cpu"
BF16, F32 = torch.bfloat16, torch.float32
torch.set_default_device(device)
cases = []


def case(group, name, calls=20):
    def add(make):
        cases.append((group, name, calls, make))
    return add


def randn(*shape, dtype=F32, grad=False):
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)


n, C = (4096, 64) if quick else (64 * 2**20, 1024)
M, V = (32, 64) if quick else (8192, 50304)
shape = (n // C, C)


def call(x, f):
    return lambda: f(x)


case("memory", "host to device, pageable")(lambda: call((randn(*shape), torch.randn(*shape, device="cpu")), lambda t: t[0].copy_(t[1])))
case("memory", "device to host, pageable")(lambda: call((torch.empty(*shape, device="cpu"), randn(*shape)), lambda t: t[0].copy_(t[1])))
case("memory", "copy on the device")(lambda: call((randn(*shape), randn(*shape)), lambda t: t[0].copy_(t[1])))
case("memory", "launch of add_, 16 elements", 2000)(lambda: call(randn(16), lambda x: x.add_(1)))

for size in (64,) if quick else (4096, 8192):
    case("products", f"matmul {size}, bfloat16")(
        lambda size=size: call((randn(size, size, dtype=BF16), randn(size, size, dtype=BF16)), lambda t: t[0] @ t[1]))
case("products", "matmul 4096, float32")(
    lambda size=64 if quick else 4096: call((randn(size, size), randn(size, size)), lambda t: t[0] @ t[1]))
for K, N in (768, 2304), (768, 768), (768, 3072), (3072, 768), (768, 50304):
    k, m = (16, 24) if quick else (K, N)
    case("products", f"linear 8192 x {K} x {N}, bfloat16")(
        lambda k=k, m=m, bias=N < 50304: call(
            (randn(M, k, dtype=BF16), randn(m, k, dtype=BF16), randn(m, dtype=BF16) if bias else None),
            lambda t: F.linear(*t)))


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(h, t, d):
    def make():
        q, k, v = (randn(1, h, t, d, dtype=BF16) for _ in range(3))
        return lambda: attend(q, k, v)
    return make


def attention_backward(h, t, d):
    def make():
        q, k, v = (randn(1, h, t, d, dtype=BF16, grad=True) for _ in range(3))
        g = randn(1, h, t, d, dtype=BF16)
        return lambda: attend(q, k, v).backward(g)
    return make


for D, T, H in (64, 1024, 96), (64, 8192, 12), (128, 1024, 48), (128, 8192, 6):
    sizes = (2, 16, 8) if quick else (H, T, D)
    for own in "", ", own kernels":  # the backend that PyTorch chooses; FlashAttention, the peer of our own kernels
        case("attention", f"attention {H} x {T} x {D}, causal, bfloat16{own}")(attention(*sizes))
        case("attention", f"attention {H} x {T} x {D}, causal, bfloat16, with backward{own}")(attention_backward(*sizes))

case("kernels", "add, float32")(lambda: call((randn(*shape), randn(*shape)), lambda t: t[0] + t[1]))
case("kernels", "transposed copy, float32")(lambda: call(randn(*shape), lambda x: x.t().contiguous()))
case("kernels", "sum of all, float32")(lambda: call(randn(*shape), torch.sum))
for dtype, word in (F32, "float32"), (BF16, "bfloat16"):
    def rows(dtype=dtype):
        return randn(*shape, dtype=dtype)

    def norm(dtype=dtype):
        return (randn(*shape, dtype=dtype, grad=True), torch.ones(C, device=device, dtype=dtype, requires_grad=True),
                torch.zeros(C, device=device, dtype=dtype, requires_grad=True), randn(*shape, dtype=dtype))

    case("kernels", f"gelu tanh, {word}")(lambda rows=rows: call(rows(), lambda x: F.gelu(x, approximate="tanh")))
    case("kernels", f"bias added to rows, {word}")(
        lambda rows=rows, dtype=dtype: call((rows(), randn(C, dtype=dtype)), lambda t: t[0] + t[1]))
    case("kernels", f"column sums, {word}")(lambda rows=rows: call(rows(), lambda x: x.sum(0)))
    case("kernels", f"softmax of rows, {word}")(lambda rows=rows: call(rows(), lambda x: x.softmax(-1)))
    case("kernels", f"dropout, {word}")(lambda rows=rows: call(rows(), lambda x: F.dropout(x, 0.1)))
    case("kernels", f"layer norm, {word}")(
        lambda norm=norm: call([t.detach() for t in norm()], lambda t: F.layer_norm(t[0], (C,), t[1], t[2])))
    case("kernels", f"layer norm with backward, {word}")(
        lambda norm=norm: call(norm(), lambda t: F.layer_norm(t[0], (C,), t[1], t[2]).backward(t[3])))
case("kernels", "cross-entropy 8192 x 50304 with backward, bfloat16")(
    lambda: call((randn(M, V, dtype=BF16, grad=True), torch.randint(0, V, (M,), device=device)),
                 lambda t: F.cross_entropy(*t).backward()))
case("kernels", "embedding 8192 of 50304 x 768 with backward, bfloat16")(
    lambda: call((torch.randint(0, V, (M,), device=device), randn(V, 768, dtype=BF16, grad=True),
                  randn(M, 768, dtype=BF16)), lambda t: F.embedding(t[0], t[1]).backward(t[2])))


@case("kernels", "AdamW, 124e6 parameters, float32")
def _():
    p = nn.Parameter(randn(1000 if quick else 124_000_000))
    p.grad = torch.randn_like(p)
    return torch.optim.AdamW([p], lr=1e-3, fused=True).step


def small_step(layers):
    def make():
        parts = [m for _ in range(layers) for m in (nn.Linear(32, 32), nn.ReLU())][:-1]
        model = nn.Sequential(*parts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        x, y = randn(8, 32), randn(8, 32)

        def step():
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        return step
    return make


for layers in 2, 12:
    for kind in "step", "captured step":  # PyTorch's eager step is the peer of both
        case("steps", f"{kind} of an MLP of {layers} layers of 32, batch 8", 500)(small_step(layers))


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


def measure(make, calls):
    fn = make()
    best = float("inf")
    for run in range(7):        # the first two warm up: the first call of a shape is slow
        wait()
        start = time.perf_counter()
        for _ in range(1 if run < 2 else calls):
            fn()
        wait()
        seconds = time.perf_counter() - start
        if run == 1:
            calls = max(1, min(calls, int(0.2 / seconds)))
        elif run > 1:
            best = min(best, seconds / calls)
    return best


print("PyTorch", torch.__version__, device)
for group, name, calls, make in cases:
    if group != options.group:
        continue
    try:
        if name.endswith(", own kernels") and device == "cuda":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                seconds = measure(make, calls)
        else:
            seconds = measure(make, calls)
    except RuntimeError as e:
        print(f"{name}: {e}")
        continue
    print(f"{name:62} {seconds * 1e6:12.1f} us", flush=True)
    if os.environ.get("MOONSHARD_RATES"):
        with open(os.environ["MOONSHARD_RATES"], "a") as sink:
            sink.write(json.dumps({"rate": name, "seconds": seconds, "torch": torch.__version__}) + "\n")
