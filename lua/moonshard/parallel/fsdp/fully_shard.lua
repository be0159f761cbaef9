-- SPDX-License-Identifier: MIT
--- fully_shard: shards the parameters of a module (or of several modules as one unit) over the ranks and adds the
--- methods of FSDPModule to it. Call it for inner modules first: parameters that a nested call has sharded belong to
--- the nested unit.
local alike = require "moonshard.parallel.fsdp.alike"
local autograd = require "moonshard.autograd"
local class = require "moonshard.core.class"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local mesh_type = require "moonshard.dist.mesh"
local module = require "moonshard.parallel.fsdp.module"
local Module = require "moonshard.nn.module".Module
local opts = require "moonshard.core.opts"
local policies = require "moonshard.parallel.fsdp.policies"
local sharded = require "moonshard.parallel.fsdp.sharded"
local tensor = require "moonshard.tensor"
local a_module = require("moonshard.nn.module.register").a_module

local lib, ffi, raise = engine.lib, engine.ffi, errors.raise
local C = ffi.C

local M = {}

-- ---- arguments -----------------------------------------------------------------------------------

local function module_list(target)
  if class.isa(target, Module) then return { target } end
  opts.need(opts.is_plain(target) and target[1] ~= nil, target, "a module or a list of modules",
    "fully_shard: argument 1")
  for k, m in ipairs(target) do opts.expect(m, a_module, "fully_shard: entry %d of the list", k) end
  return target
end

-- The shard group and, for a mesh of two dimensions, the group of replicas. Without a mesh: the whole world.
local function groups_of(mesh)
  local dist = require "moonshard.dist"
  dist.init()
  if mesh == nil then return dist.default_group() end
  local is_mesh = type(mesh) == "table" and type(mesh.get_group) == "function"
  if not is_mesh then raise("fully_shard expects a 1D or 2D DeviceMesh but got %s", errors.show(mesh)) end
  if mesh.ndim ~= 1 then
    if mesh.ndim ~= 2 then raise("fully_shard expects a 1D or 2D DeviceMesh but got %s", tostring(mesh)) end
    if not mesh.names[1] then raise "Please init the 2D mesh for HSDP with mesh_dim_names specified" end
    return mesh:get_group(2), mesh:get_group(1)
  end
  return mesh:get_group(1)
end

-- The mesh of the dimensions that `dims` names, { replicate, shard } or { shard }.
local function data_parallel_mesh(mesh, dims)
  opts.need(policies.is_mesh_dims(dims), dims, "fsdp.DataParallelMeshDims", "fully_shard: option 'dp_mesh_dims'")
  opts.need(mesh_type.is_mesh(mesh), mesh, "a DeviceMesh as dist.init_device_mesh makes",
    "fully_shard: option 'mesh', which 'dp_mesh_dims' needs,")
  if not dims.replicate then return mesh[dims.shard] end
  if dims.replicate == dims.shard then raise("fully_shard: dp_mesh_dims names '%s' twice", dims.shard) end
  local part = mesh_type.new(mesh.device, { mesh:get_group(dims.replicate), mesh:get_group(dims.shard) },
    { dims.replicate, dims.shard })
  rawset(part, "of_world", rawget(mesh, "of_world"))
  return part
end

-- Divides every shard group into groups of `size` consecutive ranks and returns this rank's. Makes each group once.
-- Collective over the world.
local smaller = {}
local function smaller_group(group, mesh, size)
  local dist = require "moonshard.dist"
  smaller[group.id] = smaller[group.id] or {}
  local known = smaller[group.id]
  if known[size] then return known[size] end
  if group ~= dist.default_group() and not (mesh and rawget(mesh, "of_world")) then
    raise("fully_shard: reshard_after_forward = %d makes new groups, which every rank of the world must join; pass a mesh made by dist.init_device_mesh", size)
  end
  local mine = {}
  for k = 0, dist.world_size(group) - 1 do mine[k + 1] = lib.ms_dist_member(group.id, k) end
  for r, members in ipairs(dist.all_gather_object(mine)) do
    if members[1] == r - 1 then                 -- all members sent this list: handle it once
      for first = 1, #members, size do
        local few = {}
        for k = 0, size - 1 do few[k + 1] = members[first + k] end
        local made = dist.new_group(few)
        if dist.rank(made) then known[size] = made end
      end
    end
  end
  return known[size]
end

local function reshard_option(value, world)
  if value == nil then return -1 end
  if type(value) == "boolean" then return value and 1 or 0 end
  if type(value) ~= "number" or value % 1 ~= 0 then
    raise("reshard_after_forward should be a bool or an int representing the group size to reshard to, not %s",
      errors.show(value))
  end
  if value < 1 or world % value ~= 0 then
    raise("If passing reshard_after_forward as an int, it should be a factor of %d, not %d", world, value)
  end
  if value == 1 then
    log.warn_once "reshard_after_forward=1 (int) means resharding parameters to world size 1, instead of reshard_after_forward=true (bool)"
    return world == 1 and 1 or 0
  end
  return value == world and 1 or value
