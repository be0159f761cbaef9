# SPDX-License-Identifier: MIT
"""scripts/bench/gpt2's step in PyTorch on one GPU, with its fastest parts: bfloat16 parameters, fused attention, fused
AdamW, clipping in foreach form. --mode compiled compiles the model with torch.compile. Prints `step SECONDS` for each
step, `peak BYTES` of allocated memory, and `version TEXT`; `unavailable REASON` without a GPU."""
import argparse
import time

import torch

import peer_step


def main():
    parser = argparse.ArgumentParser()
    for name in ("vocab", "context", "layers", "heads", "dim", "batch", "runs"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--mode", choices=("eager", "compiled"), default="eager")
    o = parser.parse_args()
    print("version", torch.__version__, flush=True)
    if not torch.cuda.is_available():
        print("unavailable PyTorch", torch.__version__, "has no GPU", flush=True)
        return
    torch.manual_seed(1)
    torch.set_default_device("cuda")
    model = peer_step.GPT(o).to(torch.bfloat16)
    step_of = torch.compile(model) if o.mode == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, o.vocab, (o.batch, o.context))

    def step():
        step_of(ids, ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):  # compiles, warms up
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(o.runs):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        print("step", time.perf_counter() - start, flush=True)
    print("peak", torch.cuda.max_memory_allocated(), flush=True)


if __name__ == "__main__":
    main()
