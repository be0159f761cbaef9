#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes distributions.json: densities, moments, entropies and divergences.  usage: make_distributions.py [OUT_DIR]"""
import os, sys
import torch
import torch.distributions as D
from cases import record, wave



class Digamma(torch.autograd.Function):
    """torch.digamma, with an exact derivative: PyTorch's trigamma has relative errors of 1e-9, its zeta(2, x) has not."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.special.digamma(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.special.zeta(torch.tensor(2.0), ctx.saved_tensors[0])


torch.digamma = torch.Tensor.digamma = lambda x: Digamma.apply(x)
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
for name in "Laplace Gumbel".split():
    add(name, getattr(D, name), [loc, scale], x, p, moments + "mode entropy cdf")
add("Cauchy", D.Cauchy, [loc, scale], x, p, "mode entropy cdf")
add("Exponential", D.Exponential, [scale], above, p, moments + "entropy cdf")
a, rate = wave((3, 1), 0.3, 0.4, 4, 0.9), scale
a2 = wave((3, 4), 1.3, 0.3, 3, 0.5)
add("Gamma", D.Gamma, [a, rate], above, None, moments + "mode entropy")
add("Chi2", D.Chi2, [a], above, None, moments + "mode entropy df")
add("StudentT", D.StudentT, [a + 2, loc, scale], x, None, moments + "mode entropy")
add("Beta", D.Beta, [a, a2], p, None, moments + "mode entropy")
points = torch.softmax(x, -1)
add("Dirichlet", D.Dirichlet, [a2], points, None, moments + "mode entropy")
add("Poisson", D.Poisson, [scale], counts, None, moments)
# PyTorch divides by 0 for the mode of concentrations below 1 before it replaces it: no gradient to compare with.
for name in ["Beta.mode", "Dirichlet.mode"]:
    fn, params = cases[name]
    cases[name] = (lambda *v, fn=fn: fn(*v).detach(), params)
half = wave((2, 3, 3), 0.3, -0.5, 0.5, 0.7)
cov = half @ half.mT + torch.eye(3)
tril = torch.linalg.cholesky(cov)
vloc, vx = wave((3,), 0.3, -1, 1, 0.9), wave((4, 2, 3), 0.2, -2, 2, 0.7)
sym = lambda m: (m + m.mT) / 2
add("MultivariateNormal", lambda m, c: D.MultivariateNormal(m, sym(c)), [vloc, cov], vx, None,
    "variance entropy scale_tril precision_matrix")
add("MultivariateNormal_tril", lambda m, t: D.MultivariateNormal(m, scale_tril=t.tril()), [vloc, tril], vx, None,
    "mean stddev covariance_matrix")
add("MultivariateNormal_precision", lambda m, c: D.MultivariateNormal(m, precision_matrix=sym(c)), [vloc, cov], vx, None,
    "entropy covariance_matrix")
add("Independent", lambda m, s: D.Independent(D.Normal(m, s), 1), [loc, scale], x, None, moments + "entropy")
mixture = lambda z, m, s: D.MixtureSameFamily(D.Categorical(logits=z), D.Normal(m, s))
add("MixtureSameFamily", mixture, [logits, loc, scale], wave((2, 3), 0.1, -2, 2, 0.7), None, "mean variance cdf")
vectors = lambda z, m: D.MixtureSameFamily(D.Categorical(logits=z), D.Independent(D.Normal(m, 0.5), 1))
add("MixtureSameFamily_vectors", vectors, [wave((3,), 0.3), loc2], wave((2, 4), 0.1, -2, 2, 0.7), None, "mean variance")

for name in "Laplace Gumbel Cauchy".split():
    kl(name, getattr(D, name), getattr(D, name), [loc, scale], [loc2, scale2])
for name in "Exponential Poisson".split():
    kl(name, getattr(D, name), getattr(D, name), [scale], [scale2])
kl("Gamma", D.Gamma, D.Gamma, [a, rate], [a2, scale2])
kl("Beta", D.Beta, D.Beta, [a, rate], [a2, scale2])
kl("Dirichlet", D.Dirichlet, D.Dirichlet, [a2], [scale2.expand(3, 4)])
kl("MultivariateNormal_tril", lambda m, t: D.MultivariateNormal(m, scale_tril=t.tril()),
   lambda m, t: D.MultivariateNormal(m, scale_tril=t.tril()), [vloc, tril], [vloc * 2, tril.flip(0) * 1.5])
kl("Independent", lambda m, s: D.Independent(D.Normal(m, s), 1), lambda m, s: D.Independent(D.Normal(m, s), 1),
   [loc, scale], [loc2, scale2])
for name in "Beta Gamma".split():
    kl(name + "_Normal", getattr(D, name), D.Normal, [a, rate], [loc2, scale2])
for name in "Gumbel Laplace".split():
    kl(name + "_Normal", getattr(D, name), D.Normal, [loc, scale], [loc2, scale2])
kl("Exponential_Normal", D.Exponential, D.Normal, [rate], [loc2, scale2])
kl("Uniform_Normal", D.Uniform, D.Normal, [loc, loc + scale], [loc2, scale2])
kl("Normal_Laplace", D.Normal, D.Laplace, [loc, scale], [loc2, scale2])
cases["kl.Exponential_Gamma"] = (lambda r, c, s: D.kl_divergence(D.Exponential(r), D.Gamma(c, s)), [rate, a2, scale2])
cases["kl.Gamma_Exponential"] = (lambda c, s, r: D.kl_divergence(D.Gamma(c, s), D.Exponential(r)), [a2, scale2, rate])
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
