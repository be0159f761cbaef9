#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes functions.json: elementwise functions and activations.  usage: make_functions.py [OUT_DIR]"""
import os, sys
import torch
import torch.nn.functional as F
from cases import record, wave

x, y = wave((3, 5), 0.3, -2.2, 2.2, 0.7), wave((5,), 1.1, -1.9, 2.3, 0.9)
inside = wave((3, 5), 0.2, -0.97, 0.97, 0.7)
positive, above, wide = wave((3, 5), 0.1, 0.05, 3, 0.7), wave((3, 5), 0.1, 1.05, 4, 0.7), wave((3, 5), 0.4, -8, 8, 0.9)
cases = {}
for name in "floor ceil trunc round frac square expm1 exp2 erf erfc tan atan sinh cosh asinh".split():
    cases[name] = (getattr(torch, name), [x])
for name in "asin acos atanh erfinv".split():
    cases[name] = (getattr(torch, name), [inside])
for name in "log1p log2 log10".split():
    cases[name] = (getattr(torch, name), [positive])
cases["acosh"] = (torch.acosh, [above])
for name in "mish hardswish hardsigmoid softsign logsigmoid relu6 selu elu celu softplus leaky_relu hardtanh softmin".split():
    fn = getattr(F, name)
    cases[name] = ((lambda t, fn=fn: fn(t, dim=-1)) if name == "softmin" else fn, [wide])
cases["elu_alpha"] = (lambda t: F.elu(t, 1.7), [x])
# PyTorch's own gradients of these two use constants rounded to float32.
cases["celu_alpha"] = (lambda t: torch.where(t > 0, t, 1.7 * torch.expm1(t / 1.7)), [x])
cases["hardsigmoid"] = (lambda t: F.relu6(t + 3) / 6, [wide])
cases["softplus_beta"] = (lambda t: F.softplus(t, 3, 5), [x])
cases["leaky_relu_slope"] = (lambda t: F.leaky_relu(t, 0.2), [x])
cases["hardtanh_limits"] = (lambda t: F.hardtanh(t, -0.5, 1.5), [x])
cases["threshold"] = (lambda t: F.threshold(t, 0.1, -3), [x])
cases["prelu"] = (F.prelu, [x, wave((5,), 0.5, 0.1, 0.4)])
cases["prelu_one"] = (F.prelu, [x, torch.tensor([0.3])])
cases["glu"] = (F.glu, [wave((2, 6), 0.2, -2, 2, 0.7)])
cases["glu_first"] = (lambda t: F.glu(t, 0), [wave((4, 3), 0.2, -2, 2, 0.7)])
# The formula of Shazeer (2020), which PyTorch has no function for.
cases["swiglu"] = (lambda t: F.silu(t[:, :3]) * t[:, 3:], [wave((2, 6), 0.2, -2, 2, 0.7)])
for name in "softshrink hardshrink tanhshrink".split():
    cases[name] = (getattr(F, name), [x])
cases["softshrink_lambda"] = (lambda t: F.softshrink(t, 1.2), [x])
cases["hardshrink_lambda"] = (lambda t: F.hardshrink(t, 1.2), [x])
for name in "fmod remainder atan2 hypot copysign maximum minimum logaddexp pow".split():
    cases[name] = (getattr(torch, name), [positive if name == "pow" else x, y])
cases["floor_divide"] = (lambda a, b: torch.floor_divide(a, b).detach(), [x, y])
cases["xlogy"] = (torch.xlogy, [x, positive])
cases["lerp"] = (lambda a, b: torch.lerp(a, b, 0.3), [x, y])
cases["lerp_high"] = (lambda a, b: torch.lerp(a, b, 0.8), [x, y])
cases["lerp_tensor"] = (torch.lerp, [x, y, wave((3, 1), 0.2, 0, 1)])
cases["addcmul"] = (lambda a, b, c: torch.addcmul(a, b, c, value=0.7), [x, y, wide])
cases["addcdiv"] = (lambda a, b, c: torch.addcdiv(a, b, c, value=0.7), [x, y, positive])
cases["logit"] = (torch.logit, [wave((3, 5), 0.2, 0.02, 0.98, 0.7)])
cases["logit_eps"] = (lambda t: torch.logit(t, 0.1), [wave((3, 5), 0.2, 0.02, 0.98, 0.7)])
cases["round_decimals"] = (lambda t: torch.round(t, decimals=1).detach(), [x])

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "functions.json"), cases)
