-- SPDX-License-Identifier: MIT
--- Functions that make one distribution of each class, with a batch of 2 in float64, by name.
local ms = require "moonshard"
local D = ms.distributions

local function t(list) return ms.tensor(list, { dtype = "float64" }) end

return {
  Normal = function() return D.Normal(t { -1, 2 }, t { 0.5, 2 }) end,
  LogNormal = function() return D.LogNormal(t { -1, 0.2 }, t { 0.5, 0.3 }) end,
  HalfNormal = function() return D.HalfNormal(t { 0.5, 3 }) end,
  Uniform = function() return D.Uniform(t { -1, 2 }, t { 0.5, 5 }) end,
  Bernoulli = function() return D.Bernoulli(t { 0.1, 0.7 }) end,
  Geometric = function() return D.Geometric(t { 0.2, 0.7 }) end,
  Laplace = function() return D.Laplace(t { -1, 2 }, t { 0.5, 2 }) end,
  Gumbel = function() return D.Gumbel(t { -1, 2 }, t { 0.5, 2 }) end,
  Exponential = function() return D.Exponential(t { 0.5, 3 }) end,
  Gamma = function() return D.Gamma(t { 0.3, 4 }, t { 0.5, 2 }) end,
  Chi2 = function() return D.Chi2(t { 1, 7 }) end,
  StudentT = function() return D.StudentT(t { 12, 30 }, t { -1, 2 }, t { 0.5, 2 }) end,
  Beta = function() return D.Beta(t { 0.4, 3 }, t { 0.5, 2 }) end,
  Dirichlet = function() return D.Dirichlet(t { { 0.3, 1, 2 }, { 2, 3, 0.5 } }) end,
  Poisson = function() return D.Poisson(t { 0.7, 40 }) end,
  MultivariateNormal = function()
    local tril = t { { { 1, 0 }, { 0.7, 2 } }, { { 2, 0 }, { -1, 1 } } }
    return D.MultivariateNormal(t { { 1, 2 }, { -1, 0 } }, { scale_tril = tril })
  end,
  Independent = function() return D.Independent(D.Normal(t { { -1, 2, 0 }, { 1, 1, 1 } }, t { 0.5, 2, 1 }), 1) end,
  MixtureSameFamily = function()
    local parts = D.Normal(t { { -1, 2 }, { 0, 4 } }, t { 0.5, 1 })
    return D.MixtureSameFamily(D.Categorical(t { { 1, 2 }, { 3, 1 } }), parts)
  end,
  OneHotCategorical = function() return D.OneHotCategorical { logits = t { { 0, 1, 2 }, { 1, -1, 0 } } } end,
}
