-- SPDX-License-Identifier: MIT
--- Checks, when a unit is made, that all ranks give it equal parameters: otherwise a gather would mix parts of
--- different ones. Names, shapes, dtypes and what is frozen must be equal, and the initial values, of which checksums
--- are compared, unless the script says that they need not be. Parameters on meta have no values yet.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local no_grad = require "moonshard.autograd".no_grad
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local lib, ffi = engine.lib, engine.ffi

local M = {}

local function hash_of(list)
  local h, text = #list, table.concat(list, "\n")
  for k = 1, #text do h = lib.ms_hash_below(h, text:byte(k), k, 2 ^ 52) end
  return h
end

-- ---- checksums ---------------------------------------------------------------------------------------

local digits = ffi.new "char[17]"

-- A checksum of the bits of t, which has values; NaNs count by their bits, too.
local function sum_of(t)
  local parts = {}
  for k, part in ipairs(tensor.flat { t }) do
    local bytes = part:numel() * part:element_size()
    local at = bytes > 0 and part:detach():to("cpu"):contiguous()
    lib.ms_file_sum(at and ffi.cast("const char *", at:data_ptr()) or digits, bytes, digits)
    parts[k] = ffi.string(digits)
  end
  return table.concat(parts, " ")
end

-- Checksums of all parameters; nil if one of them has no values, is sparse, or belongs to another unit.
local function sums_of(params)
  for _, p in ipairs(params) do
    if p.device:find "^meta" or p.is_sparse or rawget(p, "_flat") then return nil end
  end
  local sums = {}
  no_grad(scope.scope, function()
    for k, p in ipairs(params) do sums[k] = scope.scope(sum_of, p) end
  end)
  return sums
end

-- ---- comparison --------------------------------------------------------------------------------------

-- Gathers `numbers` whole numbers of each rank of the group; returns a list of lists.
local function gather(group, numbers, dist)
  local world, n = dist.world_size(group), #numbers
  local all = create.zeros({ world * n }, { dtype = "int64", device = "cpu" })
  local mine = create.tensor(numbers, { dtype = "int64", device = "cpu" })
  dist.all_gather(all, mine, { group = group })
  local flat, lists = all:tolist(), {}
  all:release()
  mine:release()
  for r = 1, world do lists[r] = { unpack(flat, (r - 1) * n + 1, r * n) } end
  return lists
end

-- Raises at the first difference between two ranks' lists.
local function differ(who, list, group, dist)
  local lists, ranks = dist.all_gather_object(list, { group = group }), dist.group_ranks(group)
  for r = 2, #ranks do
    for k = 1, math.max(#lists[1], #lists[r]) do
      local first, other = lists[1][k], lists[r][k]
      if first ~= other then
        errors.raise("%s: the model differs between ranks: rank %d has %s, rank %d has %s", who, ranks[1],
          first or ("no parameter %d"):format(k - 1), ranks[r], other or ("no parameter %d"):format(k - 1))
      end
    end
  end
end

-- The positions of two ranks whose values must be equal and are not, and of the first parameter in which they differ;
-- nil if there are none. entries: of each rank, the values' hash (below 0: it has none) and the number of its set.
local function unequal(entries)
  local first = {}
  for r, entry in ipairs(entries) do
    local values, set = entry[1], entry[2]
    if values >= 0 then
      first[set] = first[set] or r
      if entries[first[set]][1] ~= values then return first[set], r end
    end
  end
end

-- Compares the ranks' lists and, in each set of ranks, their checksums (nil: not this rank's). Returns whether all ranks
-- have equal checksums.
local function compare(what, list, sums, set, group, dist)
  if dist.world_size(group) == 1 then return true end
  local entries, equal = gather(group, { hash_of(list), sums and hash_of(sums) or -1, set }, dist), true
  for r = 2, #entries do equal = equal and entries[r][1] == entries[1][1] end
  if not equal then return differ(what.who, list, group, dist) end
  for _, entry in ipairs(entries) do
    table.remove(entry, 1)
    equal = equal and entry[1] >= 0 and entry[1] == entries[1][1]
  end
  local a, b = unequal(entries)
  if not a then return equal end
  local all, ranks, k = dist.all_gather_object(sums or {}, { group = group }), dist.group_ranks(group), 1
  while all[a][k] == all[b][k] do k = k + 1 end
  errors.raise("%s: the initial values of %s differ between ranks %d and %d, %s", what.who, what.name(k), ranks[a], ranks[b],
    what.advice)
