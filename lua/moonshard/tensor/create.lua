-- SPDX-License-Identifier: MIT
--- Makes tensors: from numbers, with a given shape, with the shape of another tensor, or on memory of the caller.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local dtypes = require "moonshard.core.dtypes"
local tensor = require "moonshard.tensor"
local a_tensor = tensor.a_tensor

local lib, ffi = engine.lib, engine.ffi
local op, a_in, a_i, a_f, args = engine.op, engine.a_in, engine.a_i, engine.a_f, engine.args
local wrap, is_tensor, wrap_same = tensor.wrap, tensor.is_tensor, tensor.wrap_same
local default, device_now = dtypes.default, dtypes.device_now
local type, select = type, select

local M = {}

local shape = ffi.new("int64_t[?]", engine.MAX_DIMS)
local OPTIONS = { dtype = opts.string, device = opts.string, requires_grad = opts.boolean }

local function whole_size(v, who)
  opts.expect(v, opts.whole, "%s: size", who)
  if v < 0 then errors.raise("%s: size is %d, expected a whole number from 0", who, v) end
  if v >= 2 ^ 63 then opts.wrong(v, "a whole number below 2^63", "%s: size", who) end
  return v
end

-- Writes a shape, given as a table or as numbers, to `shape`. Returns the number of dimensions.
local function take_shape(who, n, first, ...)
  if type(first) == "table" then
    if is_tensor(first) then opts.wrong(first, "a whole number or a table of them", "%s: size", who) end
    if n > 1 then errors.raise("%s: sizes must be numbers or one table, got a table and %s", who, errors.kind((...))) end
    if first.dtype ~= nil or first.device ~= nil or first.requires_grad ~= nil then
      errors.raise("%s: options are mixed with the sizes; pass them in a separate table after the sizes", who)
    end
    n = #first
    tensor.check_count(who, n)
    for d = 1, n do shape[d - 1] = whole_size(first[d], who) end
    return n
  end
  tensor.check_count(who, n)
  if n > 0 then shape[0] = whole_size(first, who) end
  for d = 2, n do shape[d - 1] = whole_size((select(d - 1, ...)), who) end
  return n
end

local function resolve(who, given, dtype)
  if given == nil then return dtype or default.dtype, device_now(), false end
  local o = opts(who, given, OPTIONS)
  return o.dtype and dtypes.number(o.dtype, who) or dtype or default.dtype,
    o.device and dtypes.device(o.device, who) or device_now(), o.requires_grad
end

-- Makes a tensor with the sizes in `shape`. If memory is short, collects garbage and tries again.
local function empty(who, dtype, device, n)
  local id = lib.ms_empty(dtype, device, n, shape)
  if id == 0 and tensor.collected() then id = lib.ms_empty(dtype, device, n, shape) end
  if id == 0 then errors.raise_text((errors.last():gsub("^empty:", who .. ":"))) end
  return wrap(id)
end

-- Runs an operator that fills a new tensor.
local function in_place(number, id, n_i, n_f)
  args.n_in, args.n_i, args.n_f = 1, n_i, n_f
  a_in[0] = id
  tensor.call(number)
end

local function require_grad(t, on)
  if on and lib.ms_set_requires_grad(t.id, 1) ~= 0 then errors.fail(t) end
  return t
end

local FILL_, ZERO_, RAND_, RANDN_, RANDINT_, ARANGE_, EYE_, TO_DEVICE =
  op "fill_", op "zero_", op "rand_", op "randn_", op "randint_", op "arange_", op "eye_", op "to_device"

local function fill_none() end
local function fill_zero(id) in_place(ZERO_, id, 0, 0) end
local function fill_value(id, v)
  a_f[0] = v
  in_place(FILL_, id, 0, 1)
end
local function fill_one(id) fill_value(id, 1) end
local function fill_rand(id)
  a_f[0], a_f[1] = 0, 1
  in_place(RAND_, id, 0, 2)
end
local function fill_randn(id)
  a_f[0], a_f[1] = 0, 1
  in_place(RANDN_, id, 0, 2)
end

local function make(who, fill, n, given, ...)
  local dtype, device, grad = resolve(who, given)
  local t = empty(who, dtype, device, take_shape(who, n, ...))
  fill(t.id)
  return require_grad(t, grad)
end

