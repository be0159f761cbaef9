-- SPDX-License-Identifier: MIT
--- Reductions over one dimension, several, or all; softmax, log_softmax; running sums, products and extremes.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local op, a_i, a_f = engine.op, engine.a_i, engine.a_f
local methods = tensor.methods
local wrap, position, call1, call1_with = tensor.wrap, tensor.position, tensor.call1, tensor.call1_with
local type = type

local KEEPDIM = { keepdim = false }

-- Writes dimensions d to engine.a_i, starting at index `at`; writes none if d is nil (all dimensions). Returns the
-- number of integers in a_i.
local function positions(d, at, who)
  if d == nil then return at end
  if type(d) == "number" then
    a_i[at] = position(d, who)
    return at + 1
  end
  if type(d) ~= "table" then opts.wrong(d, "a whole number or a list of them", "%s: dimension", who) end
  if #d > engine.MAX_DIMS then errors.raise("%s: %d dimensions; at most %d are supported", who, #d, engine.MAX_DIMS) end
  for k = 1, #d do a_i[at + k - 1] = position(d[k], who) end
  return at + #d
end

for _, name in ipairs { "sum", "mean", "prod", "all", "any", "amax", "amin" } do
  local number = op(name)
  methods[name] = function(t, d, given)
    if d == nil and given == nil then return wrap(call1(number, t, name)) end
    if given == nil and opts.is(d) then d, given = nil, d end
    a_i[0] = given ~= nil and opts(name, given, KEEPDIM).keepdim and 1 or 0
    return wrap(call1_with(number, t, name, positions(d, 1, name)))
  end
end

for _, name in ipairs { "var", "std" } do
  local number = op(name)
  methods[name] = function(t, d, given)
    if given == nil and opts.is(d) then d, given = nil, d end
    local o = opts(name, given, { keepdim = false, correction = 1 })
    a_i[0] = o.keepdim and 1 or 0
    local n = positions(d, 1, name)
    a_f[0] = o.correction
    return wrap(call1_with(number, t, name, n, 1))
  end
end

for _, name in ipairs { "max", "min" } do
  local along, over_all = op(name), op(name .. "_all")
  --- Without d, the largest (smallest) element; along d: values, indices (int64, from 0); for a tensor d, as maximum
  --- (minimum).
  methods[name] = function(t, d, given)
    if given == nil and opts.is(d) then d, given = nil, d end
    if d == nil then
      if given ~= nil then opts(name .. " without a dimension", given, {}) end
      return wrap(call1(over_all, t, name))
    end
    if tensor.is_tensor(d) then return methods[name == "max" and "maximum" or "minimum"](t, d) end
    a_i[0], a_i[1] = position(d, name), given ~= nil and opts(name, given, KEEPDIM).keepdim and 1 or 0
    local values = call1_with(along, t, name, 2)
    local indices = engine.a_out[1]
    return wrap(values), wrap(indices)
  end
end

for _, name in ipairs { "argmax", "argmin" } do
  local number = op(name)
  methods[name] = function(t, d, given)
    if given == nil and opts.is(d) then d, given = nil, d end
    a_i[0], a_i[1] = position(d or -1, name), given ~= nil and opts(name, given, KEEPDIM).keepdim and 1 or 0
    return wrap(call1_with(number, t, name, 2))
  end
end

local NORM = op "norm"
local NORM_OPTIONS = { keepdim = false, dim = opts.any, p = opts.any }
--- The p-norm, `sum(|t|^p)^(1/p)`; p = math.huge gives the largest absolute value. Errors: a dtype that is not floating
--- point.
---@param p? number  the exponent (default: 2)
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param given? { keepdim: boolean, dim: integer|integer[], p: number }
---   keepdim: leaves the dimensions with size 1; dim: d by name; p: p by name
---@return Tensor
function methods.norm(t, p, d, given)
  if given == nil and opts.is(d) then d, given = nil, d end
  if given == nil and opts.is(p) then p, given = nil, p end
  local keepdim = false
  if given ~= nil then
    local o = opts("norm", given, NORM_OPTIONS)
    keepdim = o.keepdim
    if o.p ~= nil and p ~= nil or o.dim ~= nil and d ~= nil then
      errors.raise("norm: %s is given by position and by name", o.p ~= nil and p ~= nil and "p" or "the dimension")
    end
    if o.p ~= nil then p = o.p end
    if o.dim ~= nil then d = o.dim end
  end
  if p ~= nil then opts.expect(p, opts.number, "norm: p") end
  a_i[0] = keepdim and 1 or 0
  local n = positions(d, 1, "norm")
  a_f[0] = p or 2
  return wrap(call1_with(NORM, t, "norm", n, 1))
end

for _, name in ipairs { "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp" } do
  local number = op(name)
  methods[name] = opts.fixed(name, function(t, d)
    a_i[0] = position(d or -1, name)
    return wrap(call1_with(number, t, name, 1))
  end)
end

for _, name in ipairs { "cummax", "cummin" } do
  local number = op(name)
  methods[name] = opts.fixed(name, function(t, d)
    a_i[0] = position(d or -1, name)
    local values = call1_with(number, t, name, 1)
    local indices = engine.a_out[1]
    return wrap(values), wrap(indices)
  end)
end

for _, name in ipairs { "cumsum", "cumprod" } do
  local fn = methods[name]
  methods[name .. "_"] = opts.fixed(name .. "_", function(t, d) return methods.copy_(t, fn(t, d)) end)
end

local LOGSUMEXP = op "logsumexp"
--- `log(sum(exp(t)))` along d, computed without overflow.
---@param d? integer  from 1; negative from the end (default: -1)
---@param given? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor
function methods.logsumexp(t, d, given)
  if given == nil and opts.is(d) then d, given = nil, d end
  a_i[0], a_i[1] = position(d or -1, "logsumexp"), given ~= nil and opts("logsumexp", given, KEEPDIM).keepdim and 1 or 0
  return wrap(call1_with(LOGSUMEXP, t, "logsumexp", 2))
end

return {}
