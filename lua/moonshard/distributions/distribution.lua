-- SPDX-License-Identifier: MIT
--- Distribution: the base of all distributions. Its methods check their arguments and call those of the class, whose
--- names begin with `_`: `_log_prob(value)`, `_cdf(value)`, `_icdf(p)`, `_entropy()`, `_sample(sizes)` or
--- `_rsample(sizes)`, and for fields `_mean()`, `_variance()` and so on.
---
--- Parameters are expanded to one batch shape when the distribution is made. Fields that are computed from them, such
--- as mean, are not stored: a tensor that a step makes is released at its end, but the distribution may live longer.
local autograd = require "moonshard.autograd"
local class = require "moonshard.core.class"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local guards = require "moonshard.core.methods"
local misspelt = require "moonshard.core.misspelt"
local opts = require "moonshard.core.opts"
local positions = require "moonshard.tensor.positions"
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.sizes"
local support = require "moonshard.distributions.support"
local tensor = require "moonshard.tensor"

local is_tensor, raise = tensor.is_tensor, errors.raise

--- A distribution of tensors: `batch_shape` is the shape of the parameters, each element a distribution of its own, and
--- `event_shape` that of one value. Every class has these fields and methods; a value has the shape
--- [..., batch_shape, event_shape], and its logarithm of the probability [..., batch_shape].
---@class Distribution
---@field batch_shape integer[]  the shape of the parameters, without the dimensions of one value
---@field event_shape integer[]  the shape of one value
---@field mean Tensor  [batch_shape, event_shape]; nan where there is none
---@field mode Tensor  [batch_shape, event_shape]: the most probable value; nan where there is none
---@field variance Tensor  [batch_shape, event_shape]; infinite or nan where there is none
---@field stddev Tensor  [batch_shape, event_shape]: the root of the variance
---@field support Constraint  the possible values: `d.support:check(x)` says which of x are
---@field has_rsample boolean  whether rsample exists
---@field validate_args boolean  whether parameters and values are checked
local Distribution = class "Distribution"
Distribution.__tensors = true           -- scopes keep the tensors of a distribution that they return

-- ---- shapes --------------------------------------------------------------------------------------------

local function shape(list) return setmetatable(list, shapes) end

--- The sizes that a script gave as numbers or as one list; none: {}.
function Distribution._sizes(who, ...)
  local n, first = select("#", ...), (...)
  local is_list = n == 1 and (opts.is_plain(first) or type(first) == "table" and getmetatable(first) == shapes)
  local list = is_list and first or { ... }
  local out = {}
  for key in pairs(is_list and opts.is_plain(list) and list or {}) do
    if type(key) ~= "number" then raise("%s: unknown option '%s', expected sizes", who, tostring(key)) end
  end
  for k = 1, is_list and #list or n do
    out[k] = opts.expect(list[k], opts.whole_from(0), "%s: size", who)
  end
  return out
end

