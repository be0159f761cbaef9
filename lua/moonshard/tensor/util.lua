-- SPDX-License-Identifier: MIT
--- Utilities: ordered pairs, deep copies, devices, memory, threads, time.
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local class = require "moonshard.core.class"
local opts = require "moonshard.core.opts"
local dtypes = require "moonshard.core.dtypes"
local tensor = require "moonshard.tensor"

local lib, now = engine.lib, context.now
local M = {}

local rank = { number = 1, string = 2, boolean = 3 }
local function before(a, b)
  local ta, tb = type(a), type(b)
  if ta ~= tb then return (rank[ta] or 4) < (rank[tb] or 4) end
  if ta == "number" or ta == "string" then return a < b end
  return tostring(a) < tostring(b)
end

--- Iterates over a table in the order of its keys: numbers, then strings, then booleans, then other keys by their text.
---@param t table  any table
---@return fun(): any, any  an iterator of key and value
function M.sorted_pairs(t)
  opts.expect(t, opts.table, "sorted_pairs: argument")
  local keys = {}
  for k in pairs(t) do keys[#keys + 1] = k end
  table.sort(keys, before)
  local at = 0
  return function()
    at = at + 1
    local k = keys[at]
    if k ~= nil then return k, t[k] end
  end
end

-- ---- deep copies ---------------------------------------------------------------------------------

local internal = { id = true, _owner = true, _site = true, _grad = true, _sparse = true }

-- Copies t's values. A storage that several tensors share is copied once, as a whole, so that the copies share one,
-- too. memo: the copies so far, by the storage's key.
local function copy_data(t, memo)
  local key = lib.ms_storage_key(t.id)
  if key == 0 then return t:detach():clone() end
  local whole = memo[key]
  if not whole then
    whole = tensor.wrap_new(lib.ms_storage_copy(t.id), t)
    memo[key] = whole
  end
  return tensor.wrap_new(lib.ms_view_alike(t.id, whole.id), t)
end

local function copy_tensor(t, memo, copy)
  local parts = tensor.inner(t)
  if parts then                                                 -- an instance of a tensor class
    for k, part in ipairs(parts) do parts[k] = copy(part) end
    local out = setmetatable(tensor.rebuild(parts, t), getmetatable(t))
    memo[t] = out
    return out
  end
  local info = tensor.info_of(t)
  local requires_grad, is_leaf, is_param = info.requires_grad ~= 0, info.is_leaf ~= 0, info.is_param ~= 0
  if not is_leaf then
    errors.raise("deepcopy: the tensor is the result of an operation; only leaves can be copied (detach it first)")
  end
  local data = copy_data(t, memo)
  local out
  if is_param then
    local id = lib.ms_param_new(data.id, requires_grad and 1 or 0)
    if id == 0 then errors.fail(t) end
    out = tensor.wrap_as(getmetatable(t), id)
    tensor.own(out)
    data:release()
  else
    out = data
    if getmetatable(t) ~= tensor.Tensor then setmetatable(out, getmetatable(t)) end
    if requires_grad then out.requires_grad = true end
  end
  memo[t] = out
  for k, v in pairs(t) do
    if not internal[k] then rawset(out, k, copy(v)) end
  end
  local grad = t.grad
  if grad then out.grad = copy(grad) end
  return out
end

--- Copies tensors, modules and tables of them. Objects and memory that are shared inside x are shared inside the copy;
--- parameters remain leaves. Functions and classes are not copied. A class may define `__deepcopy(obj, memo, copy)`.
--- Errors: a tensor that an operation made.
---@generic T
---@param x T  any value
---@return T
function M.deepcopy(x)
  local memo = {}
  local function copy(v)
    if type(v) ~= "table" then return v end
    if memo[v] ~= nil then return memo[v] end
    if class.is_class(v) then return v end
    if tensor.is_tensor(v) then return copy_tensor(v, memo, copy) end
    local mt = getmetatable(v)
    local own = mt and rawget(mt, "__deepcopy")
    if own then
      local out = own(v, memo, copy)
      memo[v] = out
      return out
    end
    local out = {}
    memo[v] = out
    for k, w in next, v do rawset(out, copy(k), copy(w)) end
    return setmetatable(out, mt)
  end
  local state = lib.ms_set_grad_mode(0)
  local ok, result = pcall(copy, x)
  lib.ms_set_grad_mode(state)
  for key, v in pairs(memo) do
    if type(key) == "number" then v:release() end       -- a copied storage: its views keep its memory
  end
  if not ok then error(result, 0) end
  return result
end

-- ---- devices and memory ----------------------------------------------------------------------------

--- The full name of a device, as t.device has it: "cuda" is "cuda:0", or the device that ms.cuda.set_device set.
--- Devices are strings, and every function takes short names. The device need not exist. Errors: another name.
---@param name string  "cpu", "cuda", "cuda:1" or "meta"
---@param index? integer  from 0, with a name that has none
---@return string
function M.device(name, index)
  if index ~= nil then
    opts.expect(index, opts.whole_from(0), "device: argument 2")
    name = ("%s:%d"):format(tostring(name), index)
  end
  return dtypes.canonical_device(name, "device")
end

local function finish(device, ...)
  now.device = device
  return context.results(...)
end

--- Runs fn(…) with another default device. Errors: a device that does not exist.
---@param device string  "cpu", "cuda", "cuda:1" or "meta"
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.with_device(device, fn, ...)
  opts.expect(fn, opts.fn, "with_device: argument 2")
  local before_it = now.device
  now.device = dtypes.present_device(device, "with_device")
  return finish(before_it, pcall(fn, ...))
end

local stats = engine.ffi.new "ms_memory"
local FIELDS = { "allocated", "peak_allocated", "reserved", "peak_reserved", "peak_scratch", "live_tensors",
  "parameters", "gradients", "optimizer", "gathered" }

--- The memory that the allocator of a device holds, in bytes: allocated (in use), reserved (taken from the system), and
--- the peaks of both; live_tensors counts the tensors of all devices. Parts of allocated are parameters, gradients,
--- optimizer (its state) and gathered (whole parameters of sharded units). peak_scratch is the most that operators on
--- the CPU used while they ran; it depends on the processor and the number of threads, allocated does not.
---@param device? string  name of the device (default: the default device)
---@return { allocated: integer, peak_allocated: integer, reserved: integer, peak_reserved: integer, peak_scratch: integer, live_tensors: integer, parameters: integer, gradients: integer, optimizer: integer, gathered: integer }
function M.memory_stats(device)
  errors.check(lib.ms_memory_stats(device and dtypes.device(device, "memory_stats") or dtypes.device_now(), stats))
  local out = {}
  for _, field in ipairs(FIELDS) do out[field] = stats[field] end
  return out
end

--- Sets the peaks of memory_stats to the current use.
---@param device? string  name of the device (default: the default device)
function M.reset_peak_memory_stats(device)
  lib.ms_reset_peak_memory(device and dtypes.device(device, "reset_peak_memory_stats") or dtypes.device_now())
end

--- Returns to the system the reserved memory that no tensor uses, on all devices.
function M.empty_cache() lib.ms_empty_cache() end

--- The number of threads that an operator of this rank uses on the CPU.
---@return integer
function M.num_threads() return lib.ms_num_threads() end

--- num_threads by PyTorch's name.
---@return integer
function M.get_num_threads() return lib.ms_num_threads() end

--- Accepted for PyTorch's scripts: results repeat bit by bit in either mode.
---@param on boolean  whether only deterministic algorithms may run
function M.use_deterministic_algorithms(on)
  opts.expect(on, opts.boolean, "use_deterministic_algorithms: argument")
end

--- Sets the number of threads that an operator of this rank uses on the CPU. Results do not depend on it.
---@param n integer  1 to 1024
function M.set_num_threads(n)
  opts.need(opts.whole_from(1).test(n) and n <= 1024, n, "a whole number from 1 to 1024", "set_num_threads: argument")
  lib.ms_set_num_threads(n)
end

--- The time of a monotonic clock in seconds.
---@return number
function M.time() return lib.ms_time() end

opts.fix(M, { "deepcopy", "memory_stats", "device" })

return M
