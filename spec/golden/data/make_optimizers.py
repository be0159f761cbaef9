#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes optimizers.json: ten steps of every optimizer in float64, by PyTorch; Lion and LAMB, which PyTorch lacks, by
algorithm 2 of Chen et al. 2023, and algorithm 2 of You et al. 2020.
usage: make_optimizers.py [OUT_DIR]"""
import json, os, sys
import torch
from torch import optim as O

torch.set_default_dtype(torch.float64)


def x_of(shape, rank=0, step=0):
    n = torch.Size(shape).numel()
    return torch.sin(0.13 * torch.arange(n, dtype=torch.float64) + 0.7 * rank + 0.29 * step).reshape(shape)


class LAMB(O.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), wd = group["betas"], group["weight_decay"]
            for p in group["params"]:
                s = self.state[p]
                t = s["t"] = s.get("t", 0) + 1
                m = s["exp_avg"] = b1 * s.get("exp_avg", torch.zeros_like(p)) + (1 - b1) * p.grad
                v = s["exp_avg_sq"] = b2 * s.get("exp_avg_sq", torch.zeros_like(p)) + (1 - b2) * p.grad ** 2
                step = (m / (1 - b1 ** t)) / ((v / (1 - b2 ** t)).sqrt() + group["eps"]) + wd * p
                p.sub_(group["lr"] * p.norm() / step.norm() * step)


class Lion(O.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (b1 * m + (1 - b1) * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                m.mul_(b2).add_((1 - b2) * p.grad)


cases = {
    "sgd": (O.SGD, dict(lr=0.05)), "sgd_momentum": (O.SGD, dict(lr=0.05, momentum=0.9, dampening=0.1)),
    "sgd_nesterov_wd": (O.SGD, dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.02)), "sgd_maximize": (O.SGD, dict(lr=0.005, momentum=0.5, weight_decay=0.1, maximize=True)),
    "adam": (O.Adam, dict(lr=0.01)), "adam_l2": (O.Adam, dict(lr=0.01, weight_decay=0.02)), "adam_maximize": (O.Adam, dict(lr=0.01, weight_decay=0.02, maximize=True)),
    "adamw": (O.AdamW, dict(lr=0.01, weight_decay=0.1)), "adamw_amsgrad": (O.AdamW, dict(lr=0.01, weight_decay=0.1, amsgrad=True)),
    "rmsprop": (O.RMSprop, dict()), "rmsprop_centered": (O.RMSprop, dict(lr=0.02, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.5, centered=True)),
    "rmsprop_momentum": (O.RMSprop, dict(lr=0.02, momentum=0.8, maximize=True)),
    "adagrad": (O.Adagrad, dict()), "adagrad_decay": (O.Adagrad, dict(lr=0.1, lr_decay=0.3, weight_decay=0.1, initial_accumulator_value=0.2, eps=1e-6)),
    "adadelta": (O.Adadelta, dict()), "adadelta_wd": (O.Adadelta, dict(lr=0.5, rho=0.8, eps=1e-3, weight_decay=0.1)),
    "adamax": (O.Adamax, dict()), "adamax_wd": (O.Adamax, dict(lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)),
    "nadam": (O.NAdam, dict()), "nadam_l2": (O.NAdam, dict(lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, momentum_decay=0.1)),
    "nadam_decoupled": (O.NAdam, dict(lr=0.02, weight_decay=0.1, decoupled_weight_decay=True)),
    "radam": (O.RAdam, dict()), "radam_l2": (O.RAdam, dict(lr=0.02, betas=(0.8, 0.9), weight_decay=0.1)),
    "radam_decoupled": (O.RAdam, dict(lr=0.02, weight_decay=0.1, decoupled_weight_decay=True)),
    "lion": (Lion, dict()), "lion_wd": (Lion, dict(lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)),
    "rprop": (O.Rprop, dict()), "rprop_limits": (O.Rprop, dict(lr=0.1, etas=(0.4, 1.5), step_sizes=(0.05, 0.2))),
    "asgd": (O.ASGD, dict()), "asgd_averaged": (O.ASGD, dict(lr=0.05, lambd=0.1, alpha=0.5, t0=3, weight_decay=0.1)),
}
matrices = {
    "lamb": (LAMB, dict()), "lamb_decay": (LAMB, dict(lr=0.05, betas=(0.8, 0.9), weight_decay=0.1)),
    "muon": (O.Muon, dict()), "muon_plain": (O.Muon, dict(lr=0.02, weight_decay=0.0, momentum=0.8, nesterov=False, ns_steps=3)),
    "muon_rms": (O.Muon, dict(lr=0.02, adjust_lr_fn="match_rms_adamw")),
    "adafactor": (O.Adafactor, dict()), "adafactor_options": (O.Adafactor, dict(lr=0.05, beta2_decay=-0.5, eps=(1e-8, 1e-2), weight_decay=0.1, maximize=True)),
    "lbfgs": (O.LBFGS, dict(lr=0.5)), "lbfgs_wolfe": (O.LBFGS, dict(line_search_fn="strong_wolfe", history_size=3, max_iter=6)),
}


def orthogonal(grad, coefficients, steps, eps):
    """Muon's Newton-Schulz iteration in the gradient's dtype; PyTorch's own runs in bfloat16."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def steps(shape, make, options):
    p = torch.nn.Parameter(x_of(shape))
    opt, trace, state = make([p], **options), [], {}
    for step in range(10):
        def closure():
            opt.zero_grad()
            d = p - x_of(shape, 3, step)
            loss = (d * d).sum() if len(shape) == 1 else (d * d * d * d).sum() + (d * d).sum()
            loss.backward()
            return loss
        opt.step(closure) if make is O.LBFGS else (closure(), opt.step())
        trace.append(p.detach().reshape(-1).tolist())
    for name, t in opt.state[p].items():
        if torch.is_tensor(t) and t.shape == p.shape and name not in ("m", "d", "prev_flat_grad"):
            state[name] = t.reshape(-1).tolist()
    return {"shape": shape, "start": x_of(shape).reshape(-1).tolist(), "params_by_step": trace, "state": state}


def sparse_steps(options):
    """Rows of a table of [6, 3]: three ids a step, one of them twice."""
    table = torch.nn.Embedding(6, 3, sparse=True)
    with torch.no_grad():
        table.weight.copy_(x_of((6, 3)))
    opt, trace = O.SparseAdam(list(table.parameters()), **options), []
    for step in range(10):
        opt.zero_grad()
        d = table(torch.tensor([step % 6, (2 * step + 1) % 6, step % 6])) - x_of((3, 3), 3, step)
        (d * d).sum().backward()
        opt.step()
        trace.append(table.weight.detach().reshape(-1).tolist())
    return trace


if __name__ == "__main__":
    out = {name: steps((5,), *case) for name, case in cases.items()}
    torch.optim._muon._zeropower_via_newtonschulz = orthogonal
    out.update({name: steps((6, 4), *case) for name, case in matrices.items()})
    with open(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)), "optimizers.json"), "w") as f:
        json.dump({"phase": 0, "torch": torch.__version__.split("+")[0], "cases": out,
                   "sparse": {"default": sparse_steps(dict()), "options": sparse_steps(dict(lr=0.05, betas=(0.8, 0.9), eps=1e-4))}}, f, separators=(",", ":"))
        f.write("\n")
