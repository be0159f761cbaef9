-- SPDX-License-Identifier: MIT
--- All-gather extensions: a parameter whose local tensor (or the class of that tensor) defines `fsdp_pre_all_gather`
--- and `fsdp_post_all_gather` determines which tensors are gathered and how the whole parameter is built from them. The
--- engine raises events for both during a run (runtime/shard/extend.c).
---
---   fsdp_pre_all_gather(self, mesh, outer_shape, outer_stride, module, mp_policy) -> list of plain tensors, metadata
---   fsdp_post_all_gather(self, outputs, metadata, param_dtype) -> tensor, tensors to free        at the first gather
---   fsdp_post_all_gather(self, outputs, metadata, param_dtype, out)       later: fills out and returns nothing
local autograd = require "moonshard.autograd"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local log = require "moonshard.core.log"
local tensor = require "moonshard.tensor"
local a_tensor = tensor.a_tensor

local lib, ffi = engine.lib, engine.ffi
local C = ffi.C
local is_tensor = tensor.is_tensor

local M = { any = false }               -- any: whether at least one unit has extensions

local units = setmetatable({}, { __mode = "v" })        -- by unit handle

-- The plain tensors in t.
local function inner_tensors(t) return tensor.flat { t } end

-- ---- search for extensions ----------------------------------------------------------------------

local function hook(t, name)
  local found = t[name]
  if found == nil then found = rawget(getmetatable(t), name) end
  if found ~= nil then opts.expect(found, opts.fn, "%s of '%s'", name,
    tostring(tensor.name_of and tensor.name_of(t) or "a parameter")) end
  return found
end

local function contiguous_strides(shape)
  local strides, step = {}, 1
  for d = #shape, 1, -1 do
    strides[d] = step
    step = step * shape[d]
  end
  return strides
end

