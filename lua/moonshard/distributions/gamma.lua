-- SPDX-License-Identifier: MIT
--- Distributions made of gamma-distributed numbers, and Poisson's.
local create = require "moonshard.tensor.create"
local Distribution = require "moonshard.distributions.distribution"
local draw = require "moonshard.distributions.draw"
local errors = require "moonshard.core.errors"
local number_types = require "moonshard.tensor.number_types"
local ops = require "moonshard.tensor.ops"
local shape = require "moonshard.tensor.shape"
local support = require "moonshard.distributions.support"
local tensor = require "moonshard.tensor"

local where = ops.where

-- Gamma-distributed numbers of concentration's dtype, at least that dtype's smallest normal number: 0 has no density.
local function standard(sizes, concentration)
  local dtype = concentration.dtype
  return draw.gamma(sizes, concentration):clamp_min(number_types.finfo(dtype).tiny):to(dtype)
end

--- The gamma distribution, with the density in proportion to x^(concentration - 1) exp(-rate x). Its parameters are the
--- fields concentration and rate.
---@class Gamma: Distribution
---@overload fun(concentration: Tensor|number, rate: Tensor|number, opts?: { validate_args: boolean }): Gamma
---   concentration: the shape of the density, above 0 and finite; rate: above 0; validate_args: checks parameters
---   and values (default: true)
local Gamma = Distribution:extend "Gamma"

function Gamma:init(concentration, rate, given)
  self:_setup(given, { { "concentration", concentration, support.finite_positive },
    { "rate", rate, support.positive } })
end
function Gamma._support() return support.nonnegative end
function Gamma:_mean() return self.concentration / self.rate end
function Gamma:_mode() return ((self.concentration - 1) / self.rate):clamp_min(0) end
function Gamma:_variance() return self.concentration / self.rate:square() end
function Gamma:_rsample(sizes) return standard(sizes, self.concentration) / self.rate end
function Gamma:_log_prob(x)
  local a, rate = self.concentration, self.rate
  return a:xlogy(rate) + (a - 1):xlogy(x) - rate * x - a:lgamma()
end
function Gamma:_entropy()
  local a = self.concentration
  return a - self.rate:log() + a:lgamma() + (1 - a) * a:digamma()
end

--- The chi-squared distribution: that of the sum of the squares of df normally distributed numbers with mean 0 and
--- deviation 1. A Gamma with concentration df / 2 and rate 1 / 2.
---@class Chi2: Gamma
---@field df Tensor  [batch_shape]: the degrees of freedom
---@overload fun(df: Tensor|number, opts?: { validate_args: boolean }): Chi2
---   df: degrees of freedom, above 0 and finite; validate_args: checks parameters and values (default: true)
local Chi2 = Gamma:extend "Chi2"

function Chi2:init(df, given)
  self:_setup(given, { { "df", df, support.finite_positive } })
  self.concentration, self.rate = self.df * 0.5, create.full_like(self.df, 0.5, { requires_grad = false })
  self.df = nil
  self._parameters = { { "concentration", support.positive }, { "rate", support.positive } }
end
function Chi2:_df() return self.concentration * 2 end

--- Student's t distribution: that of loc + scale z / sqrt(x / df), where z has the normal distribution with mean 0 and
--- deviation 1, and x has that of Chi2(df). Its parameters are the fields df, loc and scale.
---@class StudentT: Distribution
---@overload fun(df: Tensor|number, loc?: Tensor|number, scale?: Tensor|number, opts?: { validate_args: boolean }): StudentT
---   df: degrees of freedom, above 0 and finite; loc: the median (default: 0); scale: above 0 (default: 1);
---   validate_args: checks parameters and values (default: true)
local StudentT = Distribution:extend "StudentT"

function StudentT:init(df, loc, scale, given)
  local function is_given(x) return x == nil or type(x) == "number" or tensor.is_tensor(x) end
  if given == nil and not is_given(loc) then loc, given = nil, loc end
  if given == nil and not is_given(scale) then scale, given = nil, scale end
  self:_setup(given, { { "df", df, support.finite_positive }, { "loc", loc or 0, support.real },
    { "scale", scale or 1, support.positive } })
end
function StudentT._support() return support.real end
function StudentT:_mean() return where(self.df:gt(1), self.loc, 0 / 0) end
function StudentT:_mode() return self.loc end
function StudentT:_variance()
  local df = self.df
  local finite = self.scale:square() * df / (where(df:gt(2), df, 3) - 2)
  return where(df:gt(2), finite, where(df:gt(1), create.full_like(df, math.huge, { requires_grad = false }), 0 / 0))
end
function StudentT:_rsample(sizes)
  local chi2 = standard(sizes, self.df * 0.5) * 2
  return self.loc + self.scale * draw.normal(sizes, self.loc) * (chi2 / self.df):rsqrt()
end
function StudentT:_log_prob(x)
  local df, y = self.df, (x - self.loc) / self.scale
  local log_norm = self.scale:log() + df:log() * 0.5 + math.log(math.pi) / 2 + (df * 0.5):lgamma()
    - ((df + 1) * 0.5):lgamma()
  return (df + 1) * -0.5 * (y:square() / df):log1p() - log_norm
end
function StudentT:_entropy()
  local df = self.df
  local log_beta = (df * 0.5):lgamma() + math.log(math.pi) / 2 - ((df + 1) * 0.5):lgamma()
  return self.scale:log() + (df + 1) * 0.5 * (((df + 1) * 0.5):digamma() - (df * 0.5):digamma()) + df:log() * 0.5
    + log_beta
