-- SPDX-License-Identifier: MIT
--- Densities, moments, entropies and divergences of distributions, forward and backward, compared with PyTorch's
--- results.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local golden_cases = require "spec.support.golden_cases"
local D = ms.distributions

-- Names of the cases that are written in another way than D[name](parameters ...).
local made = {
  Bernoulli_logits = function(z) return D.Bernoulli { logits = z } end,
  Geometric_logits = function(z) return D.Geometric { logits = z } end,
  Categorical_logits = function(z) return D.Categorical { logits = z } end,
}

-- The function of a case such as "Normal.log_prob" or "kl.Normal".
local function of(name, inputs)
  local class, what = name:match "^(.*)%.([%w_]+)$"
  if class == "kl" then
    local n = inputs / 2
    return function(...)
      local list = { ... }
      return D.kl_divergence(D[what](unpack(list, 1, n)), D[what](unpack(list, n + 1)))
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

describe("golden distributions", function()
  for _, test in ipairs(golden_cases("distributions", cases)) do it(unpack(test)) end
end)
