-- SPDX-License-Identifier: MIT
--- Checks, when a unit is made, that all ranks give it equal parameters. Otherwise a gather would mix parts of
--- different parameters.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local lib = require "moonshard.core.ffi".lib

local M = {}

local function hash_of(list)
  local h, text = #list, table.concat(list, "\n")
  for k = 1, #text do h = lib.ms_hash_below(h, text:byte(k), k, 2 ^ 52) end
  return h
end

-- Gathers a hash of each rank's list, and the lists themselves only if the hashes differ.
local function compare(who, list, group, dist)
  local world = dist.world_size(group)
  if world == 1 then return end
  local all = create.zeros({ world }, { dtype = "int64", device = "cpu" })
  local mine = create.tensor({ hash_of(list) }, { dtype = "int64", device = "cpu" })
  dist.all_gather(all, mine, { group = group })
  local hashes, equal = all:tolist(), true
  all:release()
  mine:release()
  for r = 2, world do equal = equal and hashes[r] == hashes[1] end
  if equal then return end
  local lists, ranks = dist.all_gather_object(list, { group = group }), dist.group_ranks(group)
  for r = 2, world do
    for k = 1, math.max(#lists[1], #lists[r]) do
      local first, other = lists[1][k], lists[r][k]
      if first ~= other then
        errors.raise("%s: the model differs between ranks: rank %d has %s, rank %d has %s", who, ranks[1],
          first or ("no parameter %d"):format(k - 1), ranks[r], other or ("no parameter %d"):format(k - 1))
      end
    end
  end
end

--- Raises on every rank, with the first difference, unless all ranks give equal names, shapes and dtypes of parameters
--- and equal settings.
---@param settings string  the settings that must be equal on all ranks
---@param params Parameter[]  the unit's parameters
---@param names string[]  their names, in the same order
---@param group Group  the ranks that shard the unit
---@param replicas? Group  the ranks with equal shards
function M.check(who, settings, params, names, group, replicas)
  local dist = require "moonshard.dist"
  local list = { settings }
  for k, p in ipairs(params) do
    list[k + 1] = ("parameter %d '%s' %s %s"):format(k, names[k], p.dtype, tostring(p.shape))
  end
  if replicas and dist.world_size(group) * dist.world_size(replicas) == dist.world_size() then
    return compare(who, list, dist.default_group(), dist)
  end
  compare(who, list, group, dist)
  if replicas then compare(who, list, replicas, dist) end
end

return M
