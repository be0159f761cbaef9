#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes distributions.json: densities, moments, entropies and divergences.  usage: make_distributions.py [OUT_DIR]"""
import os, sys
import torch
import torch.distributions as D
from cases import record, wave

cases = {}


def add(name, make, params, value=None, p=None, fields=""):
    """A case for log_prob of value, cdf of value where the class has it, icdf of p, and each field or method."""
    n = len(params)
    if value is not None:
        cases[name + ".log_prob"] = (lambda *a: make(*a[:n]).log_prob(a[n]), params + [value])
    for field in fields.split():
        if field == "cdf":
            cases[name + ".cdf"] = (lambda *a: make(*a[:n]).cdf(a[n]), params + [value])
        elif field == "entropy":
            cases[name + ".entropy"] = (lambda *a: make(*a).entropy(), params)
        else:
            cases[f"{name}.{field}"] = (lambda *a, f=field: getattr(make(*a), f), params)
    if p is not None:
        cases[name + ".icdf"] = (lambda *a: make(*a[:n]).icdf(a[n]), params + [p])


def kl(name, P, Q, p, q):
    cases["kl." + name] = (lambda *a: D.kl_divergence(P(*a[:len(p)]), Q(*a[len(p):])), p + q)


loc, scale = wave((3, 1), 0.3, -1, 1, 0.9), wave((4,), 0.2, 0.4, 2, 0.8)
loc2, scale2 = wave((3, 4), 1.3, -1, 1, 0.5), wave((3, 4), 1.2, 0.5, 1.7, 0.6)
x, above = wave((2, 3, 4), 0.1, -2.5, 2.5, 0.7), wave((2, 3, 4), 0.1, 0.05, 3.5, 0.7)
p = wave((2, 3, 4), 0.4, 0.03, 0.97, 0.7)
probs, logits = wave((3, 4), 0.4, 0.1, 0.9, 0.7), wave((3, 4), 0.2, -2, 2, 0.7)
probs2, logits2 = wave((3, 4), 0.9, 0.15, 0.85, 0.6), wave((3, 4), 0.7, -1, 2, 0.9)
zeros_and_ones = (wave((2, 3, 4), 0.1, freq=0.9) > 0).double()
counts = wave((2, 3, 4), 0.1, 0, 6, 0.7).round()
ids = wave((2, 3), 0.1, 0, 3, 1.7).round()
moments = "mean variance stddev "

add("Normal", D.Normal, [loc, scale], x, p, moments + "mode entropy cdf")
add("LogNormal", D.LogNormal, [loc, scale], above, p, moments + "mode entropy cdf")
add("HalfNormal", D.HalfNormal, [scale], above, p, moments + "entropy cdf")
add("Uniform", D.Uniform, [loc - 2, scale + 2], wave((2, 3, 4), 0.1, -0.9, 2.3, 0.7), p, moments + "entropy cdf")
add("Bernoulli", D.Bernoulli, [probs], zeros_and_ones, None, moments + "mode entropy logits")
add("Bernoulli_logits", lambda z: D.Bernoulli(logits=z), [logits], zeros_and_ones, None, moments + "entropy probs")
add("Geometric", D.Geometric, [probs], counts, None, moments + "entropy logits")
add("Geometric_logits", lambda z: D.Geometric(logits=z), [logits], counts, None, moments + "entropy probs")
add("Categorical", D.Categorical, [probs], ids, None, "mode entropy probs logits")
add("Categorical_logits", lambda z: D.Categorical(logits=z), [logits], ids, None, "mode entropy probs logits")
one_hot = torch.nn.functional.one_hot(ids.long(), 4).double()
add("OneHotCategorical", D.OneHotCategorical, [probs], one_hot, None, moments + "mode entropy")

kl("Normal", D.Normal, D.Normal, [loc, scale], [loc2, scale2])
kl("LogNormal", D.LogNormal, D.LogNormal, [loc, scale], [loc2, scale2])
kl("HalfNormal", D.HalfNormal, D.HalfNormal, [scale], [scale2])
kl("Uniform", D.Uniform, D.Uniform, [loc, loc + scale], [loc - 1 - scale2, loc + 3 + scale2])
kl("Bernoulli", D.Bernoulli, D.Bernoulli, [probs], [probs2])
kl("Geometric", D.Geometric, D.Geometric, [probs], [probs2])
kl("Categorical", D.Categorical, D.Categorical, [probs], [probs2])
kl("OneHotCategorical", D.OneHotCategorical, D.OneHotCategorical, [probs], [probs2])

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "distributions.json"), cases)
