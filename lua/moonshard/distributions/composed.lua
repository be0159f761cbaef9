-- SPDX-License-Identifier: MIT
--- Distributions made of others: Independent and MixtureSameFamily.
local class = require "moonshard.core.class"
local create = require "moonshard.tensor.create"
local Categorical = require "moonshard.distributions.categorical".Categorical
local Distribution = require "moonshard.distributions.distribution"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local support = require "moonshard.distributions.support"

local raise = errors.raise
local OPTIONS = { validate_args = true }
local a_distribution = opts.kind("a distribution", function(x) return class.isa(x, Distribution) end)

local function sum_last(t, n)
  for _ = 1, n do t = t:sum(-1) end
  return t
end

-- The constraint `of` for values with n more dimensions: it must hold for all elements along these dimensions.
local function all_last(of, n)
  return support.new(of.text, of.event_dims + n, function(x)
    local met = of:check(x)
    for _ = 1, n do met = met:all(-1) end
    return met
  end)
end

--- A distribution whose last batch dimensions belong to one value: log_prob is the sum over them.
---@class Independent: Distribution
---@field base_dist Distribution  of independent elements
---@field reinterpreted_batch_ndims integer  how many of its last batch dimensions belong to one value
---@overload fun(base_distribution: Distribution, reinterpreted_batch_ndims: integer, opts?: { validate_args: boolean }): Independent
---   base_distribution: of independent elements; reinterpreted_batch_ndims: how many of its last batch dimensions
---   belong to one value; validate_args: checks values (default: true)
local Independent = Distribution:extend "Independent"

