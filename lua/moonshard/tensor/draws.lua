-- SPDX-License-Identifier: MIT
--- Random fills, draws and permutations. All numbers come from the library's generator, so a seed gives the same ones
--- for any number of threads and any world size, and on every device; normally distributed float64 numbers may differ
--- in the last place between devices.
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
require "moonshard.tensor.summaries"

local op, a_in, a_f, args = engine.op, engine.a_in, engine.a_f, engine.args
local methods, id_of, is_tensor = tensor.methods, tensor.id_of, tensor.is_tensor

local M = {}
local RAND_, RANDN_, RANDINT_ = op "rand_", op "randn_", op "randint_"

local function check_float(who, t)
  id_of(t, who)
  if not dtypes.is_float(tensor.info_of(t).dtype) then
    errors.raise("%s: the tensor is %s %s, expected floating point", who, t.dtype, tostring(t.shape))
  end
end

local function fill(who, number, t, a, b)
  check_float(who, t)
  args.n_in, args.n_i, args.n_f = 1, 0, 2
  a_in[0], a_f[0], a_f[1] = id_of(t, who), a, b
  tensor.call(number, t)
  return t
end

--- Fills t with random numbers, uniform from low to high. Errors: a dtype that is not floating point, low above high.
---@param low? number  lowest number (default: 0)
---@param high? number  upper limit (default: 1)
---@return Tensor self
function methods.uniform_(t, low, high)
  low = opts.expect(low == nil and 0 or low, opts.number, "uniform_: lower limit")
  high = opts.expect(high == nil and 1 or high, opts.number, "uniform_: upper limit")
  if low > high then errors.raise("uniform_: the lower limit %g is above the upper limit %g", low, high) end
  return fill("uniform_", RAND_, t, low, high)
end

--- Fills t with normally distributed random numbers. Errors: a dtype that is not floating point.
---@param mean? number  their mean (default: 0)
---@param std? number  their standard deviation, at least 0 (default: 1)
---@return Tensor self
function methods.normal_(t, mean, std)
  mean = opts.expect(mean == nil and 0 or mean, opts.number, "normal_: mean")
  std = opts.expect(std == nil and 1 or std, opts.number_from(0), "normal_: standard deviation")
  return fill("normal_", RANDN_, t, mean, std)
end

--- Fills t with random whole numbers from low to high - 1. Without limits, from 0 to the largest n below 2^53 for which
--- t's dtype represents every whole number from 0 to n.
---@param low? integer  lowest number, or with one argument the upper limit (default: 0)
---@param high? integer  upper limit (default: see above)
---@return Tensor self
function methods.random_(t, low, high)
  id_of(t, "random_")
  if high == nil then low, high = 0, low end
  high = high or ({ float32 = 2 ^ 24 + 1, float64 = 2 ^ 53, float16 = 2 ^ 11 + 1, bfloat16 = 2 ^ 8 + 1, int64 = 2 ^ 53,
    int32 = 2 ^ 31, int16 = 2 ^ 15, int8 = 2 ^ 7, uint8 = 2 ^ 8, bool = 2 })[t.dtype]
  opts.expect(low, opts.whole, "random_: lower limit")
  opts.expect(high, opts.whole, "random_: upper limit")
  if high <= low then errors.raise("random_: the upper limit is %g, expected a number above the lower one, %g", high, low) end
  args.n_in, args.n_i, args.n_f = 1, 0, 2
  a_in[0], a_f[0], a_f[1] = t.id, low, high
  tensor.call(RANDINT_, t)
  return t
end

--- Normally distributed random numbers. If mean and std are numbers, they apply to all elements of a tensor of the
--- given sizes; a tensor has the mean or the std of each element.
---@param mean? number|Tensor  their mean (default: 0)
---@param std? number|Tensor  their standard deviation, at least 0; broadcasts with mean (default: 1)
---@param sizes? integer|integer[]  of the result, if both are numbers
---@param given? { dtype: string, device: string }  of the result, if both are numbers
---@return Tensor
function M.normal(mean, std, sizes, given)
  if opts.is(std) and given == nil then std, given = nil, std end
  if mean == nil then mean = 0 end
  if std == nil then std = 1 end
  for what, v in pairs { mean = mean, ["standard deviation"] = std } do
    if not is_tensor(v) and type(v) ~= "number" then opts.wrong(v, "a number or a tensor", "normal: %s", what) end
  end
  if type(std) == "number" then opts.expect(std, opts.number_from(0), "normal: standard deviation") end
  return scope.run("normal", function()
    if not is_tensor(mean) and not is_tensor(std) then
      if type(sizes) ~= "number" and not opts.is_plain(sizes) then
        opts.wrong(sizes, "sizes, because mean and standard deviation are numbers", "normal: argument 3")
      end
      return methods.normal_(create.empty(sizes, opts("normal", given, { dtype = opts.string, device = opts.string })),
        mean, std)
    end
    local like = is_tensor(mean) and (is_tensor(std) and mean + std or mean) or std
    check_float("normal", like)
    return create.randn_like(methods.detach(like), { requires_grad = false }) * std + mean
  end)
end

-- Uniform numbers from 0 to 1 of t's shape, in float32 unless t is float64: half types are too coarse.
local function uniform_like(t)
  return create.rand_like(t, { dtype = t.dtype == "float64" and "float64" or "float32", requires_grad = false })
end

--- Fills t with exponentially distributed random numbers. Errors: a dtype that is not floating point.
---@param rate? number  one divided by their mean, above 0 (default: 1)
---@return Tensor self
function methods.exponential_(t, rate)
  rate = opts.expect(rate == nil and 1 or rate, opts.positive, "exponential_: rate")
  check_float("exponential_", t)
  return scope.run("exponential_", function()
    return methods.copy_(t, methods.log1p(-uniform_like(t)) * (-1 / rate))
  end)
