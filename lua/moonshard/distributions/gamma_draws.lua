-- SPDX-License-Identifier: MIT
--- Random numbers of the gamma distribution with rate 1, with the gradient for its concentration; and those of
--- Poisson's. Computed in float64.
---
--- Gamma numbers are drawn by rejection (Marsaglia & Tsang 2000), all elements at once, again until each has been
--- accepted. They are returned as logarithms, because those of small concentrations underflow. The gradient is the
--- implicit one (Figurnov, Mohamed & Mnih 2018): dx/da = -(dP(a, x)/da) / density(x), with P the distribution function.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local ops = require "moonshard.tensor.ops"
local Function = require "moonshard.autograd.function".Function

local M = {}

local where = ops.where
local TINY = 2 ^ -1022

local function kind(a) return { dtype = "float64", device = a.device } end

-- Each round accepts more than 3 of 4 elements, so an element is not accepted by any round once in 4^100 draws at most.
local ROUNDS = 100

-- Calls try() until every element has been accepted. try returns a tensor of values, and which of them are accepted.
-- label: the parameter's name in messages.
local function accepted(label, sizes, like, try)
  local out, open = create.zeros(sizes, kind(like)), create.full(sizes, true, { device = like.device })
  for _ = 1, ROUNDS do
    local values, ok = try()
    local now = ok:logical_and(open)
    out = where(now, values, out)
    open = open:logical_and(ok:logical_not())
    if not open:any():item() then return out end
  end
  errors.raise("%s: no random number was accepted in %d rounds, for elements such as %g", label, ROUNDS,
    like:masked_select(open)[1]:item())
end

-- Calls draw for a. Elements of a that are negative, infinite or nan, which constructors refuse unless validate_args is
-- false, are replaced by stand_in, so that draw ends; their result is infinity if they are infinite, otherwise nan.
local function drawn(a, stand_in, draw)
  local usable = a:ge(0):logical_and(a:lt(math.huge))
  if usable:all():item() then return draw(a) end
  return where(usable, draw(where(usable, a, stand_in)), where(a:gt(0), a:detach(), 0 / 0))
end

-- The logarithms of gamma numbers. A number of concentration a < 1 is one of concentration a + 1 times u^(1/a), with u
-- uniform in (0, 1).
local function log_gamma(a)
  local small = a:lt(1)
  local d = where(small, a + 1, a) - 1 / 3
  local c = 1 / (d * 9):sqrt()
  local log = accepted("concentration", a.shape, a, function()
    local z = create.randn(a.shape, kind(a))
    local v = z * c + 1
    v = v * v * v
    local log_v = v:clamp_min(TINY):log()
    local log_u = create.rand(a.shape, kind(a)):clamp_min(TINY):log()
    return log_v + d:log(), v:gt(0):logical_and(log_u:lt(z * z * 0.5 + d - d * v + d * log_v))
  end)
  local boost = create.rand(a.shape, kind(a)):clamp_min(TINY):log() / a
  return where(small, log + boost, log)
end

local LARGE = 500                       -- concentrations from which the series is replaced by an approximation

-- The gradient of log x for a. With u_n = x^n / (a (a + 1) ... (a + n)), P(a, x) / density = x * sum u_n, and
-- d log(x) / da = sum u_n (digamma(a + n + 1) - log x). The terms rise until a + n reaches x, then fall like those of a
-- normal density with the variance max(a, x). For large a, x = a + z sqrt(a) + (z^2 - 1) / 3 + (z^3 - 7 z) / (36
-- sqrt(a)) (Cornish & Fisher 1938), differentiated at a fixed z, which Wilson & Hilferty's cube root gives: its relative
-- error is below 1e-4.
local function slope(a, log)
  local large = a:ge(LARGE)
  local x = log:exp()
  local root = a:sqrt()
  local z = (((log - a:log()) / 3):exp() - 1 + 1 / (a * 9)) * root * 3
  local far = (z / (root * 2) - (z * z * z - z * 7) / (a * root * 72) + 1) / x
  if large:all():item() then return far end

  local b, y = where(large, 1, a), where(large, 1, x)
  local log_y = where(large, 0, log)
  local terms = ((y - b):clamp_min(0) + y:maximum(b):sqrt() * 9 + 30):max():item()
  local u, n, digamma = 1 / b, b + 1, (b + 1):digamma()
  local sum = u * (digamma - log_y)
  for _ = 1, terms do
    u = u * y / n
    digamma = digamma + 1 / n
    n = n + 1
    sum = sum + u * (digamma - log_y)
  end
  return where(large, far, sum)
end

local implicit = Function {
  forward = function(ctx, a)
    local log = log_gamma(a)
    ctx:save(a, log)
    return log
  end,
  backward = function(ctx, grad)
    local a, log = ctx:saved()
    return grad * slope(a, log)
  end,
}

--- The logarithms of gamma numbers of the given sizes, float64, with a gradient for the concentration. Those of an
--- infinite concentration are infinite; those of a negative one or of nan are nan.
---@param sizes integer[]
---@param concentration Tensor  expands to sizes
---@return Tensor
function M.log_gamma(sizes, concentration)
  return drawn(concentration:double():expand(sizes):contiguous(), 1, implicit)
end

-- Poisson numbers of rates below 10: subtracts the probabilities of 0, 1, 2, ... from a uniform number until it is
-- negative; the result is the number of subtractions before that one.
local function by_inversion(rate)
  local rest, p, k = create.rand(rate.shape, kind(rate)), (-rate):exp(), 0
  local out = create.zeros(rate.shape, kind(rate))
  repeat
    rest = rest - p
    local more = rest:ge(0)
    k = k + 1
    out = out + more:double()
    p = p * rate / k
  until k > 80 or not more:any():item()
  return out
end

-- Poisson numbers of rates from 10: transformed rejection (Hoermann 1993, algorithm PTRS).
local function by_rejection(rate)
  local b = rate:sqrt() * 2.53 + 0.931
  local a = b * 0.02483 - 0.059
  local log_alpha = (1.1328 / (b - 3.4) + 1.1239):log()
  local v_r = 0.9277 - 3.6224 / (b - 2)
  local log_rate = rate:log()
  return accepted("rate", rate.shape, rate, function()
    local u, v = create.rand(rate.shape, kind(rate)) - 0.5, create.rand(rate.shape, kind(rate)):clamp_min(TINY)
    local us = 0.5 - u:abs()
    local k = ((a * 2 / us + b) * u + rate + 0.43):floor()
    local quick = us:ge(0.07):logical_and(v:le(v_r))
    local possible = k:ge(0):logical_and(us:ge(0.013):logical_or(v:le(us)))
    local ratio = v:log() + log_alpha - (a / (us * us) + b):log()
    local fits = ratio:le(k * log_rate - rate - (k:clamp_min(0) + 1):lgamma())
    return k, quick:logical_or(possible:logical_and(fits))
  end)
end

local function poisson(rate)
  local low = rate:lt(10)
  if rate:numel() == 0 or low:all():item() then return by_inversion(rate) end
  local high = by_rejection(where(low, 10, rate))
  if not low:any():item() then return high end
  return where(low, by_inversion(where(low, rate, 0)), high)
end

--- Poisson numbers of the given sizes, float64, without a gradient. The number of an infinite rate is infinite; that
--- of a negative rate or of nan is nan.
---@param sizes integer[]
---@param rate Tensor  expands to sizes
---@return Tensor
function M.poisson(sizes, rate)
  return drawn(rate:double():expand(sizes):contiguous(), 0, poisson)
end

return M
