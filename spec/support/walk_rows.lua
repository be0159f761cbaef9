-- SPDX-License-Identifier: MIT
--- Steps for spec/support/walk.lua that call the rows of the operator table with their samples, in which some numbers
--- are replaced by special ones, and compare float32, float16 and bfloat16 with float64.
require "moonshard"
local F = require "moonshard.core.ffi"
local samples = require "spec.support.samples"
local walk = require "spec.support.walk"
local E = F.ffi.C
local inf, abs = math.huge, math.abs

local DTYPES = { float32 = E.MS_F32, float16 = E.MS_F16, bfloat16 = E.MS_BF16 }

-- Exact in every dtype.
local SPECIAL = { 0 / 0, inf, -inf, 0, -1 / inf, 2 ^ -14, -2 ^ -24, 2 ^ 15, -2 ^ 15, 1, -1, 0.5, 20, -20, 3, -6 }

-- Operators that round intermediate results to the dtype or compute factors that it does not hold, such as the sigmoid
-- of -200: with special values infinity stands where float64 has a large number, and nan where that meets 0.
local ordinary_only = {}
for name in ("gelu_mlp gru lstm rnn linear_cross_entropy add_layer_norm add_rms_norm scatter_reduce"):gmatch "%S+" do
  ordinary_only[name] = true
end

local function largest(list, most)
  for _, x in ipairs(list) do
    local a = abs(x)
    if a < inf and a > most then most = a end
  end
  return most
end

local function step(op)
  return function()
    local sample = walk.pick(op.samples)
    local values, most = samples.values(sample, walk.below(1000)), 1
    local special = not ordinary_only[op.name] and walk.pick { 0, 0.02, 0.1, 0.3 }
    for k, input in ipairs(sample.inputs) do
      if samples.is_float(input) and input.kind ~= "s" and special then
        for j = 1, #values[k] do
          if walk.uniform() < special then values[k][j] = walk.pick(SPECIAL) end
        end
      end
      most = largest(values[k], most)
    end
    local strided = walk.uniform() < 0.3 and op.name ~= "view" and op.name ~= "as_strided"
    local options = { values = values, strided = strided }
    local right = samples.evaluate(op, sample, options)
    if not right then return nil end
    for name, dtype in pairs(DTYPES) do
      options.dtype = dtype
      local got, _, text = samples.evaluate(op, sample, options)
      local differs = not got and not (text:find "dtype" or text:find "float") and "refused: " .. text
      for k = 1, got and #right.out or 0 do
        local scale = largest(right.out[k], most)
        differs = differs or walk.differs(got.out[k], right.out[k], name, 16, scale * math.max(1, most))
      end
      local how = strided and ", strided" or ""
      if differs then return differs, ("%s, sample '%s'%s"):format(name, sample.text, how) end
    end
  end
end

local steps = {}
for _, op in ipairs(samples.operators()) do
  local is_hidden = op.name:find "_backward$" or op.name:find "^linalg"
  if not op.random and not is_hidden and samples.has_kernel(op.op, E.MS_CPU) then
    steps[#steps + 1] = { op.name, step(op) }
  end
end
return steps
