-- SPDX-License-Identifier: MIT
--- Names of dtypes and devices, and the defaults.
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local hints = require "moonshard.core.hints"
local opts = require "moonshard.core.opts"
local lib, C = engine.lib, engine.ffi.C

local M = {}

local names, numbers = {}, {}
for number = 0, C.MS_DTYPES - 1 do
  local name = engine.ffi.string(lib.ms_name_of(C.MS_NAME_DTYPE, number))
  names[number] = name
  numbers[name] = number
end
M.names = { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool" }
M.numbers = numbers

--- The name of a dtype number.
function M.name(number) return names[number] end

--- The number of a dtype name; raises for any other value. who: the function's name in messages.
function M.number(name, who)
  local number = numbers[name]
  if number then return number end
  if type(name) ~= "string" then opts.wrong(name, "a string such as 'float32'", "%s: dtype", who or "dtype") end
  errors.raise("%s: %s", who or "dtype", errors.unknown("dtype", name, M.names))
end

function M.is_float(number) return number <= C.MS_BF16 end

-- ---- devices: type | index << 8 -----------------------------------------------------------------

local types = { cpu = C.MS_CPU, cuda = C.MS_CUDA, meta = C.MS_META }
local cuda_current  -- index of the device that "cuda" means; nil until one is needed or set

--- The index of the device that "cuda" means. Unless it was set, it is this process's rank on its node modulo the
--- number of devices, so that the ranks of a node use all of its GPUs. The first call determines it for the process,
--- unless there is no device: then the index is 0.
function M.cuda_device()
  if not cuda_current then
    local rank = lib.ms_dist_local_rank()
    if lib.ms_dist_is_initialized() == 0 then
      local launch = engine.ffi.new "ms_launch"
      lib.ms_launcher(launch)
      rank = launch.local_rank
    end
    local count = rank > 0 and lib.ms_cuda_count() or 1
    if count == 0 then return 0 end
    cuda_current = rank % count
  end
  return cuda_current
end

--- The name of a device, as in t.device: "cpu", "cuda:1".
function M.device_name(device)
  local kind = bit.band(device, 255)
  if kind == C.MS_CPU then return "cpu" end
  if kind == C.MS_META then return "meta" end
  return "cuda:" .. bit.rshift(device, 8)
end

--- The number of a device name; "cuda" means the current CUDA device.
function M.device(name, who)
  if name == "cpu" then return C.MS_CPU end
  if type(name) ~= "string" then opts.wrong(name, "a string such as 'cpu'", "%s: device", who or "device") end
  local kind, index = name:match "^(%a+):(%d+)$"
  kind = kind or name
  if not types[kind] then
    local dtype = hints.synonym(kind, M.names)
    if dtype then errors.raise("%s: unknown device '%s'; did you mean the dtype '%s'?", who or "device", name, dtype) end
    errors.raise("%s: %s", who or "device", errors.unknown("device", name, { "cpu", "cuda", "meta" }))
  end
  if kind ~= "cuda" then
    if index and tonumber(index) ~= 0 then
      errors.raise("%s: device '%s' does not exist; the only one of its type is '%s'", who or "device", name, kind)
    end
    return types[kind]
  end
  index = tonumber(index) or M.cuda_device()
  if index > 4095 then
    errors.raise("%s: device '%s' does not exist: the largest index is 4095", who or "device", name)
  end
  return bit.bor(C.MS_CUDA, bit.lshift(index, 8))
end

--- Converts a device name to the form that t.device has.
function M.canonical_device(name, who) return M.device_name(M.device(name, who)) end

function M.set_cuda_device(i) cuda_current = i end

-- ---- defaults ------------------------------------------------------------------------------------

local now = context.now
local default = { dtype = C.MS_F32, device = C.MS_CPU }
M.default = default
-- Set explicitly, because the engine keeps an earlier default dtype when specs load this module again.
lib.ms_set_default_dtype(default.dtype)

--- The dtype of floating point tensors for which none is given; initially "float32".
---@return string
function M.default_dtype() return names[default.dtype] end

--- Sets the dtype of floating point tensors for which none is given. Errors: a dtype that is not floating point.
---@param name string  "float32", "float64", "float16" or "bfloat16"
function M.set_default_dtype(name)
  local number = M.number(name, "set_default_dtype")
  if not M.is_float(number) then
    errors.raise("set_default_dtype: dtype '%s' is not floating point, expected float32, float64, float16 or bfloat16", name)
  end
  default.dtype = number
  lib.ms_set_default_dtype(number)
end

--- The device of tensors for which none is given; initially "cpu".
---@return string
function M.default_device() return M.device_name(M.device_now()) end

--- The number of the default device.
function M.device_now() return now.device or default.device end

--- The number of a device; raises if it does not exist. Loads the CUDA plugin for a GPU.
function M.present_device(name, who)
  local number = M.device(name, who)
  if bit.band(number, 255) == C.MS_CUDA and bit.rshift(number, 8) >= lib.ms_cuda_count() then
    local n = lib.ms_cuda_count()
    errors.raise("%s: device '%s' is not available: %s", who, M.device_name(number),
      n == 0 and engine.ffi.string(lib.ms_cuda_why())
        or ("the last CUDA device is cuda:%d"):format(n - 1))
  end
  return number
end

--- Sets the device of tensors for which none is given; inside with_device, until with_device ends. Errors: a device
--- that does not exist.
---@param name string  "cpu", "cuda", "cuda:1" or "meta"
function M.set_default_device(name)
  local number = M.present_device(name, "set_default_device")
  if now.device then now.device = number else default.device = number end
end

return M