end

-- The dimension (from 0) along which fn shards p.
local function placement(fn, name, p, world)
  local s = fn(name, p)
  if s == nil then return 0 end
  if not policies.is_shard(s) then
    raise("fully_shard: shard_placement_fn returned %s for '%s', expected fsdp.Shard(d) or nil", errors.kind(s), name)
  end
  local dim, shape = s.dim, p.shape
  if dim < 0 then dim = dim + #shape + 1 end
  if dim < 1 or dim > #shape then
    raise("Shard dim %d is invalid for %dD tensor: %s", s.dim, #shape, tostring(shape))
  end
  if dim > 1 and shape[dim] % world ~= 0 then
    raise("FSDP does not support uneven sharding on dim %d: %s (world size: %d)", dim, tostring(shape), world)
  end
  return dim - 1
end

-- ---- parameters of a unit -----------------------------------------------------------------------

-- Returns the parameters of the modules and of their descendants, without duplicates, their names and modules, and a
-- list with { module, field, parameter, name } for each field that has a parameter. Skips ignored parameters and
-- children that are already sharded; raises if a parameter is also in a module that is already sharded.
local function managed(modules, ignored)
  local params, names, owners, places, seen, visited = {}, {}, {}, {}, {}, {}
  local function visit(m, prefix)
    if visited[m] then return end
    visited[m] = true
    for name, p in m:named_parameters { recurse = false } do
      local full = prefix .. name
      if not ignored[p] then places[#places + 1] = setmetatable({ m, name, p, full }, { __mode = "v" }) end
      if not seen[p] and not ignored[p] then
        seen[p] = true
        if rawget(p, "_unit") then
          raise("Parameter '%s' is shared with a parameter already managed by another FSDP group. For shared/tied parameters, "
            .. "use fully_shard([module_a, module_b]) to place them in the same FSDP group.", full)
        end
        params[#params + 1], names[#names + 1], owners[#owners + 1] = p, full, m
      end
    end
    for name, child in m:named_children() do
      if not module.unit_of(child) then visit(child, prefix .. name .. ".") end
    end
  end
  for _, m in ipairs(modules) do visit(m, "") end
  return params, names, owners, places
end

-- The device on which the unit computes: the GPU of its mesh, or else the device of its parameters; nil while these are
-- on meta (to_empty sets it later).
local function compute_device(mesh, params)
  if mesh and mesh.device == "cuda" then return dtypes.canonical_device("cuda", "fully_shard") end
  local on = params[1] and params[1].device
  return on and not on:find "^meta" and on or nil
end

-- Moves buffers, which are not sharded, from the CPU to `device`, on which the unit computes, if that is a GPU.
local function move_buffers(modules, device)
  if not device then return end
  autograd.no_grad(function()
    for _, m in ipairs(modules) do
      for _, b in ipairs(m:buffers()) do
        if b.device:find "^cpu" and device:find "^cuda" then errors.check(lib.ms_set_data(b.id, b:to(device).id), b) end
      end
    end
  end)
end

local function dtype_number(name) return name and dtypes.number(name) or -1 end

-- ---- fully_shard ---------------------------------------------------------------------------------

--- Shards a module's parameters over the ranks, along their first dimension or that of shard_placement_fn, except those
--- that a nested call has already sharded. They are gathered before forward and, if they were resharded, before
--- backward; gradients are reduced after backward. mesh: a mesh of one dimension, or { replicate, shard }.
--- reshard_after_forward: whether parameters are resharded after forward (default: true; false for the root), or a
--- number of ranks over which they stay sharded. Every rank must make the same call. Errors: containers without
--- forward; models that differ between ranks, also in their initial values (raised on every rank).
---@param target Module|Module[]  a list becomes one unit
---@param given? { mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims, reshard_after_forward: boolean|integer, shard_placement_fn: fun(name: string, p: Parameter): Placement?, mp_policy: MixedPrecisionPolicy, offload_policy: CPUOffloadPolicy, ignored_params: Parameter[], check_values: boolean }
---   mesh: a mesh of one dimension, or { replicate, shard } (default: the world); dp_mesh_dims: the dimensions to use,
---   if the mesh has others, too; reshard_after_forward: whether to reshard after forward (default: true; false for the
---   root), or the number of ranks to stay sharded over; shard_placement_fn: returns the placement of a parameter; nil:
---   along the first dimension; mp_policy: dtypes of the unit (default: unchanged); offload_policy: keeps shards on the
---   CPU; ignored_params: stay whole on every rank; check_values: initial values that differ between ranks are an error
---   (default: true)
---@return Module|Module[]  target, whose class is now "FSDP" followed by its old name
function M.fully_shard(target, given)
  local o = opts("fully_shard", given, {
    mesh = opts.any, dp_mesh_dims = opts.any, reshard_after_forward = opts.any, shard_placement_fn = opts.fn,
    mp_policy = opts.any, offload_policy = opts.any, ignored_params = opts.any,
    check_values = true,
  })
  local modules = module_list(target)
  for _, m in ipairs(modules) do
    if m.forward == nil then raise("fully_shard does not support containers that do not implement forward: %s",
      tostring(m)) end
    if module.unit_of(m) then raise "Each distinct composable distributed API can only be applied to a module once." end
  end
  local policy = o.mp_policy or policies.MixedPrecisionPolicy()
  opts.need(policies.is_policy(policy), policy, "an fsdp.MixedPrecisionPolicy", "fully_shard: option 'mp_policy'")
  opts.need(o.offload_policy == nil or policies.is_offload(o.offload_policy), o.offload_policy,
    "an fsdp.CPUOffloadPolicy", "fully_shard: option 'offload_policy'")
  if o.dp_mesh_dims ~= nil then o.mesh = data_parallel_mesh(o.mesh, o.dp_mesh_dims) end
  local group, replicas = groups_of(o.mesh)
  local dist = require "moonshard.dist"
  local world = dist.world_size(group)
  local reshard = reshard_option(o.reshard_after_forward, world)
  local ignored, given_ignored = {}, o.ignored_params or {}
  opts.need(opts.is_plain(given_ignored), given_ignored, "a list of parameters", "fully_shard: option 'ignored_params'")
  for k, p in ipairs(given_ignored) do
    if not tensor.is_tensor(p) then opts.wrong(p, "a parameter", "fully_shard: ignored_params[%d]", k) end
    ignored[p] = true
  end

  local params, names, owners, places = managed(modules, ignored)
  local equal = alike.check("fully_shard", ("reshard_after_forward = %s, param_dtype = %s, reduce_dtype = %s"):format(
    tostring(o.reshard_after_forward), tostring(policy.param_dtype), tostring(policy.reduce_dtype)),
    { params = params, names = names, owner = modules[1]:class_name(), values = o.check_values }, group, replicas)
  local device = compute_device(o.mesh, params)
  move_buffers(modules, device)
  -- The engine receives an instance of a tensor class as its inner tensors, each of which is a separate parameter.
  local n = #tensor.flat(params)
  local ids, dims = ffi.new("ms_id[?]", math.max(n, 1)), ffi.new("int32_t[?]", math.max(n, 1))
  n = 0
  local positions = {}
  for k, p in ipairs(params) do
    local dim = o.shard_placement_fn and p.ndim > 0 and placement(o.shard_placement_fn, names[k], p, world) or 0
    tensor.set_name(p, names[k])
    positions[k] = {}
    for j, part in ipairs(tensor.flat { p }) do
      positions[k][j], dims[n], ids[n] = n, dim, part.id
      n = n + 1
    end
  end
  local options = ffi.new("ms_unit_options", {
    group = group.id, layout = M.layout == "flat" and C.MS_LAYOUT_FLAT or C.MS_LAYOUT_ROWS,
    reshard_after_forward = reshard,
    param_dtype = dtype_number(policy.param_dtype), reduce_dtype = dtype_number(policy.reduce_dtype),
    output_dtype = dtype_number(policy.output_dtype), cast_forward_inputs = policy.cast_forward_inputs and 1 or 0,
    dims = dims, offload = o.offload_policy and (o.offload_policy.pin_memory and 2 or 1) or 0,
    device = device and dtypes.device(device, "fully_shard") or -1,
  })
  if replicas then options.replicates, options.replicate_group = 1, replicas.id end
  if reshard > 1 then options.reshards_to, options.reshard_group = 1, smaller_group(group, o.mesh, reshard).id end
  local class_names = {}
  for k, m in ipairs(modules) do class_names[k] = m:class_name() end
  local handle = lib.ms_unit_new(table.concat(class_names, ", "), n, ids, options)
  if handle == 0 then errors.fail() end

  local mesh = o.mesh
  local unit = {
    handle = handle, modules = setmetatable({}, { __mode = "v" }), policy = policy, world = world, group = group,
    replicates = replicas ~= nil, unlike = o.check_values and not equal,
    owner = ffi.gc(ffi.new("ms_unit_owner", { unit = handle }), lib.ms_unit_owner_release),
    offload = o.offload_policy ~= nil, params = params, names = names, owners = setmetatable(owners, { __mode = "v" }),
    places = places, positions = positions, ignored_params = setmetatable(ignored, { __mode = "k" }),
    mesh = function()
      mesh = mesh or dist.mesh_from_group(group, { names = { "dp_shard" } })
      return mesh
    end,
  }
  function unit.shard_mesh() return replicas and unit.mesh()[unit.mesh().names[2]] or unit.mesh() end
  for k, m in ipairs(modules) do
    unit.modules[k] = m
    rawset(m, "_fsdp", unit)
    setmetatable(m, module.class_for(getmetatable(m)))
  end
  for _, p in ipairs(params) do sharded.adopt(p, unit) end
  return target
end

return M
