-- SPDX-License-Identifier: MIT
--- Layers with weight_norm and spectral_norm, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local nn = ms.nn
local utils, call = nn.utils, nn.utils.stateless.functional_call

local function linear(x) return nn.Linear(4, 3, { bias = false, dtype = x.dtype }) end
local function conv(x) return nn.Conv2d(2, 3, 2, { bias = false, dtype = x.dtype }) end

local function weight_normed(make, dim)
  return function(x, g, v)
    local m = utils.weight_norm(make(x), { dim = dim })
    return call(m, { ["parametrizations.weight.original0"] = g, ["parametrizations.weight.original1"] = v }, x)
  end
end

-- A vector of sines of its positions, with norm 1.
local function unit_wave(t, offset)
  local list = {}
  for k = 1, t:numel() do list[k] = math.sin(0.9 * (k - 1) + offset) end
  local wave = ms.tensor(list, { dtype = t.dtype })
  return wave / wave:norm()
end

local function spectral_normed(make, steps, training)
  return function(x, w)
    local m = utils.spectral_norm(make(x), { n_power_iterations = steps })
    m:train(training)
    local norm = m.parametrizations.weight[1]
    ms.no_grad(function()
      norm._u:copy_(unit_wave(norm._u, 0.4))
      norm._v:copy_(unit_wave(norm._v, 1.1))
    end)
    local given = { ["parametrizations.weight.original"] = w }
    local first = call(m, given, x)
    return ms.stack { first, call(m, given, x) }
  end
end

local cases = {
  weight_linear = weight_normed(linear, 1), weight_linear_columns = weight_normed(linear, 2),
  weight_linear_whole = weight_normed(linear, false), weight_conv = weight_normed(conv, 1),
  spectral_linear = spectral_normed(linear, 1, true), spectral_linear_eval = spectral_normed(linear, 1, false),
  spectral_conv = spectral_normed(conv, 3, true),
}

golden_cases("parametrized", cases)
