-- SPDX-License-Identifier: MIT
--- Uniform: equally probable numbers between two limits.
local draw = require "moonshard.distributions.draw"
local Distribution = require "moonshard.distributions.distribution"
local errors = require "moonshard.core.errors"
local support = require "moonshard.distributions.support"

--- The uniform distribution of numbers from low to high. Its parameters are the fields low and high. Errors: a low that
--- is not below high.
---@class Uniform: Distribution
---@overload fun(low: Tensor|number, high: Tensor|number, opts?: { validate_args: boolean }): Uniform
---   low: the lowest number; high: the upper limit; validate_args: checks parameters and values (default: true)
local Uniform = Distribution:extend "Uniform"

function Uniform:init(low, high, given)
  self:_setup(given, { { "low", low, support.real }, { "high", high, support.real } })
  if self.validate_args and not self.low:lt(self.high):all():item() then
    local where = self.low:lt(self.high):reshape(-1):long():argmin(1):item() + 1
    errors.raise("Uniform: low is %g and high is %g, expected a low below high",
      self.low:reshape(-1)[where]:item(), self.high:reshape(-1)[where]:item())
  end
end

function Uniform:_support() return support.between(self.low, self.high) end
function Uniform:_mean() return (self.low + self.high) / 2 end
function Uniform:_mode() return self.low:detach() * (0 / 0) end
function Uniform:_stddev() return (self.high - self.low) / math.sqrt(12) end
function Uniform:_variance() return (self.high - self.low):square() / 12 end
function Uniform:_rsample(sizes) return self.low + draw.uniform(sizes, self.low) * (self.high - self.low) end
function Uniform:_log_prob(x)
  local inside = x:ge(self.low):logical_and(x:lt(self.high)):to(self.low.dtype)
  return inside:log() - (self.high - self.low):log()
end
function Uniform:_cdf(x) return ((x - self.low) / (self.high - self.low)):clamp(0, 1) end
function Uniform:_icdf(p) return p * (self.high - self.low) + self.low end
function Uniform:_entropy() return (self.high - self.low):log() end

return { Uniform = Uniform }
