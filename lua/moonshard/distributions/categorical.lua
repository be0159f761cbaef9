-- SPDX-License-Identifier: MIT
--- Categorical: random class ids, from 0. OneHotCategorical: the same as one-hot vectors.
local create = require "moonshard.tensor.create"
local Distribution = require "moonshard.distributions.distribution"
local number_types = require "moonshard.tensor.number_types"
local ops = require "moonshard.tensor.ops"
local support = require "moonshard.distributions.support"
require "moonshard.tensor.draws"

-- Stores the parameter, probs or logits, normalised: probs, or the exponentials of logits, have the sum 1.
local function begin(self, who, first, given)
  local name, value, options = self._either(who, first, given, { "probs", "logits" })
  self:_setup(options, { { name, value, name == "probs" and support.weights or support.logits } })
  if name == "probs" then
    self.probs = self.probs / self.probs:sum(-1, { keepdim = true })
  else
    self.logits = self.logits - self.logits:logsumexp(-1, { keepdim = true })
  end
end
local function probs_of(self) return self.logits:softmax(-1) end
local function logits_of(self)
  local p = self.probs
  local eps = number_types.finfo(p.dtype).eps
  return p:clamp(eps, 1 - eps):log()
end
local function classes(self)
  local sizes = self:_like().shape
  return sizes[#sizes]
end
local function entropy(self)
  local log, p = self.logits, self.probs
  return -(log:clamp_min(number_types.finfo(log.dtype).min) * p):sum(-1)
end

-- Draws class ids. sizes: of the result, [draws, batch_shape].
local function draw_ids(self, sizes)
  local p, n = self.probs, 1
  for k = 1, #sizes - #self.batch_shape do n = n * sizes[k] end
  local rows = 1
  for _, size in ipairs(self.batch_shape) do rows = rows * size end
  if n * rows == 0 then return create.zeros(sizes, { dtype = "int64", device = p.device }) end
  local ids = p:reshape(rows, classes(self)):multinomial(n, { replacement = true })
  return ids:t():reshape(sizes)
end

--- Class ids from 0 to K - 1, int64. The fields probs and logits can both be read, and are normalised: probs have the
--- sum 1, logits are logarithms of probabilities.
---@class Categorical: Distribution
---@field probs Tensor  [batch_shape, K]: the probabilities of the classes
---@field logits Tensor  [batch_shape, K]: their logarithms
---@overload fun(probs?: Tensor, opts?: { probs: Tensor, logits: Tensor, validate_args: boolean }): Categorical
---   probs: [batch_shape, K], numbers in proportion to the probabilities of the classes; logits: in place of probs:
---   logarithms of such numbers, as a layer computes them; validate_args: checks parameters and values (default: true)
local Categorical = Distribution:extend "Categorical"
Categorical._probs, Categorical._logits, Categorical._entropy = probs_of, logits_of, entropy
Categorical._classes = classes
Categorical._ids = true                 -- values are class ids, not floating point

function Categorical:init(probs, given) begin(self, "Categorical", probs, given) end

function Categorical:_support() return support.id_below(classes(self)) end
function Categorical:_mean() return create.full(self.batch_shape, 0 / 0, self:_kind()) end
function Categorical:_variance() return create.full(self.batch_shape, 0 / 0, self:_kind()) end
function Categorical:_kind()
  local like = self:_like()
  return { dtype = like.dtype, device = like.device }
end
function Categorical:_mode() return self:_like():detach():argmax(-1) end
function Categorical:_sample(sizes) return draw_ids(self, sizes) end
function Categorical:_log_prob(x)
  local log, ids = self.logits, x:long()
  local sizes = self._joint(ids.shape, self.batch_shape)
  local own = self._join(sizes, { classes(self) })
  return log:expand(own):gather(-1, ids:expand(sizes):unsqueeze(-1)):squeeze(-1)
end
function Categorical:_values() return create.arange(0, classes(self), { device = self:_like().device }) end

--- Vectors of K elements, one of which is 1, the others 0. Parameters and fields as those of Categorical; samples have
--- the dtype of the parameter.
---@class OneHotCategorical: Distribution
---@field probs Tensor  [batch_shape, K]: the probabilities of the classes
---@field logits Tensor  [batch_shape, K]: their logarithms
---@overload fun(probs?: Tensor, opts?: { probs: Tensor, logits: Tensor, validate_args: boolean }): OneHotCategorical
---   probs: [batch_shape, K], numbers in proportion to the probabilities of the classes; logits: in place of probs:
---   logarithms of such numbers; validate_args: checks parameters and values (default: true)
local OneHotCategorical = Distribution:extend "OneHotCategorical"
OneHotCategorical._probs, OneHotCategorical._logits, OneHotCategorical._entropy = probs_of, logits_of, entropy

function OneHotCategorical:init(probs, given)
  begin(self, "OneHotCategorical", probs, given)
  self.event_shape = self._part({ classes(self) }, 1, 1)
end

local function one_hot(self, ids)
  local like = self:_like()
  local sizes = self._join(ids.shape, { classes(self) })
  return create.zeros(sizes, { dtype = like.dtype, device = like.device }):scatter_(-1, ids:unsqueeze(-1), 1)
end

function OneHotCategorical._support() return support.one_hot end
function OneHotCategorical:_mean() return self.probs end
function OneHotCategorical:_variance()
  local p = self.probs
  return p * (1 - p)
end
function OneHotCategorical:_mode() return one_hot(self, self:_like():detach():argmax(-1)) end
function OneHotCategorical:_sample(sizes) return one_hot(self, draw_ids(self, self._part(sizes, 1, #sizes - 1))) end
function OneHotCategorical:_log_prob(x)
  return ops.where(x:ne(0), self.logits, 0):sum(-1)
end
function OneHotCategorical:_values()
  local like = self:_like()
  return create.eye(classes(self), { dtype = like.dtype, device = like.device })
end

return { Categorical = Categorical, OneHotCategorical = OneHotCategorical }
