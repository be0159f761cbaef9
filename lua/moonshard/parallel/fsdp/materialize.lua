-- SPDX-License-Identifier: MIT
--- Prepares a module's parameters and buffers before FSDP shards them: selects the compute device, allocates those on
--- meta, moves them to the device, makes them equal on all ranks (docs/semantics.md#sync-module-states), and casts
--- buffers.
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local log = require "moonshard.core.log"
local ops = require "moonshard.tensor.shape"
local no_grad = require "moonshard.autograd".no_grad

local lib, raise = engine.lib, errors.raise

local M = {}

--- Returns root and those of its descendants whose tensors an FSDP instance of root manages: excludes ignored modules
--- and other instances, with all modules below them.
---@return Module[]
function M.modules(root, ignored, is_fsdp)
  local list, seen = {}, {}
  local function visit(m)
    if seen[m] or ignored[m] or is_fsdp(m) then return end
    seen[m] = true
    list[#list + 1] = m
    for _, child in ipairs(m:children()) do visit(child) end
  end
  visit(root)
  return list
end

-- The parameters and buffers of a module itself, without its descendants', that are not sharded.
local function own(m)
  local list = {}
  for _, names in ipairs { m._params, m._buffers } do
    for _, name in ipairs(names) do
      local t = m._slots[name]
      if t ~= nil and not rawget(t, "_unit") and not rawget(t, "_flat") then list[#list + 1] = t end
    end
  end
  return list
end
M.own = own

local function on_meta(t) return t.device:find "^meta" ~= nil end

-- Makes t use the memory of `at`, a tensor made for this purpose. Releases `at` at once; otherwise its memory would
-- remain until garbage collection, even after sharding.
local function point(t, at)
  if lib.ms_set_data(t.id, at.id) ~= 0 then errors.fail(t, at) end
  at:release()
end

-- Raises unless all parameters are on one device or, with device_id, on the CPU and one GPU. Skips parameters that are
-- ignored, sharded or on meta.
local function check_devices(modules, device_id, ignored_params)
  local devices, seen, on_cpu = {}, {}, false
  for _, m in ipairs(modules) do
    for _, name in ipairs(m._params) do
      local p = m._slots[name]
      if p ~= nil and not ignored_params[p] and not rawget(p, "_unit") and not rawget(p, "_flat") and not on_meta(p)
        and not seen[p.device] then
        seen[p.device] = true
        devices[#devices + 1] = "'" .. p.device .. "'"
        on_cpu = on_cpu or p.device:find "^cpu" ~= nil
      end
    end
  end
  if #devices == 2 and on_cpu then
    if device_id == nil then
      raise "To support a module with both CPU and GPU params, please pass in device_id argument."
    end
  elseif #devices > 1 then
    table.sort(devices)
    raise("FSDP only supports single device modules but got params on [%s]", table.concat(devices, ", "))
  end
end

--- The device on which an instance computes: that of its option device_id, otherwise that of the first parameter or
--- buffer that is not on meta, otherwise the default device. Raises if the parameters are on several devices, unless
--- these are the CPU and one GPU and device_id is given.
---@param modules Module[]  the modules that the instance manages
---@param device_id? integer|string  the option: a GPU's index from 0 (the CPU if there is no GPU), or a device's name
---@param ignored_params table<Parameter, boolean>  parameters that the instance ignores, as keys
---@return string
function M.device(modules, device_id, ignored_params)
  check_devices(modules, device_id, ignored_params)
  if device_id ~= nil then
    if type(device_id) == "number" then
      opts.need(device_id >= 0 and device_id % 1 == 0, device_id, "an index from 0 or a device",
        "FSDP: option 'device_id'")
      return dtypes.canonical_device(lib.ms_cuda_count() > 0 and ("cuda:%d"):format(device_id) or "cpu",
        "FSDP: device_id")
    end
    if device_id == "cuda" then
      log.warn("FSDP got the argument `device_id` cuda on rank " .. (require "moonshard.dist").rank()
        .. ", which does not have an explicit index. "
        .. "FSDP will use the current device. If this is incorrect, please explicitly call `ms.cuda.set_device()` before FSDP initialization or "
        .. "pass in the explicit device index as the `device_id` argument.")
    end
    return dtypes.canonical_device(device_id, "FSDP: device_id")
  end
  for _, m in ipairs(modules) do
    for _, t in ipairs(own(m)) do
      if not on_meta(t) then return t.device end
    end
  end
  return dtypes.canonical_device(dtypes.default_device(), "FSDP")
end

--- Materializes modules: for each that has a tensor on meta, calls fn(module) or, if fn is nil, allocates all of the
--- module's own tensors on the device and calls its reset_parameters().
function M.from_meta(modules, fn, device)
  if fn ~= nil and not opts.fn.test(fn) then
    raise("Expected %s to be callable but got %s", errors.show(fn), type(fn))
  end
  for _, m in ipairs(modules) do
    local tensors, any = own(m), false
    for _, t in ipairs(tensors) do any = any or on_meta(t) end
    if any and fn then
      fn(m)
    elseif any then
      for _, t in ipairs(tensors) do point(t, create.empty_like(t, { device = device })) end
      local ok, text = pcall(function()
        if type(m.reset_parameters) ~= "function" then raise("%s has no reset_parameters", m:class_name()) end
        no_grad(function() m:reset_parameters() end)
      end)
      if not ok then
        log.warn(("Unable to call `reset_parameters()` for module on meta device with error %s. Please ensure your module implements a "
          .. "`reset_parameters()` method."):format(tostring(text)))
        error(text, 0)
      end
    end
  end
end

--- Moves parameters and buffers from the CPU to the compute device if `given`, the option device_id, is not nil. Raises
--- if one is on a GPU that is not the compute device.
function M.move(modules, device, given)
  local elsewhere
  for _, m in ipairs(modules) do
    for _, t in ipairs(own(m)) do
      if t.device ~= device and not on_meta(t) then
        if not t.device:find "^cpu" then
          raise("Inconsistent compute device and `device_id` on rank %d: %s vs %s", (require "moonshard.dist").rank(),
            t.device, device)
        end
        elsewhere = true
      end
    end
  end
  if not elsewhere or given == nil then return end
  no_grad(function()
    for _, m in ipairs(modules) do
      for _, t in ipairs(own(m)) do
        if t.device ~= device then point(t, t:detach():to(device)) end
      end
    end
  end)
end

local BUCKET = 250 * 2 ^ 20             -- bytes: tensors are collected for one broadcast until this size is reached

local function broadcast(dist, list, source, group)
  no_grad(function()
    local flat = {}
    for k, t in ipairs(list) do flat[k] = t:detach():reshape(-1) end
    local whole = #flat == 1 and flat[1]:clone() or ops.cat(flat, 1)
    dist.broadcast(whole, { src = source, group = group })
    local at = 1
    for _, t in ipairs(list) do
      local n = t:numel()
      t:detach():copy_(whole:narrow(1, at, n):reshape(t.shape))
      at = at + n
    end
  end)
end

--- Broadcasts parameters, except ignored ones, and buffers of the first rank of each group to its other ranks. Sends
--- each tensor once in each group, even if several instances contain it.
function M.sync(modules, groups, ignored_params)
  local dist = require "moonshard.dist"
  local by_dtype, order, seen = {}, {}, {}
  for _, m in ipairs(modules) do
    for _, t in ipairs(own(m)) do
      if not seen[t] and not ignored_params[t] and not rawget(t, "_synced") and t:numel() > 0 then
        seen[t] = true
        if not by_dtype[t.dtype] then
          by_dtype[t.dtype] = {}
          order[#order + 1] = t.dtype
        end
        table.insert(by_dtype[t.dtype], t)
        rawset(t, "_synced", true)
      end
    end
  end
  for _, group in ipairs(groups) do
    local source = dist.group_ranks(group)[1]
    for _, dtype in ipairs(order) do
      local bucket, bytes = {}, 0
      for _, t in ipairs(by_dtype[dtype]) do
        bucket[#bucket + 1] = t
        bytes = bytes + t:numel() * t:element_size()
        if bytes >= BUCKET then
          broadcast(dist, bucket, source, group)
          bucket, bytes = {}, 0
        end
      end
      if #bucket > 0 then broadcast(dist, bucket, source, group) end
    end
  end
end

--- Casts floating point buffers to dtype (nil: back to their original dtypes). State dicts contain them in their
--- original dtypes.
function M.cast_buffers(modules, dtype)
  no_grad(function()
    for _, m in ipairs(modules) do
      for _, name in ipairs(m._buffers) do
        local b = m._slots[name]
        local to = dtype or b ~= nil and rawget(b, "_original_dtype") or nil
        if b ~= nil and to and dtypes.is_float(dtypes.number(b.dtype)) and b.dtype ~= to then
          if not rawget(b, "_original_dtype") then rawset(b, "_original_dtype", b.dtype) end
          point(b, b:to(to))
        end
      end
    end
  end)
end

return M
