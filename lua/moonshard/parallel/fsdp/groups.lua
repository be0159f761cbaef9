-- SPDX-License-Identifier: MIT
--- The ranks over which an FSDP instance shards, and the ranks that hold the same shards: strategy, groups and mesh.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local log = require "moonshard.core.log"
local mesh_type = require "moonshard.dist.mesh"

local M = {}

M.STRATEGIES = { "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2" }
M.HYBRID = { hybrid_shard = true, hybrid_shard_zero2 = true }
--- Strategies that vacate gathered parameters after forward, except the root's.
M.RESHARDS = { full_shard = true, hybrid_shard = true }

-- Groups, made once: {ranks of this node, ranks with the same position on every node}.
local by_node

-- Returns by_node, which the first call makes. Collective over the world.
local function node_groups(dist)
  if by_node then return by_node end
  local places = dist.all_gather_object { host = dist.rank() - dist.local_rank(), at = dist.local_rank() }
  local hosts, ats, host_order, at_order = {}, {}, {}, {}
  for r, place in ipairs(places) do
    if not hosts[place.host] then
      hosts[place.host] = {}
      host_order[#host_order + 1] = place.host
    end
    if not ats[place.at] then
      ats[place.at] = {}
      at_order[#at_order + 1] = place.at
    end
    table.insert(hosts[place.host], r - 1)
    table.insert(ats[place.at], r - 1)
  end
  local function mine(lists, order)
    local found
    for _, key in ipairs(order) do
      local group = #lists[key] == #places and dist.default_group() or dist.new_group(lists[key])
      if dist.rank(group) then found = group end
    end
    return found
  end
  by_node = { mine(hosts, host_order), mine(ats, at_order) }
  return by_node
end

local function hybrid_groups(dist, o, strategy)
  local given, mesh = o.process_group, o.device_mesh
  if mesh ~= nil then
    if mesh.ndim ~= 2 then errors.raise("Expected device_mesh to have ndim=2 but got %d", mesh.ndim) end
    return { mesh:get_group(2), mesh:get_group(1) }  -- mesh dimensions: replicate, shard
  end
  if given == nil then
    if o.auto_wrap_policy == nil then
      errors.raise("Manual wrapping with %s requires explicit specification of process group or device_mesh.", strategy)
    end
    return node_groups(dist)
  end
  local pair = type(given) == "table" and getmetatable(given) == nil and #given == 2 and dist.is_group(given[1])
    and dist.is_group(given[2])
  if not pair then
    errors.raise("Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] but got %s",
      errors.show(given))
  end
  return given
end

--- Returns `{ strategy, group, replicate, given }` of an instance: parameters are sharded over group; the ranks of
--- replicate (may be nil) hold the same shards; given is the group that the options name (default: all ranks), or with
--- a hybrid strategy the pair { shard, replicate }. With "no_shard", group is this rank alone, whatever given is.
---@param o table       the checked options of FSDP
---@param quiet boolean?  an enclosing instance has already warned
function M.resolve(o, quiet)
  local function warn(text)
    if not quiet then log.warn_once(text) end
  end
  local dist = require "moonshard.dist"
  dist.init()
  if o.device_mesh ~= nil then
    if o.process_group ~= nil then
      errors.raise("Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them.")
    end
    opts.need(mesh_type.is_mesh(o.device_mesh), o.device_mesh, "a mesh made by dist.init_device_mesh",
      "FSDP: option 'device_mesh'")
  end
  local strategy = o.sharding_strategy or "full_shard"
  if M.HYBRID[strategy] then
    local pair = hybrid_groups(dist, o, strategy)
    local shard, replicate = pair[1], pair[2]
    if dist.world_size(shard) == 1 then
      warn(("FSDP is switching to use `NO_SHARD` instead of %s since the shard group has one rank."):format(strategy))
      strategy = "no_shard"
    end
    return { strategy = strategy, group = shard, replicate = dist.world_size(replicate) > 1 and replicate or nil,
      given = pair }
  end
  local group = o.process_group
  if o.device_mesh then
    if o.device_mesh.ndim ~= 1 then
      errors.raise("Expected device_mesh to have ndim=1 but got %d", o.device_mesh.ndim)
    end
    group = o.device_mesh:get_group(1)
  end
  if group ~= nil and not dist.is_group(group) then
    errors.raise("FSDP: option 'process_group' is %s, expected a group made by dist.new_group%s", errors.kind(group),
      type(group) == "table" and #group == 2 and " ({shard, replicate} is for hybrid strategies)" or "")
  end
  group = group or dist.default_group()
  local world = dist.world_size(group)
  if not dist.rank(group) then errors.raise("FSDP: rank %d is not a member of the process group", dist.rank()) end
  if strategy == "no_shard" then
    if world > 1 then
      warn "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` instead."
    end
  elseif world == 1 then
    warn(("FSDP is switching to use `NO_SHARD` instead of %s since the world size is 1."):format(strategy))
    strategy = "no_shard"
  end
  if strategy == "no_shard" then
    return { strategy = strategy, group = dist.self_group(), replicate = world > 1 and group or nil, given = group }
  end
  return { strategy = strategy, group = group, given = group }
end

--- The mesh of an FSDP instance's parameters: the script's mesh, or one made from the instance's groups.
---@param unit table    unit of an FSDP instance
---@return DeviceMesh
function M.mesh_of(unit)
  if unit.options.device_mesh then return unit.options.device_mesh end
  if not unit.own_mesh then
    local placed, group, names = unit.placed
    if M.HYBRID[unit.options.sharding_strategy] then
      group, names = { placed.given[2], placed.given[1] }, { "dp_replicate", "dp_shard" }
    elseif placed.replicate then
      group, names = placed.replicate, { "dp_replicate" }
    else
      group, names = placed.group, { "dp_shard" }
    end
    unit.own_mesh = mesh_type.mesh_from_group(group, { names = names })
  end
  return unit.own_mesh
end

--- Sets the groups in a unit's options for the engine.
function M.fill(options, groups)
  options.group = groups.group.id
  if groups.replicate then options.replicates, options.replicate_group = 1, groups.replicate.id end
  return options
end

return M
