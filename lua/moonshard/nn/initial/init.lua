-- SPDX-License-Identifier: MIT
--- nn.init: functions that fill a tensor in place, without a graph, and return it. The generator is counter-based: a
--- random number depends on the position of its element, so a shard gets the numbers of its position in the whole
--- tensor.
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local a_tensor = tensor.a_tensor

local ffi, lib, args, a_in, a_i, a_f = engine.ffi, engine.lib, engine.args, engine.a_in, engine.a_i, engine.a_f
local raise = errors.raise

local rand_, randn_, trunc_, fill_ = engine.op "rand_", engine.op "randn_", engine.op "trunc_normal_", engine.op "fill_"

---@class moonshard.nn.init
local M = {}

local shard_of
--- Registers fn(t). For a sharded tensor fn returns the shard and the position of the shard's first element in the
--- whole tensor. If the tensor is sharded along another dimension than the first, the shard is several contiguous runs
--- of the whole tensor; fn then also returns their number and the distance between their beginnings. For all other
--- tensors fn returns nil.
---@param fn fun(t: Tensor): Tensor?, integer, integer?, integer?  shard, position, number of runs, distance of runs
local function on_sharded(fn) shard_of = fn end

-- Returns the tensor to write, the position of its first element in the whole tensor, and, if it is several contiguous
-- runs of the whole tensor, the number of runs and the distance between their beginnings.
local function target(t, who)
  opts.expect(t, a_tensor, "%s: argument 1", who)
  if shard_of then
    local piece, place, runs, apart = shard_of(t)
    if piece then return piece, place, runs, apart end
  end
  return t, 0
end

local fill_at
function fill_at(op, x, place, n_f, a, b, c, d)
  -- For an instance of a tensor class, each inner tensor gets its own random numbers.
  if x.id < 0 then
    for _, part in ipairs(tensor.inner(x)) do fill_at(op, part, place, n_f, a, b, c, d) end
    return
  end
  a_in[0] = x.id
  args.n_in, args.n_i, args.n_f = 1, 1, n_f
  a_i[0], a_f[0], a_f[1], a_f[2], a_f[3] = place, a, b, c, d
  if op == fill_ then args.n_i = 0 end
  local grad_mode = lib.ms_set_grad_mode(0)
  local status = lib.ms_call_op(op, args)
  lib.ms_set_grad_mode(grad_mode)
  if status ~= 0 then errors.fail(x) end
end

local seed, offset = ffi.new "double[1]", ffi.new "double[1]"

local function fill(op, who, t, n_f, a, b, c, d)
  local x, place, runs, apart = target(t, who)
  if op ~= fill_ and not dtypes.is_float(tensor.info_of(x).dtype) then
    raise("%s: fills floating point tensors, got %s %s", who, t.dtype, tostring(t.shape))
  end
  if not runs or op == fill_ or x:numel() == 0 then
    fill_at(op, x, place, n_f, a, b, c, d)
    return t
  end
  -- All runs are parts of one draw, so each starts from the same offset of the generator.
  local flat, n = x:detach():reshape(-1), x:numel() / runs
  lib.ms_rng_get(seed, offset)
  for k = 0, runs - 1 do
    lib.ms_rng_set(seed[0], offset[0])
    local run = flat:narrow(1, k * n + 1, n)
    fill_at(op, run, place + k * apart, n_f, a, b, c, d)
    run:release()
  end
  return t
end

local function number(who, what, v, default)
  if v == nil then return default end
  opts.expect(v, opts.number, "%s: %s", who, what)
  return v
end

--- Fills t with one value.
---@param t Tensor  floating point or integer, of any shape
---@param v number  cast to t's dtype
---@return Tensor t
function M.constant_(t, v) return fill(fill_, "constant_", t, 1, number("constant_", "value", v, 0), 0, 0, 0) end
--- Fills t with 0.
---@param t Tensor  of any shape and dtype
---@return Tensor t
function M.zeros_(t) return fill(fill_, "zeros_", t, 1, 0, 0, 0, 0) end
--- Fills t with 1.
---@param t Tensor  of any shape and dtype
---@return Tensor t
function M.ones_(t) return fill(fill_, "ones_", t, 1, 1, 0, 0, 0) end