local function join(...)
  local out = {}
  for k = 1, select("#", ...) do
    for _, size in ipairs((select(k, ...))) do out[#out + 1] = size end
  end
  return out
end
Distribution._join = join

local function part(of, first, last)
  local out = {}
  for d = first, last do out[#out + 1] = of[d] end
  return shape(out)
end
Distribution._part = part

-- The shape to which two shapes broadcast; nil if they do not.
local function joint(a, b)
  local sizes = positions.broadcast { a, b }
  return sizes and shape(sizes)
end
Distribution._joint = joint

-- ---- parameters ----------------------------------------------------------------------------------------

local OPTIONS = { validate_args = true }

--- Stores the parameters of a new distribution, expanded to one batch shape. Numbers get the dtype and the device of
--- the parameters that are tensors.
---@param given table?  the options that the script gave
---@param list table[]  of { name, value, constraint }
function Distribution:_setup(given, list)
  local who, like = class.name(self), nil
  self.validate_args = opts(who, given, OPTIONS).validate_args
  for _, p in ipairs(list) do
    local name, value = p[1], p[2]
    if is_tensor(value) then
      if not value:is_floating_point() then
        raise("%s: %s is %s %s, expected floating point", who, name, value.dtype, tostring(value.shape))
      end
      like = like or value
    elseif type(value) ~= "number" then
      local n = p[3].event_dims
      opts.wrong(value, n == 0 and "a number or a tensor"
        or ("a tensor of at least %d dimension%s"):format(n, n == 1 and "" or "s"), "%s: %s", who, name)
    end
  end
  local batch, kind = shape {}, like and { dtype = like.dtype, device = like.device } or nil
  local values = {}
  for k, p in ipairs(list) do
    local name, value, constraint = p[1], p[2], p[3]
    if not is_tensor(value) then value = create.tensor(value, kind) end
    local own = #value.shape - constraint.event_dims
    if own < 0 then
      raise("%s: %s has shape %s, expected at least %d dimension%s", who, name, tostring(value.shape),
        constraint.event_dims, constraint.event_dims == 1 and "" or "s")
    end
    local together = joint(batch, part(value.shape, 1, own))
    if not together then
      raise("%s: %s has shape %s, which does not broadcast with that of the other parameters, %s", who, name,
        tostring(value.shape), tostring(batch))
    end
    batch, values[k] = together, value
  end
  self.batch_shape, self.event_shape, self._parameters = batch, self.event_shape or shape {}, list
  for k, p in ipairs(list) do
    local name, value, constraint = p[1], values[k], p[3]
    if self.validate_args then scope.run("validate_args", support.verify, who .. ": " .. name, value, constraint) end
    list[k] = { name, constraint }
    self[name] = self:_expanded(value, constraint.event_dims, batch)
  end
end

--- Expands a parameter to the batch shape `batch`.
function Distribution._expanded(_, value, event_dims, batch)
  local n = #value.shape
  local sizes = join(batch, part(value.shape, n - event_dims + 1, n))
  return value.shape == shape(sizes) and value or value:expand(sizes)
end

--- Checks that a script gave exactly one of several parameters, by position or as an option. Returns its name, its
--- value and the other options.
---@param who string  the class
---@param first any  the argument by position: names[1], or the options
---@param given table?  the options after it
---@param names string[]  the alternatives
function Distribution._either(who, first, given, names)
  if opts.is(first) then
    if given ~= nil then raise("%s: two tables of options, expected one", who) end
    first, given = nil, first
  end
  local spec = { validate_args = true }
  for _, name in ipairs(names) do spec[name] = opts.any end
  local o, name = opts(who, given, spec), nil
  if first ~= nil then
    if o[names[1]] ~= nil then raise("%s: %s is given twice, by position and as an option", who, names[1]) end
    o[names[1]] = first
  end
  for _, candidate in ipairs(names) do
    if o[candidate] ~= nil then
      if name then raise("%s: %s and %s are given, expected one of them", who, name, candidate) end
      name = candidate
    end
  end
  if not name then raise("%s: expected %s", who, table.concat(names, " or ")) end
  return name, o[name], { validate_args = o.validate_args }
end

-- The tensor that gives results their dtype and device.
function Distribution:_like() return self[self._parameters[1][1]] end

--- The distribution with a larger batch shape, whose parameters are views of this one's.
---@param ... integer|integer[]  the sizes of the new batch_shape, as numbers or one list
---@return Distribution
function Distribution:expand(...)
  local new, batch = setmetatable({}, getmetatable(self)), shape(self._sizes("expand", ...))
  for name, value in pairs(self) do new[name] = value end
  if self._expand then self:_expand(new, batch) end                -- distributions made of others have it
  for _, p in ipairs(self._parameters or {}) do
    new[p[1]] = self:_expanded(self[p[1]], p[2].event_dims, batch)
  end
  new.batch_shape = batch
  return new
end

-- ---- values --------------------------------------------------------------------------------------------

--- Checks a value, or a probability if `constraint` is given. Returns a tensor of floating point, or of class ids if the
--- class has `_ids`.
function Distribution:_value(who, value, constraint)
  local label = ("%s: %s: value"):format(class.name(self), who)
  if type(value) == "number" then
    local like = self:_like()
    value = create.tensor(value, { dtype = like.dtype, device = like.device })
  end
  opts.need(is_tensor(value), value, "a number or a tensor", "%s", label)
  local n, event = #value.shape, self.event_shape
  if n < #event or part(value.shape, n - #event + 1, n) ~= event
    or not joint(part(value.shape, 1, n - #event), self.batch_shape) then
    raise("%s has shape %s, expected one that broadcasts with batch_shape %s%s", label, tostring(value.shape),
      tostring(self.batch_shape), event[1] and " and ends in event_shape " .. tostring(event) or "")
  end
  if not value:is_floating_point() and not self._ids then value = value:to(self:_like().dtype) end
  if self.validate_args then
    scope.run("validate_args", support.verify, label, value, constraint or self.support)
  end
  return value
end

local function lacking(self, name, ours)
  if not self[ours] then raise("%s has no %s", class.name(self), name) end
end

--- The logarithm of the density of values, or of their probability if they are discrete.
---@param value Tensor|number  [..., batch_shape, event_shape], broadcasts with them
---@return Tensor  [..., batch_shape]
function Distribution:log_prob(value)
  lacking(self, "log_prob", "_log_prob")
  return scope.run("log_prob", self._log_prob, self, self:_value("log_prob", value))
end

--- The probability of values up to the given ones. Errors: a class without it, such as Categorical.
---@param value Tensor|number  broadcasts with batch_shape
---@return Tensor
function Distribution:cdf(value)
  lacking(self, "cdf", "_cdf")
  return scope.run("cdf", self._cdf, self, self:_value("cdf", value))
end

--- The inverse of cdf. Errors: a class without it, such as Gamma.
---@param value Tensor|number  probabilities, broadcast with batch_shape
---@return Tensor
function Distribution:icdf(value)
  lacking(self, "icdf", "_icdf")
  return scope.run("icdf", self._icdf, self, self:_value("icdf", value, support.probability))
end

--- The entropy, in nats. Errors: a class without it, such as Poisson.
---@return Tensor  [batch_shape]
function Distribution:entropy()
  lacking(self, "entropy", "_entropy")
  return scope.run("entropy", self._entropy, self)
end

--- e to the power of the entropy.
---@return Tensor  [batch_shape]
function Distribution:perplexity()
  lacking(self, "entropy", "_entropy")
  return scope.run("perplexity", function() return self:_entropy():exp() end)
end

--- Draws values, without a gradient.
---@param ... integer|integer[]  sizes in front of the batch shape, as numbers or one list (default: none)
---@return Tensor  [sizes, batch_shape, event_shape]
function Distribution:sample(...)
  local sizes = self._sizes("sample", ...)
  lacking(self, "sample", self._sample and "_sample" or "_rsample")
  local all = join(sizes, self.batch_shape, self.event_shape)
  return autograd.no_grad(scope.run, "sample", self._sample or self._rsample, self, all, sizes)
end

--- Draws values as a function of the parameters and of random numbers, so that the parameters get a gradient. Errors: a
--- class whose has_rsample is false.
---@param ... integer|integer[]  sizes in front of the batch shape, as numbers or one list (default: none)
---@return Tensor  [sizes, batch_shape, event_shape]
function Distribution:rsample(...)
  local sizes = self._sizes("rsample", ...)
  if not self.has_rsample then
    raise("%s has no rsample: its samples have no gradient; use sample, and log_prob for a gradient", class.name(self))
  end
  return scope.run("rsample", self._rsample, self, join(sizes, self.batch_shape, self.event_shape), sizes)
end

local ENUMERATE = { expand = true }
--- All values of a discrete distribution of finite support. Errors: a class without it, such as Poisson.
---@param given? { expand: boolean }  expand: to the batch shape, instead of dimensions of size 1 (default: true)
---@return Tensor  [values, batch_shape, event_shape]
function Distribution:enumerate_support(given)
  lacking(self, "enumerate_support", "_values")
  local o = opts("enumerate_support", given, ENUMERATE)
  return scope.run("enumerate_support", function()
    local values = self:_values()                                  -- [values, event_shape]
    local sizes = { values.shape[1] }
    for _ = 1, #self.batch_shape do sizes[#sizes + 1] = 1 end
    values = values:reshape(join(sizes, self.event_shape))
    return o.expand and values:expand(join({ values.shape[1] }, self.batch_shape, self.event_shape)) or values
  end)
end

-- ---- fields --------------------------------------------------------------------------------------------

-- Fields that are computed when they are read, and the methods that compute them.
local fields = {}
for name in ([[has_rsample mean mode variance stddev support probs logits df covariance_matrix precision_matrix
  scale_tril]]):gmatch "%S+" do fields[name] = "_" .. name end

function Distribution:_has_rsample() return self._rsample ~= nil end
function Distribution:_stddev() return self.variance:sqrt() end

-- function of a script -> field -> true: it has read the field without a call.
local seen = setmetatable({}, { __mode = "k" })

-- Refuses `d:mean()`. level: that of the function that reads the field, 1: the caller.
local function refuse_call(name, level)
  local info = not errors.is_library(level + 1) and debug.getinfo(level + 1, "f")
  local reader = info and info.func
  if not reader or seen[reader] and seen[reader][name] then return end
  if misspelt.is_call(name, level + 1) then raise("%s is a field: write distribution.%s, without a call", name, name) end
  seen[reader] = seen[reader] or {}
  seen[reader][name] = true
end

-- Names of PyTorch's and NumPy's fields, and what to write instead.
local instead = {
  arg_constraints = "parameters are checked when the distribution is made, and d.support is the constraint of values",
  std = "did you mean 'stddev'?", var = "did you mean 'variance'?", median = "write d:icdf(0.5)",
}

-- The message about a misspelt field; nil for fields of the script's own, which it may test for.
local function misspelling(self, cls, name)
  if type(name) ~= "string" or name:sub(1, 1) == "_" or fields[name] then return nil end
  local advice, limit = instead[name], #name < 8 and 1 or 2
  local known = guards.names(cls)
  for field, get in pairs(fields) do
    if cls[get] then known[#known + 1] = field end
  end
  for field in pairs(self) do known[#known + 1] = field end
  table.sort(known)
  for _, field in ipairs(known) do
    if field == name then return nil end
    if not advice and errors.alike(field, name, limit) then advice = ("did you mean '%s'?"):format(field) end
  end
  return advice and ("%s has no field '%s'; %s"):format(class.name(self), name, advice)
end

local messages = setmetatable({}, { __mode = "k" })     -- class -> field -> the message, or false

Distribution.__index = function(self, name)
  local cls = getmetatable(self)
  local value = cls[name]
  if value ~= nil then return value end
  local get = fields[name] and cls[fields[name]]
  if not get then
    guards.look(cls, name, 2)
    local of = messages[cls] or {}
    messages[cls] = of
    if of[name] == nil and rawget(self, "batch_shape") then of[name] = misspelling(self, cls, name) or false end
    if of[name] and not errors.is_library(2) then raise("%s", of[name]) end
    return nil
  end
  refuse_call(name, 2)
  return scope.run(name, get, self)
end

function Distribution:__tostring()
  local parts = {}
  for k, p in ipairs(self._parameters or {}) do
    local t = self[p[1]]
    parts[k] = ("%s: %s"):format(p[1], t.ndim == 0 and ("%g"):format(t:item()) or tostring(t.shape))
  end
  return ("%s(%s)"):format(class.name(self), table.concat(parts, ", "))
end

guards.guard(Distribution, "distribution")

return Distribution
