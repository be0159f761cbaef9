-- SPDX-License-Identifier: MIT
--- Random numbers of given sizes for distributions. Those of half types are drawn in float32, and rounded; gamma and
--- Poisson numbers are drawn in float64 (kernels/formulas/gamma_draws.h).
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local number_types = require "moonshard.tensor.number_types"
local tensor = require "moonshard.tensor"

local GAMMA, POISSON = engine.op "gamma_draw", engine.op "poisson_draw"
local a_i = engine.a_i

local M = {}

local function of(fn, sizes, like)
  local dtype = like.dtype
  local wide = dtype == "float64" and dtype or "float32"
  local t = fn(sizes, { dtype = wide, device = like.device })
  return wide == dtype and t or t:to(dtype)
end

--- Uniform numbers in [0, 1). Those of half types are clamped, as numbers near 1 round to 1.
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

-- Draws by an operator that repeats its parameter for the leading sizes.
local function by_parameter(number, who, sizes, parameter, logarithm)
  local p = parameter.dtype == "float64" and parameter or parameter:float()
  local more = #sizes - p.ndim
  a_i[0], a_i[1] = 0, logarithm and 1 or 0
  for d = 1, more do a_i[d + 1] = sizes[d] end
  return tensor.wrap(tensor.call1_with(number, p, who, more + 2))
end

--- Gamma numbers with rate 1, or their logarithms (numbers of a small concentration underflow), float64, with a
--- gradient for the concentration. An infinite concentration gives infinity, a negative one or nan gives nan.
---@param sizes integer[]  sizes of the result; the last ones are the concentration's
---@param concentration Tensor
---@param logarithm? boolean
---@return Tensor
function M.gamma(sizes, concentration, logarithm)
  return by_parameter(GAMMA, "gamma_draw", sizes, concentration, logarithm)
end

--- Poisson numbers, float64, without a gradient; an infinite rate gives infinity, a negative one or nan gives nan.
---@param sizes integer[]  sizes of the result; the last ones are the rate's
---@param rate Tensor
---@return Tensor
function M.poisson(sizes, rate) return by_parameter(POISSON, "poisson_draw", sizes, rate:detach(), false) end

return M
