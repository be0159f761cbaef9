-- SPDX-License-Identifier: MIT
--- Laplace, Cauchy and Gumbel, which have a location and a scale, and Exponential.
local draw = require "moonshard.distributions.draw"
local Distribution = require "moonshard.distributions.distribution"
local support = require "moonshard.distributions.support"

local EULER = 0.57721566490153286061

local function setup(self, loc, scale, given)
  self:_setup(given, { { "loc", loc, support.real }, { "scale", scale, support.positive } })
end

local function real() return support.real end
local function loc_of(self) return self.loc end

--- Laplace's distribution, with the density exp(-|x - loc| / scale) / (2 scale). Its parameters are the fields loc and
--- scale.
---@class Laplace: Distribution
---@overload fun(loc: Tensor|number, scale: Tensor|number, opts?: { validate_args: boolean }): Laplace
---   loc: the mean; scale: the mean distance from it, above 0; validate_args: checks parameters and values (default:
---   true)
local Laplace = Distribution:extend "Laplace"
Laplace._support, Laplace._mean, Laplace._mode = real, loc_of, loc_of

function Laplace:init(loc, scale, given) setup(self, loc, scale, given) end
function Laplace:_stddev() return self.scale * math.sqrt(2) end
function Laplace:_variance() return self.scale:square() * 2 end
function Laplace:_rsample(sizes)
  local distance, side = draw.exponential(sizes, self.loc), draw.uniform(sizes, self.loc):lt(0.5)
  return self.loc + self.scale * distance * (side:to(self.loc.dtype) * 2 - 1)
end
function Laplace:_log_prob(x) return -(self.scale * 2):log() - (x - self.loc):abs() / self.scale end
function Laplace:_cdf(x)
  local from = x - self.loc
  return 0.5 - from:sign() * (-from:abs() / self.scale):expm1() * 0.5
end
function Laplace:_icdf(p)
  local from = p - 0.5
  return self.loc - self.scale * from:sign() * (from:abs() * -2):log1p()
end
function Laplace:_entropy() return (self.scale * 2):log() + 1 end

--- Cauchy's distribution: that of the ratio of two independent normal variables with mean 0. It has no mean, and the
--- variance is infinite. Its parameters are the fields loc and scale.
---@class Cauchy: Distribution
---@overload fun(loc: Tensor|number, scale: Tensor|number, opts?: { validate_args: boolean }): Cauchy
---   loc: the median; scale: the half width at half maximum of the density, above 0; validate_args: checks parameters
---   and values (default: true)
local Cauchy = Distribution:extend "Cauchy"
Cauchy._support, Cauchy._mode = real, loc_of

function Cauchy:init(loc, scale, given) setup(self, loc, scale, given) end
function Cauchy:_mean() return self.loc:detach() * (0 / 0) end
function Cauchy:_variance() return self.scale:detach() * math.huge end
function Cauchy:_rsample(sizes)
  return self.loc + self.scale * ((draw.uniform(sizes, self.loc) - 0.5) * math.pi):tan()
end
function Cauchy:_log_prob(x)
  return -self.scale:log() - ((x - self.loc) / self.scale):square():log1p() - math.log(math.pi)
end
function Cauchy:_cdf(x) return ((x - self.loc) / self.scale):atan() / math.pi + 0.5 end
function Cauchy:_icdf(p) return ((p - 0.5) * math.pi):tan() * self.scale + self.loc end
function Cauchy:_entropy() return self.scale:log() + math.log(4 * math.pi) end

--- Gumbel's distribution of the largest of many numbers. Its parameters are the fields loc and scale.
---@class Gumbel: Distribution
---@overload fun(loc: Tensor|number, scale: Tensor|number, opts?: { validate_args: boolean }): Gumbel
---   loc: the most probable value; scale: above 0; validate_args: checks parameters and values (default: true)
local Gumbel = Distribution:extend "Gumbel"
Gumbel._support, Gumbel._mode = real, loc_of

function Gumbel:init(loc, scale, given) setup(self, loc, scale, given) end
function Gumbel:_mean() return self.loc + self.scale * EULER end
function Gumbel:_stddev() return self.scale * (math.pi / math.sqrt(6)) end
function Gumbel:_variance() return self.scale:square() * (math.pi ^ 2 / 6) end
function Gumbel:_rsample(sizes) return self.loc + self.scale * draw.gumbel(sizes, self.loc) end
function Gumbel:_log_prob(x)
  local y = (self.loc - x) / self.scale
  return y - y:exp() - self.scale:log()
end
function Gumbel:_cdf(x) return (-((self.loc - x) / self.scale):exp()):exp() end
function Gumbel:_icdf(p) return self.loc - self.scale * (-p:log()):log() end
function Gumbel:_entropy() return self.scale:log() + (1 + EULER) end

--- The exponential distribution of waiting times. Its parameter is the field rate.
---@class Exponential: Distribution
---@overload fun(rate: Tensor|number, opts?: { validate_args: boolean }): Exponential
---   rate: 1 / mean, above 0; validate_args: checks parameters and values (default: true)
local Exponential = Distribution:extend "Exponential"

function Exponential:init(rate, given) self:_setup(given, { { "rate", rate, support.positive } }) end
function Exponential._support() return support.nonnegative end
function Exponential:_mean() return 1 / self.rate end
function Exponential:_mode() return self.rate:detach() * 0 end
function Exponential:_stddev() return 1 / self.rate end
function Exponential:_variance() return self.rate:pow(-2) end
function Exponential:_rsample(sizes) return draw.exponential(sizes, self.rate) / self.rate end
function Exponential:_log_prob(x) return self.rate:log() - self.rate * x end
function Exponential:_cdf(x) return -(-self.rate * x):expm1() end
function Exponential:_icdf(p) return -(-p):log1p() / self.rate end
function Exponential:_entropy() return 1 - self.rate:log() end

return { Laplace = Laplace, Cauchy = Cauchy, Gumbel = Gumbel, Exponential = Exponential }
