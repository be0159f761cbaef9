-- SPDX-License-Identifier: MIT
--- Elementwise functions with options, and those composed of others.
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local number_types = require "moonshard.tensor.number_types"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
require "moonshard.tensor.ops"

local op, a_in, a_f, args = engine.op, engine.a_in, engine.a_f, engine.args
local methods, wrap, id_of, is_tensor = tensor.methods, tensor.wrap, tensor.id_of, tensor.is_tensor

local ROUND = op "round"
--- The nearest whole number, element by element; halves go to the even one. The gradient is 0.
---@param given? { decimals: integer }  decimals: digits after the point to round to; negative before it (default: 0)
---@return Tensor
function methods.round(t, given)
  local decimals = given ~= nil and opts("round", given, { decimals = opts.option(opts.whole, 0) }).decimals or 0
  if decimals == 0 then return wrap(tensor.call1(ROUND, t, "round")) end
  local scale = 10 ^ math.abs(decimals)
  if decimals > 0 then return wrap(tensor.call1(ROUND, t * scale, "round")) / scale end
  return wrap(tensor.call1(ROUND, t / scale, "round")) * scale
end

--- round in place.
---@param given? { decimals: integer }  decimals: digits after the point to round to; negative before it (default: 0)
---@return Tensor self
function methods.round_(t, given) return methods.copy_(t, methods.round(t, given)) end

-- t / u rounded to whole numbers. Halves are divided in float32, so that the quotient is rounded once.
local function whole_quotient(t, u, mode)
  local dtype = number_types.result_type(t, u)
  local wide = (dtype == "float16" or dtype == "bfloat16") and "float32" or dtype
  if is_tensor(t) then t = methods.to(t, wide) end
  if is_tensor(u) then u = methods.to(u, wide) end
  local q
  if mode == "floor" then q = methods.floor_divide(t, u)
  elseif dtypes.is_float(dtypes.numbers[wide]) then q = methods.trunc(t / u)
  else q = methods.floor_divide(t - methods.fmod(t, u), u) end
  return methods.to(q, dtype)
end

