-- SPDX-License-Identifier: MIT
--- Serialization of Lua values for all_gather_object and broadcast_object: nil, booleans, numbers, strings, tensors on
--- the CPU, and tables of these, with shared and circular references. Functions and userdata cannot be sent; the error
--- says where in the value they are.
local ffi = require "ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local dtypes = require "moonshard.core.dtypes"
local tensor = require "moonshard.tensor"
local engine = require "moonshard.core.ffi"

local lib = engine.lib
local M = {}

local double1 = ffi.new "double[1]"

local function number_bytes(x)
  double1[0] = x
  return ffi.string(double1, 8)
end

local function put(out, x, seen, path)
  local kind = type(x)
  if x == nil then
    out[#out + 1] = "0"
  elseif kind == "boolean" then
    out[#out + 1] = x and "t" or "f"
  elseif kind == "number" then
    out[#out + 1] = "n" .. number_bytes(x)
  elseif kind == "string" then
    out[#out + 1] = "s" .. number_bytes(#x)
    out[#out + 1] = x
  elseif kind == "table" then
    if seen[x] then
      out[#out + 1] = "r" .. number_bytes(seen[x])
      return
    end
    seen.count = seen.count + 1
    seen[x] = seen.count
    if tensor.is_tensor(x) then
      local whole = x:detach():contiguous()
      if whole.device ~= "cpu:0" and whole.device ~= "cpu" then
        errors.raise("%s: %s is a tensor on %s, expected one on the CPU (t:cpu())", seen.who, path, whole.device)
      end
      local shape = whole.shape
      out[#out + 1] = "T" .. number_bytes(dtypes.number(whole.dtype)) .. number_bytes(#shape)
      local bytes = lib.ms_dtype_size(dtypes.number(whole.dtype))
      for _, size in ipairs(shape) do
        out[#out + 1] = number_bytes(size)
        bytes = bytes * size
      end
      if bytes > 0 then out[#out + 1] = ffi.string(lib.ms_data_ptr(whole.id), bytes) end
      return
    end
    if not opts.is_plain(x) then
      errors.raise("%s: %s is %s, expected a plain table or a tensor", seen.who, path, errors.kind(x))
    end
    local n = 0
    for _ in pairs(x) do n = n + 1 end
    out[#out + 1] = "{" .. number_bytes(n)
    for key, value in pairs(x) do
      local where = path .. (type(key) == "string" and "." .. key or "[" .. tostring(key) .. "]")
      put(out, key, seen, "a key of " .. path)
      put(out, value, seen, where)
    end
  else
    errors.raise("%s: %s is a %s, which cannot be sent to another rank", seen.who, path, kind)
  end
end

--- Encodes a value as bytes.
---@param value any
---@param who string  names the caller in errors
---@return string
function M.encode(value, who)
  local out = {}
  put(out, value, { count = 0, who = who }, "the value")
  return table.concat(out)
end

local function get_number(bytes, at)
  ffi.copy(double1, bytes:sub(at, at + 7), 8)
  return double1[0], at + 8
end

local get

local function get_tensor(bytes, at)
  local dtype, ndim, size
  dtype, at = get_number(bytes, at)
  ndim, at = get_number(bytes, at)
  local shape, total = ffi.new "int64_t[8]", lib.ms_dtype_size(dtype)
  for d = 0, ndim - 1 do
    size, at = get_number(bytes, at)
    shape[d] = size
    total = total * size
  end
  local t = tensor.wrap_new(lib.ms_empty(dtype, ffi.C.MS_CPU, ndim, shape))
  if total > 0 then ffi.copy(lib.ms_data_ptr(t.id), bytes:sub(at, at + total - 1), total) end
  return t, at + total
end

function get(bytes, at, seen)
  local tag = bytes:sub(at, at)
  at = at + 1
  if tag == "0" then return nil, at end
  if tag == "t" or tag == "f" then return tag == "t", at end
  if tag == "n" then return get_number(bytes, at) end
  if tag == "s" then
    local n
    n, at = get_number(bytes, at)
    return bytes:sub(at, at + n - 1), at + n
  end
  if tag == "r" then
    local n
    n, at = get_number(bytes, at)
    return seen[n], at
  end
  if tag == "T" then
    local place = #seen + 1
    seen[place] = false
    local t
    t, at = get_tensor(bytes, at)
    seen[place] = t
    return t, at
  end
  local out = {}
  seen[#seen + 1] = out
  local n, from = get_number(bytes, at)
  for _ = 1, n do
    local key, after_key = get(bytes, from, seen)
    out[key], from = get(bytes, after_key, seen)
  end
  return out, from
end

--- Decodes bytes made by encode.
function M.decode(bytes) return (get(bytes, 1, {})) end

return M
