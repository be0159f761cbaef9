-- SPDX-License-Identifier: MIT
--- Normal distributions, and those of the exponential and the absolute value of normal numbers.
local draw = require "moonshard.distributions.draw"
local Distribution = require "moonshard.distributions.distribution"
local support = require "moonshard.distributions.support"
local ops = require "moonshard.tensor.ops"

local LOG_ROOT = 0.5 * math.log(2 * math.pi)
local ROOT_2 = math.sqrt(2)

local function log_density(x, loc, scale)
  return ((x - loc) / scale):square() * -0.5 - scale:log() - LOG_ROOT
end

-- Formulas that Normal, LogNormal and HalfNormal share: the distribution function, its inverse and the entropy.
local function below(x, loc, scale) return (((x - loc) / (scale * ROOT_2)):erf() + 1) * 0.5 end
local function quantile(p, loc, scale) return loc + scale * (p * 2 - 1):erfinv() * ROOT_2 end
local function entropy(scale) return scale:log() + (0.5 + LOG_ROOT) end

--- The normal distribution. Its parameters are the fields loc and scale.
---@class Normal: Distribution
---@overload fun(loc: Tensor|number, scale: Tensor|number, opts?: { validate_args: boolean }): Normal
---   loc: the mean; scale: the standard deviation, above 0; validate_args: checks parameters and values (default: true)
local Normal = Distribution:extend "Normal"

function Normal:init(loc, scale, given)
  self:_setup(given, { { "loc", loc, support.real }, { "scale", scale, support.positive } })
end

function Normal._support() return support.real end
function Normal:_mean() return self.loc end
function Normal:_mode() return self.loc end
function Normal:_stddev() return self.scale end
function Normal:_variance() return self.scale:square() end
function Normal:_rsample(sizes) return self.loc + draw.normal(sizes, self.loc) * self.scale end
function Normal:_log_prob(x) return log_density(x, self.loc, self.scale) end
function Normal:_cdf(x) return below(x, self.loc, self.scale) end
function Normal:_icdf(p) return quantile(p, self.loc, self.scale) end
function Normal:_entropy() return entropy(self.scale) end

--- The distribution of e to the power of a normally distributed number. Its parameters are the fields loc and scale.
---@class LogNormal: Distribution
---@overload fun(loc: Tensor|number, scale: Tensor|number, opts?: { validate_args: boolean }): LogNormal
---   loc: the mean of the logarithm; scale: the standard deviation of the logarithm, above 0; validate_args: checks
---   parameters and values (default: true)
local LogNormal = Distribution:extend "LogNormal"

function LogNormal:init(loc, scale, given)
  self:_setup(given, { { "loc", loc, support.real }, { "scale", scale, support.positive } })
end

function LogNormal._support() return support.positive end
function LogNormal:_mean() return (self.loc + self.scale:square() / 2):exp() end
function LogNormal:_mode() return (self.loc - self.scale:square()):exp() end
function LogNormal:_variance()
  local square = self.scale:square()
  return square:expm1() * (self.loc * 2 + square):exp()
end
function LogNormal:_rsample(sizes) return (self.loc + draw.normal(sizes, self.loc) * self.scale):exp() end
function LogNormal:_log_prob(x)
  local log = x:log()
  return log_density(log, self.loc, self.scale) - log
end
function LogNormal:_cdf(x) return below(x:log(), self.loc, self.scale) end
function LogNormal:_icdf(p) return quantile(p, self.loc, self.scale):exp() end
function LogNormal:_entropy() return entropy(self.scale) + self.loc end

--- The distribution of the absolute value of a normally distributed number with mean 0. Its parameter is the field
--- scale.
---@class HalfNormal: Distribution
---@overload fun(scale: Tensor|number, opts?: { validate_args: boolean }): HalfNormal
---   scale: the standard deviation of the normal distribution, above 0; validate_args: checks parameters and values
---   (default: true)
local HalfNormal = Distribution:extend "HalfNormal"

function HalfNormal:init(scale, given) self:_setup(given, { { "scale", scale, support.positive } }) end

function HalfNormal._support() return support.nonnegative end
function HalfNormal:_mean() return self.scale * math.sqrt(2 / math.pi) end
function HalfNormal:_mode() return self.scale:detach() * 0 end
function HalfNormal:_variance() return self.scale:square() * (1 - 2 / math.pi) end
function HalfNormal:_rsample(sizes) return (draw.normal(sizes, self.scale) * self.scale):abs() end
function HalfNormal:_log_prob(x)
  return ops.where(x:ge(0), log_density(x, 0, self.scale) + math.log(2), -math.huge)
end
function HalfNormal:_cdf(x) return below(x, 0, self.scale) * 2 - 1 end
function HalfNormal:_icdf(p) return quantile((p + 1) / 2, 0, self.scale) end
function HalfNormal:_entropy() return entropy(self.scale) - math.log(2) end

return { Normal = Normal, LogNormal = LogNormal, HalfNormal = HalfNormal }
