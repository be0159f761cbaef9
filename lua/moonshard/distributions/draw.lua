-- SPDX-License-Identifier: MIT
--- Random numbers of given sizes for distributions. Those of half types are drawn in float32, and rounded.
local create = require "moonshard.tensor.create"
local number_types = require "moonshard.tensor.number_types"

local M = {}

local function of(fn, sizes, like)
  local dtype = like.dtype
  local wide = dtype == "float64" and dtype or "float32"
  local t = fn(sizes, { dtype = wide, device = like.device })
  return wide == dtype and t or t:to(dtype)
end

--- Uniform numbers in [0, 1). Half types' are clamped, as numbers near 1 round to 1.
---@param sizes integer[]
---@param like Tensor  gives dtype and device
---@return Tensor
function M.uniform(sizes, like)
  local t, dtype = of(create.rand, sizes, like), like.dtype
  if dtype == "float64" or dtype == "float32" then return t end
  return t:clamp_max(1 - number_types.finfo(dtype).eps / 2)
end

--- Normally distributed numbers with mean 0 and deviation 1.
---@param sizes integer[]
---@param like Tensor  gives dtype and device
---@return Tensor
function M.normal(sizes, like) return of(create.randn, sizes, like) end

--- Exponentially distributed numbers with rate 1.
---@param sizes integer[]
---@param like Tensor  gives dtype and device
---@return Tensor
function M.exponential(sizes, like)
  return of(function(...) return (-create.rand(...)):log1p():neg() end, sizes, like)
end

--- Numbers of Gumbel's distribution with location 0 and scale 1.
---@param sizes integer[]
---@param like Tensor  gives dtype and device
---@return Tensor
function M.gumbel(sizes, like)
  return of(function(_, kind)
    local u = create.rand(sizes, kind):clamp_min(number_types.finfo(kind.dtype).tiny)        -- log 0 is infinite
    return -(-u:log()):log()
  end, sizes, like)
end

return M
