-- SPDX-License-Identifier: MIT
--- Reads the elements of tensors: as Lua's numbers or booleans, and int64 values that a number may not hold, those
--- beyond 2^53, as int64_t.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local lib, ffi, info = engine.lib, engine.ffi, engine.info
local methods, getters, inner, id_of = tensor.methods, tensor.getters, tensor.inner, tensor.id_of
local info_of = tensor.info_of
local tonumber = tonumber

local M = {}

local BOOL, INT64 = ffi.C.MS_BOOL, ffi.C.MS_I64
local LIMIT = 2 ^ 53                                    -- up to here a number holds every whole number
local double1, int64s = ffi.new "double[1]", ffi.new "int64_t[1]"

-- An element of an int64 tensor.
local function exact(v)
  if v >= -LIMIT and v <= LIMIT then return tonumber(v) end
  return v
end

--- The value of a tensor of one element, as a Lua number or boolean. Waits for the device. An int64 value beyond 2^53,
--- which a number may not hold, is an `int64_t` of LuaJIT's FFI: arithmetic and `("%d"):format` are exact, tonumber
--- rounds. Every nan is the same one. Errors: a tensor of more or fewer elements than one.
---@return number|boolean|ffi.cdata*
function methods.item(t)
  if lib.ms_item(id_of(t, "item"), double1) ~= 0 then errors.fail(t) end
  local v, dtype = double1[0], info_of(t).dtype
  if dtype == BOOL then return v ~= 0 end
  if dtype == INT64 and (v >= LIMIT or v <= -LIMIT) then
    if lib.ms_read_int64(t.id, int64s, 1) ~= 0 then errors.fail(t) end
    return exact(int64s[0])
  end
  return v
end

--- Returns a buffer with all elements: doubles, or int64_t if some elements are beyond 2^53.
---@param t Tensor
---@return ffi.cdata* values
---@return integer n  how many
---@return boolean is_int64  whether they are int64_t
function M.read(t)
  while t.id < 0 do t = inner(t)[1] end
  info_of(t)
  local n, dtype = tonumber(info.numel), info.dtype
  local values = ffi.new("double[?]", math.max(n, 1))
  if lib.ms_read(t.id, values, n) ~= 0 then errors.fail(t) end
  if dtype ~= INT64 then return values, n, false end
  for k = 0, n - 1 do
    if values[k] >= LIMIT or values[k] <= -LIMIT then
      local wholes = ffi.new("int64_t[?]", n)
      if lib.ms_read_int64(t.id, wholes, n) ~= 0 then errors.fail(t) end
      return wholes, n, true
    end
  end
  return values, n, false
end

--- The elements as a nested table; a 0-dim tensor gives a single value. Waits for the device. Elements are as those of
--- item: numbers, booleans, or `int64_t` for int64 values beyond 2^53.
---@return table|number|boolean|ffi.cdata*
function methods.tolist(t)
  id_of(t, "tolist")
  local values, _, is_int64 = M.read(t)
  local shape, is_bool = getters.shape(t), info.dtype == BOOL
  local at = 0
  local function level(d)
    if d > #shape then
      at = at + 1
      local v = values[at - 1]
      if is_bool then return v ~= 0 end
      return is_int64 and exact(v) or v
    end
    local list = {}
    for k = 1, shape[d] do list[k] = level(d + 1) end
    return list
  end
  return level(1)
end

opts.fix(methods, { "item", "tolist" })

return M
