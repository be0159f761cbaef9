-- SPDX-License-Identifier: MIT
--- Rotary positions (Su et al. 2021), with the scalings of long contexts that configurations ask for. The cosines and
--- sines of a call's positions are computed once and shared by all layers.
local create = require "moonshard.tensor.create"
local shape = require "moonshard.tensor.shape"

local M = {}

-- Llama 3.1: frequencies whose wavelength is beyond the original context are divided by the factor; between two
-- wavelengths the division fades in.
local function llama3(rate, o)
  local wavelength = 2 * math.pi / rate
  local long, short = o.context / o.low, o.context / o.high
  if wavelength < short then return rate end
  if wavelength > long then return rate / o.factor end
  local smooth = (o.context / wavelength - o.low) / (o.high - o.low)
  return (1 - smooth) * rate / o.factor + smooth * rate
end

--- The angle by which each pair of features turns from one position to the next.
---@param o { d: integer, base: number, kind: string, factor: number, low: number, high: number, context: integer }
---@return number[]  d / 2 angles
function M.rates(o)
  local rates = {}
  for k = 1, o.d / 2 do
    local rate = o.base ^ (-2 * (k - 1) / o.d)
    if o.kind == "linear" then rate = rate / o.factor elseif o.kind == "llama3" then rate = llama3(rate, o) end
    rates[k] = rate
  end
  return rates
end

--- The cosines and sines of positions, in float32 and then in the model's dtype, as transformers computes them.
---@param rates number[]
---@param positions Tensor  int64 [T], or [B, T]
---@param dtype string
---@return { cos: Tensor, sin: Tensor }  [T, d / 2], or [B, 1, T, d / 2]
function M.table(rates, positions, dtype)
  local kind = { dtype = dtype == "float64" and "float64" or "float32", device = positions.device }
  local angles = positions:to(kind.dtype):unsqueeze(-1) * create.tensor(rates, kind)
  if angles.ndim == 3 then angles = angles:unsqueeze(2) end
  return { cos = angles:cos():to(dtype), sin = angles:sin():to(dtype) }
end

--- Turns the first features of queries or keys, of which i and i + d / 2 form a pair.
---@param x Tensor  [B, H, T, D]
---@param at { cos: Tensor, sin: Tensor }
---@return Tensor
function M.turn(x, at)
  local half, rest = at.cos:size(-1), nil
  if 2 * half < x:size(-1) then rest = x:narrow(-1, 2 * half + 1, x:size(-1) - 2 * half) end
  local a, b = x:narrow(-1, 1, half), x:narrow(-1, half + 1, half)
  return shape.cat({ a * at.cos - b * at.sin, b * at.cos + a * at.sin, rest }, -1)
end

return M
