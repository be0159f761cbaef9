-- SPDX-License-Identifier: MIT
--- load_state_dict with `assign` for a sharded model on meta: the state dict determines the device of the new memory.
--- All parameters of a unit share one block of memory, so one load must contain all of them or none; without any, the
--- unit stays on meta.
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local tensor = require "moonshard.tensor"
local no_grad = require "moonshard.autograd".no_grad

local lib = engine.lib
local rawget, ipairs = rawget, ipairs

local M = {}

local function on_meta(t) return t.device:find "^meta" ~= nil end

-- The handle of p's unit; for an instance of a tensor class, of the unit of its inner tensors.
local function unit_handle(p) return lib.ms_unit_of(p.id < 0 and tensor.inner(p)[1].id or p.id) end

--- Allocates memory for tensors that are on meta and that the state dict contains.
---@param m Module  a model with units
---@param device_of table<string, string>  devices of the state dict's tensors, by name
---@param strict boolean  true: allocates nothing if the state dict lacks a tensor that is on meta; the caller reports it
function M.make_room(m, device_of, strict)
  local names, values = m:_state()
  local units, order, given, plain = {}, {}, {}, {}
  for i, name in ipairs(names) do given[values[i]] = given[values[i]] or device_of[name] and name end
  for i, name in ipairs(names) do
    local p = values[i]
    if on_meta(p) then
      if strict and not given[p] then return end
      local handle = unit_handle(p)
      if handle ~= 0 and not units[handle] then
        units[handle] = { unit = rawget(p, "_unit") }
        order[#order + 1] = handle
      end
      local unit = units[handle]
      if not unit then
        if given[p] then plain[#plain + 1] = p end
      elseif given[p] then
        unit.has = unit.has or given[p]
      else
        unit.lacks = unit.lacks or name
      end
    end
  end
  for _, handle in ipairs(order) do
    local unit = units[handle]
    if unit.has and unit.lacks then
      errors.raise("load_state_dict: with assign, all parameters of a unit on meta must be loaded together; the state has '%s', but not '%s' of the same unit; "
        .. "add it, or call to_empty(device) first", unit.has, unit.lacks)
    end
  end
  no_grad(function()
    for _, p in ipairs(plain) do
      errors.check(lib.ms_set_data(p.id, create.empty_like(p, { device = device_of[given[p]] }).id), p)
    end
  end)
  for _, handle in ipairs(order) do
    local unit = units[handle]
    if unit.has then
      errors.check(lib.ms_unit_to(handle, dtypes.device(device_of[unit.has], "load_state_dict"), -1, 0))
      -- The next gather looks for all-gather extensions again.
      if unit.unit then unit.unit.looked, unit.unit.extensions = nil, nil end
    end
  end
end

--- Devices of a state dict's tensors, by name; without those that are on meta.
function M.devices(sd)
  local device_of = {}
  for name, t in pairs(sd) do
    if tensor.is_tensor(t) and not on_meta(t) then device_of[name] = t.device end
  end
  return device_of
end

return M
