-- SPDX-License-Identifier: MIT
--- Random numbers of given sizes for distributions. Those of half types are drawn in float32, and rounded.
local create = require "moonshard.tensor.create"

local M = {}

local function of(fn, sizes, like)
  local dtype = like.dtype
  local wide = dtype == "float64" and dtype or "float32"
  local t = fn(sizes, { dtype = wide, device = like.device })
  return wide == dtype and t or t:to(dtype)
end

--- Uniform numbers in [0, 1).
---@param sizes integer[]
---@param like Tensor  gives dtype and device
---@return Tensor
function M.uniform(sizes, like) return of(create.rand, sizes, like) end

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

return M
