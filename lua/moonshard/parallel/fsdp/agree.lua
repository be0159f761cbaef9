-- SPDX-License-Identifier: MIT
--- Makes a model's ranks agree on the outcome of a call: if one rank refuses it, all ranks refuse it, before anything
--- is gathered or changed.
local calls = require "moonshard.dist.calls"
local errors = require "moonshard.core.errors"
local object = require "moonshard.dist.object"
local module = require "moonshard.parallel.fsdp.module"
local opts = require "moonshard.core.opts"
local sharded = require "moonshard.parallel.fsdp.sharded"
local sorted_pairs = require "moonshard.tensor.util".sorted_pairs
local tensor = require "moonshard.tensor"
local a_module = require("moonshard.nn.module.register").a_module

local M = {}

-- The units of m and its descendants. If there are none, the units of the sharded tensors in the state dict x, because
-- gathering these is collective, too.
local function units_in(m, x)
  local units = module.units_below(m)
  local function look(v)
    if type(v) ~= "table" then return end
    if tensor.is_tensor(v) then
      if sharded.is_sharded(v) then units[#units + 1] = sharded.unit_of(v) end
    elseif getmetatable(v) == nil then
      for _, entry in sorted_pairs(v) do look(entry) end
    end
  end
  if #units == 0 and type(x) == "table" and not tensor.is_tensor(x) then
    look(type(x.state) == "table" and not tensor.is_tensor(x.state) and x.state or x)
  end
  return units
end

--- Groups that together contain all ranks of a model's units: only the world if one group is the world, or if two
--- groups are the dimensions of a mesh over it; none if no unit has more than one rank.
---@param m Module  a model with units
---@param x? any  the state dict to load
---@return Group[]
function M.groups_of(m, x)
  local dist = require "moonshard.dist"
  local list, seen = {}, {}
  local function add(group)
    if group and not seen[group] and dist.world_size(group) > 1 then
      seen[group] = true
      list[#list + 1] = group
    end
  end
  for _, unit in ipairs(units_in(m, x)) do
    if unit.classic then
      add(unit.placed.replicate)
      add(unit.placed.group)
    else
      if unit.replicates then add(unit.mesh():get_group(1)) end
      add(unit.group)
    end
  end
  if seen[dist.default_group()] then return { dist.default_group() } end
  -- Two groups whose sizes multiply to the world's are the two dimensions of a mesh over all ranks.
  if #list == 2 and dist.world_size(list[1]) * dist.world_size(list[2]) == dist.world_size() then
    return { dist.default_group() }
  end
  return list
end

local ALONE = 1                          -- id of the group that contains only this rank

local check_module = calls.one(function(who, m)
  opts.expect(m, a_module, "%s: argument 1", who)
end)

--- Begins a call that all ranks of a model make: finds the groups of its ranks and checks the options. An error here
--- makes the peers' first collective fail, so the call fails on every rank.
---@param who string  the function's name in messages
---@param m Module  a model with units
---@param given table?  the options
---@param spec table<string, any>  by name: default values of the options, or kinds of values (core/opts.lua)
---@param x? any  the state dict to load
---@return Group[] groups, table options
function M.begin(who, m, given, spec, x)
  check_module(who, m)
  local groups = M.groups_of(m, x)
  local check = calls.one(function() return opts(who, given, spec) end, function() return groups[1] and groups[1].id
    or ALONE end)
  return groups, check()
end

--- Gathers a value from every rank that the groups connect. Returns the values by world rank.
---@return table<integer, any>
function M.gather(groups, value)
  local dist = require "moonshard.dist"
  local known = { [dist.rank()] = value }
  for _, group in ipairs(groups) do
    for _, some in ipairs(dist.all_gather_object(known, { group = group })) do
      if type(some) ~= "table" then
        errors.raise "ranks make different calls: some of them save or load a state dict"
      end
      for rank, v in pairs(some) do known[rank] = v end
    end
  end
  return known
end

--- Whether this rank is the first in each of the groups, or rank 0 of the world if there are no groups.
---@return boolean
function M.is_first(groups)
  local dist = require "moonshard.dist"
  for _, group in ipairs(groups) do
    if dist.rank(group) ~= 0 then return false end
  end
  return #groups > 0 or dist.rank() == 0
end

--- Sends the first rank's value (a tensor or Lua value) to every rank, from the first rank of each group in turn.
---@param send fun(value: any, src: integer, group: Group): any  broadcasts a value; returns the received one
function M.from_first(groups, value, send)
  local dist = require "moonshard.dist"
  for _, group in ipairs(groups) do value = send(value, dist.group_ranks(group)[1], group) end
  return value
end

--- Runs fn(…) on every rank. Returns its result, and a table with every rank's second result (`reported`, a Lua value).
--- If fn fails on some ranks, all ranks raise: these ranks their own error, the others the first error in rank order.
---@param fn fun(...): any, any  returns a result, and a value to report to all ranks
---@return any result, table<integer, any> reported
function M.agree(groups, fn, ...)
  if #groups == 0 then
    local result, reported = fn(...)
    return result, { [(require "moonshard.dist").rank()] = reported }
  end
  local ok, result, reported = pcall(function(...)
    local result, reported = fn(...)
    -- A value that cannot be sent must fail here instead of in the gather.
    return result, object.encode(reported, "fsdp")
  end, ...)
  local all = M.gather(groups, { failed = not ok and tostring(result) or nil, reported = reported })
  if not ok then error(result, 0) end
  for rank, v in sorted_pairs(all) do
    if v.failed then errors.raise("%s (on rank %d)", v.failed:gsub("^[^\n]-:%d+: ", ""), rank) end
    all[rank] = object.decode(v.reported)
  end
  return result, all
end

--- Raises on every rank if the ranks' values differ; the error names two ranks with different values.
---@param reported table<integer, string>  the values, by world rank
---@param what string  the message before the values
function M.same(reported, what)
  local first_rank, first
  for rank, value in sorted_pairs(reported) do
    if not first_rank then first_rank, first = rank, value end
    if value ~= first then
      errors.raise("%s: rank %d: %s; rank %d: %s", what, first_rank, first == "" and "none" or first, rank,
        value == "" and "none" or value)
    end
  end
end

--- Runs fn(…), which communicates or changes shared state: if it fails on one rank, peers that wait for this rank raise
--- its error, too. fn gets at most five arguments.
function M.together(groups, fn, ...) return calls.several(fn, function() return #groups > 0 end)(...) end

return M
