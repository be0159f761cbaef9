-- SPDX-License-Identifier: MIT
--- Densities, moments, entropies and divergences of distributions, forward and backward, compared with PyTorch's
--- results.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local golden_cases = require "spec.support.golden_cases"
local D = ms.distributions

-- Names of the cases that are written in another way than D[name](parameters ...).
local function symmetric(m) return (m + m.mT) / 2 end
local made = {
  MultivariateNormal = function(m, c) return D.MultivariateNormal(m, symmetric(c)) end,
  MultivariateNormal_tril = function(m, t) return D.MultivariateNormal(m, { scale_tril = t:tril() }) end,
  MultivariateNormal_precision = function(m, c) return D.MultivariateNormal(m, { precision_matrix = symmetric(c) }) end,
  Independent = function(m, s) return D.Independent(D.Normal(m, s), 1) end,
  MixtureSameFamily = function(z, m, s) return D.MixtureSameFamily(D.Categorical { logits = z }, D.Normal(m, s)) end,
  MixtureSameFamily_vectors = function(z, m)
    return D.MixtureSameFamily(D.Categorical { logits = z }, D.Independent(D.Normal(m, 0.5), 1))
  end,
  Bernoulli_logits = function(z) return D.Bernoulli { logits = z } end,
  Geometric_logits = function(z) return D.Geometric { logits = z } end,
  Categorical_logits = function(z) return D.Categorical { logits = z } end,
}

-- The function of a case such as "Normal.log_prob" or "kl.Normal".
local function of(name, inputs)
  local class, what = name:match "^(.*)%.([%w_]+)$"
  if class == "kl" then
    local P, Q = what, what                                       -- "Normal", or "Normal_Laplace"
    if not made[what] and what:find "_" then P, Q = what:match "^(%w+)_(%w+)$" end
    local n = P == "Exponential" and 1 or Q == "Exponential" and 2 or inputs / 2
    return function(...)
      local list = { ... }
      return D.kl_divergence((made[P] or D[P])(unpack(list, 1, n)), (made[Q] or D[Q])(unpack(list, n + 1)))
    end
  end
  local make = made[class] or D[class]
  if what == "entropy" then return function(...) return make(...):entropy() end end
  if what == "log_prob" or what == "cdf" or what == "icdf" then
    return function(...)
      local list = { ... }
      local d = make(unpack(list, 1, inputs - 1))
      return d[what](d, list[inputs])
    end
  end
  return function(...) return make(...)[what] end
end

local cases, reference = {}, golden.load "distributions".cases
for name, case in pairs(reference) do cases[name] = of(name, #case.inputs) end

golden_cases("distributions", cases)
