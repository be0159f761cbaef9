-- SPDX-License-Identifier: MIT
--- Facts about dtypes: their limits, and the dtypes of results.
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local create = require "moonshard.tensor.create"
local scope = require "moonshard.tensor.scope"

local M = {}

-- Binary digits of the significand, and the exponents of the smallest normal and of the largest number.
local FLOATS = { float32 = { 24, -126, 127 }, float64 = { 53, -1022, 1023 }, float16 = { 11, -14, 15 },
  bfloat16 = { 8, -126, 127 } }
local DECIMALS = { float32 = 6, float64 = 15, float16 = 3, bfloat16 = 2 }

local function dtype_of(x, who)
  if tensor.is_tensor(x) then return x.dtype end
  dtypes.number(x, who)
  return x
end

local function printed(name, format, list)
  return setmetatable(list, { __tostring = function(t)
    local words = {}
    for _, key in ipairs(t) do words[#words + 1] = ("%s " .. format):format(key, t[key]) end
    return ("%s(%s: %s)"):format(name, t.dtype, table.concat(words, ", "))
  end })
end

--- The limits of a floating-point dtype: eps (the distance of 1 to the next number), max, min, tiny (the smallest
--- normal number above 0, also smallest_normal), resolution (10^-d for d exact decimal digits), bits, dtype.
---@param dtype? string|Tensor  a name, or a tensor of that dtype (default: the default dtype)
---@return { eps: number, max: number, min: number, tiny: number, smallest_normal: number, resolution: number, bits: integer, dtype: string }
function M.finfo(dtype)
  dtype = dtype_of(dtype == nil and dtypes.default_dtype() or dtype, "finfo")
  local row = FLOATS[dtype]
  if not row then
    errors.raise("finfo: the dtype is %s, expected floating point; iinfo has the limits of integers", dtype)
  end
  local digits, low, high = row[1], row[2], row[3]
  local max, tiny = (2 - 2 ^ (1 - digits)) * 2 ^ high, 2 ^ low
  return printed("finfo", "%g", { "eps", "max", "min", "tiny", eps = 2 ^ (1 - digits), max = max, min = -max, tiny = tiny,
    smallest_normal = tiny, resolution = 10 ^ -DECIMALS[dtype],
    bits = 8 * engine.lib.ms_dtype_size(dtypes.numbers[dtype]), dtype = dtype })
end

--- The limits of an integer dtype: min, max, bits, dtype. The max of int64, which no number
--- holds, is an `int64_t`, as item gives it.
---@param dtype string|Tensor  a name, or a tensor of that dtype
---@return { min: number, max: number|ffi.cdata*, bits: integer, dtype: string }
function M.iinfo(dtype)
  dtype = dtype_of(dtype, "iinfo")
  local number = dtypes.numbers[dtype]
  if dtypes.is_float(number) or dtype == "bool" then
    errors.raise("iinfo: the dtype is %s, expected an integer; finfo has the limits of floating point", dtype)
  end
  local bits = 8 * engine.lib.ms_dtype_size(number)
  local max, min = 2 ^ (bits - 1) - 1, -2 ^ (bits - 1)
  if dtype == "uint8" then max, min = 255, 0 end
  if dtype == "int64" then max = 0x7fffffffffffffffLL end
  return printed("iinfo", "%d", { "min", "max", min = min, max = max, bits = bits, dtype = dtype })
end

-- 0: bool, 1: integers, 2: floating point.
local function category(dtype)
  return dtypes.is_float(dtypes.numbers[dtype]) and 2 or dtype == "bool" and 0 or 1
end

--- Whether an operation may convert from one dtype to another: not from floating point to integers or bool, nor from
--- integers to bool.
---@param from string  a dtype
---@param to string  a dtype
---@return boolean
function M.can_cast(from, to)
  return category(dtype_of(from, "can_cast")) <= category(dtype_of(to, "can_cast"))
end

local function one(x)
  if type(x) ~= "number" and type(x) ~= "boolean" then return x end
  return create.tensor(x, { dtype = type(x) == "number" and x % 1 == 0 and "int64" or nil })
end

--- The dtype of the sum of two tensors or numbers.
---@param a Tensor|number|boolean  a number counts as a tensor without dimensions
---@param b Tensor|number|boolean  as for a
---@return string
function M.result_type(a, b)
  local operands = { a, b }
  for k = 1, 2 do
    local x = operands[k]
    if not tensor.is_tensor(x) and type(x) ~= "number" and type(x) ~= "boolean" then
      opts.wrong(x, "a tensor, a number or a boolean", "result_type: argument %d", k)
    end
  end
  return scope.run("result_type", function()
    local function sample(x) return create.zeros(#x.shape > 0 and { 1 } or {}, { dtype = x.dtype }) end
    return tensor.methods.where(sample(one(a)), create.ones({}, { dtype = "bool" }), sample(one(b))).dtype
  end)
end

--- The dtype of the sum of a tensor of dtype a and one of dtype b, each with at least one dimension.
---@param a string  a dtype
---@param b string  a dtype
---@return string
function M.promote_types(a, b)
  return M.result_type(create.empty(1, { dtype = dtype_of(a, "promote_types") }),
    create.empty(1, { dtype = dtype_of(b, "promote_types") }))
end

opts.fix(M, { "finfo", "iinfo", "can_cast", "result_type", "promote_types" })

return M