for name, fill in pairs { empty = fill_none, zeros = fill_zero, ones = fill_one, rand = fill_rand,
  randn = fill_randn } do
  M[name] = function(...)
    local n, given = opts.split(...)
    if given == nil and n == select("#", ...) then return make(name, fill, n, nil, ...) end
    if n == 0 and select("#", ...) > 0 and (...) == nil then    -- an undefined variable, rather than the shape []
      errors.raise("%s: size is nil, expected a whole number", name)
    end
    local list = { ... }
    return make(name, fill, n, given, unpack(list, 1, n))
  end
  M[name .. "_like"] = function(t, given)
    opts.expect(t, a_tensor, "%s_like: argument", name)
    if t.id < 0 then
      local parts = {}
      for k, part in ipairs(tensor.inner(t)) do parts[k] = M[name .. "_like"](part, given) end
      return tensor.rebuild(parts, t)
    end
    local info = tensor.info_of(t)
    local n, dtype, device, grad = info.ndim, info.dtype, info.device, false
    for d = 0, n - 1 do shape[d] = info.shape[d] end
    if given ~= nil then
      local o = opts(name .. "_like", given, OPTIONS)
      if o.dtype then dtype = dtypes.number(o.dtype, name .. "_like") end
      if o.device then device = dtypes.device(o.device, name .. "_like") end
      grad = o.requires_grad
    end
    local out = empty(name .. "_like", dtype, device, n)
    fill(out.id)
    return require_grad(out, grad)
  end
end

local function value_dtype(v) return type(v) == "boolean" and ffi.C.MS_BOOL or default.dtype end

--- A tensor whose elements all have one value. Default dtype: bool for a boolean, otherwise the default dtype.
---@param sizes integer|integer[]  a number, or a list; {} is a single value
---@param value number|boolean  value of every element
---@param given? { dtype: string, device: string, requires_grad: boolean }
---@return Tensor
function M.full(sizes, value, given)
  if type(value) ~= "number" and type(value) ~= "boolean" then opts.wrong(value, "a number or a boolean", "full: value") end
  local dtype, device, grad = resolve("full", given, value_dtype(value))
  local t = empty("full", dtype, device, take_shape("full", 1, sizes))
  fill_value(t.id, value == true and 1 or value or 0)
  return require_grad(t, grad)
end

--- A tensor whose elements all have one value, with the shape of t and, without options, its dtype and device.
---@param t Tensor  gives shape, dtype and device
---@param value number|boolean  value of every element
---@param given? { dtype: string, device: string, requires_grad: boolean }
---@return Tensor
function M.full_like(t, value, given)
  if type(value) == "boolean" then value = value and 1 or 0 end
  if type(value) ~= "number" then opts.wrong(value, "a number or a boolean", "full_like: value") end
  local out = M.empty_like(t, given)
  fill_value(out.id, value)
  return out
end

--- The numbers first, first + step, … up to but not including last. Errors: a step of 0, or one that leads away from
--- last; 2^53 or more numbers.
---@param ... number|TensorOptions  `last`, `first, last` or `first, last, step`, then options; defaults: first 0, step 1
---@return Tensor  1-dim; int64 if the arguments are whole numbers, else the default dtype
function M.arange(...)
  local n, given = opts.split(...)
  if n > 3 then opts.wrong((select(4, ...)), "options or nothing", "arange: argument 4") end
  for k = 1, math.max(n, 1) do
    local v = select(k, ...)
    opts.expect(v, opts.number, "arange: argument %d", k)
  end
  local first, last, step = ...
  if n < 2 then first, last, step = 0, first, 1 elseif n < 3 then step = 1 end
  if step == 0 then errors.raise("arange: step is 0, expected a number other than 0") end
  if (last - first) * step < 0 then errors.raise("arange: from %g, steps of %g never reach %g", first, step, last) end
  local count = math.max(0, math.ceil((last - first) / step))
  if count ~= count or count >= 2^53 then
    errors.raise("arange: from %g to %g in steps of %g there are %g numbers, expected fewer than 2^53", first, last, step,
      count)
  end
  local whole = first % 1 == 0 and last % 1 == 0 and step % 1 == 0
  local dtype, device, grad = resolve("arange", given, whole and ffi.C.MS_I64 or nil)
  shape[0] = count
  local t = empty("arange", dtype, device, 1)
  a_f[0], a_f[1] = first, step
  in_place(ARANGE_, t.id, 0, 2)
  return require_grad(t, grad)
end

local function spaced(who, first, last, steps, given, of)
  opts.expect(first, opts.number, "%s: first number", who)
  opts.expect(last, opts.number, "%s: last number", who)
  opts.expect(steps, opts.whole_from(0), "%s: number of steps", who)
  local list, step = {}, steps > 1 and (last - first) / (steps - 1) or 0
  for k = 0, steps - 1 do                       -- from both ends, as PyTorch does
    list[k + 1] = of(k < steps / 2 and first + step * k or last - step * (steps - 1 - k))
  end
  local o = opts(who, given, OPTIONS)
  return M.tensor(list, { dtype = o.dtype, device = o.device, requires_grad = o.requires_grad })