end

-- ---- numbers with the sum 1 -------------------------------------------------------------------------------

local function log_density(x, c)
  return (c - 1):xlogy(x):sum(-1) + c:sum(-1):lgamma() - c:lgamma():sum(-1)
end

local function entropy_of(c)
  local k, total = c.shape[#c.shape], c:sum(-1)
  return c:lgamma():sum(-1) - total:lgamma() - (k - total) * total:digamma() - ((c - 1) * c:digamma()):sum(-1)
end

-- The most probable point; if all concentrations are below 1, the corner of the largest concentration.
local function mode_of(c)
  local above = (c - 1):clamp_min(0)
  local inside = above / above:sum(-1, { keepdim = true })
  local corner = create.zeros_like(c, { requires_grad = false })
    :scatter_(-1, c:detach():argmax(-1, { keepdim = true }), 1)
  return where(c:lt(1):all(-1, { keepdim = true }), corner, inside)
end

-- Draws from Dirichlet's distribution, clamped to [tiny, 1), as PyTorch's, because 0 and 1 have no density.
local function simplex_draw(sizes, c)
  local info = number_types.finfo(c.dtype)
  return draw.gamma(sizes, c, true):softmax(-1):to(c.dtype):clamp(info.tiny, 1 - info.eps / 2)
end

--- Dirichlet's distribution of K positive numbers with the sum 1. Its parameter is the field concentration.
---@class Dirichlet: Distribution
---@overload fun(concentration: Tensor, opts?: { validate_args: boolean }): Dirichlet
---   concentration: [batch_shape, K], above 0 and finite; validate_args: checks parameters and values (default: true)
local Dirichlet = Distribution:extend "Dirichlet"

local positives = support.new("finite numbers > 0", 1, function(x)
  return x:gt(0):logical_and(x:lt(math.huge)):all(-1)
end)

function Dirichlet:init(concentration, given)
  if tensor.is_tensor(concentration) and concentration.ndim > 0 and concentration:size(-1) == 0 then
    errors.raise("Dirichlet: concentration has shape %s, expected at least one number in its last dimension",
      tostring(concentration.shape))
  end
  self:_setup(given, { { "concentration", concentration, positives } })
  local sizes = self.concentration.shape
  self.event_shape = self._part(sizes, #sizes, #sizes)
end
function Dirichlet._support() return support.simplex end
function Dirichlet:_mean() return self.concentration / self.concentration:sum(-1, { keepdim = true }) end
function Dirichlet:_mode() return mode_of(self.concentration) end
function Dirichlet:_variance()
  local c = self.concentration
  local total = c:sum(-1, { keepdim = true })
  return c * (total - c) / (total:square() * (total + 1))
end
function Dirichlet:_rsample(sizes) return simplex_draw(sizes, self.concentration) end
function Dirichlet:_log_prob(x) return log_density(x, self.concentration) end
function Dirichlet:_entropy() return entropy_of(self.concentration) end

--- The beta distribution of numbers from 0 to 1, with the density in proportion to x^(concentration1 - 1)
--- (1 - x)^(concentration0 - 1). Its parameters are the fields concentration1 and concentration0.
---@class Beta: Distribution
---@overload fun(concentration1: Tensor|number, concentration0: Tensor|number, opts?: { validate_args: boolean }): Beta
---   concentration1: above 0 and finite, often called alpha; concentration0: above 0 and finite, often called beta;
---   validate_args: checks parameters and values (default: true)
local Beta = Distribution:extend "Beta"

function Beta:init(concentration1, concentration0, given)
  self:_setup(given, { { "concentration1", concentration1, support.finite_positive },
    { "concentration0", concentration0, support.finite_positive } })
end

local function pair(a, b) return shape.stack({ a, b }, -1) end

function Beta._support() return support.probability end
function Beta:_both() return pair(self.concentration1, self.concentration0) end
function Beta:_mean() return self.concentration1 / (self.concentration1 + self.concentration0) end
function Beta:_mode() return mode_of(self:_both()):select(-1, 1) end
function Beta:_variance()
  local a, b = self.concentration1, self.concentration0
  local total = a + b
  return a * b / (total:square() * (total + 1))
end
function Beta:_rsample(sizes)
  return simplex_draw(self._join(sizes, { 2 }), self:_both()):select(-1, 1)
end
function Beta:_log_prob(x) return log_density(pair(x, 1 - x), self:_both()) end
function Beta:_entropy() return entropy_of(self:_both()) end

-- ---- Poisson ----------------------------------------------------------------------------------------------

--- Poisson's distribution of counts. Its parameter is the field rate. Samples have the parameter's dtype.
---@class Poisson: Distribution
---@overload fun(rate: Tensor|number, opts?: { validate_args: boolean }): Poisson
---   rate: the mean, from 0 and finite; validate_args: checks parameters and values (default: true)
local Poisson = Distribution:extend "Poisson"

function Poisson:init(rate, given) self:_setup(given, { { "rate", rate, support.finite_nonnegative } }) end
function Poisson._support() return support.count end
function Poisson:_mean() return self.rate end
function Poisson:_mode() return self.rate:detach():floor() end
function Poisson:_variance() return self.rate end
function Poisson:_sample(sizes) return draw.poisson(sizes, self.rate):to(self.rate.dtype) end
function Poisson:_log_prob(x) return x:xlogy(self.rate) - self.rate - (x + 1):lgamma() end

return { Gamma = Gamma, Chi2 = Chi2, StudentT = StudentT, Dirichlet = Dirichlet, Beta = Beta, Poisson = Poisson }