end

local SEED = "give all ranks the same seed (ms.manual_seed) before the model is built"
local OFF = "check_values = false if the values are loaded afterwards"
local ADVICE = {
  FSDP = ("so the ranks would not train one model: %s, or set sync_module_states = true to take rank 0's; %s"):format(SEED, OFF),
  fully_shard = ("so the shards would be a mixture: %s; %s"):format(SEED, OFF),
}

--- Raises on every rank, with the first difference, unless all ranks give equal names, shapes and dtypes of parameters
--- and equal settings, freeze the same parameters, and give equal values to the ranks that share them.
---@param who string  "fully_shard" or "FSDP"
---@param settings string  the settings that must be equal on all ranks
---@param given { params: Parameter[], names: string[], owner: string, values: boolean }
---   params: the unit's parameters; names: their names, in the same order; owner: the class of the unit's module; values:
---   whether initial values must be equal
---@param group Group  the ranks that shard the unit
---@param replicas? Group  the ranks with equal shards; those of fully_shard may get equal values later
---@return boolean?  whether all replicas have equal values already
function M.check(who, settings, given, group, replicas)
  local dist = require "moonshard.dist"
  local list = { settings }
  for k, p in ipairs(given.params) do
    list[k + 1] = ("parameter %d '%s' %s %s%s"):format(k, given.names[k], p.dtype, tostring(p.shape),
      p.requires_grad and "" or ", frozen")
  end
  local alone = dist.world_size(group) == 1 and (not replicas or dist.world_size(replicas) == 1)
  local sums = given.values and not alone and sums_of(given.params) or nil
  local what = { who = who, advice = ADVICE[who],
    name = function(k) return ("parameter '%s' of %s"):format(given.names[k], given.owner) end }
  if replicas and dist.world_size(group) * dist.world_size(replicas) == dist.world_size() then
    return compare(what, list, sums, who == "FSDP" and 0 or dist.group_ranks(group)[1], dist.default_group(), dist)
  end
  compare(what, list, sums, 0, group, dist)
  return replicas and compare(what, list, sums, who == "FSDP" and 0 or dist.rank(), replicas, dist)
end

--- At the first forward of a root: raises unless the replicas of fully_shard's shards are equal, if they were not when
--- the units were made. Until then the script may have broadcast or loaded them.
---@param units FSDPUnit[]
function M.check_replicas(units)
  local dist = require "moonshard.dist"
  local by_group, order = {}, {}
  for _, unit in ipairs(units) do
    local group = unit.replicates and unit.unlike and unit.mesh():get_group(1)
    if group and dist.world_size(group) > 1 then
      if not by_group[group.id] then
        by_group[group.id] = { group = group, parts = {}, names = {} }
        order[#order + 1] = by_group[group.id]
      end
      local g = by_group[group.id]
      for k, p in ipairs(unit.params) do
        g.parts[#g.parts + 1] = p:to_local()
        g.names[#g.names + 1] = (unit.path == "" and "" or unit.path .. ".") .. unit.names[k]
      end
    end
  end
  for _, g in ipairs(order) do
    compare({ who = "fully_shard", name = function(k) return ("the shards of parameter '%s'"):format(g.names[k]) end,
      advice = "which hold replicas of them: broadcast them before the first forward, or " .. SEED
        .. "; check_values = false if replicas may differ" }, {}, sums_of(g.parts), 0, g.group, dist)
  end
end

return M