end

--- Evenly spaced numbers.
---@param first number  the first number
---@param last number  the last number
---@param steps integer  how many numbers
---@param given? { dtype: string, device: string, requires_grad: boolean }
---@return Tensor  [steps]
function M.linspace(first, last, steps, given)
  return spaced("linspace", first, last, steps, given, function(v) return v end)
end

--- Powers of a base with evenly spaced exponents.
---@param first number  exponent of the first power
---@param last number  exponent of the last power
---@param steps integer  how many numbers
---@param given? { base: number, dtype: string, device: string, requires_grad: boolean }  base: base of the powers (default: 10)
---@return Tensor  [steps]
function M.logspace(first, last, steps, given)
  local o = opts("logspace", given, { base = 10, dtype = opts.string, device = opts.string, requires_grad = opts.boolean })
  local base = o.base
  o.base = nil
  return spaced("logspace", first, last, steps, o, function(v) return base ^ v end)
end

--- Random whole numbers, uniform from low to high - 1. Errors: high is not above low.
---@param low? integer  default 0: `ms.randint(high, sizes, opts)` omits it
---@param high integer  above low
---@param sizes? integer|integer[]  shape (default: {}, a single number)
---@param given? { dtype: string, device: string, requires_grad: boolean }  dtype: default: int64
---@return Tensor  int64 unless an option gives another dtype
function M.randint(low, high, sizes, given)
  if type(high) == "table" then low, high, sizes, given = 0, low, high, sizes end
  if type(low) ~= "number" or type(high) ~= "number" then
    errors.raise("randint: limits are %s and %s, expected numbers", errors.kind(low), errors.kind(high))
  end
  if high <= low then errors.raise("randint: high is %g, expected a number above low, which is %g", high, low) end
  local dtype, device, grad = resolve("randint", given, ffi.C.MS_I64)
  local t = empty("randint", dtype, device, take_shape("randint", sizes == nil and 0 or 1, sizes))
  a_f[0], a_f[1] = low, high
  in_place(RANDINT_, t.id, 0, 2)
  return require_grad(t, grad)
end

--- A matrix with ones on the diagonal and zeros elsewhere.
---@param ... integer|TensorOptions  rows, columns (default: as many as rows), then options
---@return Tensor  [rows, columns]
function M.eye(...)
  local n, given = opts.split(...)
  local rows, columns = ...
  if n < 2 then columns = rows end
  local dtype, device, grad = resolve("eye", given)
  shape[0], shape[1] = whole_size(rows, "eye"), whole_size(columns, "eye")
  local t = empty("eye", dtype, device, 2)
  in_place(EYE_, t.id, 0, 0)
  return require_grad(t, grad)
end

-- ---- from Lua numbers ----------------------------------------------------------------------------

