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
  OneHotCategorical = function() return D.OneHotCategorical { logits = t { { 0, 1, 2 }, { 1, -1, 0 } } } end,
}
