-- SPDX-License-Identifier: MIT
--- Device meshes: ranks arranged in a grid, with a group for every line of the grid through this rank.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local dtypes = require "moonshard.core.dtypes"

local M = {}

local dist
--- Receives the functions of dist/init.lua with which a mesh makes groups and queries them.
function M.use(functions) dist = functions end

---@class DeviceMesh
---@field ndim integer  number of dimensions
---@field names string[]  names of the dimensions; empty if they have none
---@field device string  type of the device: "cpu" or "cuda"
local methods = {}
local Mesh = { __name = "DeviceMesh" }

local function position(self, d, who)
  if d == nil and self.ndim == 1 then return 1 end
  if type(d) == "string" then
    for k, name in ipairs(self.names) do
      if name == d then return k end
    end
    errors.raise("%s: %s", who, errors.unknown("mesh dimension", d, self.names))
  end
  if type(d) ~= "number" then
    errors.raise("%s: dimension is %s, expected a position from 1 to %d or a name", who, errors.kind(d), self.ndim)
  end
  local k = d < 0 and self.ndim + 1 + d or d
  if k < 1 or k > self.ndim or k % 1 ~= 0 then
    errors.raise("%s: dimension %s is out of range for a mesh with %d dimension%s", who, tostring(d), self.ndim,
      self.ndim == 1 and "" or "s")
  end
  return k
end

--- The number of ranks along dimension d, or of the whole mesh.
---@param d? integer|string  from 1, negative from the end; or the dimension's name
---@return integer
function methods:size(d)
  if d == nil then
    local n = 1
    for _, size in ipairs(self.shape) do n = n * size end
    return n
  end
  return self.shape[position(self, d, "mesh:size")]
end

--- This rank's position along dimension d. Errors: d is missing and the mesh has several dimensions.
---@param d? integer|string  from 1, negative from the end; or the dimension's name
---@return integer  from 0
function methods:rank(d) return dist.rank(self.groups[position(self, d, "mesh:rank")]) end

--- The group of the ranks on the line through this rank along dimension d. Errors: d is missing and the mesh has
--- several dimensions.
---@param d? integer|string  from 1, negative from the end, or the dimension's name; nil: the only dimension
---@return Group
function methods:get_group(d) return self.groups[position(self, d, "mesh:get_group")] end

function Mesh.__index(self, key)
  local method = methods[key]
  if method then return method end
  if type(key) ~= "string" then return nil end
  for k, name in ipairs(rawget(self, "names") or {}) do
    if name == key then
      if self.ndim == 1 then return self end
      local parts = rawget(self, "_parts") or {}
      rawset(self, "_parts", parts)
      if not parts[key] then
        parts[key] = M.new(self.device, { self.groups[k] }, { name })
        rawset(parts[key], "of_world", rawget(self, "of_world"))
      end
      return parts[key]
    end
  end
  if key:sub(1, 1) == "_" then return nil end
  errors.raise("%s", errors.unknown("dimension of the mesh", key, rawget(self, "names") or {}))
end

function Mesh.__tostring(self)
  local sizes = {}
  for k, size in ipairs(self.shape) do
    sizes[k] = self.names[k] and ("%s = %d"):format(self.names[k], size) or tostring(size)
  end
  return ("DeviceMesh(%s, [%s])"):format(self.device, table.concat(sizes, ", "))
end

--- Makes a mesh from groups, one group per dimension.
function M.new(device, groups, names)
  local shape = {}
  for k, group in ipairs(groups) do shape[k] = dist.world_size(group) end
  return setmetatable({ ndim = #groups, names = names or {}, device = device, groups = groups, shape = shape }, Mesh)
end

--- Whether x is a mesh.
---@param x any  any value
---@return boolean
function M.is_mesh(x) return getmetatable(x) == Mesh end

local function check_names(who, names, n)
  if names == nil then return {} end
  if #names ~= n then errors.raise("%s: the number of names is %d, expected the number of dimensions, %d", who, #names, n) end
  for k, name in ipairs(names) do
    opts.expect(name, opts.string, "%s: names[%d]", who, k)
    for j = 1, k - 1 do
      if names[j] == name then errors.raise("%s: the name '%s' is given twice", who, name) end
    end
  end
  return names
end

--- Arranges the world as a grid; the last dimension varies fastest. Collective over the world. Errors: sizes whose
--- product is not the number of ranks.
---@param device string  "cpu" or "cuda"
---@param shape integer[]  sizes of the dimensions, whose product is the number of ranks
---@param given? { names: string[] }
---   names: names of the dimensions; `mesh.tp` is the mesh of the dimension with the name "tp"
---@return DeviceMesh
function M.init_device_mesh(device, shape, given)
  local o = opts("init_device_mesh", given, { names = opts.table })
  local kind = dtypes.device_name(dtypes.device(device, "init_device_mesh")):match "^%a+"
  if type(shape) ~= "table" or #shape == 0 then opts.wrong(shape, "a list of sizes", "init_device_mesh: the shape") end
  local total = 1
  for k, size in ipairs(shape) do
    if type(size) ~= "number" or size < 1 or size % 1 ~= 0 then
      errors.raise("init_device_mesh: size %d is %s, expected a whole number from 1", k, errors.show(size))
    end
    total = total * size
  end
  local world, me = dist.world_size(), dist.rank()
  if total ~= world then
    errors.raise("init_device_mesh: shape [%s] has %d rank%s, but the world has %d", table.concat(shape, ", "), total,
      total == 1 and "" or "s", world)
  end
  local names = check_names("init_device_mesh", o.names, #shape)
  local groups = {}
  local stride = total
  for d, size in ipairs(shape) do
    local outer = stride
    stride = stride / size
    if size == world then
      groups[d] = dist.default_group()
    else
      -- Iterates over all lines along d, in the same order on every rank.
      for first = 0, total - 1 do
        if math.floor(first % outer / stride) == 0 then
          local line = {}
          for k = 0, size - 1 do line[k + 1] = first + k * stride end
          local group = dist.new_group(line)
          if dist.rank(group) then groups[d] = group end
        end
      end
    end
  end
  assert(me and #groups == #shape)
  local mesh = M.new(kind, groups, names)
  rawset(mesh, "of_world", true)                -- every rank of the world belongs to it
  return mesh
end

--- Makes a mesh from existing groups, one per dimension. To be called only by members of all these groups.
---@param groups Group|Group[]  one group, or { replicate, shard }
---@param given? { names: string[], device: string }
---   names: names of the dimensions; device: "cpu" or "cuda" (default: the type of the default device)
---@return DeviceMesh
function M.mesh_from_group(groups, given)
  local o = opts("mesh_from_group", given, { names = opts.table, device = opts.string })
  if dist.is_group(groups) then groups = { groups } end
  opts.need(type(groups) == "table" and #groups > 0, groups, "a group or a list of groups",
    "mesh_from_group: argument 1")
  for k, group in ipairs(groups) do
    opts.expect(group, dist._a_group, "mesh_from_group: entry %d", k)
    if not dist.rank(group) then
      errors.raise("mesh_from_group: rank %d is not a member of the group in entry %d", dist.rank(), k)
    end
  end
  return M.new((o.device or dtypes.default_device()):match "^%a+", groups,
    check_names("mesh_from_group", o.names, #groups))
end

return M
