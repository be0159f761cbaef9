-- SPDX-License-Identifier: MIT
--- Bernoulli: random zeros and ones. Geometric: the number of zeros before the first 1.
local create = require "moonshard.tensor.create"
local draw = require "moonshard.distributions.draw"
local Distribution = require "moonshard.distributions.distribution"
local number_types = require "moonshard.tensor.number_types"
local ops = require "moonshard.tensor.ops"
local support = require "moonshard.distributions.support"
require "moonshard.tensor.functions"

-- The logit of a probability, finite at 0 and 1 as PyTorch's.
local function logit(p)
  local eps = number_types.finfo(p.dtype).eps
  p = p:clamp(eps, 1 - eps)
  return p:log() - (-p):log1p()
end

-- Stores the parameter, probs or logits. Reading the other field computes it.
local function begin(self, who, first, given, constraint)
  local name, value, options = self._either(who, first, given, { "probs", "logits" })
  self:_setup(options, { { name, value, name == "probs" and constraint or support.real } })
end
local function probs_of(self) return self.logits:sigmoid() end
local function logits_of(self) return logit(self.probs) end

-- The logarithm of the probability of x in {0, 1}, from the logit z; for other x, its mean over draws of Bernoulli(x).
local function log_of(x, z) return x * z:logsigmoid() + (1 - x) * (-z):logsigmoid() end

--- Zeros and ones: 1 has the probability probs. The fields probs and logits can both be read. Samples have the dtype of
--- the parameter.
---@class Bernoulli: Distribution
---@field probs Tensor  [batch_shape]: the probability of 1
---@field logits Tensor  [batch_shape]: log(probs / (1 - probs))
---@overload fun(probs?: Tensor|number, opts?: { probs: Tensor, logits: Tensor, validate_args: boolean }): Bernoulli
---   probs: the probability of 1; logits: in place of probs; validate_args: checks parameters and values
---   (default: true)
local Bernoulli = Distribution:extend "Bernoulli"
Bernoulli._probs, Bernoulli._logits = probs_of, logits_of

function Bernoulli:init(probs, given) begin(self, "Bernoulli", probs, given, support.probability) end

function Bernoulli._support() return support.boolean end
function Bernoulli:_mean() return self.probs end
function Bernoulli:_mode()
  local p = self.probs:detach()
  return p:gt(0.5):to(p.dtype):masked_fill(p:eq(0.5), 0 / 0)
end
function Bernoulli:_variance()
  local p = self.probs
  return p * (1 - p)
end
function Bernoulli:_sample(sizes)
  local p = self.probs
  return draw.uniform(sizes, p):lt(p):to(p.dtype)
end
function Bernoulli:_log_prob(x) return log_of(x, self.logits) end
function Bernoulli:_entropy() return -log_of(self.probs, self.logits) end
function Bernoulli:_values() return create.arange(0, 2):to(self:_like().device):to(self:_like().dtype) end

--- The number of failures before the first success, from 0. The fields probs and logits can both be read.
---@class Geometric: Distribution
---@field probs Tensor  [batch_shape]: the probability of success
---@field logits Tensor  [batch_shape]: log(probs / (1 - probs))
---@overload fun(probs?: Tensor|number, opts?: { probs: Tensor, logits: Tensor, validate_args: boolean }): Geometric
---   probs: the probability of success, above 0; logits: in place of probs; validate_args: checks parameters and values
---   (default: true)
local Geometric = Distribution:extend "Geometric"
Geometric._probs, Geometric._logits = probs_of, logits_of

local above_0 = support.new("a number above 0, up to 1", 0, function(x) return x:gt(0):logical_and(x:le(1)) end)

function Geometric:init(probs, given) begin(self, "Geometric", probs, given, above_0) end

function Geometric._support() return support.count end
function Geometric:_mean() return 1 / self.probs - 1 end
function Geometric:_mode() return self.probs:detach() * 0 end
function Geometric:_variance()
  local p = self.probs
  return (1 / p - 1) / p
end
function Geometric:_sample(sizes)
  local p = self.probs
  return (draw.exponential(sizes, p) / -(-p):log1p()):floor()
end
function Geometric:_log_prob(x)
  local p = self.probs
  -- For p = 1 and x = 0 the product is 0 * log(0), whose value and gradient are nan, so p is replaced by 0 there.
  local failure = ops.where(p:eq(1):logical_and(x:eq(0)), 0, p)
  return x * (-failure):log1p() + p:log()
end
function Geometric:_entropy()
  local p = self.probs
  return -log_of(p, self.logits) / p
end

return { Bernoulli = Bernoulli, Geometric = Geometric }
