-- SPDX-License-Identifier: MIT
--- Handles parameters that a script assigned to fields of a sharded module. Plain, whole parameters assigned between
--- fully_shard and the first forward replace the unit's old ones. Later assignments are an error, and so are all
--- assignments to fields of an fsdp.FSDP instance without use_orig_params.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local sharded = require "moonshard.parallel.fsdp.sharded"
local shards = require "moonshard.nn.shards"
local tensor = require "moonshard.tensor"

local lib = engine.lib
local rawget, rawset, getmetatable, ipairs, next = rawget, rawset, getmetatable, ipairs, next

local M = {}

local function present(place)
  local m = place[1]
  return m and rawget(m, "_slots")[place[2]]
end

--- Raises if a parameter was replaced: the new tensor would be neither sharded nor reduced. An element of unit.places
--- is { module, field, parameter, name }, with weak references in the units of fully_shard.
function M.check(unit)
  local places = unit.places
  for k = 1, #places do
    local place = places[k]
    local now = present(place)
    if now ~= place[3] and now ~= nil then
      errors.raise("parameter '%s' was replaced after its module was sharded: the replacement, %s, is neither sharded nor reduced; "
        .. "change the parameter in place, or replace it before %s", (unit.path == "" and "" or unit.path .. ".")
        .. place[4], errors.kind(now), unit.classic and "its module is wrapped" or "the first forward")
    end
  end
end

-- Maps parameters of the unit to the plain, whole parameter that replaced each. Also returns the set of parameters that
-- the unit keeps, because at least one of their fields has no replacement, or its replacement is not a plain, whole
-- parameter or differs from the replacement in an earlier field.
local function replacements(unit)
  local by, kept = {}, {}
  for _, place in ipairs(unit.places) do
    local p, now = place[3], present(place)
    local fits = now ~= p and p.id >= 0 and tensor.is_tensor(now) and now.id >= 0 and getmetatable(now).__param == true
      and not sharded.is_sharded(now) and (by[p] == nil or by[p] == now)
    if fits then by[p] = now else kept[p] = true end
  end
  return by, kept
end

-- Moves a unit from meta to the device of its replacements; returns false if one of its parameters has no replacement
-- with memory.
local function leave_meta(unit, by, kept)
  local device
  for _, p in ipairs(unit.params) do
    device = device or by[p] and by[p].device
    if not by[p] or kept[p] or by[p].device:find "^meta" then return false end
  end
  errors.check(lib.ms_unit_to(unit.handle, require("moonshard.core.dtypes").device(device, "fully_shard"), -1, 0))
  return true
end

--- At the first forward, makes a unit use the parameters that replaced its own. Replacements that it cannot use stay in
--- their fields, and M.check raises for them.
function M.take_in(unit)
  local by, kept = replacements(unit)
  if next(by) == nil then return end
  local on_meta = unit.params[1].id >= 0 and unit.params[1]:to_local().device:find "^meta"
  if on_meta and not leave_meta(unit, by, kept) then return end
  for k, p in ipairs(unit.params) do
    local now = not kept[p] and by[p]
    if now then
      if lib.ms_unit_replace(unit.handle, unit.positions[k][1], now.id) ~= 0 then errors.fail(now) end
      rawset(p, "_unit", nil)
      shards.leave(p, unit.names[k], "was replaced by the parameter that the script assigned to its field")
      unit.params[k] = now
      sharded.adopt(now, unit)
      for _, place in ipairs(unit.places) do
        if place[3] == p then place[3] = now end
      end
    end
  end
end

return M
