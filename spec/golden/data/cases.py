# SPDX-License-Identifier: MIT
"""Records functions of PyTorch as cases for spec/support/golden_cases.lua, in float64: for each name the inputs, the output, and, where
the output has a gradient, the gradient of the output (a sine of its position) and those of the inputs."""
import json, math, os
import torch

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def wave(shape, offset=0.0, low=-1.0, high=1.0, freq=0.13):
    """Numbers between low and high: sines of their position."""
    n = math.prod(shape)
    i = torch.arange(n, dtype=torch.float64)
    return ((low + high) / 2 + (high - low) / 2 * torch.sin(freq * i + offset)).reshape(shape)


def record(path, functions):
    """functions: name -> (function, [inputs]). Writes path."""
    out = {}
    for name, (fn, args) in functions.items():
        args = [a.clone().requires_grad_() for a in args]
        r = fn(*args)
        case = {"input_shapes": [list(a.shape) for a in args], "inputs": [a.detach().reshape(-1).tolist() for a in args],
                "output_shape": list(r.shape), "output": r.detach().double().reshape(-1).tolist()}
        if r.requires_grad:
            seed = wave(tuple(r.shape), 0.9) if r.dim() else torch.tensor(1.0)
            r.backward(seed)
            case["grad_output"] = seed.reshape(-1).tolist()
            case["input_grads"] = [(torch.zeros_like(a) if a.grad is None else a.grad).reshape(-1).tolist() for a in args]
        out[name] = case
    with open(path, "w") as f:
        json.dump({"phase": 0, "torch": torch.__version__.split("+")[0], "cases": out}, f)
        f.write("\n")