-- The shape of a nested table, determined by its first elements; and the first element that is not a table.
local function measure(value)
  local sizes = {}
  while type(value) == "table" do
    if is_tensor(value) then
      errors.raise "tensor: an element is a tensor, expected a number or a boolean; ms.stack and ms.cat put tensors together"
    end
    sizes[#sizes + 1] = #value
    if #sizes > engine.MAX_DIMS then
      errors.raise("tensor: the table is nested deeper than %d dimensions", engine.MAX_DIMS)
    end
    value = value[1]
  end
  return sizes, value
end

-- Stores element `at` (from 0) of an int64 tensor.
local function store_exactly(wholes, at, v)
  local fits = type(v) == "number" and v % 1 == 0 and v >= -2 ^ 63 and v < 2 ^ 63
    or ffi.istype("int64_t", v) or ffi.istype("uint64_t", v) and v < 2 ^ 63
  if not fits then
    opts.wrong(v, "a whole number from -2^63 to below 2^63, because of the 64-bit integers", "tensor: element %d",
      at + 1)
  end
  wholes[at] = v
end

--- A tensor with the numbers or booleans of a nested table, or a copy of a tensor. 64-bit integers of LuaJIT's FFI,
--- such as `5LL` and what tolist gives for int64 values beyond 2^53, are exact and make the tensor int64. Errors: rows of
--- different lengths; elements that are neither numbers nor booleans; 64-bit integers with another dtype or with
--- fractions.
---@param value number|boolean|table|Tensor|ffi.cdata*  of any shape, with up to 8 dimensions
---@param given? { dtype: string, device: string, requires_grad: boolean }
---@return Tensor  of a table: bool if all elements are booleans, else the default dtype; of a tensor: its dtype
function M.tensor(value, given)
  if type(value) == "number" and type(given) == "number" then
    errors.raise("tensor: argument 2 is a number (%s), expected options; several numbers stand in a table: write ms.tensor { %s, %s, ... }",
      tostring(given), tostring(value), tostring(given))
  end
  if is_tensor(value) then
    local o = opts("tensor", given, OPTIONS)
    local copy = value:detach():clone()
    if o.device then copy = copy:to(o.device) end
    if o.dtype then copy = copy:to(o.dtype) end
    return require_grad(copy, o.requires_grad)
  end
  local sizes, first = measure(value)
  local count = 1
  for d = 1, #sizes do
    shape[d - 1] = sizes[d]
    count = count * sizes[d]
  end
  local values, at = ffi.new("double[?]", math.max(count, 1)), 0
  local wholes                                  -- int64_t, in place of `values`, once an element is a 64-bit integer
  local saw_bool, saw_number = false, false
  local function take(v, d)
    if d > #sizes then
      if type(v) == "boolean" then
        saw_bool = true
        v = v and 1 or 0
      elseif type(v) == "number" then
        saw_number = true
      elseif not errors.is_int64(v) then
        opts.wrong(v, "a number or a boolean", "tensor: element %d", at + 1)
      elseif not wholes then
        wholes = ffi.new("int64_t[?]", count)
        for k = 0, at - 1 do store_exactly(wholes, k, values[k]) end
      end
      if wholes then store_exactly(wholes, at, v) else values[at] = v end
      at = at + 1
      return
    end
    if type(v) ~= "table" or is_tensor(v) then
      errors.raise("tensor: an element is %s where a list of length %d was expected", errors.kind(v), sizes[d])
    end
    local n = 0
    for k in next, v do
      n = n + 1
      if type(k) ~= "number" or k < 1 or k % 1 ~= 0 then
        errors.raise("tensor: the table has a key %s, expected a list", errors.show(k))
      end
    end
    for k = 1, n do
      if v[k] == nil then errors.raise("tensor: the list has a hole: element %d is nil", k) end
    end
    if n ~= sizes[d] then
      errors.raise("tensor: rows differ in length: %d, but the first row has %d (dimension %d)", n, sizes[d], d)
    end
    for k = 1, n do take(v[k], d + 1) end
  end
  opts.need(first ~= nil or count == 0, value, "a number, a boolean or a nested table of them", "tensor: argument 1")
  take(value, 1)
  local dtype, device, grad = resolve("tensor", given, wholes and ffi.C.MS_I64
    or saw_bool and not saw_number and ffi.C.MS_BOOL or nil)
  if wholes and dtype ~= ffi.C.MS_I64 then
    errors.raise("tensor: there are 64-bit integers (LL), which need dtype int64, but option 'dtype' is '%s'",
      dtypes.name(dtype))
  end
  local function fill()
    if wholes then return lib.ms_from_int64(#sizes, shape, wholes) end
    return lib.ms_from_data(dtype, #sizes, shape, values)
  end
  local id = fill()
  if id == 0 and tensor.collected() then id = fill() end
  if id == 0 then errors.fail() end
  local t = wrap(id)
  if device ~= ffi.C.MS_CPU then
    args.n_in, args.n_i, args.n_f = 1, 1, 0
    a_in[0], a_i[0] = id, device
    local moved = wrap_same(tensor.call(TO_DEVICE, t), t)
    if moved ~= t then t:release() end
    t = moved
  end
  return require_grad(t, grad)
end

--- A tensor on memory that the caller owns. The caller must keep the memory valid while the tensor or a view of it is
--- in use. Nothing is copied.
---@param pointer ffi.cdata*  elements row by row in the CPU's memory
---@param sizes integer|integer[]  a number, or a list; {} is a single value
---@param given? { dtype: string }  dtype: dtype of the elements (default: "float32")
---@return Tensor
function M.from_pointer(pointer, sizes, given)
  opts.need(type(pointer) == "cdata" or type(pointer) == "userdata" or pointer == nil, pointer, "an FFI pointer",
    "from_pointer: argument 1")
  local o = opts("from_pointer", given, { dtype = "float32" })
  local n = take_shape("from_pointer", 1, sizes)
  return tensor.wrap_new(lib.ms_from_pointer(ffi.cast("void *", pointer), dtypes.number(o.dtype, "from_pointer"), n, shape))
end

return M