local function deviation(who, std)
  return opts.expect(number(who, "std", std, 1), opts.number_from(0), "%s: std", who)
end

--- Fills t with normal random numbers.
---@param t Tensor  floating point, of any shape
---@param mean? number|{ mean: number, std: number }  mean (default: 0); or a table of mean and std
---@param std? number   standard deviation (default: 1)
---@return Tensor t
function M.normal_(t, mean, std)
  if opts.is(mean) then
    local o = opts("normal_", mean, { mean = 0, std = 1 })
    mean, std = o.mean, o.std
  end
  return fill(randn_, "normal_", t, 2, number("normal_", "mean", mean, 0), deviation("normal_", std), 0, 0)
end

--- Fills t with uniform random numbers in [a, b).
---@param t Tensor  floating point, of any shape
---@param a? number|{ a: number, b: number }  lower bound (default: 0); or a table of a and b
---@param b? number  upper bound (default: 1)
---@return Tensor t
function M.uniform_(t, a, b)
  if opts.is(a) then
    local o = opts("uniform_", a, { a = 0, b = 1 })
    a, b = o.a, o.b
  end
  a, b = number("uniform_", "a", a, 0), number("uniform_", "b", b, 1)
  if a > b then raise("uniform_: a is %g, expected at most b, which is %g", a, b) end
  return fill(rand_, "uniform_", t, 2, a, b, 0, 0)
end

--- Fills t with random numbers of the truncated normal distribution on [a, b].
---@param t Tensor  floating point, of any shape
---@param mean? number|{ mean: number, std: number, a: number, b: number }  mean (default: 0); or a table of all four
---@param std? number   standard deviation (default: 1)
---@param a? number     lower bound (default: -2)
---@param b? number     upper bound (default: 2)
---@return Tensor t
function M.trunc_normal_(t, mean, std, a, b)
  if opts.is(mean) then
    local o = opts("trunc_normal_", mean, { mean = 0, std = 1, a = -2, b = 2 })
    mean, std, a, b = o.mean, o.std, o.a, o.b
  end
  return fill(trunc_, "trunc_normal_", t, 4, number("trunc_normal_", "mean", mean, 0), deviation("trunc_normal_", std),
    number("trunc_normal_", "a", a, -2), number("trunc_normal_", "b", b, 2))
end

-- Returns fan in and fan out of a weight [out, in, …]; further dimensions are the receptive field.
local function fans(t, who)
  opts.expect(t, a_tensor, "%s: argument 1", who)
  local shape = t.shape
  if #shape < 2 then raise("%s: fan in and fan out need at least 2 dimensions, got %s", who, tostring(shape)) end
  local field = 1
  for d = 3, #shape do field = field * shape[d] end
  return shape[2] * field, shape[1] * field
end

local nonlinearities = { "linear", "relu", "leaky_relu", "tanh", "sigmoid", "selu", "conv1d", "conv2d", "conv3d" }

--- The factor that preserves a signal's variance through a nonlinearity.
---@param nonlinearity string  "linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu", or the name of a convolution
---@param a? number  slope of leaky_relu (default: 0.01)
---@return number
function M.calculate_gain(nonlinearity, a)
  if nonlinearity == "relu" then return math.sqrt(2) end
  if nonlinearity == "leaky_relu" then return math.sqrt(2 / (1 + (a or 0.01) ^ 2)) end
  if nonlinearity == "tanh" then return 5 / 3 end
  if nonlinearity == "selu" then return 3 / 4 end
  for _, name in ipairs(nonlinearities) do
    if name == nonlinearity then return 1 end
  end
  raise("calculate_gain: %s", errors.unknown("nonlinearity", nonlinearity, nonlinearities))
