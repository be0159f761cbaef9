-- SPDX-License-Identifier: MIT
--- Handles parameters that came into a sharded model later, in fields of their own or in place of others. Plain, whole
--- parameters assigned to a unit's fields between fully_shard and the first forward replace the unit's old ones. All
--- others that require grad are an error, because they would be neither sharded nor reduced, except those that
--- writeback.lua copies.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local sharded = require "moonshard.parallel.fsdp.sharded"
local shards = require "moonshard.nn.module.shards"
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

-- Whether unit may leave p as it is: units whose replaced parameters are not looked for have such ones.
local function is_left(unit, m, p)
  if unit.ignored_modules and unit.ignored_modules[m] or unit.ignored_params[p] then return true end
  return unit.replaces and unit.switches.skip_writeback_check
end

-- Adds to `found` the parameters below m, in module order, that require grad and belong to no unit although the unit
-- around them should manage them.
local function collect(m, unit, found, seen)
  if seen[m] then return end
  seen[m] = true
  unit = rawget(m, "_fsdp") or unit
  local slots, params = rawget(m, "_slots"), rawget(m, "_params")
  for k = 1, #params do
    local p = slots[params[k]]
    if p ~= nil and not rawget(p, "_unit") and not rawget(p, "_flat") and not rawget(p, "_stray")
      and not is_left(unit, m, p) and p.requires_grad then
      found[#found + 1] = { p, unit }
    end
  end
  for k = 1, #m do collect(rawget(m, k), unit, found, seen) end
  local children = rawget(m, "_children")
  for k = 1, #children do collect(slots[children[k]], unit, found, seen) end
end

--- Marks the parameters below m, a sharded module whose forward begins, that belong to no unit although they should:
--- their gradients are this rank's own, and optimizers refuse them unless the script has reduced them. Called at each
--- outermost forward: elements of containers may change without notice.
function M.look(m, unit)
  local found = {}
  collect(m, unit, found, {})
  if #found == 0 then return end
  local names = {}
  for name, p in m:named_parameters() do names[p] = name end
  for _, entry in ipairs(found) do
    if entry[2].replaces == nil then M.check(entry[2]) end
    shards.stray(entry[1], names[entry[1]] or "?")
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