--- Finds those of a unit's local tensors that have all-gather extensions, and registers them in the engine. Called at
--- lazy initialization, and after local tensors were replaced.
function M.look(unit)
  unit.looked = true
  if not unit.positions then return end                 -- fsdp.FSDP does not support extensions
  local list, counts, which = {}, {}, {}
  for k, p in ipairs(unit.params) do
    local part = p:to_local()
    local pre, post = hook(part, "fsdp_pre_all_gather"), hook(part, "fsdp_post_all_gather")
    if (pre == nil) ~= (post == nil) then
      errors.raise("Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: %s", tostring(part))
    end
    if pre then
      local at = unit.positions[k]
      list[#list + 1] = {
        part = part, pre = pre, post = post, name = unit.names[k], module = unit.owners[k], n = #at,
        shape = p.shape, strides = contiguous_strides(p.shape), dtype = unit.policy.param_dtype or p.dtype,
      }
      counts[#counts + 1] = #at
      for _, position in ipairs(at) do which[#which + 1] = position end
    end
  end
  if #list == 0 and not unit.extensions then return end
  errors.check(lib.ms_unit_extend(unit.handle, #list, ffi.new("int32_t[?]", #list + 1, counts),
    ffi.new("int32_t[?]", #which + 1, which)))
  unit.extensions = #list > 0 and list or nil
  units[unit.handle] = unit
  M.any = M.any or #list > 0
end

-- ---- events of a gather -------------------------------------------------------------------------

local buffer = ffi.new "ms_id[64]"

local function put(list, who, what)
  local n = 0
  for k, t in ipairs(list) do
    opts.expect(t, a_tensor, "%s: %s %d", who, what, k)
    for _, inner in ipairs(inner_tensors(t)) do
      if n == 64 then errors.raise("%s: more than 64 %ss, counting inner tensors; expected at most 64", who, what) end
      buffer[n] = inner.id
      n = n + 1
    end
  end
  return n
end

local function is_list(x) return type(x) == "table" and not is_tensor(x) and getmetatable(x) == nil end

autograd.handlers[C.MS_EV_PRE_GATHER] = function(_, event)
  local unit = units[event.unit]
  for e, x in ipairs(unit.extensions) do
    local who = ("fsdp_pre_all_gather of '%s'"):format(x.name)
    -- With offloading, the hook receives a copy on the device of the gathered parameter.
    local part = x.part
    if unit.offload then
      local device = lib.ms_unit_get_state(unit.handle).device
      if dtypes.device(part.device) ~= device then
        part = autograd.no_grad(part.to, part:detach(), dtypes.device_name(device))
      end
    end
    local inputs, metadata = x.pre(part, unit.shard_mesh(), x.shape, x.strides, x.module, unit.policy)
    if not is_list(inputs) or #inputs == 0 then
      errors.raise("%s returned %s, expected a list of one or more tensors", who, errors.kind(inputs))
    end
    for k, t in ipairs(inputs) do
      if is_tensor(t) and t.id < 0 then
        errors.raise("%s: returned tensor %d is a %s, expected a plain tensor", who, k, t:class_name())
      end
    end
    x.metadata = metadata
    local n = put(inputs, who, "returned tensor")
    if lib.ms_unit_extension_inputs(unit.handle, e - 1, n, buffer) ~= 0 then errors.fail() end
  end
  return nil, 0
end

local function first_gather(unit, e, x, outputs)
  local who = ("fsdp_post_all_gather of '%s'"):format(x.name)
  local whole, freed = x.post(x.part, outputs, x.metadata, x.dtype)
  if not is_tensor(whole) then
    errors.raise("%s returned %s at the first gather, expected the whole tensor and a list of tensors to free", who,
      errors.kind(whole))
  end
  freed = freed or {}
  if not is_list(freed) then
    errors.raise("%s: the tensors to free are %s, expected a list", who, errors.kind(freed))
  end
  local inners = inner_tensors(whole)
  local ids = ffi.new("ms_id[?]", #inners)
  for k, t in ipairs(inners) do
    ids[k - 1] = t.id
    -- Reshard frees a tensor if its storage has no other user, or is that of a gathered output or of a tensor that the
    -- hook lists to be freed. Warn of any other storage: it stays allocated, so memory grows with every unit.
    local goes = lib.ms_storage_is_shared(t.id) == 0
    for _, list in ipairs { freed, outputs } do
      for _, other in ipairs(list) do
        for _, inner in ipairs(inner_tensors(other)) do goes = goes or lib.ms_same_storage(t.id, inner.id) ~= 0 end
      end
    end
    if not goes then
      log.warn(who .. " returned a tensor that shares memory with other tensors and is not among the tensors to free: reshard will not free it")
    end
  end
  local n = put(freed, who, "tensor to free")
  if lib.ms_unit_extension_whole(unit.handle, e - 1, #inners, ids, n, buffer) ~= 0 then errors.fail() end
  x.out = whole:keep()
end

autograd.handlers[C.MS_EV_POST_GATHER] = function(_, event)
  local unit = units[event.unit]
  for e, x in ipairs(unit.extensions) do
    local n = lib.ms_unit_extension_outputs(unit.handle, e - 1, buffer, 64)
    if n < 0 then errors.fail() end
    local outputs = {}
    for k = 1, n do outputs[k] = tensor.wrap(buffer[k - 1]) end
    if x.out == nil then first_gather(unit, e, x, outputs)
    else x.post(x.part, outputs, x.metadata, x.dtype, x.out) end
    x.metadata = nil
  end
  return nil, 0
end

-- ---- gathering -----------------------------------------------------------------------------------

local function run(handle, early, prefetched)
  local r = lib.ms_unit_gather_run(handle, early and 1 or 0, prefetched and 1 or 0)
  autograd.pull(r)
  lib.ms_run_free(r)
end

--- Gathers the parameters of a unit with extensions. early: only starts the gather. Collective.
function M.gather(unit, early) run(unit.handle, early, false) end

local following = ffi.new "double[64]"

--- Starts the early gathers of this unit's forward that are of units with extensions: the units that
--- set_modules_to_forward_prefetch names or, by default, the next unit.
function M.prefetch(unit)
  local n = lib.ms_unit_prefetches(unit.handle, following, 64)
  if n == 0 then return end
  local list = {}                       -- a new table: a hook may call this function again
  for k = 1, n do list[k] = following[k - 1] end
  for k = 1, n do run(list[k], true, true) end
end

return M