end

--- Fills t with uniform random numbers in +-gain sqrt(6 / (fan_in + fan_out)) (Glorot & Bengio 2010). Errors: fewer
--- than 2 dimensions.
---@param t Tensor  [out, in, …]
---@param given? { gain: number }  gain: factor of the numbers (default: 1)
---@return Tensor t
function M.xavier_uniform_(t, given)
  local fan_in, fan_out = fans(t, "xavier_uniform_")
  local bound = opts("xavier_uniform_", given, { gain = 1 }).gain * math.sqrt(6 / (fan_in + fan_out))
  return M.uniform_(t, -bound, bound)
end

--- Fills t with normal random numbers of standard deviation gain sqrt(2 / (fan_in + fan_out)) (Glorot & Bengio 2010).
--- Errors: fewer than 2 dimensions.
---@param t Tensor  [out, in, …]
---@param given? { gain: number }  gain: factor of the numbers (default: 1)
---@return Tensor t
function M.xavier_normal_(t, given)
  local fan_in, fan_out = fans(t, "xavier_normal_")
  return M.normal_(t, 0, opts("xavier_normal_", given, { gain = 1 }).gain * math.sqrt(2 / (fan_in + fan_out)))
end

local kaiming = { a = 0, mode = opts.one_of({ "fan_in", "fan_out" }, "fan_in"),
  nonlinearity = opts.one_of(nonlinearities, "leaky_relu") }

-- Returns the standard deviation, or nil if the fan is 0; the tensor then has no elements.
local function kaiming_std(who, t, given)
  local o = opts(who, given, kaiming)
  local fan_in, fan_out = fans(t, who)
  local fan = o.mode == "fan_in" and fan_in or fan_out
  if fan == 0 then return nil end
  return M.calculate_gain(o.nonlinearity, o.a) / math.sqrt(fan)
end

--- Fills t with uniform random numbers in +-gain sqrt(3 / fan) (He et al. 2015). Errors: fewer than 2 dimensions.
---@param t Tensor  [out, in, …]
---@param given? { a: number, mode: "fan_in"|"fan_out", nonlinearity: string }
---   a: slope of leaky_relu; mode: "fan_in" preserves the variance in forward, "fan_out" in backward; nonlinearity: the
---   nonlinearity after this layer, as in calculate_gain
---@return Tensor t
function M.kaiming_uniform_(t, given)
  local std = kaiming_std("kaiming_uniform_", t, given)
  if not std then return t end
  local bound = math.sqrt(3) * std
  return M.uniform_(t, -bound, bound)
end

--- Fills t with normal random numbers of standard deviation gain / sqrt(fan) (He et al. 2015). Errors: fewer than 2
--- dimensions.
---@param t Tensor  [out, in, …]
---@param given? { a: number, mode: "fan_in"|"fan_out", nonlinearity: string }
---   a: slope of leaky_relu; mode: "fan_in" preserves the variance in forward, "fan_out" in backward; nonlinearity: the
---   nonlinearity after this layer, as in calculate_gain
---@return Tensor t
function M.kaiming_normal_(t, given)
  local std = kaiming_std("kaiming_normal_", t, given)
  return std and M.normal_(t, 0, std) or t
end

-- Sets a row (counted from 0) of a matrix to 0, if this rank has it.
local function zero_row_(t, row)
  local x, place, runs = target(t, "zeros_")
  local at = runs and row or row - place / t:size(2)     -- sharded along columns: every rank has a part of every row
  if at >= 0 and at < x:size(1) then M.zeros_(x:detach():select(1, at + 1)) end
end

opts.fix(M, { "zeros_", "ones_", "normal_", "uniform_", "trunc_normal_" })

return { init = M, on_sharded = on_sharded, zero_row_ = zero_row_ }
