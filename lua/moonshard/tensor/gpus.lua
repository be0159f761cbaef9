-- SPDX-License-Identifier: MIT
--- CUDA devices: whether there are any, which one is current, waiting. The functions are those of ms.cuda.
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

local lib, text = engine.lib, engine.ffi.string
local functions = {}

--- The index of a CUDA device. i: an index, a name, or nil for the current device; who: the function that was called,
--- for messages.
local function checked(i, who)
  if i == nil then i = dtypes.cuda_device() end
  if type(i) == "string" then
    local number = dtypes.device(i, who)
    if bit.band(number, 255) ~= engine.ffi.C.MS_CUDA then
      errors.raise("%s: device is '%s', expected a CUDA device", who, i)
    end
    i = bit.rshift(number, 8)
  end
  opts.need(opts.whole.test(i), i, "a whole number or a string such as 'cuda:0'", "%s: device", who)
  local n = lib.ms_cuda_count()
  if n == 0 then errors.raise("%s: there is no CUDA device: %s", who, text(lib.ms_cuda_why())) end
  if i < 0 or i >= n then
    errors.raise("%s: device %d does not exist; the last CUDA device is %d", who, i, n - 1)
  end
  return i
end

--- Whether there is a working CUDA device. Loads the CUDA plugin at the first call.
---@return boolean
function functions.is_available() return lib.ms_cuda_count() > 0 end

--- The reason why there is no CUDA device; nil if there is one.
---@return string?
function functions.why_unavailable()
  if lib.ms_cuda_count() == 0 then return text(lib.ms_cuda_why()) end
  return nil
end

--- The number of CUDA devices; 0 without CUDA.
---@return integer
function functions.device_count() return lib.ms_cuda_count() end

--- The index of the device that "cuda" means: the one set by set_device, else this process's rank on its node modulo
--- the number of devices.
---@return integer  from 0
function functions.current_device() return dtypes.cuda_device() end

--- Sets the device that "cuda" means. Errors: a device that does not exist.
---@param i integer|string  an index from 0, or "cuda:1"
function functions.set_device(i)
  opts.need(i ~= nil, i, "a whole number or a string such as 'cuda:0'", "cuda.set_device: device")
  dtypes.set_cuda_device(checked(i, "cuda.set_device"))
end

--- A device's model, multiprocessors and memory. Errors: a device that does not exist.
---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
---@return string
function functions.device_name(i)
  local name = lib.ms_cuda_name(checked(i, "cuda.device_name"))
  if name == nil then errors.fail() end
  return text(name)
end

--- Waits for all work queued on a device. Errors: errors that its kernels reported.
---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
function functions.synchronize(i) errors.check(lib.ms_cuda_synchronize(checked(i, "cuda.synchronize"))) end

return { functions = functions, checked = checked }