end

local function check_probability(who, p)
  if not is_tensor(p) and (type(p) ~= "number" or not (p >= 0 and p <= 1)) then
    opts.wrong(p, "a number from 0 to 1 or a tensor of them", "%s: probability", who)
  end
end

--- Random zeros and ones: each element is 1 with a probability that t or p gives. No gradient.
---@param p? number|Tensor  the probability of 1; a tensor broadcasts to t's shape (default: t's elements)
---@return Tensor  of t's shape and dtype
function methods.bernoulli(t, p)
  id_of(t, "bernoulli")
  if p ~= nil then check_probability("bernoulli", p) else check_float("bernoulli", t) end
  return scope.run("bernoulli", function()
    local u = uniform_like(t)
    return methods.to(methods.lt(u, p or methods.to(methods.detach(t), u.dtype)), t.dtype)
  end)
end

--- Fills t with random zeros and ones.
---@param p? number|Tensor  the probability of 1; a tensor, floating point, broadcasts to t's shape (default: 0.5)
---@return Tensor self
function methods.bernoulli_(t, p)
  id_of(t, "bernoulli_")
  if p == nil then p = 0.5 end
  check_probability("bernoulli_", p)
  return scope.run("bernoulli_", function()
    local u = uniform_like(t)
    return methods.copy_(t, methods.to(methods.lt(u, is_tensor(p) and methods.to(p, u.dtype) or p), t.dtype))
  end)
end

-- Draws without replacement: in each row the positions of the n smallest of exponentially distributed numbers, whose
-- rates are the weights.
local function draw_different(weights, n)
  local waits = methods.log1p(-uniform_like(weights)) * -1 / weights
  waits = methods.masked_fill(waits, methods.eq(weights, 0), math.huge)
  local out = {}
  for k = 1, n do
    out[k] = methods.argmin(waits, -1, { keepdim = true })
    methods.scatter_(waits, -1, out[k], math.huge)
  end
  return shapes.cat(out, -1)
end

-- Draws with replacement: the id of a draw is how many of the cumulative weights its uniform number reaches. Loops over
-- the draws or over the weights, whichever are fewer.
local function draw_again(weights, n)
  local rows, width = methods.size(weights, 1), methods.size(weights, 2)
  local reached = methods.cumsum(weights, -1)
  local u = create.rand({ rows, n }, { dtype = "float64", device = weights.device })
    * methods.narrow(reached, 2, width, 1)
  local out = {}
  if n <= width then
    for k = 1, n do
      out[k] = methods.sum(methods.to(methods.le(reached, methods.narrow(u, 2, k, 1)), "int64"), -1, { keepdim = true })
    end
    return shapes.cat(out, -1)
  end
  local ids = create.zeros({ rows, n }, { dtype = "int64", device = weights.device })
  for k = 1, width do
    methods.add_(ids, methods.to(methods.ge(u, methods.narrow(reached, 2, k, 1)), "int64"))
  end
  return ids
end

--- Draws ids of elements, from 0, with probabilities in proportion to the elements. Errors: negative or infinite
--- elements, a row without enough elements above 0.
---@param n integer  number of draws in each row
---@param given? { replacement: boolean }  replacement: an id may be drawn again (default: false)
---@return Tensor  int64 [n], or [rows, n] if t has two dimensions
function methods.multinomial(t, n, given)
  check_float("multinomial", t)
  opts.expect(n, opts.whole_from(1), "multinomial: number of draws")
  local again = opts("multinomial", given, { replacement = false }).replacement
  local dims = #t.shape
  if dims ~= 1 and dims ~= 2 or t:numel() == 0 then
    errors.raise("multinomial: the tensor has shape %s, expected [n] or [rows, n], not empty", tostring(t.shape))
  end
  return scope.run("multinomial", function()
    local weights = methods.double(methods.detach(t))
    if dims == 1 then weights = methods.unsqueeze(weights, 1) end
    local lowest, highest = weights:min():item(), weights:max():item()
    if not (lowest >= 0 and highest < math.huge) then
      errors.raise("multinomial: elements are from %g to %g, expected finite numbers from 0", lowest, highest)
    end
    local enough = methods.sum(methods.to(methods.gt(weights, 0), "int64"), -1):min():item()
    if enough < (again and 1 or n) then
      errors.raise("multinomial: the number of elements above 0 in a row is %d, expected at least %s", enough,
        again and "1" or ("%d, the number of draws without replacement"):format(n))
    end
    local ids = (again and draw_again or draw_different)(weights, n)
    return dims == 1 and methods.reshape(ids, n) or ids
  end)
end

--- The numbers from 0 to n - 1 in random order.
---@param n integer  how many, from 0
---@param given? { dtype: string, device: string }  dtype: dtype of the result (default: int64)
---@return Tensor  [n]
function M.randperm(n, given)
  opts.expect(n, opts.whole_from(0), "randperm: argument")
  local o = opts("randperm", given, { dtype = "int64", device = opts.string })
  return scope.run("randperm", function()
    local u, list = create.rand(n, { dtype = "float64", device = "cpu" }):tolist(), {}
    for k = 1, n do                             -- a Fisher-Yates shuffle
      local at = math.floor(u[k] * k) + 1
      list[k] = list[at]
      list[at] = k - 1
    end
    return create.tensor(list, { dtype = o.dtype, device = o.device })
  end)
end

opts.fix(methods, { "uniform_", "normal_", "random_", "exponential_", "bernoulli", "bernoulli_" })

return M
