-- SPDX-License-Identifier: MIT
--- Functions of nn.F that are made of other operators, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local F = ms.nn.F

-- Running statistics by the formula of make_layers.py: n values between low and high.
local function wave(n, offset, low, high)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = (low + high) / 2 + (high - low) / 2 * math.sin(0.9 * i + offset) end
  return list
end
local function running(x)
  return ms.tensor(wave(4, 0.1, -0.5, 0.5), { dtype = x.dtype }), ms.tensor(wave(4, 0.8, 0.5, 1.5), { dtype = x.dtype })
end

local cases = {
  group_norm = function(x, w, b) return F.group_norm(x, 3, w, b) end,
  group_norm_plain = function(x) return F.group_norm(x, 2, { eps = 1e-3 }) end,
  group_norm_vectors = function(x, w, b) return F.group_norm(x, 2, w, b) end,
  instance_norm = function(x, w, b) return F.instance_norm(x, nil, nil, w, b) end,
  instance_norm_plain = function(x) return F.instance_norm(x) end,
  instance_norm_running = function(x)
    local mean, var = running(x)
    return F.instance_norm(x, mean, var, { use_input_stats = false })
  end,
  instance_norm_tracked = function(x)
    local mean, var = running(x)
    F.instance_norm(x, mean, var, { momentum = 0.3 })
    return ms.cat { mean, var }
  end,
  rms_norm_sizes = function(x, w) return F.rms_norm(x, { 3, 4 }, w, { eps = 1e-5 }) end,
  rms_norm_plain = function(x) return F.rms_norm(x, { 4, 5 }) end,
  pad = function(x) return F.pad(x, { 1, 2, 0, 3 }, { value = 0.5 }) end,
  pad_negative = function(x) return F.pad(x, { -1, 2, 1, -2 }) end,
  pixel_shuffle = function(x) return F.pixel_shuffle(x, 2) end,
  bilinear = F.bilinear,
  bilinear_batches = F.bilinear,
}

golden_cases("layers", cases)