-- The quotient, with gradients of 0 for both operands.
local function rounded_quotient(t, u, mode)
  local leaves, plain = {}, {}
  for k, x in ipairs { t, u } do
    local flows = is_tensor(x) and x.requires_grad
    if flows then leaves[#leaves + 1] = x end
    plain[k] = flows and methods.detach(x) or x
  end
  local q = whole_quotient(plain[1], plain[2], mode)
  for _, x in ipairs(leaves) do
    -- An element is never taken from floor(x), whose gradient is 0.
    q = methods.where(q, create.tensor(true, { device = q.device }), methods.to(methods.floor(x), q.dtype))
  end
  return q
end

local divide, divide_in_place = methods.div, methods.div_
local ROUNDING = { rounding_mode = opts.one_of { "trunc", "floor" } }

--- t / u, element by element; u broadcasts. With rounding_mode the result is rounded to whole numbers, integers stay
--- integers, and the gradients are 0. Integers divided by 0 give 0 then.
---@param u Tensor|number  broadcasts with t
---@param given? { rounding_mode: "trunc"|"floor" }  rounding_mode: towards 0, or down (default: no rounding)
---@return Tensor
function methods.div(t, u, given)
  local mode = given ~= nil and opts("div", given, ROUNDING).rounding_mode
  if not mode then return divide(t, u) end
  opts.need(is_tensor(u) or type(u) == "number", u, "a tensor or a number", "div: operand")
  return scope.run("div", rounded_quotient, t, u, mode)
end

--- t / u in place.
---@param u Tensor|number  broadcasts to t's shape
---@param given? { rounding_mode: "trunc"|"floor" }  rounding_mode: towards 0, or down (default: no rounding)
---@return Tensor self
function methods.div_(t, u, given)
  local mode = given ~= nil and opts("div_", given, ROUNDING).rounding_mode
  return mode and methods.copy_(t, methods.div(t, u, given)) or divide_in_place(t, u)
end

--- t * t, element by element.
---@return Tensor
function methods.square(t) return methods.pow(t, 2) end
--- square in place.
---@return Tensor self
function methods.square_(t) return methods.pow_(t, 2) end

--- t, but at least low, element by element.
---@param low number|Tensor  the lower limit
---@return Tensor
function methods.clamp_min(t, low) return methods.clamp(t, low) end
--- clamp_min in place.
---@param low number|Tensor  the lower limit
---@return Tensor self
function methods.clamp_min_(t, low) return methods.clamp_(t, low) end
--- t, but at most high, element by element.
---@param high number|Tensor  the upper limit
---@return Tensor
function methods.clamp_max(t, high) return methods.clamp(t, nil, high) end
--- clamp_max in place.
---@param high number|Tensor  the upper limit
---@return Tensor self
function methods.clamp_max_(t, high) return methods.clamp_(t, nil, high) end

local LOGIT = op "logit"
--- log(t / (1 - t)), element by element: the inverse of sigmoid.
---@param given? { eps: number }  eps: t is first limited to [eps, 1 - eps] (default: no limit)
---@return Tensor
function methods.logit(t, given)
  local eps = given ~= nil and opts("logit", given, { eps = opts.number_from(0) }).eps
  a_f[0], a_f[1] = eps or -math.huge, eps and 1 - eps or math.huge
  return wrap(tensor.call1_with(LOGIT, t, "logit", 0, 2))
end

local SOFTPLUS = op "softplus"
--- log(1 + e^(beta t)) / beta, a smooth relu, element by element; t itself where beta t > threshold.
---@param given? { beta: number, threshold: number }
---   beta: sharpness, not 0 (default: 1); threshold: where beta t exceeds it, the result is t (default: 20)
---@return Tensor
function methods.softplus(t, given)
  local o = opts("softplus", given, { beta = 1, threshold = 20 })
  if o.beta == 0 then opts.wrong(o.beta, "a number other than 0", "softplus: option 'beta'") end
  a_f[0], a_f[1] = o.beta, o.threshold
  return wrap(tensor.call1_with(SOFTPLUS, t, "softplus", 0, 2))
end

local POLYGAMMA = op "polygamma"
local function floating(t, who)
  id_of(t, who)
  return methods.is_floating_point(t) and t or methods.float(t)
end

--- The n-th derivative of digamma, element by element.
---@param n integer  from 0; 0: digamma itself
---@return Tensor
function methods.polygamma(t, n)
  opts.expect(n, opts.whole_from(0), "polygamma: n")
  if n == 0 then return methods.digamma(t) end
  a_f[0] = n
  return wrap(tensor.call1_with(POLYGAMMA, floating(t, "polygamma"), "polygamma", 0, 1))
end

--- The logarithm of the multivariate gamma function: p (p - 1) / 4 log(pi), plus the sum over j = 0 to p - 1 of
--- lgamma(t - j / 2). Errors: p below 1.
---@param p integer  the number of dimensions
---@return Tensor  meaningful where t is above (p - 1) / 2 only
function methods.mvlgamma(t, p)
  opts.expect(p, opts.whole_from(1), "mvlgamma: p")
  return scope.run("mvlgamma", function()
    local x = floating(t, "mvlgamma")
    local sum = methods.lgamma(x) + p * (p - 1) / 4 * math.log(math.pi)
    for j = 1, p - 1 do sum = sum + methods.lgamma(x - j / 2) end
    return sum
  end)
end

-- ---- three tensors --------------------------------------------------------------------------------

local LERP, LERP_, LERP_TENSOR = op "lerp", op "lerp_", op "lerp_tensor"

local function lerp_by_number(number, who, t, u, weight)
  args.n_in, args.n_i, args.n_f = 2, 0, 1
  a_in[0], a_in[1], a_f[0] = id_of(t, who), id_of(u, who, "end"), weight
  return tensor.call(number, t, u)
end

local function check_weight(who, weight)
  if type(weight) ~= "number" then opts.wrong(weight, "a number or a tensor", "%s: weight", who) end
end

--- t + weight * (u - t), element by element: t at weight 0, u at weight 1. Errors: dtypes that differ or are not
--- floating point.
---@param u Tensor  broadcasts with t
---@param weight number|Tensor  a tensor broadcasts with t and u
---@return Tensor
function methods.lerp(t, u, weight)
  if is_tensor(weight) then return wrap(tensor.call3(LERP_TENSOR, t, u, weight, "lerp")) end
  check_weight("lerp", weight)
  return wrap(lerp_by_number(LERP, "lerp", t, u, weight))
end
--- lerp in place, as exponential moving averages use it.
---@param u Tensor  broadcasts to t's shape
---@param weight number|Tensor  a tensor broadcasts to t's shape
---@return Tensor self
function methods.lerp_(t, u, weight)
  if is_tensor(weight) then return methods.copy_(t, methods.lerp(t, u, weight)) end
  check_weight("lerp_", weight)
  lerp_by_number(LERP_, "lerp_", t, u, weight)
  return t
end

-- ---- isclose and nan_to_num -----------------------------------------------------------------------

local CLOSE = { rtol = opts.option(opts.number_from(0), 1e-5), atol = opts.option(opts.number_from(0), 1e-8),
  equal_nan = false }
--- Whether |t - u| <= atol + rtol * |u|, element by element: a bool tensor. Equal infinities are close.
---@param u Tensor  broadcasts with t
---@param given? { rtol: number, atol: number, equal_nan: boolean }
---   rtol: relative tolerance; atol: absolute tolerance; equal_nan: two nan are close
---@return Tensor  bool
function methods.isclose(t, u, given)
  local o = opts("isclose", given, CLOSE)
  id_of(t, "isclose")
  id_of(u, "isclose")
  t, u = methods.double(t), methods.double(u)
  local limit = methods.abs(u) * o.rtol + o.atol
  local near = methods.logical_and(methods.le(methods.abs(t - u), limit), methods.isfinite(u))
  near = methods.logical_or(near, methods.eq(t, u))
  if not o.equal_nan then return near end
  return methods.logical_or(near, methods.logical_and(methods.isnan(t), methods.isnan(u)))
end

local LARGEST = { float32 = (2 - 2 ^ -23) * 2 ^ 127, float64 = (2 - 2 ^ -52) * 2 ^ 1023, float16 = 65504,
  bfloat16 = (2 - 2 ^ -7) * 2 ^ 127 }
--- Replaces nan and infinities, element by element; other elements, and those of integer tensors, keep their values.
---@param given? { nan: number, posinf: number, neginf: number }
---   nan: replaces nan (default: 0); posinf: replaces infinity (default: the dtype's largest number); neginf: replaces
---   -infinity (default: the dtype's lowest number)
---@return Tensor
function methods.nan_to_num(t, given)
  local o = opts("nan_to_num", given, { nan = 0, posinf = opts.number, neginf = opts.number })
  id_of(t, "nan_to_num")
  local largest = LARGEST[t.dtype]
  if not largest then return methods.clone(t) end
  local y = methods.masked_fill(t, methods.isnan(t), o.nan)
  y = methods.masked_fill(y, methods.eq(t, math.huge), o.posinf or largest)
  return methods.masked_fill(y, methods.eq(t, -math.huge), o.neginf or -largest)
end
--- nan_to_num in place.
---@param given? { nan: number, posinf: number, neginf: number }
---   nan: replaces nan (default: 0); posinf: replaces infinity (default: the dtype's largest number); neginf: replaces
---   -infinity (default: the dtype's lowest number)
---@return Tensor self
function methods.nan_to_num_(t, given) return methods.copy_(t, methods.nan_to_num(t, given)) end

opts.fix(methods, { "square", "square_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "lerp", "lerp_" })
