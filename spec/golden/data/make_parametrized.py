#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes parametrized.json: layers with weight_norm and spectral_norm.  usage: make_parametrized.py [OUT_DIR]"""
import os, sys
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from cases import record, wave


def weight_normed(make, dim):
    def fn(x, g, v):
        m = weight_norm(make(), dim=dim)
        return functional_call(m, {"parametrizations.weight.original0": g, "parametrizations.weight.original1": v}, x)
    return fn


def spectral_normed(make, steps, training):
    """The outputs of two forwards, after vectors that are sines of their position."""
    def fn(x, w):
        m = spectral_norm(make(), n_power_iterations=steps).train(training)
        norm = m.parametrizations.weight[0]
        for name, t in (("_u", norm._u), ("_v", norm._v)):
            t.copy_(torch.nn.functional.normalize(wave(tuple(t.shape), 0.4 if name == "_u" else 1.1, freq=0.9), dim=0))
        given = {"parametrizations.weight.original": w}
        first = functional_call(m, given, x)
        return torch.stack([first, functional_call(m, given, x)])
    return fn


def linear(): return nn.Linear(4, 3, bias=False)
def conv(): return nn.Conv2d(2, 3, 2, bias=False)


x, image = wave((5, 4), 0.3, -2, 2, 0.7), wave((2, 2, 3, 3), 0.5, -1, 1, 0.9)
w, kernel = wave((3, 4), 1.1, -1, 1.3, 0.8), wave((3, 2, 2, 2), 0.2, -1, 1, 1.1)
cases = {
    "weight_linear": (weight_normed(linear, 0), [x, wave((3, 1), 0.2, 0.5, 2), w]),
    "weight_linear_columns": (weight_normed(linear, 1), [x, wave((1, 4), 0.2, 0.5, 2), w]),
    "weight_linear_whole": (weight_normed(linear, None), [x, torch.tensor(1.7), w]),
    "weight_conv": (weight_normed(conv, 0), [image, wave((3, 1, 1, 1), 0.2, 0.5, 2), kernel]),
    "spectral_linear": (spectral_normed(linear, 1, True), [x, w]),
    "spectral_linear_eval": (spectral_normed(linear, 1, False), [x, w]),
    "spectral_conv": (spectral_normed(conv, 3, True), [image, kernel]),
}
if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "parametrized.json"), cases)