function Independent:init(base_distribution, reinterpreted_batch_ndims, given)
  self.base_dist = opts.expect(base_distribution, a_distribution, "Independent: argument 1")
  local n = reinterpreted_batch_ndims
  opts.expect(n, opts.whole_from(0), "Independent: argument 2, the number of dimensions,")
  local batch = base_distribution.batch_shape
  if n > #batch then
    raise("Independent: argument 2, the number of dimensions, is %d, but the distribution's batch_shape is %s", n,
      tostring(batch))
  end
  self.validate_args, self.reinterpreted_batch_ndims = opts("Independent", given, OPTIONS).validate_args, n
  self.batch_shape = self._part(batch, 1, #batch - n)
  local all = self._join(batch, base_distribution.event_shape)
  self.event_shape = self._part(all, #batch - n + 1, #all)
end

function Independent:_like() return self.base_dist:_like() end
function Independent:_has_rsample() return self.base_dist.has_rsample end
function Independent:_support() return all_last(self.base_dist.support, self.reinterpreted_batch_ndims) end
function Independent:_mean() return self.base_dist.mean end
function Independent:_mode() return self.base_dist.mode end
function Independent:_stddev() return self.base_dist.stddev end
function Independent:_variance() return self.base_dist.variance end
function Independent:_sample(_, own) return self.base_dist:sample(own) end
function Independent:_rsample(_, own) return self.base_dist:rsample(own) end
function Independent:_log_prob(x) return sum_last(self.base_dist:_log_prob(x), self.reinterpreted_batch_ndims) end
function Independent:_entropy() return sum_last(self.base_dist:entropy(), self.reinterpreted_batch_ndims) end
function Independent:_expand(new, batch)
  local own = self._part(self.event_shape, 1, self.reinterpreted_batch_ndims)
  new.base_dist = self.base_dist:expand(self._join(batch, own))
end
function Independent:__tostring()
  return ("Independent(%s, %d)"):format(tostring(self.base_dist), self.reinterpreted_batch_ndims)
end

--- A mixture of K distributions of one class, such as normal ones: the last batch dimension of component_distribution
--- is that of the components.
---@class MixtureSameFamily: Distribution
---@field mixture_distribution Distribution  the Categorical, with batch_shape
---@field component_distribution Distribution  of batch shape [batch_shape, K]
---@overload fun(mixture_distribution: Distribution, component_distribution: Distribution, opts?: { validate_args: boolean }): MixtureSameFamily
---   mixture_distribution: a Categorical of K classes, with batch shape [] or batch_shape; component_distribution: of
---   batch shape [batch_shape, K]; validate_args: checks values (default: true)
local MixtureSameFamily = Distribution:extend "MixtureSameFamily"

local a_categorical = opts.kind("a Categorical", function(x) return class.isa(x, Categorical) end)

function MixtureSameFamily:init(mixture_distribution, component_distribution, given)
  local mixture = opts.expect(mixture_distribution, a_categorical, "MixtureSameFamily: argument 1")
  local parts = opts.expect(component_distribution, a_distribution, "MixtureSameFamily: argument 2")
  local batch = parts.batch_shape
  local own, k = self._part(batch, 1, #batch - 1), mixture:_classes()
  if batch[#batch] ~= k then
    raise("MixtureSameFamily: the mixture has %d classes, but the components have batch_shape %s, expected [..., %d]",
      k, tostring(batch), k)
  end
  if not (mixture.batch_shape == own or #mixture.batch_shape == 0) then
    raise("MixtureSameFamily: the mixture has batch_shape %s, expected [] or %s, that of the components without its last "
      .. "dimension", tostring(mixture.batch_shape), tostring(own))
  end
  self.validate_args = opts("MixtureSameFamily", given, OPTIONS).validate_args
  self.mixture_distribution, self.component_distribution = mixture:expand(own), parts
  self.batch_shape, self.event_shape = own, parts.event_shape
end

-- The place of the components' dimension in a value, from the end.
local function place(self) return -1 - #self.event_shape end

-- The mean of a tensor [batch_shape, K, event_shape] over the components, weighted by their probabilities.
local function average(self, t)
  local probs = self.mixture_distribution.probs
  for _ = 1, #self.event_shape do probs = probs:unsqueeze(-1) end
  return (probs * t):sum(place(self))
end

function MixtureSameFamily:_like() return self.component_distribution:_like() end
function MixtureSameFamily:_support() return self.component_distribution.support end
function MixtureSameFamily:_mean() return average(self, self.component_distribution.mean) end
function MixtureSameFamily:_mode()
  local like = self:_like()
  local sizes = self._join(self.batch_shape, self.event_shape)
  return create.full(sizes, 0 / 0, { dtype = like.dtype, device = like.device })
end
function MixtureSameFamily:_variance()
  local parts = self.component_distribution
  local from = parts.mean - self:_mean():unsqueeze(place(self))
  return average(self, parts.variance) + average(self, from:square())
end
function MixtureSameFamily:_sample(sizes, own)
  local ids, values = self.mixture_distribution:sample(own), self.component_distribution:sample(own)
  local at = ids:unsqueeze(-1)
  for _ = 1, #self.event_shape do at = at:unsqueeze(-1) end
  local d = #own + #self.batch_shape + 1
  local one = self._join(self._part(sizes, 1, d - 1), { 1 }, self.event_shape)
  return values:gather(d, at:expand(one):contiguous()):squeeze(d)
end
function MixtureSameFamily:_log_prob(x)
  local logs = self.component_distribution:_log_prob(x:unsqueeze(place(self)))
  return (logs + self.mixture_distribution.logits):logsumexp(-1)
end
function MixtureSameFamily:_cdf(x)
  return (self.component_distribution:cdf(x:unsqueeze(-1)) * self.mixture_distribution.probs):sum(-1)
end
function MixtureSameFamily:_expand(new, batch)
  local parts = self.component_distribution
  new.mixture_distribution = self.mixture_distribution:expand(batch)
  new.component_distribution = parts:expand(self._join(batch, { parts.batch_shape[#parts.batch_shape] }))
end
function MixtureSameFamily:__tostring()
  return ("MixtureSameFamily(%s, %s)"):format(tostring(self.mixture_distribution), tostring(self.component_distribution))
end

return { Independent = Independent, MixtureSameFamily = MixtureSameFamily }
