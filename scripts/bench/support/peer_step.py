# SPDX-License-Identifier: MIT
"""scripts/bench/step's model in PyTorch, with its fastest parts for CPUs: GPT-2's shape, tied head, fused attention,
fused AdamW; several ranks as DistributedDataParallel over gloo (its FSDP has no reduce-scatter there). bfloat16 is
autocast: parameters, gradients and optimizer state stay float32, as in our run. Prints `step SECONDS` for each step,
on the slowest rank, and with --adamw 1 `adamw SECONDS`."""
import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SHAPE = ("vocab", "context", "layers", "heads", "dim", "batch", "length")


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2)
             for p in self.qkv(self.norm1(x)).split(c, dim=2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.token, self.position = nn.Embedding(o.vocab, o.dim), nn.Embedding(o.context, o.dim)
        self.blocks = nn.ModuleList(Block(o.dim, o.heads) for _ in range(o.layers))
        self.norm = nn.LayerNorm(o.dim)
        self.head = nn.Linear(o.dim, o.vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, ids, targets):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def alone(model, optimizer, ids, targets):
    """Times the optimizer alone, on one thread: a list of seconds."""
    torch.set_num_threads(1)
    model(ids, targets).backward()
    times = []
    for _ in range(6):
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return times[1:]


def train(rank, o, port):
    torch.set_num_threads(o.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(1)
    model = GPT(o)
    if o.ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=o.ranks)
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids, targets = (torch.randint(0, o.vocab, (o.batch, o.length)) for _ in range(2))
    times = torch.zeros(o.runs + 2, dtype=torch.float64)
    # The first two warm up (DDP rebuilds its buckets after the first).
    for run in range(o.runs + 2):
        if o.ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=o.dtype == "bfloat16"):
            loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times[run] = time.perf_counter() - start
    if o.ranks > 1:
        dist.all_reduce(times, dist.ReduceOp.MAX)
        dist.destroy_process_group()
    if rank == 0:
        for name, list in ("step", times[2:].tolist()), ("adamw", alone(model, optimizer, ids, targets) if o.adamw else []):
            for seconds in list:
                print(name, seconds, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in SHAPE + ("ranks", "threads", "runs", "adamw"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    if options.ranks == 1:
        train(0, options, free)
    else:
        torch.multiprocessing.spawn(train, args=(options, free), nprocs=options.ranks)
